"""Pallas' Triton backend is deprecated: a JAX without it imports us, and runs what needs none of it."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import sys
    sys.modules["jax.experimental.pallas.triton"] = None  # as if this version of JAX no longer had it

    import jax.numpy as jnp
    import numpy as np
    import tree_attention_jax as ta
    from tree_attention_jax import backends

    tree = ta.TokenTree.from_levels([1, 3], [40, 9])
    plan = ta.plan_tree(tree, num_q_heads=4, num_kv_heads=2, head_dim=16)
    k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(6, 16, 2, 16)), jnp.float32) for i in (0, 1))
    q = jnp.asarray(np.random.default_rng(2).normal(size=(3, 4, 16)), jnp.float32)
    want = ta.reference.dense_tree_attention(q, k, v, tree)
    for implementation in (None, ("pallas_mixed", "pallas_triton", "xla")):
        out = ta.tree_attention(q, k, v, plan, implementation=implementation)
        np.testing.assert_allclose(out, want, atol=1e-5)
        new_k, _ = ta.append_kv(k + 0, v + 0, q[:, :2], q[:, :2], plan, implementation=implementation)
        assert (np.asarray(new_k).reshape(-1, 2, 16)[plan.slots[:3]] == q[:, :2]).all()
    for call in (
        lambda: ta.tree_attention(q, k, v, plan, implementation="pallas_triton"),
        lambda: ta.append_kv(k, v, q[:, :2], q[:, :2], plan, implementation="pallas_triton"),
    ):
        try:
            call()
        except NotImplementedError as error:
            print(error)
"""


@pytest.mark.slow
def test_a_jax_without_it():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 2
    assert all("has no Triton backend of Pallas" in line and "'xla' anywhere" in line for line in told)

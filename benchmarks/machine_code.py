"""What the compilers make of a suite's Mosaic kernels for an H200, on any machine: registers, spills, serial products.

    python -m benchmarks.machine_code --suite shared --only "1,1024_2048,1 32/8"
    python -m benchmarks.machine_code --only "1,16,64_1024,256,32 16/1" --sass out/      # with nvdisasm on the PATH

XLA compiles for a GPU that is not there, if it is told what it would be. That takes CUDA's plugin for JAX, without its
libraries (``pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt``, of the version of ``jax``; or 13 for 12), and
``ptxas`` of CUDA 12.8 or newer on the PATH. Nothing runs.

Of each kernel, what ptxas says: registers, and bytes that it spills; and whether it has *serialised* matrix products,
as it does where an operand of one is touched before it has ended: then the kernel is right and slow.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DEVICE = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""
GPU = "NVIDIA H200"
# Of the process that compiles: the compilers print as they go.
CHILD = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
PLUGINS = "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"


class Kernel(NamedTuple):
    """What ptxas says of one kernel; bytes a thread."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    serialised: str


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="fasttree")
    parser.add_argument("--only", default="", help="only cells whose label contains this")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--sass", type=Path, help="write what nvdisasm prints to this folder, a file a cell")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.in_child:
        return _compile_all(args)
    missing = [name for name in ("ptxas", *(["nvdisasm"] if args.sass else [])) if not shutil.which(name)]
    if missing:
        parser.error(f"{' and '.join(missing)} not on the PATH: from CUDA's toolkit")
    if not any(_installed(name) for name in PLUGINS):
        parser.error("no CUDA plugin for JAX is installed: pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt")
    environment = os.environ | CHILD | ({"MOSAIC_GPU_DUMP_SASS": "1"} if args.sass else {})
    command = [sys.executable, "-m", "benchmarks.machine_code", *(sys.argv[1:] if argv is None else argv), "--in-child"]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wrong = run.returncode
    for number, (label, text) in enumerate(_by_cell(run.stdout)):
        print(label)
        for kernel in kernels(text):
            wrong |= bool(kernel.serialised)
            serial = f", SERIALISED: {kernel.serialised}" if kernel.serialised else ""
            spills = f"spills {kernel.spill_stores} bytes, loads {kernel.spill_loads}"
            print(f"  {kernel.name}: {kernel.registers} registers, {spills}{serial}")
        if args.sass:
            args.sass.mkdir(parents=True, exist_ok=True)
            (args.sass / f"{number}.sass").write_text(f"{label}\n{text}")
    if run.returncode:
        print(run.stdout[-2000:])
    elif "\n== " not in run.stdout:
        parser.error(f"--only {args.only!r}: no cell of {args.suite} has that in its label")
    return wrong


def kernels(text: str) -> Iterator[Kernel]:
    """The kernels that ptxas reports in a compiler's output, in its order."""
    serialised: dict[str, str] = {}
    for why, name in re.findall(r"instructions are serialized due to (.*?) in the function '(\w+)'", text):
        serialised[name] = why
    spills = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
    report = re.compile(rf"Compiling entry function '(\w+)' for .*?{spills}.*?Used (\d+) registers", re.DOTALL)
    for name, stores, loads, registers in report.findall(text):
        short = name.removesuffix("_mosaic_gpu_kernel")
        yield Kernel(short, int(registers), int(stores), int(loads), serialised.get(name, ""))


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package
        return False


def _by_cell(output: str) -> Iterator[tuple[str, str]]:
    for part in output.split("\n== ")[1:]:
        label, _, text = part.partition("\n")
        yield label, text


def _compile_all(args: argparse.Namespace) -> int:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

    import tree_attention_jax as ta
    from benchmarks.suites import cells
    from pallas_kernels import attend_mosaic
    from pallas_kernels.options import Options

    topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1", target_config=DEVICE)
    here = SingleDeviceSharding(topology.devices[0])
    device = AbstractDevice(device_kind=GPU, num_cores=None, platform="gpu")  # for who asks what it is lowered for
    mesh = AbstractMesh((1,), ("_",), abstract_device=device)

    def array(*shape: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    for cell in cells(args.suite):
        if args.only not in cell.label:
            continue
        heads = {"num_q_heads": cell.num_q_heads, "num_kv_heads": cell.num_kv_heads, "head_dim": cell.head_dim}
        tree = cell.tree()
        plan = ta.plan_tree(tree, page_size=cell.page_size, gpu=GPU, strategy=args.strategy, **heads)
        slots = (int(tree.page_table(cell.page_size)[1].max()) + 1) * cell.page_size
        q = array(tree.num_queries, cell.num_q_heads, cell.head_dim)
        kv = array(slots, cell.num_kv_heads, cell.head_dim)
        call = functools.partial(attend_mosaic.launch_all, shape=plan.shape, options=Options(scale=cell.head_dim**-0.5))
        print(f"\n== {cell.label}", flush=True)
        with use_abstract_mesh(mesh):
            lowered = jax.jit(call).trace(q, kv, kv, array(*plan.buffer.shape, dtype=jnp.int32), None)
            lowered.lower(lowering_platforms=("cuda",)).compile()
    return 0


if __name__ == "__main__":
    sys.exit(main())

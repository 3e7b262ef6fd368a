"""Whole decoding steps of a model with random weights, planning included: ours, and the same decoder in plain JAX.

    python -m benchmarks.decode --workload bestof64,fasttree --json out.json     # with the shape of Llama-3-8B
    python -m benchmarks.decode --workload deft --model llama-2-7b,mistral-7b    # few-shot, drafts, trees of thoughts
    python -m benchmarks.decode --workload A --tiny                              # seconds on a CPU: does it work

Strategies are those of `plan_tree`, and three decoders on JAX's own attention (`plain_decoder`): "jax" gathers each
sequence's K/V out of the shared pages (and verifies drafts by a mask), "jax_contiguous" keeps a copy for each sequence,
"jax_cudnn" does so and attends by cuDNN.

A strategy runs its workload twice, and the second run counts: the first one compiles. Of processes that name one
``--lock``, several compile at a time (each with a share of the memory: XLA_PYTHON_CLIENT_MEM_FRACTION).

Prompts are not prefilled (their pages hold zeros), which changes no time of decoding. The results are written after
every row; with --resume, a run that was cut short goes on where it stopped. A row whose strategy cannot run (out of
memory, no cuDNN) says why.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks import decode_run, harness
from benchmarks.suites.decoding import GROUPS, Workload, named
from tree_attention_jax.models import CONFIGS, Llama, LlamaConfig
from tree_attention_jax.planning.strategies import STRATEGIES

TINY = LlamaConfig(64, 64, 96, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16)
KEY = "workload", "model", "strategy", "new_tokens", "horizon"


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    if args.resume and args.json and args.json.exists():
        rows = [row for row in json.loads(args.json.read_text())["rows"] if "error" not in row]
    done = {tuple(row[name] for name in KEY) for row in rows}
    for model_name in ["tiny"] if args.tiny else args.models:
        model = None
        for name, workload in args.workloads.items():
            for strategy in args.strategies:
                key = name, model_name, strategy, args.new_tokens, args.horizon
                if key in done:
                    continue
                if args.minutes and time.perf_counter() - begin > 60 * args.minutes:
                    print(f"{args.minutes:g} minutes are over: --resume goes on with {', '.join(map(str, key[:3]))}")
                    return 0
                if model is None:
                    with harness.locked(args.lock, alone=False):
                        model = _model(model_name)
                rows.append(dict(zip(KEY, key)) | _row(workload, model, strategy, args))
                print(json.dumps(rows[-1]), flush=True)
                if args.json:
                    args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    _summary(rows)
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = "; ".join(f"{group} is {','.join(names)}" for group, names in GROUPS.items())
    parser.add_argument("--workload", default="bestof64,fasttree", help=f"comma-separated; {groups}")
    parser.add_argument("--model", default="llama-3-8b", help=f"comma-separated, of {', '.join(CONFIGS)}")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and a hundredth of the tokens")
    parser.add_argument("--strategies", default="auto,per_query,jax", help="comma-separated")
    parser.add_argument(
        "--new-tokens", type=int, default=256, help="of each sequence; a replay takes 4 times the steps"
    )
    parser.add_argument("--horizon", type=int, default=16, help="steps on the device between two plans")
    parser.add_argument("--implementation", help="of tree_attention")
    parser.add_argument(
        "--lock", type=Path, help="a file: of all processes that name it, one measures at a time, or several compile"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--resume", action="store_true", help="keep what that file holds, measure the rest")
    parser.add_argument("--minutes", type=float, help="begin no row after so long")
    args = parser.parse_args(argv)
    args.models, args.strategies = args.model.split(","), args.strategies.split(",")
    known = {"--model": list(CONFIGS), "--strategies": [*STRATEGIES, *decode_run.PLAIN]}
    for option, values in ("--model", args.models), ("--strategies", args.strategies):
        for value in values:
            if value not in known[option]:
                parser.error(f"{option} is {value!r}: known are {', '.join(known[option])}")
    try:
        args.workloads = named(args.workload)
    except ValueError as error:
        parser.error(str(error))
    return args


def _model(name: str) -> Llama:
    gc.collect()  # the one before may still be there, and two do not fit
    if name == "tiny":
        return Llama(TINY, dtype="float32", rngs=nnx.Rngs(0))
    return Llama(CONFIGS[name], dtype="bfloat16", rngs=nnx.Rngs(0))


def _row(workload: Workload, model: Llama, strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    workload = workload.scaled() if args.tiny else workload
    run = decode_run.Run(workload, strategy, args.new_tokens, args.horizon, args.implementation, args.lock)
    try:
        measured = run.measure(model)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # What a strategy cannot do is a result; it must not cost those after it.
        measured = {"error": f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0][:300]}"}
    gc.collect()
    return measured | {
        "row_seconds": round(time.perf_counter() - begin, 1),
        "environment": harness.environment() | {"backend": jax.default_backend()},
    }


def _summary(rows: list[dict[str, Any]]) -> None:
    by_cell: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if "error" not in row:
            by_cell.setdefault((row["model"], row["workload"]), {})[row["strategy"]] = row["tokens_per_s"]
    for (model, workload), speeds in by_cell.items():
        for other in [strategy for strategy in speeds if strategy != "auto" and "auto" in speeds]:
            gain = speeds["auto"] / speeds[other]
            print(f"{model} {workload}: auto has {gain:.2f} x the tokens a second of {other}")


if __name__ == "__main__":
    sys.exit(main())

"""Tables of the suites beside FastTree's, and of compiling and launching."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.comparison import COPY_BYTES_PER_US, PeerTime, fastest, key_of, peer_times
from benchmarks.plots import quote

# suite -> its title in docs/performance.md, and what its last column shows of a row
SUITES: dict[str, tuple[str, str | None]] = {
    "verify": ("Draft verification", "tflops"),
    "prefill": ("Prefill", "tflops"),
    "long": ("Long contexts, nothing shared", "copy_share"),
    "shared": ("A node shared by 1,024 queries", "longest_tflops"),
    "heads": ("Head dims and page sizes", "copy_share"),
    "decode": ("Forests of decoding", None),
    "pat": ("PAT's trees", None),
    "odd": ("Odd trees", None),
}
COLUMNS = {
    "tflops": "TFLOP/s",
    "longest_tflops": "TFLOP/s of the longest launch",
    "copy_share": "of the copy rate",
}


def suite_table(suite: str, report: dict[str, Any]) -> str:
    """A row a cell: every strategy measured, and the best peer."""
    column = SUITES[suite][1]
    best = fastest(peer_times(report.get("peers", [])))
    strategies = list(dict.fromkeys(row["strategy"] for row in report["rows"]))
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        found.setdefault(key_of(row), {})[row["strategy"]] = row
    lines = [
        f"Microseconds a layer ({quote(report)}; bf16, cold L2, planning excluded).",
        "",
        f"| tree | heads | head dim | page | floor | {' | '.join(strategies)} | whole call | best peer "
        f"| {COLUMNS[column] if column else 'peer / ours'} |",
        f"|{'---|' * (8 + len(strategies))}",
    ]
    for key, rows in found.items():
        first = rows[strategies[0]] if strategies[0] in rows else next(iter(rows.values()))
        times = [f"{rows[s]['us']:.1f}" if "us" in rows.get(s, {}) else "-" for s in strategies]
        peer = best.get(key)
        fastest_peer = f"{peer.us:.1f} {peer.name}" if peer else "-"
        lines.append(
            f"| {key[0]} | {key[1]}/{key[2]} | {key[3]} | {key[4]} | {_number(first.get('floor_us'))} "
            f"| {' | '.join(times)} | {_number(first.get('wall_us'))} | {fastest_peer} | {_last(first, column, peer)} |"
        )
    reasons = {(row["peer"], row.get("why_not") or row.get("failed")) for row in report.get("peers", [])}
    told = sorted(f"{name}: {reason}" for name, reason in reasons if reason)
    return "\n".join(lines + (["", "Left out: " + "; ".join(told) + "."] if told else []))


def _last(row: dict[str, Any], column: str | None, peer: PeerTime | None) -> str:
    if column == "copy_share":
        return f"{row[column]:.0%}" if row.get(column) else "-"
    if column:
        return _number(row.get(column))
    return f"{peer.us / row['us']:.2f}" if peer and "us" in row else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def compile_table(report: dict[str, Any]) -> str:
    """What :mod:`benchmarks.compile` wrote."""
    report = {part: _without_failures(rows) if isinstance(rows, list) else rows for part, rows in report.items()}
    lines = [f"Seconds to the first result of a fresh program ({quote(report)}).", ""]
    if report.get("tiles"):
        lines += ["| tile class, alone | trace and lower | compile | first call |", "|---|---|---|---|"]
        lines += [f"| {row['tile']} | {_seconds(row)} |" for row in report["tiles"]]
    if report.get("plans"):
        lines += ["", "| plan | launches | trace and lower | compile | first call |", "|---|---|---|---|---|"]
        lines += [f"| {row['plan']} | {row['launches']} | {_seconds(row)} |" for row in report["plans"]]
    for row in report.get("growth", []):
        lines += [
            "",
            f"{row['tree']}: leaves that grow from {row['first_tokens']} to {row['last_tokens']} tokens, planned every "
            f"{row['horizon']} steps, run {row['programs']} programs in {row['plans']} plans.",
        ]
    if report.get("graphs"):
        lines += [
            "",
            "| command buffers | calls in | graphs launched | alone | named in XLA's dump | us a layer |",
            "|---|---|---|---|---|---|",
        ]
        for row in report["graphs"]:
            lines.append(
                f"| {row['flags'] or 'default'} | {row['program']} | {row['graph_launches']} "
                f"| {row['kernel_launches']} | {row['in_dump']} | {row['wall_us']:.1f} |"
            )
    for row in report.get("gaps", []):
        lines += [
            "",
            f"A decode step of {row['layers']} layers ({row['model']}, {row['tree']}): {row['step_us']:.0f} us, "
            f"{row['idle_us']:.0f} us of them ({row['idle_share']:.1%}) idle between {row['kernels']} kernels.",
        ]
    return "\n".join(lines)


def implementations_table(report: dict[str, Any]) -> str:
    """What :mod:`benchmarks.implementations` wrote: a row a case, whole calls and the wide launch alone."""
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        if "failed" not in row:
            found.setdefault((row["case"], *row["heads"]), {})[row["implementation"]] = row
    lines = [
        f"Microseconds of all kernels of a call; in brackets the launch of wide tiles alone ({quote(report)}).",
        "",
        "| case | heads | Triton | Mosaic | mixed | JAX's `attention_mgpu` "
        "| TFLOP/s of the wide launch: Triton, Mosaic, JAX |",
        "|---|---|---|---|---|---|---|",
    ]
    for (case, *heads), rows in found.items():
        triton, mosaic, mixed, jax_own = (
            rows.get(name) for name in ("pallas_triton", "pallas_mosaic", "pallas_mixed", "attention_mgpu")
        )
        rates = [f"{row['tflops']:.0f}" for row in (triton, mosaic, jax_own) if row and "tflops" in row]
        lines.append(
            f"| {case} | {heads[0]}/{heads[1]} | {_of_call(triton)} | {_of_call(mosaic)} | {_of_call(mixed)} "
            f"| {_of_call(jax_own)} | {', '.join(rates) or '-'} |"
        )
    return "\n".join(lines)


def _of_call(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    wide = [us for name, us in row.get("kernels", {}).items() if "_r128" in name or "_r64" in name]
    return f"{row['us']:.1f}" + (f" ({max(wide):.1f})" if wide else "")


def decode_table(report: dict[str, Any]) -> str:
    """What :mod:`benchmarks.decode` wrote: whole steps of a model."""
    rows = [row for row in report["rows"] if "error" not in row]
    speeds = {_of_workload(row): row["tokens_per_s"] for row in rows if row["strategy"] == "auto"}
    rows = sorted(rows, key=lambda row: (*_of_workload(row), row["strategy"]))
    lines = [
        f"Whole decoding steps of a model with random weights ({quote(rows[0])}; bf16, planning included, a plan every "
        f"{rows[0]['horizon']} steps). *Attention* is timed alone, on the tree in the middle of the run, or at its end "
        "where it says so; *K/V* is the time to read each token's K/V once, over all layers, at "
        f"{COPY_BYTES_PER_US / 1e6:.2f} TB/s; *auto* is its tokens a second over this row's, of the same commit.",
        "",
        "| workload | model | strategy | steps/s | tokens/s | auto | attention, ms a step | of the step "
        "| K/V, ms a step | GPU idle | plan, ms a step | commit |",
        f"|{'---|' * 12}",
    ]
    for row in rows:
        where = " (end)" if row.get("attention_at") == "end" else ""
        attention = f"{_number(row['attention_ms_per_step'])}{where} | {_share(row['attention_share'])}"
        shared = row["kv_gb_saved"] > 0  # else the bytes of a token count once for each sequence
        kv_ms = f"{row['kv_gb_read'] * 1e6 / row['steps'] / COPY_BYTES_PER_US:.1f}" if shared else "-"
        gain = speeds.get(_of_workload(row), 0.0) / row["tokens_per_s"]
        lines.append(
            f"| {row['workload']} | {row['model']} | {row['strategy']} | {row['steps_per_s']:.1f} "
            f"| {row['tokens_per_s']:.0f} | {f'{gain:.2f}' if gain and row['strategy'] != 'auto' else '-'} "
            f"| {attention} | {kv_ms} | {_share(row['device_idle_share'])} | {row['plan_ms_per_step']:.2f} "
            f"| {row['environment'].get('commit', '-')} |"
        )
    return "\n".join(lines)


# What a README has room for.
IN_SHORT = {
    "llama-2-7b": ("A", "B", "C", "D", "fewshot50", "draft64"),
    "mistral-7b": ("A", "B", "C", "D", "fewshot50", "draft64"),
    "llama-3-8b": ("bestof64",),
}


def decode_summary(report: dict[str, Any]) -> str:
    """`auto` beside the same decoder with `per_query` and with JAX's own attention, where one commit has both, and how
    long the GPU idled."""
    both: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        if "error" not in row and row["workload"] in IN_SHORT.get(row["model"], ()):
            both.setdefault(_of_workload(row), {})[row["strategy"]] = row
    pairs = {key: found for key, found in both.items() if {"auto", "per_query"} <= found.keys()}
    if not pairs:
        return "Whole decoding steps are not measured yet."
    lines = [
        f"Whole decoding steps, planning included ({quote(next(iter(pairs.values()))['auto'])}; random weights, bf16):",
        "",
        "| workload | model | tokens/s | over `per_query`'s | over JAX's own attention's | GPU idle |",
        "|---|---|---|---|---|---|",
    ]
    for (model, workload, _), found in sorted(pairs.items()):
        auto, idle = found["auto"], _share(found["auto"].get("device_idle_share"))
        gains = [
            f"{auto['tokens_per_s'] / found[other]['tokens_per_s']:.2f}" if other in found else "-"
            for other in ("per_query", "jax")
        ]
        lines.append(f"| {workload} | {model} | {auto['tokens_per_s']:,.0f} | {' | '.join(gains)} | {idle} |")
    return "\n".join(lines)


def _of_workload(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["workload"], row["environment"].get("commit", "")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def planning_table(report: dict[str, Any]) -> str:
    """What :mod:`benchmarks.planning` wrote: a row a strategy, over all cells."""
    best: dict[tuple, float] = {}
    for row in report["rows"]:
        key = (row["tree"], *row["heads"])
        best[key] = min(best.get(key, np.inf), row["modelled_us"])
    lines = [
        "Milliseconds of one CPU core a plan, from parent and length arrays to the packed buffer, over the cells of "
        f"`{report['suite']}` (Python {report['environment']['python']} on a shared two-core virtual machine, whose "
        f"speed varies by half, {report['environment']['date']}; plans for the {report['gpu']}).",
        "",
        "| strategy | median | worst | 100,000 leaves of a page | modelled time of the plan / best strategy's |",
        "|---|---|---|---|---|",
    ]
    many = {row["strategy"]: row["plan_ms"] for row in report["many_leaves"] if row["leaves"] == 100_000}
    for strategy in dict.fromkeys(row["strategy"] for row in report["rows"]):
        mine = [row for row in report["rows"] if row["strategy"] == strategy]
        times = [row["plan_ms"] for row in mine]
        ratio = np.exp(np.mean([np.log(row["modelled_us"] / best[row["tree"], *row["heads"]]) for row in mine]))
        lines.append(
            f"| {strategy} | {np.median(times):.1f} | {max(times):.1f} | {_number(many.get(strategy))} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def _without_failures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "failed" not in row]


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['lower_s']:.2f} | {row['compile_s']:.2f} | {row['first_call_s']:.3f}"

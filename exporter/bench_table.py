"""A benchmark as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
MIB = 2**20


def render_table(result: Json) -> str:
    """Machine, memory, prefill, steps by context and width, generation by category, and how noisy it was."""
    machine = result["machine"]
    lines = [
        f"{result['model']} on {machine['processor']}, {machine['threads']} threads, {machine['instruction_set']}",
        *_memory(result["memory"]),
        *_prefill(result["prefill"]),
        *_contexts(result["contexts"]),
        *_generation(result["generation"]),
    ]
    if result["noise"]:
        lines += ["", result["noise"]["text"]]
    return "\n".join(lines)


def _memory(memory: Json | None) -> list[str]:
    if memory is None:
        return []
    peak, weights, cache, beyond = (
        f"{memory[key] / MIB:,.0f}" for key in ("peak_bytes", "weights_bytes", "cache_bytes", "beyond_bytes")
    )
    return [
        "",
        f"peak memory at {memory['context']:,} tokens: {peak} MiB = {weights} weights + {cache} cache + {beyond} "
        f"beyond (interpreter and libraries alone: {memory['libraries_bytes'] / MIB:,.0f})",
    ]


def _prefill(rows: Sequence[Json]) -> list[str]:
    if not rows:
        return []
    table = [["prompt tokens", "prefill tok/s", "10 %", "90 %", "spread"]]
    for row in rows:
        speed = row["tokens_per_second"]
        table.append([f"{row['tokens']:,}", *(f"{speed[k]:,.0f}" for k in ("median", "p10", "p90")), _share(speed)])
    return ["", *align(table)]


def _contexts(contexts: Sequence[Json]) -> list[str]:
    lines: list[str] = []
    for found in contexts:
        decode, nbytes, share = found["decode"], found["bytes_per_token"], found["bandwidth_share"]
        draft = found["draft_ms"]
        lines += [
            "",
            f"at {found['context']:,} tokens: plain step {_times(decode['milliseconds'])}, "
            f"{decode['tokens_per_second']['median']:.0f} tok/s" + (f"; draft step {_times(draft)}" if draft else ""),
            f"  a token reads {nbytes['total'] / 1e6:.1f} MB: weights {nbytes['weights'] / 1e6:.1f}, head "
            f"{nbytes['head'] / 1e6:.1f}, cache {nbytes['cache'] / 1e6:.1f}; that is {share['median']:.0%} of the "
            f"{found['read_bandwidth']['median'] / 1e9:.1f} GB/s at which this machine reads as many bytes",
        ]
        table = [["  rows of a verify", "ms", "90 %", "99 %", "to one row", "10 %", "90 %"]]
        for width, time in found["verify"].items():
            ratio = found["verify_ratio"][width]
            table.append(
                [f"  {width}", *(f"{time[k]:.2f}" for k in ("median", "p90", "p99"))]
                + [f"{ratio[k]:.2f}" for k in ("median", "p10", "p90")]
            )
        lines += align(table)
    return lines


def _generation(generation: Json | None) -> list[str]:
    if generation is None:
        return []
    head = ["category", "prompts", "contestant", "tok/s", "90 % step ms", "99 %", "to plain", "10 %", "90 %"]
    table = [[*head, "tokens a step", "accepted"]]
    for entry in generation["categories"]:
        for name, found in entry["contestants"].items():
            steps, ratio = found.get("verify_ms"), found["ratio"]
            acceptance = found.get("acceptance")
            table.append(
                [entry["category"], str(entry["prompts"]), name, f"{found['tokens_per_second']['median']:.1f}"]
                + ([f"{steps[k]:.2f}" for k in ("p90", "p99")] if steps else ["", ""])
                + [f"{ratio[k]:.2f}" for k in ("median", "p10", "p90")]
                + [
                    f"{found['tokens_per_step']:.2f}" if steps else "",
                    "" if acceptance is None else f"{acceptance:.0%}",
                ]
            )
    lines = ["", f"greedy, {generation['tokens']} new tokens, {generation['rounds']} rounds", *align(table)]
    for name, different in generation["different_prompts"].items():
        verdict = f"DIFFER on prompts {', '.join(map(str, different))}" if different else "equal on every prompt"
        lines.append(f"ids of {name} against plain: {verdict}")
    return lines


def _times(found: Json) -> str:
    return f"{found['median']:.2f} ms (90 %: {found['p90']:.2f}, 99 %: {found['p99']:.2f})"


def _share(found: Json) -> str:
    return f"{found['spread']:.0%}"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = [not any(row[c][:1].isdigit() for row in rows[1:]) for c in range(len(widths))]
    return [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width) for cell, width, text in zip(row, widths, left)
        ).rstrip()
        for row in rows
    ]

"""What a bundle costs on this machine: memory, prefill, steps by width and context, generation by category."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specexport.exporter.bench_bandwidth import read_bandwidth
from specexport.exporter.bench_bytes import WeightBytes, cache_bytes, weight_bytes
from specexport.exporter.bench_generation import PLAIN, Contestant, PairContestant, generate_in_turn, summarize
from specexport.exporter.bench_machine import describe_machine
from specexport.exporter.bench_memory import measure_memory
from specexport.exporter.bench_prompts import BenchPrompt
from specexport.exporter.bench_statistics import Summary, in_turn, noise, ratios
from specexport.exporter.bench_steps import BANDWIDTH, DRAFT, VERIFY, some_ids, time_steps
from specexport.exporter.progress import Progress
from specexport.plugins.errors import InputError
from specexport.runtime.native import num_threads

PARTS = ("memory", "prefill", "steps", "generation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured.

    Attributes:
        contexts: Positions in the cache behind which steps are timed.
        prompt_lengths: Tokens of the prompts whose prefill is timed; the contexts are added.
        widths: Rows of a verify.
        rounds: Rounds of prefills and generations.
        step_rounds: Rounds of steps, each of all widths.
        tokens: New tokens of a generation.
        num_assistant_tokens: Drafted tokens a round, each a contestant; empty takes the bundle's.
        parts: Of PARTS.
    """

    contexts: tuple[int, ...] = (128,)
    prompt_lengths: tuple[int, ...] = (16, 64, 256, 1024)
    widths: tuple[int, ...] = tuple(range(1, 17))
    rounds: int = 3
    step_rounds: int = 40
    tokens: int = 64
    num_assistant_tokens: tuple[int, ...] = ()
    parts: tuple[str, ...] = PARTS


def bench(
    pair: Any,
    bundle: pathlib.Path,
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    progress: Progress,
    against: Mapping[str, Contestant] | None = None,
) -> dict[str, Any]:
    """Measure everything that ``options`` asks for; the keys of the result are in docs/bench.md.

    Raises:
        InputError: A context leaves no room for the widest verify.
    """
    _check_room(pair, options)
    weights = weight_bytes(pair.target.path)
    result: dict[str, Any] = {
        "bundle": str(bundle),
        "model": pair.manifest.target.model.source,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "options": dataclasses.asdict(options),
        "weights": {
            **dataclasses.asdict(weights),
            "step": weights.step,
            "summary": pair.manifest.target.weights.summary,
        },
        "memory": None,
        "prefill": [],
        "contexts": [],
        "verify_ms": {},
        "generation": None,
        "noise": None,
    }
    if "memory" in options.parts:
        with progress.stage("Memory, in a process of its own"):
            result["memory"] = measure_memory(bundle, max(options.contexts), num_threads())
    if "prefill" in options.parts:
        result["prefill"] = _prefill(pair, options, progress)
    if "steps" in options.parts:
        result["contexts"] = [_steps(pair, context, weights, options, progress) for context in options.contexts]
        first = result["contexts"][0]
        result["verify_ms"] = {width: found["median"] for width, found in first["verify"].items()}
        result["noise"] = first["noise"]
    if "generation" in options.parts and prompts:
        result["generation"] = _generation(pair, prompts, options, progress, against or {})
    return result


def _check_room(pair: Any, options: BenchOptions) -> None:
    limit = pair.target.context_length
    for context in options.contexts:
        if "steps" in options.parts and context + max(options.widths) > limit:
            raise InputError(
                f"--context is {context}; with {max(options.widths)} rows behind it, it must be at most "
                f"{limit - max(options.widths)}: the bundle has {limit} positions"
            )


def _prefill(pair: Any, options: BenchOptions, progress: Progress) -> list[dict[str, Any]]:
    """Tokens a second by length of the prompt, through `generate`; the draft's prefill, if any, counts."""
    limit = pair.target.context_length - 1
    lengths = sorted({length for length in (*options.prompt_lengths, *options.contexts) if length <= limit})
    size = pair.manifest.contract.vocab_size

    def task(length: int) -> Any:
        ids = some_ids(length, size)[0].tolist()
        return lambda: length / pair.generate(ids, max_new_tokens=1, do_sample=False).metrics.prefill_s

    with progress.stage("Prefill", options.rounds + 1) as advance:
        found = in_turn({str(n): task(n) for n in lengths}, options.rounds, advance=advance)
    return [{"tokens": n, "tokens_per_second": Summary.of(found[str(n)]).to_json()} for n in lengths]


def _steps(pair: Any, context: int, weights: WeightBytes, options: BenchOptions, progress: Progress) -> dict[str, Any]:
    """Verify by width, draft, bytes of one token and the share of the read bandwidth, behind one context."""
    cache = cache_bytes(pair.manifest.target.cache, context)
    total = weights.step + cache
    samples = time_steps(
        pair, context, options.widths, options.step_rounds, progress, beside={BANDWIDTH: lambda: read_bandwidth(total)}
    )
    one = samples[f"{VERIFY} {options.widths[0]}"]
    achieved = [total / (ms / 1e3) for ms in one]
    verify = {str(width): Summary.of(samples[f"{VERIFY} {width}"]).to_json() for width in options.widths}
    return {
        "context": context,
        "decode": {
            "milliseconds": Summary.of(one).to_json(),
            "tokens_per_second": Summary.of([1e3 / ms for ms in one]).to_json(),
        },
        "verify": verify,
        "verify_ratio": {
            str(width): Summary.of(ratios(samples[f"{VERIFY} {width}"], one)).to_json() for width in options.widths
        },
        "draft_ms": Summary.of(samples[DRAFT]).to_json() if DRAFT in samples else None,
        "bytes_per_token": {"weights": weights.layers, "head": weights.head, "cache": cache, "total": total},
        "read_bandwidth": Summary.of(samples[BANDWIDTH]).to_json(),
        "bandwidth_share": Summary.of(ratios(achieved, samples[BANDWIDTH])).to_json(),
        "noise": noise(one),
    }


def _generation(
    pair: Any,
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    progress: Progress,
    against: Mapping[str, Contestant],
) -> dict[str, Any] | None:
    contestants: dict[str, Contestant] = {PLAIN: PairContestant(pair, 0)}
    if pair.manifest.draft is not None:
        counts = options.num_assistant_tokens or (pair.manifest.draft.num_assistant_tokens,)
        contestants |= {f"speculative {count}": PairContestant(pair, count) for count in counts if count}
    contestants |= against
    run = generate_in_turn(contestants, prompts, options.tokens, options.rounds, progress, pair.target.context_length)
    if not run.prompts:
        return None
    return {"tokens": options.tokens, **summarize(run)}

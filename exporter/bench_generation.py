"""Generates from prompts plainly, speculatively, and in other engines, in turn; groups what comes out by category."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from specexport.exporter.bench_prompts import BenchPrompt
from specexport.exporter.bench_statistics import Summary, ratios
from specexport.exporter.progress import Progress

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Generated:
    """One continuation: its ids, its seconds, and for our own engine its metrics."""

    ids: list[int]
    prefill_s: float
    decode_s: float
    metrics: Any = None

    @property
    def speed(self) -> float:
        """Tokens a second after the first."""
        return (len(self.ids) - 1) / self.decode_s


class Contestant(Protocol):
    """What continues a prompt greedily by exactly ``new`` tokens."""

    def generate(self, ids: Sequence[int], new: int) -> Generated:
        """Continue; an end-of-sequence id does not end it."""
        ...


@dataclasses.dataclass(frozen=True)
class PairContestant:
    """Our own runtime, with ``num_assistant_tokens`` drafted a round; 0 is plain."""

    pair: Any
    num_assistant_tokens: int

    def generate(self, ids: Sequence[int], new: int) -> Generated:
        """Continue greedily."""
        output = self.pair.generate(
            list(ids),
            max_new_tokens=new,
            do_sample=False,
            repetition_penalty=1.0,
            num_assistant_tokens=self.num_assistant_tokens,
            ignore_eos=True,
        )
        metrics = output.metrics
        return Generated(output.token_ids, metrics.prefill_s, metrics.decode_s, metrics)


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that was generated: contestant to prompt by prompt, round by round, in the same order for all."""

    prompts: tuple[BenchPrompt, ...]
    rounds: int
    outputs: Mapping[str, Sequence[Generated]]

    def of(self, name: str, category: str | None = None) -> list[Generated]:
        """One contestant's, of one category or of all."""
        return [
            found
            for index, found in enumerate(self.outputs[name])
            if category is None or self.prompts[index // self.rounds].category == category
        ]

    def categories(self) -> list[str]:
        """In the order of the prompts."""
        return list(dict.fromkeys(prompt.category for prompt in self.prompts))


def generate_in_turn(
    contestants: Mapping[str, Contestant],
    prompts: Sequence[BenchPrompt],
    new: int,
    rounds: int,
    progress: Progress,
    context_length: int,
) -> Run:
    """Every contestant on a prompt, then again for the next round, then the next prompt; one turn before warms up.

    Prompts that leave no room for ``new`` tokens are left out, and said so.
    """
    fitting = [prompt for prompt in prompts if len(prompt.ids) + new <= context_length]
    if len(fitting) < len(prompts):
        progress.note(f"{len(prompts) - len(fitting)} prompts leave no room for {new} tokens and are left out")
    outputs: dict[str, list[Generated]] = {name: [] for name in contestants}
    with progress.stage(f"Generating from {len(fitting)} prompts", len(fitting) * rounds + 1) as advance:
        for contestant in contestants.values():
            if fitting:
                contestant.generate(fitting[0].ids, min(new, 8))
        advance(1)
        for prompt in fitting:
            for _ in range(rounds):
                for name, contestant in contestants.items():
                    outputs[name].append(contestant.generate(prompt.ids, new))
                advance(1)
    return Run(tuple(fitting), rounds, outputs)


def different_prompts(run: Run, name: str) -> list[int]:
    """Indices of the prompts on which a contestant's ids are not plain decoding's, in any round."""
    pairs = zip(run.outputs[PLAIN], run.outputs[name])
    return sorted({index // run.rounds for index, (a, b) in enumerate(pairs) if a.ids != b.ids})


def summarize(run: Run, baseline: str = PLAIN) -> dict[str, Any]:
    """Speeds, ratios to plain decoding pair by pair, and acceptance, for all prompts and by category."""
    result: dict[str, Any] = {
        "prompts": len(run.prompts),
        "rounds": run.rounds,
        "different_prompts": {
            name: different_prompts(run, name) for name in run.outputs if run.of(name)[0].metrics and name != baseline
        },
        "categories": [],
    }
    for category in (None, *run.categories()):
        count = sum(category in (None, prompt.category) for prompt in run.prompts)
        contestants: dict[str, Any] = {}
        entry = {"category": category or "all", "prompts": count, "contestants": contestants}
        for name in run.outputs:
            found, base = run.of(name, category), run.of(baseline, category)
            if len(found) < 2:
                break
            contestants[name] = _contestant(found, base)
        else:
            result["categories"].append(entry)
    return result


def _contestant(found: Sequence[Generated], base: Sequence[Generated]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "tokens_per_second": Summary.of([one.speed for one in found]).to_json(),
        "ratio": Summary.of(ratios([one.speed for one in found], [one.speed for one in base])).to_json(),
    }
    steps = [ms for one in found if one.metrics for ms in one.metrics.verify_ms]
    if len(steps) > 1:
        metrics = [one.metrics for one in found]
        rounds = sum(one.steps for one in metrics)
        drafted = sum(one.drafted for one in metrics)
        host = [ms for one in metrics for ms in one.host_ms]
        entry |= {
            "verify_ms": Summary.of(steps).to_json(),
            "host_ms": Summary.of(host).to_json(),
            "draft_ms": Summary.of([ms for one in metrics for ms in one.draft_ms]).to_json(),
            "tokens_per_step": round(sum(one.new_tokens - 1 for one in metrics) / rounds, 4),
            "acceptance": round(sum(one.accepted for one in metrics) / drafted, 4) if drafted else None,
        }
    return entry

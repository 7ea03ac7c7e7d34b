"""Greedy continuations: exported plain and speculative against the reference, on raw ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specexport.exporter.compare_reference import Reference
from specexport.exporter.compare_statistics import FloatArray, Ids, margin_verdict, top_margin


class PairLike(Protocol):
    """What the comparison of generations needs of a loaded pair."""

    @property
    def tokenizer(self) -> Any:
        """Has ``decode(ids)``; None where a bundle has no tokenizer."""
        ...

    def generate(self, prompt: Any, **options: Any) -> Any:
        """Continue a prompt; the result has ``token_ids``."""
        ...


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """Where two continuations part.

    Attributes:
        position: Index in the continuation; as many ids before it are equal.
        ids: The two ids there (other side first); None where a continuation has ended.
        margin: The reference's top-1 minus top-2 logit there.
        verdict: "tie" when the margin is under the stated one, else "fault".
    """

    position: int
    ids: tuple[int | None, int | None]
    margin: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class PromptGeneration:
    """One prompt, continued three ways."""

    prompt: str
    prompt_tokens: int
    plain_ids: tuple[int, ...]
    speculative_ids: tuple[int, ...] | None
    reference_ids: tuple[int, ...]
    matched: int
    difference: FirstDifference | None
    speculative_difference: FirstDifference | None
    plain_text: str
    speculative_text: str | None
    reference_text: str


@dataclasses.dataclass(frozen=True)
class GenerationFigures:
    """All prompts.

    Attributes:
        matched_mean: Mean number of ids before the first that differs from the reference's.
        matched_share: Matched ids over the ids compared, 0 to 1.
        identical: Prompts whose continuation equals the reference's whole.
        ties: Prompts that part at a tie.
        faults: Prompts that part where the reference was sure.
        speculative_equals_plain: None where the pair has no draft.
        speculative_mismatches: Prompts whose speculative ids are not the plain ids.
    """

    prompts: tuple[PromptGeneration, ...]
    max_new_tokens: int
    tie_margin: float
    matched_mean: float
    matched_share: float
    identical: int
    ties: int
    faults: int
    speculative_equals_plain: bool | None
    speculative_mismatches: int


def matched_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading ids are equal."""
    count = 0
    for a, b in zip(left, right):
        if a != b:
            break
        count += 1
    return count


def compare_prompt(
    pair: PairLike,
    reference: Reference,
    prompt: Ids,
    *,
    speculative: bool,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...],
    vocab_size: int | None,
    tie_margin: float,
) -> PromptGeneration:
    """Continue one prompt [tokens] greedily by the exported model and the reference.

    The reference reads the exported continuation in one pass, which shows where its own greedy choice first differs,
    and only goes on alone from there.

    Ids from ``vocab_size`` on (the contract's masked tail) are never emitted, so the reference may not choose them.
    """
    # A penalty in the model's generation_config.json would change even greedy ids, and the reference has none.
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "repetition_penalty": 1.0}
    plain = _ids(pair.generate(prompt.tolist(), num_assistant_tokens=0, **settings).token_ids)
    drafted = _ids(pair.generate(prompt.tolist(), **settings).token_ids) if speculative else None

    sequence = np.concatenate([prompt, np.asarray(plain, np.int64)])
    logits = reference.logits(sequence)[len(prompt) - 1 :, :vocab_size]
    chosen = logits.argmax(axis=1)
    matched = matched_prefix(plain, chosen.tolist())
    difference = None
    reference_ids = plain[:matched]
    if matched < len(plain):
        start = np.concatenate([prompt, np.asarray(plain[:matched], np.int64)])
        chosen_id = int(chosen[matched])
        tail = reference.greedy(np.append(start, chosen_id), max_new_tokens - matched - 1, eos_token_ids)
        reference_ids += (chosen_id, *(() if chosen_id in eos_token_ids else tail))
        difference = _difference(matched, chosen_id, plain[matched], logits[matched], tie_margin)
    speculative_difference = None
    if drafted is not None and drafted != plain:
        common = matched_prefix(drafted, plain)
        row = logits[min(common, len(logits) - 1)]
        speculative_difference = _difference(common, _at(plain, common), _at(drafted, common), row, tie_margin)

    def decode(ids: Sequence[int]) -> str:
        return "" if pair.tokenizer is None else str(pair.tokenizer.decode(list(ids)))

    return PromptGeneration(
        prompt=decode(prompt.tolist()),
        prompt_tokens=len(prompt),
        plain_ids=plain,
        speculative_ids=drafted,
        reference_ids=reference_ids,
        matched=matched,
        difference=difference,
        speculative_difference=speculative_difference,
        plain_text=decode(plain),
        speculative_text=None if drafted is None else decode(drafted),
        reference_text=decode(reference_ids),
    )


def summarize(prompts: Sequence[PromptGeneration], *, max_new_tokens: int, tie_margin: float) -> GenerationFigures:
    """Count matches, ties and faults over all prompts."""
    matched = [found.matched for found in prompts]
    compared = sum(len(found.plain_ids) for found in prompts)
    parted = [found.difference for found in prompts if found.difference is not None]
    drafted = [found for found in prompts if found.speculative_ids is not None]
    mismatches = sum(found.speculative_difference is not None for found in drafted)
    return GenerationFigures(
        prompts=tuple(prompts),
        max_new_tokens=max_new_tokens,
        tie_margin=tie_margin,
        matched_mean=sum(matched) / len(matched) if matched else 0.0,
        matched_share=sum(matched) / compared if compared else 1.0,
        identical=len(prompts) - len(parted),
        ties=sum(difference.verdict == "tie" for difference in parted),
        faults=sum(difference.verdict == "fault" for difference in parted),
        speculative_equals_plain=mismatches == 0 if drafted else None,
        speculative_mismatches=mismatches,
    )


def _difference(
    position: int, expected: int | None, found: int | None, row: FloatArray, tie_margin: float
) -> FirstDifference:
    margin = top_margin(row)
    return FirstDifference(position, (expected, found), margin, margin_verdict(margin, tie_margin))


def _ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(token) for token in token_ids)


def _at(ids: tuple[int, ...], index: int) -> int | None:
    return ids[index] if index < len(ids) else None

"""Teacher forcing of one engine against its reference, through three paths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specexport.exporter.compare_paths import (
    EngineLike,
    Logits,
    PathFigures,
    PathStatistics,
    choose_segments,
    other_paths,
    prefill,
)
from specexport.exporter.compare_reference import Reference, ReferenceModelError
from specexport.exporter.compare_result import CompareOptions, EngineComparison
from specexport.exporter.compare_statistics import Ids, TokenStatistics
from specexport.exporter.progress import Progress, Silent
from specexport.plugins.errors import InputError


def compare_engine(
    engine: EngineLike,
    reference: Reference,
    windows: Sequence[Ids],
    *,
    options: CompareOptions,
    progress: Progress | None = None,
    title: str = "Comparing",
) -> EngineComparison:
    """Teacher-force an engine and its reference on the same ids.

    One window's reference logits [tokens, vocab] are in memory at a time, and of the engine's one chunk, plus the rows
    that are computed again through the other paths.

    Args:
        engine: The exported model.
        reference: The truth.
        windows: int64 [tokens] each.
        options: How; ``num_assistant_tokens`` None counts as 4.
        progress: Told of each row.
        title: Of the stage.

    Raises:
        InputError: There is no window, or one is longer than the engine's context.
        ReferenceModelError: The two have different vocabularies.
    """
    if not windows:
        raise InputError("there is no window to compare on")
    longest = max(len(window) for window in windows)
    if longest > engine.context_length:
        raise InputError(
            f"a window of {longest} tokens does not fit the engine's {engine.context_length} positions; "
            "make --window smaller"
        )
    segments = choose_segments([len(window) for window in windows], None if options.full else options.path_tokens)
    k = 4 if options.num_assistant_tokens is None else options.num_assistant_tokens
    paths = other_paths(k + 1)
    statistics = TokenStatistics(tie_margin=options.tie_margin)
    by_path = {name: PathStatistics(options.tie_margin) for name in paths}
    total = sum(len(window) for window in windows) * 2 + len(paths) * sum(s.stop - s.start for s in segments)
    with (progress or Silent()).stage(title, total) as advance:
        for index, ids in enumerate(windows):
            truth = reference.logits(ids)
            _check_vocabulary(truth, engine)
            advance(len(ids))
            targets = np.append(ids[1:], -1)
            inside = [segment for segment in segments if segment.window == index]
            kept: list[list[Logits]] = [[] for _ in inside]
            for start, logits in prefill(engine, ids, options.prefill_chunk):
                rows = slice(start, start + len(logits))
                statistics.add(index, start, truth[rows], logits, targets[rows])
                for segment, blocks in zip(inside, kept):
                    low, high = max(segment.start - start, 0), segment.stop - start
                    blocks.append(logits[low : max(high, 0)].copy())
                advance(len(logits))
            for segment, blocks in zip(inside, kept):
                prefilled = np.concatenate(blocks)
                for name, path in paths.items():
                    for position, logits in path(engine, ids, segment, options.prefill_chunk):
                        rows = slice(position, position + len(logits))
                        ours = prefilled[position - segment.start :][: len(logits)]
                        by_path[name].add(index, position, truth[rows], logits, ours, targets[rows])
                        advance(len(logits))
    figures = statistics.figures()
    prefilled_path = PathFigures(
        tokens=figures.tokens,
        kl_mean=figures.kl_mean,
        kl_max=figures.kl_max,
        top1_agreement=figures.top1_agreement,
        max_difference=0.0,
        identical=True,
        first_difference=None,
    )
    others = {name: path.figures() for name, path in by_path.items()}
    return EngineComparison(figures, {"prefill": prefilled_path, **others})


def _check_vocabulary(truth: Logits, engine: EngineLike) -> None:
    if truth.shape[1] != engine.vocab_size:
        raise ReferenceModelError(
            f"the reference has logits for {truth.shape[1]} ids, the engine for {engine.vocab_size}; "
            "they are not the same model: give the engine's own source as --reference"
        )

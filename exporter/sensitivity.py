"""Which matrices need finer activations than int8: what int8 costs in each is measured, and a budget of KL spent.

The reference is the same engine with int16 everywhere, so weights and cache count for nothing here, and no eager model
is needed. Errors of different matrices are nearly independent, so their KLs add up, nearly: the sum finds the
candidates, a measurement decides.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specexport.exporter.activations import ActivationChoice
from specexport.exporter.compare_text import cut_windows, default_text
from specexport.exporter.compile import compile_engine
from specexport.exporter.progress import Progress
from specexport.exporter.trial_engine import Linear, TrialEngine

if TYPE_CHECKING:
    from specexport.exporter.artifact import WeightsFiles
    from specexport.exporter.compile import CapturedModel
    from specexport.exporter.config import BuildConfig
    from specexport.exporter.tokenizer_files import TokenizerFiles
    from specexport.exporter.weights import WeightStore

Floats = npt.NDArray[np.float32]
Group = tuple[Linear, ...]

TOKENS = 256
SECONDS = 60  # about what all measurements together may take
ROUNDS = 4  # the last choice is measured, and corrected, this often
NEAR_ENOUGH = 0.9  # of the target: no further round is tried


def choose_activations(
    captured: CapturedModel,
    weights: WeightStore,
    config: BuildConfig,
    files: WeightsFiles,
    tokenizer: TokenizerFiles,
    progress: Progress,
) -> ActivationChoice:
    """The precision that was asked for; with ``auto``, chosen for each matrix on the text that ships.

    Args:
        captured: Its graph is left as it is.
        weights: Of the same model.
        config: The build's.
        files: The bundle's data files; the weights that are written here are those that the engine will share.
        tokenizer: The bundle's, written below ``files.root`` already.
        progress: Told of each stage and of the choice.
    """
    precision = config.activation_precision
    if precision.bits is not None:
        return ActivationChoice(precision.bits)
    from specexport.runtime.tokenizer import Tokenizer

    assert precision.target_kl is not None
    ids = Tokenizer(files.root / "tokenizer.json").encode(default_text())
    window = min(TOKENS, captured.context_length)
    (ids_measured, *_) = cut_windows(ids, window=window, tokens=window, bos_token_id=tokenizer.bos_token_id)
    copy = dataclasses.replace(captured, graph=captured.graph.clone())
    quiet = dataclasses.replace(config, dump_passes=None)
    compiled = compile_engine(copy, weights, quiet, ActivationChoice(16), files, progress)
    files.flush()
    trial = TrialEngine(files.root / compiled.entry.engines["cpu"].file, compiled.entry)
    choice = choose(trial, ids_measured, precision.target_kl, progress)
    progress.note(f"Activations: {choice.summary() or 'no matrix is quantized, so all stay fp32'}")
    return choice


def choose(trial: TrialEngine, ids: npt.NDArray[np.int64], target_kl: float, progress: Progress) -> ActivationChoice:
    """Keep int8 where it costs least, until the mean KL over ``ids`` [tokens] reaches ``target_kl``."""
    linears = trial.linears
    if not linears:
        return ActivationChoice(16)
    started = time.perf_counter()
    truth = SoftTargets(trial.logits(ids, ()))

    def kl(int8: Collection[Linear]) -> float:
        return truth.mean_kl(trial.logits(ids, int8)) if int8 else 0.0

    before = time.perf_counter()
    everywhere = kl(linears)
    seconds = time.perf_counter() - before
    costs: dict[Group, float] = {tuple(linears): everywhere}
    chosen, reached = list(linears), everywhere
    if not everywhere <= target_kl:
        groups = grouped(linears, max(1, int(SECONDS / seconds)))
        with progress.stage("Measuring what int8 activations cost", len(groups)) as advance:
            for group in groups:
                costs[group] = kl(group)
                advance(1)
        costs.pop(tuple(linears), None)
        chosen, reached = spend(costs, kl, target_kl)
    return ActivationChoice(
        16,
        frozenset(itertools.chain.from_iterable(linear.matrices for linear in chosen)),
        {
            "target_kl": target_kl,
            "kl": reached,
            "kl_int8_everywhere": everywhere,
            "tokens": len(ids),
            "linears": len(linears),
            "int8_linears": len(chosen),
            "seconds": round(time.perf_counter() - started, 1),
            "costs": [{"int8": [name for x in group for name in x.matrices], "kl": c} for group, c in costs.items()],
            "int16": sorted(name for linear in set(linears) - set(chosen) for name in linear.matrices),
        },
    )


def spend(
    costs: Mapping[Group, float], kl: Callable[[Collection[Linear]], float], target_kl: float
) -> tuple[list[Linear], float]:
    """The largest choice that was measured (``kl``) to keep the target, and its KL; nothing if none does."""
    best: tuple[list[Linear], float] = ([], 0.0)
    budget = target_kl
    for _ in range(ROUNDS):
        chosen = list(itertools.chain.from_iterable(affordable(costs, budget)))
        reached = kl(chosen)
        if reached <= target_kl and weights_in(chosen) >= weights_in(best[0]):
            best = (chosen, reached)
        if not chosen or NEAR_ENOUGH * target_kl <= reached <= target_kl:
            break
        # KLs do not add up exactly: take what the sum was off by for what it will be off by.
        budget *= 0.5 if math.isnan(reached) else (1 + NEAR_ENOUGH) / 2 * target_kl / max(reached, target_kl / 10)
    return best


def affordable(costs: Mapping[Group, float], budget: float) -> list[Group]:
    """Groups whose costs add up to at most ``budget``, those with the least cost a weight first."""
    taken, spent = [], 0.0
    for group in sorted(costs, key=lambda group: costs[group] / weights_in(group)):
        if spent + costs[group] <= budget:  # never true of NaN
            taken.append(group)
            spent += costs[group]
    return taken


def grouped(linears: Sequence[Linear], most: int) -> list[Group]:
    """About ``most`` groups at most: neighbouring layers' linears of one kind are measured together."""
    size = math.ceil(len(linears) / most)
    kinds: dict[str, list[Linear]] = {}
    for linear in linears:
        kinds.setdefault(re.sub(r"\d+", "#", "+".join(linear.matrices)), []).append(linear)
    return [tuple(kind[start : start + size]) for kind in kinds.values() for start in range(0, len(kind), size)]


def weights_in(linears: Iterable[Linear]) -> int:
    """How many weights ``linears`` have: the work that int8 halves."""
    return sum(linear.weights for linear in linears)


class SoftTargets:
    """The distributions of a reference's logits [tokens, vocab], for KLs far below float32's steps of a logit."""

    def __init__(self, logits: Floats) -> None:
        self._logits = logits
        self._p = np.exp(logits - logits.max(axis=1, keepdims=True))
        self._p /= self._p.sum(axis=1, keepdims=True)

    def mean_kl(self, logits: Floats) -> float:
        """Mean KL(reference || other) in nats.

        Only differences d of logits enter, as log E[exp(d - E d)] under the reference: no large terms cancel.
        """
        with np.errstate(invalid="ignore"):
            d = logits - self._logits
        d[self._p == 0] = 0  # masked ids; they are -inf on both sides
        d -= np.einsum("tv,tv->t", self._p, d)[:, None]
        return float(np.log1p(np.einsum("tv,tv->t", self._p, np.expm1(d)), dtype=np.float64).mean())

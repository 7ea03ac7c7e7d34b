"""One request's choice of tokens: settings, seed, and the tokens so far, for the target and its draft alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specexport.plugins.errors import SpecexportError
from specexport.runtime.noise import Purpose, uniforms
from specexport.runtime.sampling import (
    Distributions,
    Floats,
    Ints,
    SamplingSettings,
    distributions,
    draw,
    penalize,
)


class LogitsError(SpecexportError):
    """A model returned NaN or infinity where a token had to be chosen."""


class Sampler:
    """Chooses tokens below ``vocab_size``; a padded tail of a model's vocabulary never comes out.

    The methods that read logits take rows float32 [R, V] that continue the committed tokens along a ``chain`` of
    drafted ones: row i is for the token after the committed ones and ``chain[: first + i]``. They raise LogitsError,
    naming ``who`` and the absolute position, where a row holds NaN or +infinity.
    """

    def __init__(self, settings: SamplingSettings, seed: int, vocab_size: int) -> None:
        self.settings = settings
        self.seed = seed
        self.vocab_size = vocab_size
        self.length = 0
        self._seen: npt.NDArray[np.bool_] | None = None
        if settings.repetition_penalty != 1:
            self._seen = np.zeros(vocab_size, bool)

    def commit(self, tokens: Sequence[int]) -> None:
        """Count ``tokens`` (prompt or output) as committed."""
        self.length += len(tokens)
        if self._seen is not None:
            self._seen[list(tokens)] = True

    def choose(self, logits: Floats, chain: Sequence[int] = (), *, first: int = 0, who: str = "target") -> Ints:
        """A model's own token for every row, int64 [R]: the argmax, or a draw by seed and position alone."""
        if not self.settings.do_sample:
            return self.argmax(logits, chain, first=first, who=who)
        return self.draw(self.distributions(logits, chain, first=first, who=who), Purpose.DRAW, first=first)

    def follow(self, logits: Floats, chain: Sequence[int]) -> list[int]:
        """The target's own tokens along ``chain``, up to the first that is not the chain's; R is len(chain) + 1.

        The rule for greedy decoding, and the exact one for drafts that put all their probability on one token: all
        but the last are the accepted ones. Rows behind a difference are not looked at.
        """
        tokens: list[int] = []
        for i in range(len(logits)):
            tokens.append(int(self.choose(logits[i : i + 1], chain, first=i)[0]))
            if i < len(chain) and tokens[i] != chain[i]:
                break
        return tokens

    def argmax(self, logits: Floats, chain: Sequence[int] = (), *, first: int = 0, who: str = "target") -> Ints:
        """The likeliest token of every row, int64 [R]; of equal ones the lowest id."""
        logits = self._prepare(logits, chain, first)
        chosen = np.array([row.argmax() for row in logits], np.int64)
        self._check_finite(logits[np.arange(len(chosen)), chosen], first, who)
        return chosen

    def distributions(
        self, logits: Floats, chain: Sequence[int] = (), *, first: int = 0, who: str = "target"
    ) -> Distributions:
        """The rows' distributions under the settings."""
        logits = self._prepare(logits, chain, first)
        self._check_finite(logits.max(axis=1), first, who)
        return distributions(logits, self.settings)

    def draw(self, rows: Distributions, purpose: Purpose, *, first: int = 0) -> Ints:
        """One token per row, int64 [R]."""
        picked = draw(rows.probabilities, self.uniforms(len(rows.probabilities), purpose, first=first))
        tokens: Ints = rows.support[picked]
        return tokens

    def uniforms(self, count: int, purpose: Purpose, *, first: int = 0) -> npt.NDArray[np.float64]:
        """float64 [count]: the numbers of that many positions, from the chain's ``first`` on."""
        start = self.length + first
        return uniforms(self.seed, np.arange(start, start + count), purpose)

    def _prepare(self, logits: Floats, chain: Sequence[int], first: int) -> Floats:
        """Cut the padded tail off; with a repetition penalty, a penalized copy."""
        logits = logits[:, : self.vocab_size]
        if self._seen is None:
            return logits
        logits, seen = logits.copy(), self._seen.copy()
        seen[list(chain[:first])] = True
        for i, row in enumerate(logits, start=first):
            penalize(row, np.flatnonzero(seen), self.settings.repetition_penalty)
            if i < len(chain):
                seen[chain[i]] = True
        return logits

    def _check_finite(self, peaks: npt.NDArray[np.float32], first: int, who: str) -> None:
        """A row's peak is not finite if the row holds a NaN or +infinity, or nothing but -infinity."""
        bad = np.flatnonzero(~np.isfinite(peaks))
        if len(bad):
            raise LogitsError(
                f"the {who}'s logits for position {self.length + first + int(bad[0])} hold NaN or infinity; "
                "its weights are damaged or its activations overflow: run `specexport compare` on the bundle"
            )

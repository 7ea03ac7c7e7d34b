"""Random numbers that are a function of (seed, absolute position, purpose), so discarded drafts use none up."""

from __future__ import annotations

import enum
import secrets

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(enum.IntEnum):
    """What a number decides at its position."""

    DRAW = 1  # the emitted token, where the target draws it: plain, matched, recovered or bonus
    DRAFT = 2  # the drafted token
    ACCEPT = 3  # whether the drafted token stays


def fresh_seed() -> int:
    """A seed from the operating system, for requests that name none."""
    return secrets.randbits(63)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One step of splitmix64: a bijection of 64-bit words whose every input bit moves every output bit."""
    x = x + _GAMMA
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seed: npt.ArrayLike, position: npt.ArrayLike, purpose: Purpose) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), float64 in the broadcast shape of ``seed`` and ``position``."""
    word = _mix(np.atleast_1d(np.asarray(seed)).astype(np.uint64) ^ (np.uint64(purpose) << np.uint64(56)))
    word = _mix(word + np.atleast_1d(np.asarray(position)).astype(np.uint64))
    return (_mix(word) >> np.uint64(11)).astype(np.float64) * 2.0**-53

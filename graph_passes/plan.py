"""What the passes are told: where weights come from, how each matrix is quantized, what the cache holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from specexport.plugins.quantized_linear.format import QuantizationScheme, QuantizedWeight


class WeightSource(Protocol):
    """Weights by state-dict name, each tied group under the name that the captured graph uses."""

    def get(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A tensor's values, float32."""
        ...

    def quantized(self, name: str, scheme: QuantizationScheme) -> QuantizedWeight:
        """The matrix ``name`` [N, K] in ``scheme``."""
        ...


# Scheme of the matrix of a name and of a shape (N, K); None keeps float32.
SchemeOf = Callable[[str, tuple[int, int]], QuantizationScheme | None]


# Bits of the activations that the matrix of a name is applied to: 8, 16 or 32. Asked for quantized matrices only.
ActivationBitsOf = Callable[[str], int]


def keep_activations(name: str) -> int:
    """Quantize no activation."""
    return 32


def keep_float32(name: str, shape: tuple[int, int]) -> QuantizationScheme | None:
    """Quantize nothing."""
    return None


class NoWeights:
    """Stands for the weights where only the graph's shape is wanted; reading one fails."""

    def get(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Fail."""
        raise RuntimeError(f"no weights were given, but {name} was read")

    def quantized(self, name: str, scheme: QuantizationScheme) -> QuantizedWeight:
        """Fail."""
        raise RuntimeError(f"no weights were given, but {name} was read")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassPlan:
    """The choices that the passes carry out.

    Attributes:
        weights: Where weights come from; read only when a graph is written.
        scheme: Scheme of each matrix by name and shape (N, K).
        activation_bits: Bits of the activations inside each quantized linear; only linears of equal ones are merged.
        activation_group_size: Input channels that share an activation scale.
        key_bits: 16 or 8.
        value_bits: 16 or 8.
        key_group_size: Channels of a head that share a key scale, cut to what divides the head; unused at 16 bits.
        value_group_size: Likewise for values.
    """

    weights: WeightSource
    scheme: SchemeOf = keep_float32
    activation_bits: ActivationBitsOf = keep_activations
    activation_group_size: int = 32
    key_bits: int = 16
    value_bits: int = 16
    key_group_size: int = 64
    value_group_size: int = 64

    def __post_init__(self) -> None:
        for name, allowed in (
            ("activation_group_size", (32,)),
            ("key_bits", (8, 16)),
            ("value_bits", (8, 16)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, is {getattr(self, name)}")


def cache_group_size(wanted: int, head_dim: int) -> int:
    """The largest group of at most ``wanted`` channels, a multiple of 8, that divides a head of ``head_dim``."""
    fitting = [size for size in range(8, min(wanted, head_dim) + 1, 8) if head_dim % size == 0]
    if not fitting:
        raise ValueError(f"a head of {head_dim} channels has no group of at most {wanted} channels in multiples of 8")
    return fitting[-1]

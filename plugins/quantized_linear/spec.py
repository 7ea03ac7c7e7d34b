"""What QuantizedLinear is called, which attributes it takes, and where its kernels are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specexport.plugins.op import OpSpec

SPEC = OpSpec(
    name="QuantizedLinear",
    version=1,
    reference="specexport.plugins.quantized_linear.reference",
    kernels={"cpu": "plugins/quantized_linear/cpu.cc"},
)

INPUTS = ("x", "weight", "scale", "minimum", "bias", "norm_weight", "norm_bias", "residual")
OUTPUTS = ("y",)
CPU_INPUTS = ("x", "packed", "bias", "norm_weight", "norm_bias", "residual")

NORMS = ("none", "rms", "layer")
# The largest integer of a quantized activation, by its bits.
ACTIVATION_LIMITS = {8: 127, 16: 127 * 128}
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu")


@dataclasses.dataclass(frozen=True)
class LinearAttributes:
    """The op's attributes.

    Attributes:
        bits: Bits of a weight: 4, 8 or 32.
        group_size: Input features that share a scale; 0 for 32 bits.
        activation_bits: 32 keeps x as it is, 8 and 16 quantize each group of it: the scale is the group's largest
            magnitude over 127 or over 16256 (127 * 128), a value the nearest multiple of the scale, ties to even, all
            in float32. At 16 bits an integer is two of int8, 128 * first + second, so it has about 15 bits, and a
            product with weights twice the integer dot products; the scales' work stays the same.
        activation_group_size: Input features of one row that share an activation scale: 32.
        norm: Norm of x before it is quantized.
        epsilon: The norm's epsilon.
        activation: What follows the product and the bias; of the gate half only when ``gated``.
        gated: 1 if the first half of the outputs gates the second.
    """

    bits: int = 4
    group_size: int = 32
    activation_bits: int = 8
    activation_group_size: int = 32
    norm: str = "none"
    epsilon: float = 1e-5
    activation: str = "none"
    gated: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 32):
            raise ValueError(f"bits must be 4, 8 or 32, is {self.bits}")
        if self.bits == 32 and self.group_size != 0:
            raise ValueError(f"group_size must be 0 for 32 bits, is {self.group_size}")
        if self.bits != 32 and self.group_size not in (32, 64, 128):
            raise ValueError(f"group_size must be 32, 64 or 128, is {self.group_size}")
        if self.activation_bits not in (8, 16, 32):
            raise ValueError(f"activation_bits must be 8, 16 or 32, is {self.activation_bits}")
        if self.bits == 32 and self.activation_bits != 32:
            raise ValueError(f"activation_bits {self.activation_bits} needs weights of 4 or 8 bits, not 32")
        if self.activation_group_size != 32:
            raise ValueError(f"activation_group_size must be 32, is {self.activation_group_size}")
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {NORMS}, is {self.norm!r}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, is {self.activation!r}")
        if self.gated not in (0, 1):
            raise ValueError(f"gated must be 0 or 1, is {self.gated}")

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> LinearAttributes:
        """Read a node's attributes; those of the CPU form that are not the op's own are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in attributes.items() if name in names})

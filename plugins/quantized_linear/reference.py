"""What QuantizedLinear means: its ONNX function body, an independent oracle, and random valid inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport.plugins.quantized_linear.body import function as function
from specexport.plugins.quantized_linear.format import QuantizationScheme, quantize
from specexport.plugins.quantized_linear.oracle import oracle as oracle
from specexport.plugins.quantized_linear.spec import LinearAttributes

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["function", "oracle", "random_inputs"]


def random_inputs(
    rng: np.random.Generator,
    *,
    rows: tuple[int, ...] = (3,),
    in_features: int = 64,
    out_features: int = 32,
    has_minimum: bool = False,
    bias: bool = False,
    norm_weight: bool = True,
    norm_bias: bool = False,
    residual: bool = False,
    **attributes: Any,
) -> tuple[dict[str, npt.NDArray[Any] | None], dict[str, Any]]:
    """Valid inputs of these sizes.

    Args:
        rng: Source of the numbers.
        rows: Leading dimensions of x.
        in_features: K.
        out_features: N, even when gated.
        has_minimum: Whether the weights have a minimum.
        bias: Whether there is a bias.
        norm_weight: Whether the norm, if there is one, has a weight.
        norm_bias: Whether the norm, if there is one, has a bias.
        residual: Whether there is a residual.
        attributes: The node's attributes; absent ones get their defaults.

    Returns:
        The inputs by name, absent ones None, and all attributes.
    """
    import dataclasses

    a = LinearAttributes(**attributes)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    dense = normal(out_features, in_features) / np.float32(in_features**0.5)
    inputs: dict[str, npt.NDArray[Any] | None] = {
        "x": normal(*rows, in_features), "weight": dense, "scale": None, "minimum": None,
        "bias": normal(out_features) if bias else None,
        "norm_weight": normal(in_features) if a.norm != "none" and norm_weight else None,
        "norm_bias": normal(in_features) if a.norm != "none" and norm_bias else None,
        "residual": normal(*rows, out_features // (1 + a.gated)) if residual else None,
    }  # fmt: skip
    if a.bits != 32:
        quantized = quantize(dense, QuantizationScheme(a.bits, a.group_size, has_minimum))
        inputs |= {"weight": quantized.weight, "scale": quantized.scale, "minimum": quantized.minimum}
    return inputs, dataclasses.asdict(a)


def cpu_inputs(
    inputs: Mapping[str, npt.NDArray[Any] | None], attributes: Mapping[str, Any]
) -> tuple[dict[str, npt.NDArray[Any] | None], dict[str, Any]]:
    """The same call in the CPU kernel's form: packed weights and the attributes that describe them."""
    from specexport.plugins.quantized_linear.pack import pack

    a = LinearAttributes.of(attributes)
    weight, x = inputs["weight"], inputs["x"]
    if weight is None or x is None:
        raise ValueError("x and weight are required")
    scale, minimum = inputs.get("scale"), inputs.get("minimum")
    packed = pack(weight, scale, minimum, a.bits, a.group_size, bool(a.gated))
    lowered: dict[str, npt.NDArray[Any] | None] = {"x": x, "packed": packed}
    lowered |= {name: inputs.get(name) for name in ("bias", "norm_weight", "norm_bias", "residual")}
    extra = {"in_features": x.shape[-1], "out_features": weight.shape[0], "has_minimum": int(minimum is not None)}
    return lowered, {**attributes, **extra}

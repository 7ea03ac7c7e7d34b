"""RMS norms as one operator: a module is replaced only after its numbers were seen to agree."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class RMSNormStyle:
    """What an RMS norm module computes: x / sqrt(mean(x^2) + epsilon) * (weight + offset)."""

    epsilon: float
    offset: float


def probe_rms_norm(module: Any) -> RMSNormStyle | None:
    """Find by trial whether ``module`` is an RMS norm over its last axis; None if it is something else."""
    import torch

    weight = getattr(module, "weight", None)
    epsilon = next((getattr(module, a) for a in ("variance_epsilon", "eps", "epsilon") if hasattr(module, a)), None)
    if weight is None or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    clone: Any = object.__new__(type(module))
    clone.__dict__ = {**copy.copy(module.__dict__), "_parameters": {}}
    generator = torch.Generator().manual_seed(0)
    trial = torch.randn(weight.shape, generator=generator)
    clone._parameters["weight"] = torch.nn.Parameter(trial, requires_grad=False)
    # Small values too, where the epsilon shows.
    x = torch.randn(3, weight.shape[0], generator=generator) * torch.tensor([[1.0], [1e-3], [30.0]])
    try:
        with torch.no_grad():
            have = clone(x)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    for offset in (0.0, 1.0):
        if have.shape == x.shape and torch.allclose(have, normed * (trial + offset), rtol=1e-4, atol=1e-6):
            return RMSNormStyle(epsilon, offset)
    return None


@contextlib.contextmanager
def rms_norms_whole(model: Any) -> Iterator[int]:
    """While open, the RMS norms of ``model`` that are provably such are the operator ``specexport::rms_norm``.

    Yields:
        How many were replaced.
    """
    styles: dict[tuple[Any, ...], RMSNormStyle | None] = {}
    replaced = 0
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if not type(module).__name__.endswith("RMSNorm"):
                continue
            weight = getattr(module, "weight", None)
            epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            key = (type(module), None if weight is None else weight.shape, epsilon)
            if key not in styles:
                styles[key] = probe_rms_norm(module)
            style = styles[key]
            if style is not None:
                module.forward = _forward(module, style)
                undo.callback(delattr, module, "forward")
                replaced += 1
        yield replaced


def _forward(module: Any, style: RMSNormStyle) -> Callable[[Any], Any]:
    def forward(x: Any) -> Any:
        import torch

        weight = module.weight + style.offset if style.offset else module.weight
        return torch.ops.specexport.rms_norm(x, weight, style.epsilon)

    return forward

"""The reference: a Transformers model in fp32, eager, one window at a time."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from specexport.exporter.compare_statistics import Ids
from specexport.plugins.errors import InputError, SpecexportError

if TYPE_CHECKING:
    import torch

Float32 = npt.NDArray[np.float32]


class ReferenceModelError(SpecexportError):
    """The reference model cannot be run, or does not fit what it is compared with."""


class Reference(Protocol):
    """What the comparison needs of the model that counts as the truth."""

    def logits(self, ids: Ids) -> Float32:
        """Logits [tokens, vocab] of one sequence [tokens]."""
        ...

    def greedy(self, ids: Ids, max_new_tokens: int, eos_token_ids: tuple[int, ...]) -> list[int]:
        """The greedy continuation of one sequence, at most ``max_new_tokens`` ids, an end id included."""
        ...

    def layer_outputs(self, ids: Ids) -> list[Float32]:
        """The residual stream after each decoder layer, [tokens, hidden] a layer."""
        ...


class TorchReference:
    """A loaded `torch.nn.Module` of the Transformers causal-LM kind, run in inference mode.

    Args:
        module: The model; it is put into evaluation mode.

    Raises:
        InputError: Its parameters are not all float32.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        import torch

        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32:
                raise InputError(
                    f"the reference's parameter {name} is {parameter.dtype}; "
                    "the comparison is against fp32: load it with dtype=torch.float32"
                )
        self._module = module.eval()

    def logits(self, ids: Ids) -> Float32:
        """Logits [tokens, vocab] of one sequence [tokens]."""
        import torch

        with torch.inference_mode():
            output = self._module(torch.from_numpy(np.ascontiguousarray(ids))[None], use_cache=False)
            return np.asarray(output.logits[0].numpy(), np.float32)

    def greedy(self, ids: Ids, max_new_tokens: int, eos_token_ids: tuple[int, ...]) -> list[int]:
        """The greedy continuation of one sequence, at most ``max_new_tokens`` ids, an end id included."""
        import torch

        if max_new_tokens < 1:
            return []
        produced: list[int] = []
        block, cache = torch.from_numpy(np.ascontiguousarray(ids))[None], None
        # Transformers renamed the argument and the output's field together.
        known = inspect.signature(self._module.forward).parameters
        name = "cache" if "cache" in known else "past_key_values"
        with torch.inference_mode():
            while len(produced) < max_new_tokens:
                output = self._module(block, use_cache=True, **{name: cache})
                produced.append(int(output.logits[0, -1].argmax()))
                if produced[-1] in eos_token_ids:
                    break
                block, cache = torch.tensor([[produced[-1]]]), output[name]
        return produced

    def layer_outputs(self, ids: Ids) -> list[Float32]:
        """The residual stream after each decoder layer, [tokens, hidden] a layer.

        Raises:
            ReferenceModelError: The module's list of decoder layers cannot be found.
        """
        import torch

        outputs: list[Float32] = []

        def record(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden, torch.Tensor)
            outputs.append(hidden.reshape(-1, hidden.shape[-1]).numpy().copy())

        handles = [layer.register_forward_hook(record) for layer in decoder_layers(self._module)]
        try:
            self.logits(ids)
        finally:
            for handle in handles:
                handle.remove()
        return outputs


def decoder_layers(module: torch.nn.Module) -> torch.nn.ModuleList:
    """The list of decoder layers: the one ModuleList as long as the configuration says.

    Raises:
        ReferenceModelError: There is none, or more than one.
    """
    import torch

    config = getattr(module, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]
    # An expert list may be as long as the list of layers, but it lies inside it.
    outer = [
        (name, child)
        for name, child in lists
        if not any(name.startswith(other + ".") for other, _ in lists if other != name)
    ]
    if len(outer) != 1:
        raise ReferenceModelError(
            f"{type(module).__name__} has {len(outer)} lists of {count} modules, so its decoder layers cannot be told"
        )
    return outer[0][1]


def as_reference(model: torch.nn.Module | Reference) -> Reference:
    """Wrap a module; what has ``logits`` and ``greedy`` already is taken as it is."""
    if hasattr(model, "greedy") and hasattr(model, "logits"):
        return model  # type: ignore[return-value]
    return TorchReference(model)  # type: ignore[arg-type]

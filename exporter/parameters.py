"""Names, shapes and ties of a model's parameters, from its configuration alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import transformers


@dataclasses.dataclass(frozen=True)
class ParameterTable:
    """What a model must be given.

    Attributes:
        shapes: State-dict name to shape, ties included.
        tied: A tied name to the one that stands for it; the others are absent.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]

    def canonical(self, name: str) -> str:
        """The name that stands for ``name``: ``model.embed_tokens.weight`` for a tied ``lm_head.weight``."""
        return self.tied.get(name, name)

    def members(self, name: str) -> list[str]:
        """``name`` and whatever is tied to it, itself first."""
        return [name, *(other for other, canonical in self.tied.items() if canonical == name)]


def parameter_table(module: torch.nn.Module) -> ParameterTable:
    """The table of a module; its parameters may be on the meta device."""
    shapes, tied = {}, {}
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        shapes[name] = tuple(tensor.shape)
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            tied[name] = canonical
    return ParameterTable(shapes, tied)


def meta_model(config: transformers.PretrainedConfig, trust_remote_code: bool = False) -> torch.nn.Module:
    """The causal language model of a configuration on the meta device: names and shapes without memory."""
    import copy

    import torch
    import transformers

    factory: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        # Building writes into the configuration, so it gets its own.
        model: torch.nn.Module = factory.from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code, attn_implementation="eager"
        )
    return model

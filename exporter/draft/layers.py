"""The target cut to its first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specexport.exporter.draft.specification import LayersDraft, check_layers
from specexport.plugins.errors import InputError

if TYPE_CHECKING:
    import torch

# Lists in a configuration with one entry a layer.
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")


def cut_layers(module: torch.nn.Module, layers: int) -> torch.nn.Module:
    """Keep a causal language model's first ``layers`` decoder layers, in place; returns the module.

    Names of what stays do not change, so weights are shared with the whole model by name. Its configuration is
    replaced by one of that depth.

    Raises:
        InputError: Not fewer layers than it has, or no single list of decoder layers to be found.
    """
    import copy

    import torch

    config: Any = module.config
    total = int(config.num_hidden_layers)
    check_layers(LayersDraft(layers), total)
    lists = [
        (owner, name, child)
        for owner in module.modules()
        for name, child in owner.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == total
    ]
    if len(lists) != 1:
        raise InputError(
            f"--draft layers:{layers}: {type(module).__name__} has {len(lists)} lists of {total} modules; "
            "its decoder layers cannot be told apart"
        )
    owner, name, child = lists[0]
    setattr(owner, name, child[:layers])
    shorter = copy.deepcopy(config)
    shorter.num_hidden_layers = layers
    for field in _PER_LAYER:
        if isinstance(value := getattr(shorter, field, None), list) and len(value) == total:
            setattr(shorter, field, value[:layers])
    for part in module.modules():
        if getattr(part, "config", None) is config:
            part.config = shorter
    return module

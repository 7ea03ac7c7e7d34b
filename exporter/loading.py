"""A source's configuration, eager reference and weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from specexport.exporter.gguf_config import gguf_config
from specexport.exporter.gguf_file import read_gguf
from specexport.exporter.gguf_weights import GGUFWeights
from specexport.exporter.parameters import meta_model, parameter_table
from specexport.exporter.source import Source
from specexport.exporter.weights import WeightStore, directory_backend
from specexport.plugins.errors import InputError

if TYPE_CHECKING:
    import torch
    import transformers


def load_config(source: Source) -> transformers.PretrainedConfig:
    """The model's configuration.

    Raises:
        InputError: An architecture that transformers does not know, or one that is no decoder.
    """
    import transformers

    if source.kind == "gguf":
        config = gguf_config(read_gguf(source.gguf_path))
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(
                source.path, trust_remote_code=source.trust_remote_code, local_files_only=True
            )
        except Exception as error:  # A configuration's own checks raise what they like.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"{source.identity}: transformers {transformers.__version__} cannot read its config.json: {reason}"
            ) from error
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    remote = source.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if getattr(config, "is_encoder_decoder", False) or (config.model_type not in known and not remote):
        raise InputError(
            f"{source.identity}: {config.model_type!r} is not a decoder that transformers {transformers.__version__} "
            "loads with AutoModelForCausalLM; only causal language models can be exported"
        )
    return config


def load_reference(source: Source, config: transformers.PretrainedConfig) -> torch.nn.Module:
    """The eager model in float32, evaluation mode, eager attention: what an export is compared with.

    Raises:
        InputError: The files lack a parameter, by name.
    """
    import torch
    import transformers

    if source.kind == "gguf":
        return _reference_from_store(open_weights(source, config), config)
    factory: Any = transformers.AutoModelForCausalLM
    model, report = factory.from_pretrained(
        source.path,
        config=copy.deepcopy(config),
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=source.trust_remote_code,
        weights_only=True,
        output_loading_info=True,
    )
    for key, what in (("missing_keys", "lack"), ("mismatched_keys", "have another shape for")):
        if names := sorted(map(str, report[key])):
            raise InputError(f"{source.identity}: the weight files {what} {names[0]} ({len(names)} in all)")
    reference: torch.nn.Module = model.eval()
    return reference


def open_weights(
    source: Source, config: transformers.PretrainedConfig, reference: torch.nn.Module | None = None
) -> WeightStore:
    """The model's weights: straight from its files where these hold every parameter, else from a loaded module.

    Args:
        source: Resolved.
        config: Of the source.
        reference: A loaded reference to fall back to, where the caller has one; else it is loaded if needed.

    Raises:
        InputError: The files do not hold the model.
    """
    table = parameter_table(meta_model(config, source.trust_remote_code))
    if source.kind == "gguf":
        return WeightStore(GGUFWeights(read_gguf(source.gguf_path), config, table), table)
    backend, reason = directory_backend(source.path, table)
    if backend is not None:
        return WeightStore(backend, table)
    store = WeightStore.from_module(load_reference(source, config) if reference is None else reference)
    store.description += f" ({reason})"
    return store


def _reference_from_store(store: WeightStore, config: transformers.PretrainedConfig) -> torch.nn.Module:
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    factory: Any = transformers.AutoModelForCausalLM
    with no_init_weights():  # Random values that would be overwritten at once.
        model = factory.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager")
    model.tie_weights()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if store.canonical(name) == name:
                # torch.from_numpy wants memory that it may write to.
                tensor.copy_(torch.from_numpy(store.get(name).copy()))
    reference: torch.nn.Module = model.eval()
    return reference

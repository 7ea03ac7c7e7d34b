"""A model configuration from a GGUF file, read by transformers from a copy without the vocabulary."""

from __future__ import annotations

import pathlib
import struct
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport.exporter.gguf_blocks import decode
from specexport.exporter.gguf_file import GGUFFile, LongArray
from specexport.plugins.errors import InputError

if TYPE_CHECKING:
    import transformers

_TOKENS = "tokenizer.ggml.tokens"
_UINT32 = 4


def gguf_config(file: GGUFFile) -> transformers.PretrainedConfig:
    """The configuration of a GGUF model.

    Raises:
        InputError: transformers does not know the architecture, or the RoPE factors have no configuration.
    """
    import transformers

    with tempfile.TemporaryDirectory(prefix="specexport-") as folder:
        # Reading a vocabulary of 50,000 texts takes transformers seconds, each time; no configuration needs it.
        _write_without_vocabulary(file, pathlib.Path(folder) / file.path.name)
        try:
            config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(
                folder, gguf_file=file.path.name, local_files_only=True
            )
        except Exception as error:  # A configuration's own checks raise what they like.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"{file.path}: architecture {file.architecture!r}: {reason}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    key_length = file.metadata.get(f"{file.architecture}.attention.key_length")
    if key_length is not None and getattr(config, "head_dim", None) is not None:
        config.head_dim = key_length
    _shortest_floats(config, file)
    _check_rope_scaling(file)
    _rope_factors(config, file)
    model_class = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    config.architectures = [model_class] if isinstance(model_class, str) else config.architectures
    return config


def shortest_float(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.999999747378752e-06 gives 1e-05."""
    return float(np.format_float_positional(np.float32(value), unique=True, trim="0"))


def _write_without_vocabulary(file: GGUFFile, target: pathlib.Path) -> None:
    """A sparse copy: header without long arrays, then a hole where the tensors' data would be."""
    kept = [extent for key, extent in file.extents.items() if not isinstance(file.metadata[key], LongArray)]
    pairs = len(kept)
    extra = b""
    size_key, tokens = f"{file.architecture}.vocab_size", file.metadata.get(_TOKENS)
    if size_key not in file.metadata and isinstance(tokens, LongArray):
        # Where the key is absent, transformers counts the tokens.
        extra = struct.pack("<Q", len(size_key)) + size_key.encode() + struct.pack("<II", _UINT32, tokens.count)
        pairs += 1
    with file.path.open("rb") as source, target.open("wb") as out:
        version = source.read(8)
        out.write(version + struct.pack("<QQ", len(file.tensors), pairs))
        for start, stop in [*kept, file.table]:
            if (start, stop) == file.table:
                out.write(extra)
            source.seek(start)
            out.write(source.read(stop - start))
        out.truncate(out.tell() + file.size)


def _shortest_floats(config: transformers.PretrainedConfig, file: GGUFFile) -> None:
    """GGUF keeps floats in 32 bits: an epsilon of 1e-5 comes back as 9.999999747378752e-06."""
    stored = {value for value in file.metadata.values() if isinstance(value, float)}

    def clean(value: Any) -> Any:
        if isinstance(value, float) and value in stored:
            return shortest_float(value)
        return {k: clean(v) for k, v in value.items()} if isinstance(value, dict) else value

    for name, value in list(vars(config).items()):
        if isinstance(value, float | dict) and (cleaned := clean(value)) != value:
            setattr(config, name, cleaned)


def _check_rope_scaling(file: GGUFFile) -> None:
    # transformers drops these keys, and the model would be silently another one.
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if kind != "none":
        raise InputError(f"{file.path}: RoPE scaling {kind!r} cannot be read from GGUF; take the safetensors instead")


def _rope_factors(config: transformers.PretrainedConfig, file: GGUFFile) -> None:
    """Llama 3's RoPE scaling is stored as one factor a frequency; find the parameters that give those factors."""
    if "rope_freqs.weight" not in file.tensors:
        return
    factors = decode(file.tensors["rope_freqs.weight"].type, file.raw("rope_freqs.weight")).reshape(-1)
    parameters = dict(config.rope_parameters)
    theta = float(parameters["rope_theta"])
    scaled = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if np.array_equal(factors, np.ones_like(factors)):
        return
    if not np.allclose(factors, llama3_factors(2 * len(factors), scaled), rtol=1e-4):
        raise InputError(
            f"{file.path}: rope_freqs.weight holds factors that are not Llama 3's; take the safetensors instead"
        )
    config.rope_parameters = scaled


def llama3_factors(channels: int, parameters: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What Llama 3's RoPE scaling divides each frequency by: float64 [channels / 2]."""
    frequencies = parameters["rope_theta"] ** (-np.arange(0, channels, 2) / channels)
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high, factor = (parameters[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float64)

"""The tensors of a GGUF file under the model's own parameter names."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport.exporter.gguf_blocks import block_scheme, decode, repack
from specexport.exporter.gguf_file import GGUFFile, GGUFTensor
from specexport.exporter.parameters import ParameterTable
from specexport.plugins.errors import InputError
from specexport.plugins.quantized_linear.format import QuantizationScheme, QuantizedWeight

if TYPE_CHECKING:
    import transformers

# Architecture -> whether its converter to GGUF reordered the rows of q and k for rotating neighbouring channels.
# Others are left out on purpose: transformers' configuration of them drops facts that change the numbers (Gemma's
# softmax scale and RoPE factor, Phi-3's window).
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
# Not a parameter; gguf_config.py turns it into configuration or refuses it.
_NOT_PARAMETERS = re.compile(r"rope_freqs\.weight")


@dataclasses.dataclass(frozen=True)
class _Entry:
    tensor: GGUFTensor
    rows: np.ndarray[Any, np.dtype[np.intp]] | None


class GGUFWeights:
    """A weight backend over one GGUF file.

    Raises:
        InputError: An architecture whose layout is not known here, or a tensor that is missing, of another shape,
            or left over.
    """

    def __init__(self, file: GGUFFile, config: transformers.PretrainedConfig, table: ParameterTable) -> None:
        if file.architecture not in ARCHITECTURES:
            raise InputError(
                f"{file.path}: GGUF architecture {file.architecture!r} cannot be read; there are "
                f"{', '.join(sorted(ARCHITECTURES))}. Take the model's safetensors instead"
            )
        self._file = file
        self._entries = _match(file, config, table)
        kinds = sorted({entry.tensor.type.name for entry in self._entries.values()})
        self.description = f"GGUF file {file.path.name} ({', '.join(kinds)})"

    def names(self) -> list[str]:
        """Parameter names, tied ones once."""
        return list(self._entries)

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A parameter's values."""
        entry = self._entries[name]
        return decode(entry.tensor.type, self._rows(entry)).reshape(entry.tensor.shape)

    def native_scheme(self, name: str) -> QuantizationScheme | None:
        """How the file has quantized the parameter already, if at all."""
        entry = self._entries[name]
        return block_scheme(entry.tensor.type) if len(entry.tensor.shape) == 2 else None

    def native(self, name: str) -> QuantizedWeight:
        """The parameter's blocks, repacked exactly."""
        entry = self._entries[name]
        return repack(entry.tensor.type, self._rows(entry))

    def _rows(self, entry: _Entry) -> np.ndarray[Any, np.dtype[np.uint8]]:
        raw = self._file.raw(entry.tensor.name)
        return raw if entry.rows is None else np.asarray(raw[entry.rows])


def rotary_rows(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """For each row of q or k as the model wants it, the row of the file that holds it.

    The file has channels 2i and 2i+1 of a head as rotation partners, the model i and i + D/2. Blocks run along the
    input dimension, so moving rows leaves them whole.

    Args:
        rows: Of the matrix, heads * D.
        heads: Of q, or of k.
    """
    half = rows // heads // 2
    return np.arange(rows).reshape(heads, half, 2).swapaxes(1, 2).reshape(rows)


def _match(file: GGUFFile, config: transformers.PretrainedConfig, table: ParameterTable) -> dict[str, _Entry]:
    import gguf

    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[file.architecture]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    interleaved = ARCHITECTURES[file.architecture]
    entries, used = {}, set()
    for name, shape in table.shapes.items():
        if name in table.tied:
            continue
        stored = next((s for member in table.members(name) if (s := _stored_name(names, member)) in file.tensors), None)
        if stored is None:
            raise InputError(f"{file.path}: no tensor for {name} {list(shape)}; the file is incomplete")
        tensor = file.tensors[stored]
        if tensor.shape != shape:
            raise InputError(
                f"{file.path}: tensor {stored!r} has the shape {list(tensor.shape)}, but {name} is {list(shape)}"
            )
        rows = None
        if interleaved and (part := re.search(r"\.attn_([qk])\.weight", stored)):
            heads = config.num_attention_heads if part[1] == "q" else config.num_key_value_heads
            rows = rotary_rows(shape[0], heads)
        entries[name] = _Entry(tensor, rows)
        used.add(stored)
    leftover = [name for name in file.tensors if name not in used and not _NOT_PARAMETERS.fullmatch(name)]
    if leftover:
        raise InputError(
            f"{file.path}: tensor {leftover[0]!r} has no place in {type(config).__name__} ({len(leftover)} such "
            "tensors); take the model's safetensors instead"
        )
    return entries


def _stored_name(names: Any, name: str) -> str | None:
    stem, dot, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    stored = names.get_name(stem)
    return None if stored is None else f"{stored}{dot}{suffix}"

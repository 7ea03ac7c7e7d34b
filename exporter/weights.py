"""A model's weights by their state-dict names, one tensor at a time, from wherever they lie."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from specexport.exporter.checkpoint import FLOATS, Checkpoint, StoredTensor, read_checkpoint
from specexport.exporter.parameters import ParameterTable, parameter_table
from specexport.plugins.errors import InputError
from specexport.plugins.quantized_linear.format import QuantizationScheme, QuantizedWeight, quantize

if TYPE_CHECKING:
    import torch

_Floats = np.ndarray[Any, np.dtype[np.float32]]


class WeightBackend(Protocol):
    """Where values come from. Names are those of parameters, each tied group once."""

    description: str

    def names(self) -> list[str]: ...

    def read(self, name: str) -> _Floats: ...


class NativeBackend(WeightBackend, Protocol):
    """A backend whose matrices may be quantized already."""

    def native_scheme(self, name: str) -> QuantizationScheme | None: ...

    def native(self, name: str) -> QuantizedWeight: ...


class WeightStore:
    """Weights by state-dict name; a tied name gives what it is tied to.

    Attributes:
        description: Where the values come from, for people.
    """

    def __init__(self, backend: WeightBackend, table: ParameterTable) -> None:
        self._backend = backend
        self._table = table
        self.description = backend.description

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> WeightStore:
        """A store over a loaded module's own tensors, whatever their names were in its files."""
        table = parameter_table(module)
        return cls(_ModuleBackend(module, table), table)

    def names(self) -> list[str]:
        """Every state-dict name, tied ones included."""
        return list(self._table.shapes)

    def canonical(self, name: str) -> str:
        """The name that stands for ``name`` and all that is tied to it."""
        return self._table.canonical(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return self._table.shapes[self._known(name)]

    def get(self, name: str) -> _Floats:
        """A tensor's values: float32, of ``shape(name)``, the caller's own copy, or read-only.

        Raises:
            InputError: No such name.
        """
        return self._backend.read(self.canonical(self._known(name)))

    def native_scheme(self, name: str) -> QuantizationScheme | None:
        """How the source has quantized this matrix already; None if it holds plain floats."""
        scheme = getattr(self._backend, "native_scheme", None)
        found: QuantizationScheme | None = None if scheme is None else scheme(self.canonical(self._known(name)))
        return found

    def quantized(self, name: str, scheme: QuantizationScheme) -> QuantizedWeight:
        """A matrix in the given scheme: the source's own blocks if they are of it, else quantized from the values."""
        if self.native_scheme(name) == scheme:
            repacked: QuantizedWeight = self._backend.native(self.canonical(name))  # type: ignore[attr-defined]
            return repacked
        return quantize(self.get(name), scheme)

    def _known(self, name: str) -> str:
        if name not in self._table.shapes:
            raise InputError(f"the model has no weight {name!r} ({len(self._table.shapes)} are known)")
        return name


def directory_backend(directory: pathlib.Path, table: ParameterTable) -> tuple[WeightBackend | None, str]:
    """Direct access to a directory's files, if they hold every parameter under its own name and shape.

    Loading may rename, merge or split what files hold (experts, for one); then only a loaded module has the truth.

    Returns:
        The backend, or None and the reason.
    """
    checkpoint = read_checkpoint(directory)
    backend = _PickleBackend(checkpoint) if checkpoint.format == "bin" else _SafetensorsBackend(checkpoint)
    places = {}
    for name, shape in table.shapes.items():
        if name in table.tied:
            continue
        stored = next((member for member in table.members(name) if member in backend.shapes), None)
        if stored is None:
            return None, f"the files hold no {name}"
        if backend.shapes[stored] != shape:
            return None, f"{stored} is {list(backend.shapes[stored])} in the files and {list(shape)} in the model"
        if backend.dtypes.get(stored, "F32") not in FLOATS:
            return None, f"{stored} is stored as {backend.dtypes[stored]}"
        places[name] = stored
    used = {member for name in places for member in table.members(name)}
    left = [name for name in backend.shapes if name not in used and not name.endswith(("inv_freq", ".attn.bias"))]
    if left:
        return None, f"the files hold {left[0]}, which is no parameter"
    return _Renamed(backend, places), ""


class _Renamed:
    def __init__(self, backend: _SafetensorsBackend | _PickleBackend, places: Mapping[str, str]) -> None:
        self._backend, self._places = backend, places
        self.description = backend.description

    def names(self) -> list[str]:
        return list(self._places)

    def read(self, name: str) -> _Floats:
        return self._backend.read(self._places[name])


class _SafetensorsBackend:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        self.shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
        self.description = f"{len(checkpoint.files)} safetensors file{'s' * (len(checkpoint.files) > 1)}, mapped"

    def read(self, name: str) -> _Floats:
        return read_stored(name, self._tensors[name])


def read_stored(name: str, tensor: StoredTensor) -> _Floats:
    """One tensor of a safetensors file as float32, through a mapping of just its bytes."""
    if tensor.dtype not in FLOATS:
        raise InputError(f"{tensor.file}: {name} is stored as {tensor.dtype}; {', '.join(FLOATS)} can be read")
    if not tensor.nbytes:
        return np.zeros(tensor.shape, np.float32)
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes,))
    if tensor.dtype == "BF16":
        values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view({"F64": np.float64, "F32": np.float32, "F16": np.float16}[tensor.dtype]).astype(np.float32)
    return np.asarray(values).reshape(tensor.shape)


class _PickleBackend:
    def __init__(self, checkpoint: Checkpoint) -> None:
        import zipfile

        import torch

        self._state: dict[str, torch.Tensor] = {}
        self.dtypes: dict[str, str] = {}  # Torch converts whatever it loads.
        for file in checkpoint.files:
            mapped = zipfile.is_zipfile(file)  # The format before torch 1.6 cannot be mapped.
            self._state.update(torch.load(file, map_location="cpu", weights_only=True, mmap=mapped))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._state.items()}
        self.description = f"{len(checkpoint.files)} pickled file{'s' * (len(checkpoint.files) > 1)} (weights_only)"

    def read(self, name: str) -> _Floats:
        return _float32(self._state[name])


class _ModuleBackend:
    def __init__(self, module: torch.nn.Module, table: ParameterTable) -> None:
        self._state = module.state_dict()
        self._table = table
        self.description = "the module that transformers loaded"

    def names(self) -> list[str]:
        return [name for name in self._state if name not in self._table.tied]

    def read(self, name: str) -> _Floats:
        return _float32(self._state[name])


def _float32(tensor: torch.Tensor) -> _Floats:
    values: _Floats = tensor.detach().float().contiguous().numpy()
    values.flags.writeable = False  # It may be the model's own memory.
    return values

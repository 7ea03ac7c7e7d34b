"""What an op is: a name, a version, a reference, and the kernels that exist."""

from __future__ import annotations

import dataclasses
import importlib
import types


class UnsupportedBackendError(LookupError):
    """An op has no kernel for the asked backend."""


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """One custom op. Modules are named, not imported, so that a spec costs nothing to load.

    Attributes:
        name: The op type in the graph.
        version: Raised whenever what the op computes changes; the manifest lists it.
        reference: Module with the ONNX function body, the numpy oracle and random valid inputs.
        kernels: Backend name to the module (or, for ``cpu``, the native source) that implements it.
        domain: The ONNX domain.
    """

    name: str
    version: int
    reference: str
    kernels: dict[str, str]
    domain: str = "specexport"

    @property
    def qualified_name(self) -> str:
        """``domain::name``, the key of the manifest's op table."""
        return f"{self.domain}::{self.name}"

    def load_reference(self) -> types.ModuleType:
        """Import the module that holds the op's meaning."""
        return importlib.import_module(self.reference)

    def load_kernel(self, backend: str) -> types.ModuleType:
        """Import the module that implements this op for ``backend``.

        Raises:
            UnsupportedBackendError: The op has no kernel for it.
        """
        try:
            module = self.kernels[backend]
        except KeyError:
            raise UnsupportedBackendError(
                f"{self.qualified_name} has no {backend} kernel; it has {sorted(self.kernels)}"
            ) from None
        return importlib.import_module(module)

"""How fast this machine reads memory, by the custom-op library's own threads."""

from __future__ import annotations

import ctypes

from specexport.plugins.errors import SpecexportError
from specexport.runtime.native import op_library


def read_bandwidth(nbytes: int, *, seconds: float = 0.05, threads: int = 0) -> float:
    """Bytes a second of reading ``nbytes`` bytes over and over, as decoding reads its weights.

    Args:
        nbytes: Size of the buffer: what fits a processor's cache is read faster than what does not, so give the bytes
            that a step reads.
        seconds: For about how long.
        threads: 0 takes the kernels' own number.

    Raises:
        SpecexportError: There is no memory for the buffer.
    """
    library = ctypes.CDLL(op_library())
    library.specexport_read_bandwidth.argtypes = [ctypes.c_int64, ctypes.c_double, ctypes.c_int]
    library.specexport_read_bandwidth.restype = ctypes.c_double
    found = float(library.specexport_read_bandwidth(nbytes, seconds, threads))
    if found <= 0:
        raise SpecexportError(f"no memory for a buffer of {nbytes:,} bytes to measure the read bandwidth with")
    return found


def instruction_set() -> str:
    """The one that the kernels use: amx, avx512_vnni, avx2 or portable."""
    library = ctypes.CDLL(op_library())
    library.specexport_isa.argtypes = []
    library.specexport_isa.restype = ctypes.c_char_p
    name: bytes = library.specexport_isa()
    return name.decode()

"""The custom-op library in this process: its path for sessions, and its threads."""

from __future__ import annotations

import ctypes
import functools

from specexport.plugins.errors import InputError, SpecexportError
from specexport.plugins.native.library import library_path


class NativeLibraryError(SpecexportError):
    """The custom-op library is missing or does not load."""


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(library_path()))
    except (OSError, FileNotFoundError) as error:
        raise NativeLibraryError(f"the custom-op library cannot be loaded: {error}") from None
    library.specexport_set_num_threads.argtypes = [ctypes.c_int]
    library.specexport_set_num_threads.restype = None
    library.specexport_get_num_threads.argtypes = []
    library.specexport_get_num_threads.restype = ctypes.c_int
    return library


def op_library() -> str:
    """Path that a session registers.

    Raises:
        NativeLibraryError: It is missing or does not load.
    """
    _library()
    return str(library_path())


def set_num_threads(count: int | None) -> None:
    """Threads of the kernels' pool, for the whole process; None leaves all that the process may use."""
    if count is None:
        return
    if count < 1:
        raise InputError(f"num_threads must be at least 1, is {count}")
    _library().specexport_set_num_threads(count)


def num_threads() -> int:
    """Threads that the kernels use now."""
    return int(_library().specexport_get_num_threads())

"""Where the built custom-op library is."""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib

LIBRARY_NAME = "libspecexport_ops.so"


@functools.cache
def library_path() -> pathlib.Path:
    """Path of the custom-op library, in a wheel, an editable install or a source tree.

    Raises:
        FileNotFoundError: The package was installed without its native part.
    """
    beside = pathlib.Path(__file__).with_name(LIBRARY_NAME)
    if beside.is_file():
        return beside
    for file in importlib.metadata.files("specexport") or ():
        if file.name == LIBRARY_NAME:
            return pathlib.Path(str(file.locate()))
    raise FileNotFoundError(
        f"{LIBRARY_NAME} is not installed beside {beside.parent}; reinstall specexport with a C++17 compiler present, "
        "or install its wheel"
    )

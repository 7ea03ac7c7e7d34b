"""The machine and the versions that a figure belongs to."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
from typing import Any

from specexport.exporter.bench_bandwidth import instruction_set
from specexport.runtime.native import num_threads

PACKAGES = ("specexport", "onnxruntime", "numpy", "torch", "transformers")
CPUINFO = pathlib.Path("/proc/cpuinfo")
MEMINFO = pathlib.Path("/proc/meminfo")


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, threads and instruction set of the kernels, memory, versions."""
    memory = re.search(r"MemTotal:\s+(\d+) kB", MEMINFO.read_text()) if MEMINFO.exists() else None
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": num_threads(),
        "instruction_set": instruction_set(),
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _processor() -> str:
    """Name, and family and model: virtual machines often hide the name."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    found = {
        key: match[1]
        for key in ("model name", "cpu family", "model")
        if (match := re.search(rf"^{key}\s*: (.+)$", text, re.MULTILINE))
    }
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']}, family {found.get('cpu family', '?')} model {found.get('model', '?')}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

"""Memory of a running pair, measured in a process of its own: load, prefill, decode, and read what Linux counted."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

from specexport.plugins.errors import SpecexportError

STATUS = pathlib.Path("/proc/self/status")
NEW_TOKENS = 16


def resident(status: str) -> dict[str, int]:
    """Bytes from the text of /proc/PID/status: ``peak``, ``now``, and of those ``files`` (mapped) and ``own``."""
    keys = {"peak": "VmHWM", "now": "VmRSS", "files": "RssFile", "own": "RssAnon"}
    found = {key: re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE) for key, name in keys.items()}
    return {key: int(match[1]) * 1024 for key, match in found.items() if match}


def measure_memory(bundle: pathlib.Path, context: int, threads: int) -> dict[str, Any] | None:
    """Peak resident bytes of a process that loads ``bundle``, reads ``context`` tokens and decodes a few.

    Returns:
        ``peak_bytes``; of it ``weights_bytes`` (the engines' data files) and ``cache_bytes`` (of the positions in
        use), and ``beyond_bytes``, the rest: interpreter, libraries, activations; ``libraries_bytes`` is the process's
        before it loaded the bundle. None where Linux's /proc is missing.

    Raises:
        SpecexportError: The process failed; the message has its last line.
    """
    if not STATUS.exists():
        return None
    command = [sys.executable, "-m", "specexport.exporter.bench_memory", str(bundle), str(context), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise SpecexportError(f"the process that measures memory failed (exit {done.returncode}): {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _run(bundle: pathlib.Path, context: int, threads: int) -> dict[str, Any]:
    from specexport.exporter.bench_bytes import position_bytes
    from specexport.exporter.bench_steps import some_ids
    from specexport.runtime import load

    before = resident(STATUS.read_text())
    pair = load(bundle, num_threads=threads, allow_failed=True)
    room = pair.target.context_length - context
    ids = some_ids(context, pair.manifest.contract.vocab_size)[0].tolist()
    pair.generate(ids, max_new_tokens=min(NEW_TOKENS, room), do_sample=False, ignore_eos=True)
    after = resident(STATUS.read_text())
    engines = [pair.manifest.target]
    if pair.manifest.draft is not None and pair.manifest.draft.engine is not None:
        engines.append(pair.manifest.draft.engine)
    files = {entry.engines["cpu"].weights for entry in engines}
    weights = sum(pair.manifest.files[name].bytes for name in files)
    positions = context + min(NEW_TOKENS, room)
    cache = sum(position_bytes(layer) * positions for entry in engines for layer in entry.cache.layers)
    return {
        "context": context,
        "peak_bytes": after["peak"],
        "own_bytes": after["own"],
        "files_bytes": after["files"],
        "libraries_bytes": before["peak"],
        "weights_bytes": weights,
        "cache_bytes": cache,
        "beyond_bytes": after["peak"] - weights - cache,
    }


if __name__ == "__main__":
    print(json.dumps(_run(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))

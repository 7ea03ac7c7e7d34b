"""The native library as C++: built with sanitizers and run over random shapes, and its C interface."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from one_node import available_isas, machine, native, one_node, run, session

from specexport.plugins.native.library import library_path
from specexport.plugins.quantized_linear import reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif(shutil.which("cmake", path=TOOLS) is None, reason="needs cmake")
def test_kernels_pass_address_and_undefined_behaviour_sanitizers() -> None:
    # Kept between runs, so that only what changed is built again.
    build = ROOT / "build" / "sanitize"
    environment = {**os.environ, "PATH": TOOLS, "ASAN_OPTIONS": "detect_leaks=0"}
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=TOOLS) else []
    commands = (
        ["cmake", "-S", str(ROOT), "-B", str(build), *generator, "-DSPECEXPORT_SANITIZE=ON"],
        ["cmake", "--build", str(build), "--target", "kernel_test", "--parallel", "2"],
        [str(build / "kernel_test")],
    )
    for command in commands:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "all native tests passed" in done.stdout


def test_thread_count_is_set_and_read() -> None:
    library = native()
    library.specexport_set_num_threads(0)
    assert 1 <= library.specexport_get_num_threads() <= len(os.sched_getaffinity(0))
    with machine(threads=3):
        assert library.specexport_get_num_threads() == 3


def test_instruction_set_is_set_and_read() -> None:
    library = native()
    assert "portable" in available_isas()
    for isa in available_isas():
        with machine(isa):
            assert library.specexport_isa() == isa.encode()
    best = library.specexport_isa()
    assert library.specexport_set_isa(b"mmx") == 0
    assert library.specexport_isa() == best


def test_the_library_needs_only_the_c_library() -> None:
    """A wheel's library must load where no compiler and no OpenMP is installed."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    out = subprocess.run([readelf, "-d", str(library_path())], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in out.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def test_a_forked_child_computes_with_workers_of_its_own() -> None:
    inputs, attributes = reference.random_inputs(np.random.default_rng(0), out_features=256)
    lowered, full = reference.cpu_inputs(inputs, attributes)
    running = session(one_node("specexport.cpu", "QuantizedLinear", lowered, full), kernels=True)
    with machine(threads=2):
        expected = run(running, lowered)
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(run(running, lowered), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_sessions_run_at_once_from_two_threads() -> None:
    import concurrent.futures

    rng = np.random.default_rng(0)
    calls = [reference.random_inputs(rng, rows=(9,), in_features=128, out_features=300, norm="rms") for _ in range(2)]
    lowered = [reference.cpu_inputs(*call) for call in calls]
    sessions = [session(one_node("specexport.cpu", "QuantizedLinear", *call), kernels=True) for call in lowered]
    expected = [run(one, call[0]) for one, call in zip(sessions, lowered)]

    def many(i: int) -> bool:
        return all(np.array_equal(run(sessions[i], lowered[i][0]), expected[i]) for _ in range(50))

    with machine(threads=2), concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(many, [0, 1, 0, 1]))

"""The rooms: who imports whom, what stays light, what the package lists, how long files are."""

import ast
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MAY_IMPORT = {
    "plugins": {"plugins"},
    "models": set(),
    "graph_passes": {"graph_passes", "plugins"},
    "runtime": {"runtime", "plugins"},
    "exporter": {"exporter", "graph_passes", "models", "plugins", "runtime"},
}
FORBIDDEN_AT_RUN_TIME = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "triton", "tensorrt", "rich", "gguf")
SOURCES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]


def imported_modules(path: pathlib.Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: pathlib.Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    rooms = {name.split(".")[1] for name in imported_modules(path) if name.startswith("specexport.")}
    assert rooms <= MAY_IMPORT[room], f"{room} may not import {rooms - MAY_IMPORT[room]}"


def test_the_walk_sees_a_wrong_import(tmp_path: pathlib.Path) -> None:
    planted = tmp_path / "oops.py"
    planted.write_text("def f():\n    from specexport.exporter import config\n")
    assert imported_modules(planted) == ["specexport.exporter"]


@pytest.mark.parametrize(
    "module",
    ["specexport.runtime", "specexport.runtime.pair", "specexport.runtime.manifest", "specexport.exporter.cli"],
)
def test_the_runtime_needs_no_export_library(module: str) -> None:
    block = f"import sys\nfor name in {FORBIDDEN_AT_RUN_TIME!r}: sys.modules[name] = None\nimport {module}\n"
    subprocess.run([sys.executable, "-c", block], check=True, cwd="/")


def test_help_is_quick() -> None:
    def seconds(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd="/")
        return time.perf_counter() - start

    # The interpreter's own start is no fault of ours, and a busy machine slows both.
    bare = min(seconds("import click") for _ in range(3))
    ours = min(
        seconds("from specexport.exporter.cli import main\nmain(['--help'], standalone_mode=False)") for _ in range(3)
    )
    assert ours - bare < 0.15


def test_every_room_is_in_the_package() -> None:
    table = (ROOT / "pyproject.toml").read_text()
    for room in MAY_IMPORT:
        assert f'"specexport/{room}" = "{room}"' in table
    missing = [folder for folder in {path.parent for path in SOURCES} if not (folder / "__init__.py").is_file()]
    assert missing == []


def test_files_have_one_idea() -> None:
    tracked = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "plugins").rglob("*.cc")]
    assert {str(p.relative_to(ROOT)): n for p in tracked if (n := len(p.read_text().splitlines())) > 400} == {}

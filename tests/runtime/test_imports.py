"""The runtime needs numpy, onnxruntime, tokenizers and jinja2; the command line answers at once."""

from __future__ import annotations

import pathlib
import pkgutil
import subprocess
import sys

import pytest

import specexport.runtime

FORBIDDEN = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "triton", "tensorrt", "rich", "safetensors")
MODULES = sorted(module.name for module in pkgutil.walk_packages(specexport.runtime.__path__, "specexport.runtime."))


def run(code: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_runtime_imports_and_generates_without_the_exporters_packages():
    fakes = pathlib.Path(__file__).parents[1]
    run(
        f"import sys, importlib; sys.modules.update(dict.fromkeys({FORBIDDEN}))\n"
        f"for name in {MODULES}: importlib.import_module(name)\n"
        "from specexport.runtime import load\n"
        "import specexport.exporter.cli_generate, specexport.exporter.cli_inspect\n"
        f"sys.path.insert(0, {str(fakes)!r})\n"
        "from runtime_fakes import TableModel, make_pair; from specexport.runtime.drafts.ngram import NgramDraft\n"
        "assert len(make_pair(TableModel.random(0), NgramDraft()).generate('ab', max_new_tokens=5).token_ids) == 5\n"
    )


@pytest.mark.parametrize("module", ["specexport.runtime", "specexport.runtime.manifest", "specexport.exporter.cli"])
def test_a_light_module_stays_light(module):
    heavy = run(
        f"import sys, {module}; print(sorted({{m.split('.')[0] for m in sys.modules}} & "
        "{'numpy', 'onnxruntime', 'tokenizers', 'jinja2', 'torch'}))"
    )
    assert heavy.strip() == "[]"


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'unload'"):
        _ = specexport.runtime.unload

"""Whatever goes wrong in a build: one clear line, the right exit code, nothing left behind."""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import click.testing
import numpy as np
import pytest

from specexport.exporter.artifact import WeightsFile
from specexport.exporter.cli import cli
from specexport.plugins.errors import InputError
from specexport.runtime import load


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli, [str(argument) for argument in arguments])


def copy_of(directory: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    to.mkdir()
    for file in directory.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def edit_config(directory: pathlib.Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def unknown_architecture(directory):
    edit_config(directory, model_type="perceptron", architectures=["PerceptronForCausalLM"])
    return "perceptron"


def encoder_decoder(directory):
    edit_config(directory, model_type="t5", architectures=["T5ForConditionalGeneration"])
    return "t5"


def dynamic_rope(directory):
    edit_config(directory, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    return "dynamic"


def no_weights(directory):
    (directory / "model.safetensors").unlink()
    return "weight"


def truncated_weights(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return "model.safetensors"


def no_tokenizer(directory):
    (directory / "tokenizer.json").unlink()
    return "tokenizer.json"


BREAKAGES = [unknown_architecture, encoder_decoder, dynamic_rope, no_weights, truncated_weights, no_tokenizer]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_a_model_that_cannot_be_built_is_refused_in_one_line(breakage, tiny_model, tmp_path):
    directory = copy_of(tiny_model("llama"), tmp_path / "model")
    named = breakage(directory)
    result = run("build", directory, "--output", tmp_path / "pair", "--offline")
    assert result.exit_code == 2, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error")]
    assert len(errors) == 1
    assert named in errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--draft", "layers:2"), "layers:2"),
        (("--draft", "layers:0"), "layers:0"),
        (("--fail-if", "kl_men>1"), "kl_men"),
        (("--fail-if", "draft.kl_mean>1"), "draft"),
        (("--context-length", "0"), "--context-length"),
        (("--kv-group-size", "7"), "--kv-group-size"),
        (("--draft", "no/such-model"), "no/such-model"),
    ],
)
def test_options_that_cannot_hold_are_refused(options, named, tiny_model, tmp_path):
    result = run("build", tiny_model("llama"), "--output", tmp_path / "pair", "--offline", *options)
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failed_gate_exits_1_and_marks_the_bundle(tiny_model, tmp_path):
    pair = tmp_path / "pair"
    result = run("build", tiny_model("llama"), "-o", pair, "--compare-tokens", 64, "--fail-if", "kl_mean>1e-12")
    assert result.exit_code == 1, result.output
    assert json.loads((pair / "manifest.json").read_text())["status"] == "failed_accuracy"
    with pytest.raises(InputError, match="failed its accuracy gate"):
        load(pair)
    assert load(pair, allow_failed=True).generate("a", max_new_tokens=2).metrics.new_tokens > 0


def test_a_full_disk_leaves_the_old_bundle(tiny_model, tiny_bundle, tmp_path, monkeypatch):
    pair = copy_tree(tiny_bundle("llama"), tmp_path / "pair")
    before = (pair / "manifest.json").read_bytes()

    def no_space(self, name, tensor):
        self._file.write(b"some bytes")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(WeightsFile, "add", no_space)
    result = run("build", tiny_model("llama"), "--output", pair, "--force")
    assert result.exit_code == 1, result.output
    assert "is full" in result.stderr
    assert (pair / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def copy_tree(source: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    for file in source.rglob("*"):
        if file.is_file():
            (to / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (to / file.relative_to(source)).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_build_leaves_nothing_that_loads(number, tiny_model, tmp_path):
    command = [sys.executable, "-c", "from specexport.exporter.cli import main; main()", "build"]
    process = subprocess.Popen(
        [*command, str(tiny_model("llama")), "--output", str(tmp_path / "pair")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A background job of a script ignores SIGINT, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not any(tmp_path.glob(".pair.building-*/engines/cpu/target.onnx")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "the build ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert not (tmp_path / "pair").exists()
    left = list(tmp_path.iterdir())
    if number != signal.SIGKILL:
        assert left == []
    for directory in left:
        with pytest.raises(InputError):
            load(directory)


def test_bad_requests_get_one_line_and_leave_the_pair_usable(tiny_bundle):
    pair = load(tiny_bundle("llama"))
    assert pair.generate("abc", max_new_tokens=0).token_ids == []
    for prompt in ("", [], [1] * 600, [9999]):
        with pytest.raises(InputError):
            pair.generate(prompt, max_new_tokens=4)
    assert pair.generate("abc", max_new_tokens=4, ignore_eos=True).metrics.new_tokens == 4
    result = run("generate", tiny_bundle("llama"), "")
    assert result.exit_code == 2
    assert "empty" in result.stderr


def test_nan_in_the_logits_is_an_error_not_a_token(tiny_model, tmp_path):
    import safetensors.numpy

    directory = copy_of(tiny_model("llama"), tmp_path / "model")
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    norm = next(name for name in tensors if name.endswith("layers.1.input_layernorm.weight"))
    tensors[norm] = np.full_like(tensors[norm], np.nan)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    result = run("build", directory, "--output", tmp_path / "pair", "--compare-tokens", 64)
    assert result.exit_code == 1, result.output
    pair = load(tmp_path / "pair", allow_failed=True)
    with pytest.raises(Exception, match=r"NaN|finite"):
        pair.generate("abc", max_new_tokens=4)

"""`specexport generate` and `inspect`, and how the command line fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import bundle_files
import click
import pytest
from bundle_files import write_bundle
from click.testing import CliRunner
from runtime_fakes import LetterTokenizer, TableModel, make_pair

import specexport.runtime.pair
from specexport.exporter.cli import COMMANDS, cli
from specexport.plugins.errors import SpecexportError
from specexport.runtime.drafts.ngram import NgramDraft
from specexport.runtime.manifest import DraftEntry


class ChatLetters(LetterTokenizer):
    def encode_chat(self, messages):
        return self.encode("".join(message["role"][0] + message["content"] for message in messages))


def run(*arguments: str, **more):
    return CliRunner().invoke(cli, list(arguments), **more)


@pytest.fixture
def loaded(monkeypatch):
    """Fakes in place of a bundle; what `load` was called with."""
    calls: list[tuple] = []
    model = TableModel.random(4, vocab_size=26)
    pair = make_pair(model, NgramDraft(), tokenizer=ChatLetters())

    def load(directory, **options):
        calls.append((directory, options))
        return pair

    monkeypatch.setattr(specexport.runtime.pair, "load", load)
    return pair, calls


def test_help_lists_the_commands_and_names_completion():
    done = run("--help")
    assert done.exit_code == 0
    for name, (_, text) in COMMANDS.items():
        assert name in done.output and text in done.output
    assert "_SPECEXPORT_COMPLETE=bash_source" in done.output


def test_help_answers_at_once():
    command = [sys.executable, "-m", "specexport.exporter.cli", "--help"]
    best = 9.0
    for _ in range(4):  # children's CPU time: other work on the machine does not count
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        best = min(best, after.children_user - before.children_user + after.children_system - before.children_system)
    assert best < 0.2


def test_shell_completion_offers_the_commands():
    environment = {
        **os.environ,
        "_SPECEXPORT_COMPLETE": "bash_complete",
        "COMP_WORDS": "specexport in",
        "COMP_CWORD": "1",
    }
    code = "from specexport.exporter.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "inspect" in done.stdout


def test_the_version():
    done = run("--version")
    assert done.exit_code == 0 and done.output.startswith("specexport ")


def test_an_unknown_command_is_a_usage_error():
    done = run("generte")
    assert done.exit_code == 2 and "No such command 'generte'" in done.output


@pytest.mark.parametrize(("kind", "code"), [(SpecexportError, 1), (specexport.plugins.errors.InputError, 2)])
def test_our_errors_are_one_line_and_an_exit_code(monkeypatch, kind, code):
    def fail(*_, **__):
        raise kind("two\n lines")

    monkeypatch.setattr(specexport.runtime.pair, "load", fail)
    done = run("generate", "somewhere", "a")
    assert (done.exit_code, done.stderr, done.stdout) == (code, "Error: two lines\n", "")


def test_a_command_of_the_export_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    for name in [name for name in sys.modules if name.startswith("specexport.graph_passes")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("pipeline", "compile"):
        monkeypatch.delitem(sys.modules, f"specexport.exporter.{name}", raising=False)
    done = run("build", "anything")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "Error: build needs onnx_ir, which is not installed; pip install 'specexport[export]'\n"


def test_a_directory_that_is_no_bundle(tmp_path):
    for command in (["inspect", str(tmp_path)], ["generate", str(tmp_path), "hello"]):
        done = run(*command)
        assert done.exit_code == 2
        assert done.stderr == (
            f"Error: {tmp_path}/manifest.json: no such file; name a directory that `specexport build` made\n"
        )


def test_generate_prints_the_text_and_a_line_of_metrics(loaded, tmp_path):
    pair, calls = loaded
    done = run("generate", str(tmp_path), "abc", "-n", "12")
    expected = pair.generate("abc", max_new_tokens=12)
    assert (done.exit_code, done.stdout) == (0, expected.text + "\n")
    assert "12 tokens (length)" in done.stderr and "tok/s" in done.stderr
    assert calls == [(tmp_path, {"num_threads": None, "verify": True, "allow_failed": False})]


def test_generate_reads_the_prompt_from_standard_input(loaded, tmp_path):
    pair, _ = loaded
    done = run("generate", str(tmp_path), "-", "-n", "5", input="abc")
    assert done.stdout == pair.generate("abc", max_new_tokens=5).text + "\n"


def test_generate_as_json(loaded, tmp_path):
    pair, _ = loaded
    flags = ["--do-sample", "--temperature", "1.5", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3"]
    done = run("generate", str(tmp_path), "abc", "-n", "20", "--json", "--repetition-penalty", "1.1", *flags)
    data = json.loads(done.stdout)
    expected = pair.generate(
        "abc", max_new_tokens=20, do_sample=True, temperature=1.5, top_k=9, top_p=0.9, min_p=0.01, seed=3,
        repetition_penalty=1.1,
    )  # fmt: skip
    assert (data["text"], data["token_ids"], data["seed"]) == (expected.text, expected.token_ids, 3)
    assert data["finish_reason"] == "length"
    for key in (
        "prefill_s",
        "decode_s",
        "drafts",
        "drafted",
        "accepted",
        "accepted_per_position",
        "recovered",
        "bonus",
    ):
        assert key in data["metrics"]
    assert done.stderr == ""


def test_generate_with_chat_system_and_stop(loaded, tmp_path):
    pair, _ = loaded
    done = run("generate", str(tmp_path), "abc", "--chat", "-n", "8")
    assert done.stdout == pair.generate("uabc", max_new_tokens=8).text + "\n"
    done = run("generate", str(tmp_path), "abc", "--system", "kind", "-n", "8")
    text = pair.generate("skinduabc", max_new_tokens=8).text
    assert done.stdout == text + "\n"
    stop = text[3]
    done = run("generate", str(tmp_path), "abc", "--system", "kind", "-n", "8", "--stop", "!!", "--stop", stop)
    assert done.stdout == text[: text.index(stop)] + "\n"
    assert "(stop)" in done.stderr


def test_generate_without_speculation(loaded, tmp_path):
    for flags in (["--no-speculation"], ["--num-assistant-tokens", "0"]):
        done = run("generate", str(tmp_path), "abc", "-n", "20", "--json", *flags)
        assert json.loads(done.stdout)["metrics"]["drafted"] == 0
    done = run("generate", str(tmp_path), "abc", "--no-speculation", "--num-assistant-tokens", "3")
    assert done.exit_code == 2 and "contradict" in done.output


def test_generate_hands_on_how_to_load(loaded, tmp_path):
    _, calls = loaded
    run("generate", str(tmp_path), "abc", "-n", "1", "--num-threads", "3", "--no-verify", "--allow-failed")
    assert calls[0][1] == {"num_threads": 3, "verify": False, "allow_failed": True}


def test_bad_options_are_usage_errors(loaded, tmp_path):
    for flags in (["-n", "-1"], ["--temperature", "0.5"], ["--do-sample", "--top-p", "2"], ["--num-threads", "0"]):
        done = run("generate", str(tmp_path), "abc", *flags)
        assert done.exit_code == 2, flags
        assert done.stderr.strip().splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize("status", ["failed_accuracy", "building", "not_compared"])
@pytest.mark.parametrize("draft", [None, DraftEntry("ngram", 4, max_ngram_size=3)])
def test_inspect_any_bundle(tmp_path, status, draft):
    write_bundle(tmp_path, status=status, draft=draft)
    done = run("inspect", str(tmp_path))
    assert done.exit_code == 0 and status in done.output
    assert ("ngram of up to 3 tokens" if draft else "none: plain decoding") in done.output


def test_inspect_for_a_person(tmp_path):
    write_bundle(tmp_path)
    done = run("inspect", str(tmp_path))
    assert done.exit_code == 0
    for text in ("org/tiny @ abc123", "LlamaForCausalLM", "layers:1", "keys 8 bits, values 16 bits", "4.0 kB",
                 "7 x int4+minimum", "target.kl_mean", "0.0025", "same tokenizer", "2, 5"):  # fmt: skip
        assert text in done.output, text
    assert "\x1b[" not in done.output, "colours are for terminals"
    assert "\x1b[" in run("inspect", str(tmp_path), color=True).output
    per_thousand = 1000 * 2 * (8 + 2 * 2 + 8 * 2)
    assert f"{per_thousand / 1000:.1f} kB per 1,000 positions" in done.output


def test_inspect_as_json_and_with_verify(tmp_path):
    write_bundle(tmp_path)
    assert json.loads(run("inspect", str(tmp_path), "--json").stdout) == bundle_files.manifest().to_json()
    assert "All 4 files are what the manifest says." in run("inspect", str(tmp_path), "--verify").output
    (tmp_path / "tokenizer.json").write_bytes(b"[]")
    done = run("inspect", str(tmp_path), "--verify")
    assert done.exit_code == 2 and "tokenizer.json: sha256 is" in done.stderr


def test_every_command_of_the_table_is_a_click_command():
    for name in COMMANDS:
        assert isinstance(cli.get_command(click.Context(cli), name), click.Command)


def test_the_stream_comes_while_it_is_made(tmp_path):
    """Text is flushed piece by piece, not at the end."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from runtime_fakes import TableModel, make_pair; import specexport.runtime.pair as p\n"
        "model = TableModel.random(0); pair = make_pair(model); forward = model.forward\n"
        "def slow(*a, **k): time.sleep(0.05); return forward(*a, **k)\n"
        "model.forward = slow; p.load = lambda *a, **k: pair\n"
        "from specexport.exporter.cli import cli; cli(['generate', 'x', 'ab', '-n', '20'])"
    )
    tests = os.path.dirname(bundle_files.__file__)
    with subprocess.Popen(
        [sys.executable, "-c", code, tests], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        first = time.monotonic()
        child.stdout.read()
        assert time.monotonic() - first > 0.5

"""Defaults as Transformers takes them from generation_config.json."""

from __future__ import annotations

import json

import pytest
from runtime_fakes import TableModel, make_pair

from specexport.plugins.errors import InputError
from specexport.runtime.request import GenerationDefaults, sampling_settings, token_limit


def read(tmp_path, data) -> GenerationDefaults:
    path = tmp_path / "generation_config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return GenerationDefaults.read(path)


def test_without_a_file_the_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GenerationConfig._get_default_generation_params()
    values = GenerationDefaults.read(None).values
    assert {key: value for key, value in values.items() if key != "min_p"} == {
        key: theirs[key] for key in values if key != "min_p"
    }
    assert theirs.get("min_p") is None and values["min_p"] == 0


def test_the_file_sets_defaults_and_the_caller_overrides_them(tmp_path):
    defaults = read(tmp_path, {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "min_p": 0.1})
    settings = sampling_settings(defaults, do_sample=None, temperature=0.2, top_p=None)
    assert (settings.do_sample, settings.temperature, settings.top_p) == (True, 0.2, 0.9)
    assert (settings.top_k, settings.min_p) == (50, 0.1)
    greedy = sampling_settings(defaults, do_sample=False)
    assert (greedy.do_sample, greedy.temperature, greedy.top_p) == (False, 1.0, 1.0)


def test_a_config_with_sampling_values_but_no_do_sample_is_greedy(tmp_path):
    defaults = read(tmp_path, {"temperature": 0.0, "top_p": 0.9, "repetition_penalty": 1.1})
    settings = sampling_settings(defaults, do_sample=None)
    assert (settings.do_sample, settings.repetition_penalty) == (False, 1.1)


def test_spelling_out_a_default_is_no_error_when_greedy():
    sampling_settings(GenerationDefaults.read(None), do_sample=False, temperature=1.0, top_p=1.0)


def test_limits(tmp_path):
    defaults = GenerationDefaults.read(None)
    assert token_limit(defaults, None, 10, 1000) == 256
    assert token_limit(defaults, None, 10, 100) == 90
    assert token_limit(defaults, 7, 10, 100) == 7
    assert token_limit(read(tmp_path, {"max_new_tokens": 30}), None, 10, 1000) == 30
    assert token_limit(read(tmp_path, {"max_length": 30}), None, 10, 1000) == 20
    assert token_limit(read(tmp_path, {"max_length": 30}), 40, 10, 1000) == 40


def test_what_is_not_implemented_is_named(tmp_path, caplog):
    read(tmp_path, {"num_beams": 4, "no_repeat_ngram_size": 0, "bad_words_ids": [[1]], "transformers_version": "5"})
    assert "not implemented and ignored: num_beams, bad_words_ids" in caplog.text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds no JSON object"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"max_new_tokens": [3]}, r"max_new_tokens is \[3\], expected a number"),
    ],
)
def test_a_broken_file(tmp_path, data, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, data)


def test_the_pair_uses_the_defaults(tmp_path):
    model = TableModel.random(0)
    pair = make_pair(model, defaults=read(tmp_path, {"do_sample": True, "max_new_tokens": 9}))
    runs = {tuple(pair.generate([0], seed=seed).token_ids) for seed in range(6)}
    assert len(runs) > 1 and {len(run) for run in runs} == {9}
    assert pair.generate([0], do_sample=False).token_ids == make_pair(model).generate([0], max_new_tokens=9).token_ids

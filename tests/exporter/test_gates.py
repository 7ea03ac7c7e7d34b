"""Gate expressions: what is read, what is refused, what fails."""

from __future__ import annotations

import math

import pytest

from specexport.exporter.gates import GATE_FIELDS, evaluate_gates, parse_gate
from specexport.plugins.errors import InputError

COMPARISON = {
    "target": {"kl_mean": 0.004, "top1_agreement": 0.96, "perplexity_delta": 0.003, "kl_max": None},
    "draft": None,
}


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("kl_mean>0.004", True),
        ("kl_mean>=0.004", False),
        ("kl_mean < 0.005", False),
        ("kl_mean<=0.003", True),
        ("target.top1_agreement<96%", True),
        ("top1_agreement < 96.1 %", False),
        ("perplexity_delta>0.5%", True),
        ("perplexity_delta>2.9e-3", False),
        ("kl_max>1e9", False),
        ("perplexity>1e9", False),
    ],
)
def test_verdicts(text: str, passed: bool) -> None:
    [result] = evaluate_gates([parse_gate(text)], COMPARISON)
    assert result.passed is passed


def test_nan_fails_whatever_the_operator() -> None:
    for operator in (">", ">=", "<", "<="):
        [result] = evaluate_gates([parse_gate(f"kl_mean{operator}1")], {"target": {"kl_mean": math.nan}})
        assert not result.passed
        assert result.to_json()["value"] is None


def test_a_result_names_field_value_and_limit() -> None:
    [result] = evaluate_gates([parse_gate("kl_mean>0.3%")], COMPARISON)
    assert str(result) == "target.kl_mean is 0.004, fails at > 0.003"
    assert result.to_json() == {
        "gate": "kl_mean>0.3%",
        "model": "target",
        "field": "kl_mean",
        "operator": ">",
        "limit": 0.003,
        "value": 0.004,
        "passed": False,
    }


@pytest.mark.parametrize(
    "text",
    [
        "kl_mean",
        "kl_mean==1",
        "kl_mean>",
        "kl_mean>x",
        "kl_mean>nan",
        "kld>1",
        "both.kl_mean>1",
        "",
        "kl_mean>1;x",
        "1<kl_mean",
    ],
)
def test_a_bad_expression_is_a_usage_error_that_lists_the_fields(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_gate(text)
    assert caught.value.exit_code == 2
    assert repr(text) in str(caught.value)
    assert all(field in str(caught.value) for field in GATE_FIELDS)


def test_a_gate_on_a_missing_draft_is_a_usage_error() -> None:
    with pytest.raises(InputError, match="no draft model"):
        evaluate_gates([parse_gate("draft.kl_mean>1")], COMPARISON)

"""What a build says of its draft's cost."""

import pytest

from specexport.exporter.result import break_even


@pytest.mark.parametrize(
    ("measured", "k", "tokens"),
    [
        ({"verify_ms": {"1": 4.0, "5": 6.0}, "draft_ms": None}, 4, 1.5),
        ({"verify_ms": {"1": 4.0, "5": 6.0}, "draft_ms": 2.0}, 4, 3.5),
        ({"verify_ms": {"1": 4.0, "5": 6.0}}, 2, 1.25),
        ({}, 4, None),
    ],
)
def test_break_even_counts_drafts_and_verify(measured, k, tokens):
    assert break_even(measured, k) == tokens

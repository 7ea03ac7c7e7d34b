"""What ``--draft`` may say, and the target cut to its first layers."""

from __future__ import annotations

import pytest
import tiny_models

from specexport.exporter.draft.layers import cut_layers
from specexport.exporter.draft.specification import (
    DraftSpecification,
    LayersDraft,
    ModelDraft,
    NgramDraft,
    NoDraft,
    check_layers,
    parse_draft,
)
from specexport.plugins.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", NoDraft()),
        ("ngram", NgramDraft(3)),
        (" ngram ", NgramDraft(3)),
        ("layers:6", LayersDraft(6)),
        ("owner/name", ModelDraft("owner/name")),
        ("./layers", ModelDraft("./layers")),
    ],
)
def test_forms(text: str, expected: DraftSpecification) -> None:
    assert parse_draft(text) == expected


@pytest.mark.parametrize("text", ["", " ", "layers", "layers:", "layers:0", "layers:-1", "layers:two", "layers:1.5"])
def test_what_is_no_draft(text: str) -> None:
    with pytest.raises(InputError, match="--draft"):
        parse_draft(text)


def test_the_number_of_layers_is_below_the_targets() -> None:
    check_layers(LayersDraft(1), 2)
    with pytest.raises(InputError, match=r"has 2 layers; take 1 to 1"):
        check_layers(LayersDraft(2), 2)


@pytest.mark.parametrize("arch", sorted(tiny_models.ARCHITECTURES))
def test_a_cut_model_computes_the_first_layers(arch: str) -> None:
    import torch

    whole, cut = tiny_models.build(arch), tiny_models.build(arch)
    returned = cut_layers(cut, 1)
    assert returned is cut
    state, kept = whole.state_dict(), cut.state_dict()
    assert 0 < len(kept) < len(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in kept.items())
    assert cut.config.num_hidden_layers == 1
    assert whole.config.num_hidden_layers > 1
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        outputs = whole(ids, output_hidden_states=True, use_cache=False)
        ours = cut(ids, output_hidden_states=True, use_cache=False)
        final = next(
            module for name, module in whole.named_modules() if name.endswith((".norm", ".ln_f", "final_layer_norm"))
        )
        torch.testing.assert_close(ours.hidden_states[-1], final(outputs.hidden_states[1]))


def test_a_module_whose_layers_cannot_be_told_apart() -> None:
    import torch

    model = tiny_models.build("llama")
    model.other = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    with pytest.raises(InputError, match="2 lists of 2 modules"):
        cut_layers(model, 1)

"""A tiny model, from its directory to exact speculative tokens."""

import collections
import itertools
import json

import numpy as np
import pytest
import torch
import transformers

from specexport.exporter.config import BuildConfig
from specexport.exporter.contract import ContractError
from specexport.exporter.pipeline import build
from specexport.runtime import load

PROMPTS = ["the sea is the sea is the", "a list: one two three one two", "x"]


def eager_greedy(directory, ids, count):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    out = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(ids) :]


def test_exact_graph_gives_the_tokens_of_eager(tiny_bundle, tiny_model):
    pair = load(tiny_bundle("llama", weights="fp32", activations="fp32"))
    for prompt in PROMPTS:
        ids = pair.tokenizer.encode(prompt)
        out = pair.generate(ids, max_new_tokens=24, do_sample=False, ignore_eos=True)
        assert out.token_ids == eager_greedy(tiny_model("llama"), ids, 24)
    assert pair.manifest.accuracy["target"]["kl_mean"] < 1e-5
    assert {(layer.key_bits, layer.value_bits) for layer in pair.manifest.target.cache.layers} == {(16, 16)}


@pytest.mark.parametrize("draft", ["ngram", "layers:1"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3_moe", "gpt2"])
def test_speculation_changes_no_token(tiny_bundle, arch, draft):
    pair = load(tiny_bundle(arch, draft=draft))
    drafted = 0
    for prompt, k in itertools.product(PROMPTS, (1, 4, 7)):
        options = {"max_new_tokens": 48, "do_sample": False, "ignore_eos": True}
        plain = pair.generate(prompt, num_assistant_tokens=0, **options)
        speculative = pair.generate(prompt, num_assistant_tokens=k, **options)
        assert speculative.token_ids == plain.token_ids
        drafted += speculative.metrics.drafted
        metrics = speculative.metrics
        assert metrics.new_tokens == 1 + metrics.accepted + metrics.recovered + metrics.bonus + metrics.plain
    assert drafted > 0


def test_seeded_sampling_with_a_one_hot_draft_is_plain_sampling(tiny_bundle):
    pair = load(tiny_bundle("llama", draft="ngram"))
    for seed in range(5):
        options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.9, "seed": seed, "ignore_eos": True}
        plain = pair.generate(PROMPTS[0], num_assistant_tokens=0, **options)
        assert pair.generate(PROMPTS[0], num_assistant_tokens=4, **options).token_ids == plain.token_ids


def test_sampled_speculation_follows_the_target_through_the_real_engines(tiny_bundle):
    """Joint law of the first two tokens under top-k 3, drafted by the first layer, against the engine's own logits."""
    pair = load(tiny_bundle("llama", draft="layers:1"))
    ids = pair.tokenizer.encode(PROMPTS[0])

    def top3(prefix):
        cache = pair.target.new_cache()
        logits = pair.target.forward(np.array([prefix]), cache, logits_rows=np.array([len(prefix) - 1]))[0]
        kept = np.argsort(-logits)[:3]
        p = np.exp((logits[kept] - logits[kept[0]]) / 1.5)
        return dict(zip(kept.tolist(), p / p.sum(), strict=True))

    exact = {(a, b): pa * pb for a, pa in top3(ids).items() for b, pb in top3([*ids, a]).items()}
    draws = 3000
    counts = collections.Counter(
        tuple(
            pair.generate(
                ids, max_new_tokens=3, do_sample=True, temperature=1.5, top_k=3, seed=s, num_assistant_tokens=2,
                ignore_eos=True,
            ).token_ids[:2]
        )
        for s in range(draws)
    )  # fmt: skip
    assert set(counts) <= set(exact)
    statistic = sum((counts[cell] - draws * p) ** 2 / (draws * p) for cell, p in exact.items())
    assert statistic < 26.1  # 8 degrees of freedom, p = 0.001


def test_another_model_of_the_same_tokenizer_drafts(tiny_bundle, tiny_model):
    draft = tiny_model("llama", 1, vocab_size=320)
    pair = load(tiny_bundle("llama", draft=str(draft)))
    contract = pair.manifest.contract
    assert (contract.vocab_size, contract.draft_vocab_size, contract.masked_tail) == (256, 320, 64)
    options = {"max_new_tokens": 40, "do_sample": False, "ignore_eos": True}
    plain = pair.generate(PROMPTS[1], num_assistant_tokens=0, **options)
    assert pair.generate(PROMPTS[1], num_assistant_tokens=3, **options).token_ids == plain.token_ids
    assert pair.manifest.accuracy["draft"]["kl_mean"] < 0.5


def test_a_draft_of_another_vocabulary_is_refused_by_its_first_mismatch(tiny_model, tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    for file in tiny_model("llama", 1).iterdir():
        (draft / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[70:72]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ContractError, match=f"{vocabulary[second]}"):
        build(BuildConfig(model=str(tiny_model("llama")), output=tmp_path / "pair", draft=str(draft)))
    assert not (tmp_path / "pair").exists()


def test_the_bundle_holds_what_its_manifest_says(tiny_bundle):
    bundle = tiny_bundle("llama", draft="layers:1")
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["status"] == "ok"
    assert manifest["ops"] == {
        "specexport.cpu::QuantizedEmbedding": 1,
        "specexport.cpu::QuantizedLinear": 1,
        "specexport::QuantizedKVAttention": 1,
    }
    files = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert files == {
        *manifest["files"],
        "manifest.json",
        "report/passes.json",
        "report/compare.json",
        "report/compare.html",
    }
    # A draft of the target's own layers costs no weights of its own.
    assert manifest["target"]["engines"]["cpu"]["weights"] == manifest["draft"]["engine"]["engines"]["cpu"]["weights"]
    packed = (bundle / "engines/cpu/weights.bin").stat().st_size
    assert packed < manifest["target"]["weights"]["bytes"] + 64 * 4096

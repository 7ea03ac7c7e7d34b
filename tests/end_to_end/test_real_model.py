"""SmolLM2-135M-Instruct through its recipe: accuracy, exact speculation, and a runtime without PyTorch."""

import json
import pathlib
import subprocess
import sys

import pytest

from specexport.exporter.config import BuildConfig
from specexport.exporter.pipeline import build
from specexport.runtime import load
from specexport.runtime.drafts.ngram import NgramDraft
from specexport.runtime.pair import Pair

pytestmark = pytest.mark.real
RECIPE = "smollm2-135m-instruct"
CHAT = [{"role": "user", "content": "Write three sentences about the sea."}]
PROMPTS = [
    CHAT,
    [{"role": "user", "content": "Repeat this list twice: red, green, blue, red, green, blue, yellow."}],
    [{"role": "user", "content": "Natalia sold 48 clips in April and half as many in May. How many altogether?"}],
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    output = tmp_path_factory.mktemp("real") / "pair"
    build(BuildConfig(model=RECIPE, output=output, draft="layers:6"))
    return output


def test_the_default_build_still_is_the_model(bundle):
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["status"] == "ok"
    target = manifest["accuracy"]["target"]
    assert 1e-4 < target["kl_mean"] < 0.004
    assert target["top1_agreement"] > 0.955
    assert target["perplexity"] / target["perplexity_reference"] == pytest.approx(1, abs=0.01)
    assert target["path_max_difference"] == 0
    assert manifest["target"]["weights"]["summary"] == {
        "int4 in groups of 32 with minimum": 120,
        "int8 in groups of 32": 2,
    }


def test_a_layer_is_five_nodes(bundle):
    import onnx

    graph = onnx.load(bundle / "engines/cpu/target.onnx", load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("QuantizedKVAttention") == 30
    assert kinds.count("QuantizedLinear") == 4 * 30 + 1
    assert len(kinds) - 5 * 30 <= 6


def test_greedy_text_and_exact_speculation_with_both_drafts(bundle):
    layers = load(bundle)
    # The next word is a near tie in fp32 eager, which int8 activations may turn.
    assert layers.generate(CHAT, max_new_tokens=24, do_sample=False).text.startswith(
        "The sea is a vast and mysterious realm, teeming with life and"
    )
    ngram = Pair(layers.target, NgramDraft(3), layers.manifest, tokenizer=layers.tokenizer)
    accepted = {"layers": 0, "ngram": 0}
    for prompt in PROMPTS:
        options = {"max_new_tokens": 64, "do_sample": False, "ignore_eos": True}
        ids = layers.tokenizer.encode_chat(prompt)
        plain = layers.generate(ids, num_assistant_tokens=0, **options).token_ids
        for name, pair in (("layers", layers), ("ngram", ngram)):
            for k in (2, 5):
                out = pair.generate(ids, num_assistant_tokens=k, **options)
                assert out.token_ids == plain
                accepted[name] += out.metrics.accepted
    assert min(accepted.values()) > 0


def test_with_fp32_activations_the_graph_itself_is_exact(tmp_path):
    result = build(BuildConfig(model=RECIPE, output=tmp_path / "pair", activations="fp32", compare_tokens=512))
    assert result.comparison.target.figures.kl_mean < 1e-5
    cache = result.manifest.target.cache.layers[0]
    assert (cache.key_bits, cache.value_bits) == (16, 16)


def test_the_runtime_needs_no_export_library(bundle):
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'onnx', 'onnx_ir', 'onnxscript', 'triton', 'tensorrt', 'rich'):\n"
        "    sys.modules[name] = None\n"
        "from specexport.runtime import load\n"
        f"out = load({str(bundle)!r}).generate({CHAT!r}, max_new_tokens=8, do_sample=False)\n"
        "assert out.text.startswith('The sea is a'), out.text\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")

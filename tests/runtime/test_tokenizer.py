"""The tokenizer from tokenizer.json, and chat templates rendered as Transformers renders them."""

from __future__ import annotations

import json

import pytest
import tokenizers
from bundle_files import FILES, file_entry, manifest, write_bundle

from specexport.runtime.bundle import open_bundle
from specexport.runtime.chat import ChatTemplate, ChatTemplateError
from specexport.runtime.tokenizer import Tokenizer, TokenizerError

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße"},
    {"role": "assistant", "content": "Hallo"},
    {"role": "user", "content": "1 < 2?"},
]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "blocks": "{{ bos_token }}\n{%- for m in messages %}\n    {% if m.role == 'user' %}\n  U: {{ m.content | trim }}\n"
    "    {% else %}\n{{ m.role }}: {{ m.content }}{{ eos_token }}\n    {% endif %}\n{% endfor %}",
    "controls": "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.content }};{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools is none }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


def words(*names: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(["<unk>", "<s>", *names])}, "<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def bundle_with(tmp_path, **files: str):
    data = {**FILES, "tokenizer.json": words("a", "b").to_str().encode()}
    data |= {name.replace("__", "."): text.encode() for name, text in files.items()}
    write_bundle(tmp_path, files={name: file_entry(content) for name, content in data.items()})
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    return open_bundle(tmp_path)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_in_transformers(template):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for prompt in (True, False):
        rendered = utils._compile_jinja_template(template).render(
            messages=MESSAGES, tools=None, documents=None, add_generation_prompt=prompt, **special
        )
        assert ChatTemplate(template, special).render(MESSAGES, add_generation_prompt=prompt) == rendered
    assert rendered


def test_variables_and_the_date_reach_the_template():
    template = ChatTemplate("{{ mood }} {{ strftime_now('%Y') | length }} {{ tools[0].name }}", {})
    assert template.render(MESSAGES, mood="calm", tools=[{"name": "f"}]) == "calm 4 f"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ nothing.at.all }}", "refuses the messages"),
        ("{{ 'a' + 1 }}", "refuses the messages"),
        ("{{ 1 / 0 }}", "refuses the messages"),
    ],
)
def test_a_template_that_refuses_or_reaches_out(template, message):
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(template, {}).render(MESSAGES)


def test_a_template_that_does_not_compile():
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_text_to_ids_and_back(tmp_path):
    tokenizer = Tokenizer.load(bundle_with(tmp_path))
    assert tokenizer.encode("a b c") == [1, 2, 3, 0]
    assert tokenizer.encode("a b", add_special_tokens=False) == [2, 3]
    assert tokenizer.decode([1, 2, 3]) == "a b"
    assert tokenizer.decode([1, 2], skip_special_tokens=False) == "<s> a"
    assert (tokenizer.token(2), tokenizer.token(99)) == ("a", None)


def test_truncation_and_padding_of_the_file_do_not_act(tmp_path):
    tokenizer = words("a", "b")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(tmp_path / "t.json"))
    assert Tokenizer(tmp_path / "t.json").encode("a b a b") == [1, 2, 3, 2, 3]


def test_the_template_of_the_config_or_its_own_file(tmp_path):
    config = json.dumps(
        {
            "bos_token": {"content": "<s>"},
            "eos_token": "b",
            "pad_token": None,
            "chat_template": [
                {"name": "tool_use", "template": "x"},
                {"name": "default", "template": "{{ bos_token }} {{ messages[0].content }} {{ eos_token }}"},
            ],
        }
    )
    message = [{"role": "user", "content": "a"}]
    tokenizer = Tokenizer.load(bundle_with(tmp_path, tokenizer_config__json=config))
    assert tokenizer.render_chat(message) == "<s> a b"
    assert tokenizer.encode_chat(message) == [1, 2, 3], "the template writes the special tokens, once"
    tokenizer = Tokenizer.load(
        bundle_with(tmp_path, tokenizer_config__json=config, chat_template__jinja="{{ eos_token }} a")
    )
    assert tokenizer.encode_chat(message) == [3, 2]


def test_without_a_template_or_a_tokenizer(tmp_path):
    with pytest.raises(ChatTemplateError, match="this model has no chat template; pass a plain prompt"):
        Tokenizer.load(bundle_with(tmp_path)).render_chat(MESSAGES)
    files = {name: entry for name, entry in manifest().files.items() if name != "tokenizer.json"}
    assert Tokenizer.load(open_bundle(write_bundle(tmp_path, files=files))) is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": "{}"}, "tokenizer.json: not a tokenizer"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json: cannot be read as JSON"),
        ({"tokenizer_config__json": "[]"}, "tokenizer_config.json: holds no JSON object"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, files, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(bundle_with(tmp_path, **files))
    assert "\n" not in str(caught.value)

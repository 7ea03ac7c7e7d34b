"""Chat templates as Transformers renders them: Jinja in an immutable sandbox, the same globals and filters."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specexport.plugins.errors import InputError


class ChatTemplateError(InputError):
    """There is no chat template, or it refuses the messages."""


class ChatTemplate:
    """A compiled template and the special tokens that it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile ``source``; ``special_tokens`` are its variables ``bos_token``, ``eos_token`` and the like.

        Raises:
            ChatTemplateError: It is no valid Jinja.
        """
        import jinja2

        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages`` ({"role": ..., "content": ...}); more ``variables`` reach the template.

        Raises:
            ChatTemplateError: The template refuses, or fails on, the messages.
        """
        values = {"documents": None, **self._special_tokens, **variables}
        try:
            text: str = self._template.render(
                messages=list(messages), tools=tools, add_generation_prompt=add_generation_prompt, **values
            )
        except Exception as error:  # a template is code from outside: it may raise anything
            raise ChatTemplateError(f"the chat template refuses the messages: {' '.join(str(error).split())}") from None
        return text


def _environment() -> Any:
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """``{% generation %}`` marks the assistant's part for training; here it only lets its body through."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[Any]:
            next(parser.stream)
            body: list[Any] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like from tokenizer_config.json, where a token is a string or {"content": ...}."""
    tokens = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    return tokens


def template_of(config: Mapping[str, Any]) -> str | None:
    """The template inside tokenizer_config.json: a string, or the one named "default" of a list."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None

"""The bundle's tokenizer, straight from tokenizer.json, and its chat template."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specexport.plugins.errors import InputError
from specexport.runtime.bundle import Bundle
from specexport.runtime.chat import ChatTemplate, ChatTemplateError, special_tokens, template_of

Messages = Sequence[Mapping[str, Any]]


class TokenizerError(InputError):
    """The tokenizer's files cannot be used."""


class Tokenizer:
    """Text to ids and back, as the model was trained with."""

    def __init__(self, path: pathlib.Path, chat: ChatTemplate | None = None) -> None:
        """Load ``path``, a tokenizer.json.

        Raises:
            TokenizerError: It is missing or no tokenizer.
        """
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"{path}: not a tokenizer: {' '.join(str(error).split())}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.chat = chat

    @classmethod
    def load(cls, bundle: Bundle) -> Tokenizer | None:
        """The bundle's tokenizer; None if the bundle has none (it then takes and gives token ids only)."""
        if not bundle.has("tokenizer.json"):
            return None
        config = _read_object(bundle.path("tokenizer_config.json")) if bundle.has("tokenizer_config.json") else {}
        source = template_of(config)
        if bundle.has("chat_template.jinja"):
            source = bundle.path("chat_template.jinja").read_text(encoding="utf-8")
        chat = ChatTemplate(source, special_tokens(config)) if source is not None else None
        return cls(bundle.path("tokenizer.json"), chat)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with the special tokens that the tokenizer puts around a text, unless told otherwise."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id, None if it has none."""
        piece: str | None = self._tokenizer.id_to_token(token_id)
        return piece

    def render_chat(self, messages: Messages, **variables: Any) -> str:
        """The prompt text for ``messages``, ready for the assistant's turn; ``variables`` as for ChatTemplate.render.

        Raises:
            ChatTemplateError: The model has no chat template, or it refuses the messages.
        """
        if self.chat is None:
            raise ChatTemplateError("this model has no chat template; pass a plain prompt")
        return self.chat.render(messages, **variables)

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        """Token ids of the rendered prompt; the template itself writes the special tokens."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise TokenizerError(f"{path}: holds no JSON object")
    return data

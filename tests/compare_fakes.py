"""An engine, a reference and a pair whose logits are a known function of the last ids."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np

VOCAB = 32


def table_logits(history: list[int]) -> np.ndarray:
    """float32 [vocab]: a fixed function of the last three ids."""
    seed = [1, *history[-3:]]
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


class FakeCache:
    def __init__(self) -> None:
        self.ids: list[int] = []

    @property
    def length(self) -> np.ndarray:
        return np.array([len(self.ids)])

    def rewind(self, length: Any) -> None:
        assert 0 <= int(np.ravel(length)[0]) <= len(self.ids)
        del self.ids[int(np.ravel(length)[0]) :]


class FakeEngine:
    """``noise`` is added to every row alike; ``fault`` breaks one path: "single", "rewind" or "nan"."""

    vocab_size = VOCAB

    def __init__(self, noise: float = 0.0, fault: str = "", context_length: int = 256) -> None:
        self.noise = noise
        self.fault = fault
        self.context_length = context_length
        self.calls: list[int] = []

    def new_cache(self, batch: int = 1, capacity: int = 256) -> FakeCache:
        assert batch == 1
        cache = FakeCache()
        if self.fault == "rewind":
            cache.rewind = lambda length: None  # type: ignore[method-assign]
        return cache

    def forward(
        self, input_ids: Any, cache: Any, *, query_length: Any = None, logits_rows: Any = None, copy: bool = True
    ) -> np.ndarray:
        ids = np.asarray(input_ids)[0]
        self.calls.append(len(ids))
        rows = []
        for token in ids.tolist():
            cache.ids.append(token)
            assert len(cache.ids) <= self.context_length
            row = table_logits(cache.ids)
            jitter = np.random.default_rng([2, *cache.ids[-3:]]).normal(0, 1, VOCAB)
            rows.append((row + self.noise * jitter).astype(np.float32))
        logits = np.stack(rows)
        if self.fault == "single" and len(ids) == 1:
            logits += np.float32(1e-3) * np.arange(VOCAB, dtype=np.float32)
        if self.fault == "nan":
            logits[0, 0] = np.nan
        return logits if logits_rows is None else logits[np.asarray(logits_rows)]


class FakeReference:
    def logits(self, ids: np.ndarray) -> np.ndarray:
        history = ids.tolist()
        return np.stack([table_logits(history[: end + 1]) for end in range(len(history))])

    def greedy(self, ids: np.ndarray, max_new_tokens: int, eos_token_ids: tuple[int, ...]) -> list[int]:
        history, produced = ids.tolist(), []
        while len(produced) < max_new_tokens and not (produced and produced[-1] in eos_token_ids):
            produced.append(int(table_logits(history + produced).argmax()))
        return produced

    def layer_outputs(self, ids: np.ndarray) -> list[np.ndarray]:
        return []


class FakeTokenizer:
    """One id a character; not a tokenizer that a text survives whole."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % VOCAB for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + token % 26) if token != 3 else "<b>" for token in ids)

    chat: Any = "a template"

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


@dataclasses.dataclass
class FakePair:
    """A pair with an ngram draft; ``swap`` makes the speculative continuation differ from that position on."""

    target: FakeEngine
    swap: int | None = None
    draft: Any = None

    def __post_init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        space = types.SimpleNamespace
        self.manifest = space(
            target=space(model=space(source="fake", architecture="Fake"), context_length=self.target.context_length),
            draft=space(kind="ngram", engine=None, num_assistant_tokens=3, layers=None),
            tokens=space(bos_token_id=None, eos_token_ids=()),
            contract=space(vocab_size=VOCAB),
            files={},
            build={},
        )

    def generate(self, prompt: list[int], *, max_new_tokens: int, num_assistant_tokens: int = 3, **options: Any) -> Any:
        assert options == {"do_sample": False, "repetition_penalty": 1.0}
        cache = self.target.new_cache()
        produced: list[int] = []
        block = list(prompt)
        while len(produced) < max_new_tokens:
            token = int(self.target.forward([block], cache)[-1].argmax())
            if num_assistant_tokens and self.swap == len(produced):
                token = (token + 1) % VOCAB
            produced.append(token)
            block = [token]
        return types.SimpleNamespace(token_ids=produced)

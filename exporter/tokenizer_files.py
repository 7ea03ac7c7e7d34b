"""The tokenizer and generation files that go into a bundle, and the special token ids."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

from specexport.exporter.gguf_file import read_gguf
from specexport.exporter.source import Source, read_json
from specexport.plugins.errors import InputError

if TYPE_CHECKING:
    import transformers

_EXPLICIT_EOS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_PROBES = ("Hello, world! It's 12345.", "  two  spaces\n\n\ttab ", "é 中文 \U0001f600")
# What saving writes about the place that a tokenizer was loaded from.
_INCIDENTAL = ("is_local", "local_files_only", "name_or_path", "_commit_hash")


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """What the runtime needs of a tokenizer.

    Attributes:
        files: File name in the bundle to its bytes: ``tokenizer.json`` always; ``tokenizer_config.json``,
            ``chat_template.jinja`` and ``generation_config.json`` if the source has them.
        eos_token_ids: All of them, sorted.
        notes: What was changed or could not be checked, for people.
    """

    files: dict[str, bytes]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    notes: tuple[str, ...] = ()

    @property
    def tokenizer_json(self) -> str:
        """The text of ``tokenizer.json``."""
        return self.files["tokenizer.json"].decode("utf-8")

    @property
    def chat_template(self) -> str | None:
        """The chat template's text, unchanged."""
        template = self.files.get("chat_template.jinja")
        return None if template is None else template.decode("utf-8")

    def write(self, directory: pathlib.Path) -> list[pathlib.Path]:
        """Write the files; returns their paths."""
        paths = []
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
            paths.append(directory / name)
        return paths


def collect_tokenizer(source: Source, config: transformers.PretrainedConfig) -> TokenizerFiles:
    """The tokenizer's files and the special tokens of a source.

    Raises:
        InputError: No ``tokenizer.json``, or one that does not load.
    """
    files = _from_gguf(source) if source.kind == "gguf" else _from_directory(source.path)
    try:
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode("utf-8"))
    except Exception as error:  # The tokenizers library raises bare Exception.
        raise InputError(f"{source.identity}: tokenizer.json cannot be loaded: {error}") from error
    notes = () if source.kind == "gguf" else _as_transformers_encodes(source, backend, files)
    tokenizer = json.loads(files["tokenizer.json"])
    generation = json.loads(files["generation_config.json"]) if "generation_config.json" in files else {}
    settings = json.loads(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    tokens = vocabulary(tokenizer)
    ids = {text: number for number, text in tokens.items()}

    def special(kind: str) -> list[int]:
        # The generation config decides; an older checkpoint has these in the model's or the tokenizer's.
        for value in (generation.get(f"{kind}_token_id"), getattr(config, f"{kind}_token_id", None)):
            if value is not None:
                return [int(number) for number in (value if isinstance(value, list | tuple) else [value])]
        token = settings.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        return [ids[text]] if isinstance(text, str) and text in ids else []

    eos = set(special("eos"))
    if source.kind == "gguf":
        metadata = read_gguf(source.gguf_path).metadata
        eos |= {metadata[key] for key in _EXPLICIT_EOS if isinstance(metadata.get(key), int)}
    return TokenizerFiles(
        files=files,
        bos_token_id=next(iter(special("bos")), None),
        eos_token_ids=tuple(sorted(eos)),
        pad_token_id=next(iter(special("pad")), None),
        notes=notes,
    )


def vocabulary(tokenizer: dict[str, Any]) -> dict[int, str]:
    """Id to token of a parsed ``tokenizer.json``, added tokens included.

    Raises:
        InputError: The model inside has no vocabulary.
    """
    vocab = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocab, dict):
        tokens = {int(number): str(text) for text, number in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: [text, score] by id.
        tokens = {number: str(entry[0]) for number, entry in enumerate(vocab)}
    else:
        raise InputError("tokenizer.json: its model has no vocabulary")
    for token in tokenizer.get("added_tokens") or ():
        tokens[int(token["id"])] = str(token["content"])
    return tokens


def _from_directory(directory: pathlib.Path) -> dict[str, bytes]:
    if not (directory / "tokenizer.json").is_file():
        raise InputError(
            f"{directory}: no tokenizer.json, which the runtime needs; make one with "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    files = {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}
    settings = read_json(directory / "tokenizer_config.json") or {}
    read_json(directory / "generation_config.json")
    if "chat_template.jinja" not in files and (template := _template(settings.get("chat_template"))) is not None:
        files["chat_template.jinja"] = template.encode("utf-8")
    return files


def _as_transformers_encodes(source: Source, backend: Any, files: dict[str, bytes]) -> tuple[str, ...]:
    """Hold the file to the reference's own encoding, which may obey tokenizer_config.json too (``add_bos_token``).

    Where they differ, ``tokenizer.json`` in ``files`` becomes what transformers would save.
    """
    import transformers

    try:
        factory: Any = transformers.AutoTokenizer
        reference = factory.from_pretrained(
            source.path, trust_remote_code=source.trust_remote_code, local_files_only=True
        )
        differ = [text for text in _PROBES if reference(text)["input_ids"] != backend.encode(text).ids]
        if not differ:
            return ()
        files["tokenizer.json"] = reference.backend_tokenizer.to_str(pretty=True).encode("utf-8")
    except Exception as error:  # A tokenizer class of its own may raise anything.
        return (f"tokenizer.json was not compared with transformers' own encoding: {type(error).__name__}: {error}",)
    return (f"transformers encodes {differ[0]!r} unlike tokenizer.json; its form was taken",)


def _template(field: Any) -> str | None:
    """The default among the forms that tokenizer_config.json may hold: a text, or named texts."""
    if isinstance(field, list):
        named = {entry.get("name"): entry.get("template") for entry in field if isinstance(entry, dict)}
        field = named.get("default", next(iter(named.values()), None))
    return field if isinstance(field, str) else None


def _from_gguf(source: Source) -> dict[str, bytes]:
    import transformers

    try:
        # Not AutoTokenizer: it reads the whole configuration first, slowly, to arrive at this class.
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
            source.path, gguf_file=source.gguf_file, local_files_only=True
        )
    except Exception as error:  # Whatever a hostile vocabulary makes it raise.
        raise InputError(f"{source.identity}: no tokenizer can be made from the GGUF file: {error}") from error
    with tempfile.TemporaryDirectory(prefix="specexport-") as folder:
        tokenizer.save_pretrained(folder)
        names = ("tokenizer.json", "tokenizer_config.json")
        files = {name: (pathlib.Path(folder) / name).read_bytes() for name in names}
    settings = {
        key: value for key, value in json.loads(files["tokenizer_config.json"]).items() if key not in _INCIDENTAL
    }
    files["tokenizer_config.json"] = (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
    template = read_gguf(source.gguf_path).metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode("utf-8")
    return files

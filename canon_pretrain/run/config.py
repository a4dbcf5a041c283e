"""Experiment files: TOML with `extends`, checked as the dataclasses of a job. No torchtitan."""

import dataclasses
import functools
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.core.files import UnreadableFile, read_bytes

T = TypeVar("T")


def valid_world_sizes(global_batch_size: int, multiple_of: int = 1) -> list[int]:
    """Return the divisors of a global batch that are multiples of `multiple_of`."""
    counts = range(multiple_of, global_batch_size + 1, multiple_of)
    return [n for n in counts if global_batch_size % n == 0]


def read_experiment(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a TOML file and those it `extends`, relative to it; `chain`: files that extend it."""
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(map(str, (*chain, resolved)))
        raise UserError("config.extends_loop", f"`extends` is circular: {names}", path=path)
    try:
        own = tomllib.loads(read_bytes(path, 1 << 20).decode())
    except UnreadableFile as error:
        named_by = f" (named by `extends` in {chain[-1]})" if chain else ""
        raise UserError("config.unreadable", f"config file {error}{named_by}", path=path) from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError("config.toml", f"{path} is not valid TOML: {why}", path=path) from None
    given = own.pop("extends", [])
    bases = [given] if isinstance(given, str) else given
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(
            "config.type",
            f"{path}: `extends` = {given!r}: expected a path or a list of paths",
            key="extends",
        )
    read = (read_experiment(path.parent / base, (*chain, resolved)) for base in bases)
    return functools.reduce(merge, [*read, own], {})


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `over`: tables are merged, any other value is replaced."""
    both = [k for k, v in over.items() if isinstance(v, dict) and isinstance(base.get(k), dict)]
    return {**base, **over, **{key: merge(base[key], over[key]) for key in both}}


def to_toml(values: Mapping[str, Any]) -> str:
    """Return `values`, as read by `read_experiment`, as TOML with one line per section."""
    return "".join(f"{_text(key)} = {_text(value)}\n" for key, value in values.items())


def _text(value: Any) -> str:
    """Return a key or a value in TOML syntax."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)} = {_text(v)}' for key, v in value.items())}}}"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # numbers, and dates by ISO 8601


def build(cls: type[T], values: Mapping[str, Any], source: str, prefix: str = "") -> T:
    """Return an instance of dataclass `cls` from TOML `values`, with all keys and types checked."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments = dict(values)
    for key, value in values.items():
        dotted, hint = f"{prefix}{key}", cast(Any, hints.get(key))
        if key not in names:
            raise unknown_key(key, names, source, prefix)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(
                    "config.type",
                    f"{source}: '{dotted}' = {value!r}: expected a section, [{dotted}]",
                    key=dotted,
                )
            arguments[key] = build(hint, value, source, prefix=f"{dotted}.")
            continue
        try:
            TypeAdapter(hint).validate_python(value, strict=True)
        except ValidationError as error:
            raise UserError(
                "config.type",
                f"{source}: '{dotted}' = {value!r}: {error.errors()[0]['msg']}",
                key=dotted,
            ) from None
    return cls(**arguments)


def check_keys(
    values: Mapping[str, Any], known: Mapping[str, Any], source: str, prefix: str = ""
) -> None:
    """Raise UserError for a key of TOML `values` that `known`, nested alike, does not have."""
    for key, value in values.items():
        if key not in known:
            raise unknown_key(key, known, source, prefix)
        if isinstance(value, dict) and isinstance(known[key], dict):
            check_keys(value, known[key], source, f"{prefix}{key}.")


def unknown_key(key: str, known: Iterable[str], source: str, prefix: str) -> UserError:
    """Return the error for a key of a TOML section, with the nearest of the `known` ones."""
    near = nearest(key, known)
    hint = f"did you mean '{near}'?" if near else f"expected one of {', '.join(sorted(known))}"
    return UserError(
        "config.unknown_key",
        f"{source}: unknown {'key' if prefix else 'section'} '{prefix}{key}': {hint}",
        key=f"{prefix}{key}",
        nearest=near,
    )

"""Experiment files: TOML with `extends`, checked as the dataclasses of a job. No torchtitan."""

import dataclasses
import functools
import json
import sys
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.core.files import UnreadableFile, read_bytes

T = TypeVar("T")
MAX_BYTES = 1 << 20  # of a config file


def valid_world_sizes(global_batch_size: int, multiple_of: int = 1) -> list[int]:
    """Return the divisors of a global batch that are multiples of `multiple_of`."""
    counts = range(multiple_of, global_batch_size + 1, multiple_of)
    return [n for n in counts if global_batch_size % n == 0]


def read_experiment(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a TOML file and those it `extends`, relative to it. Raises UserError.

    `extended_by`: the files that extend it, the outermost first.
    """
    resolved = path.resolve()
    if resolved in extended_by:
        names = " -> ".join(map(str, (*extended_by, resolved)))
        raise UserError("config.extends_loop", f"`extends` is circular: {names}", path=path)

    try:
        values = tomllib.loads(read_bytes(path, MAX_BYTES).decode())
    except UnreadableFile as error:
        origin = ""
        if extended_by:
            origin = f" (named by `extends` in {extended_by[-1]})"
        raise UserError("config.unreadable", f"config file {error}{origin}", path=path) from None
    except RecursionError:
        raise _not_toml(path, "nested too deeply") from None
    except ValueError as error:
        raise _not_toml(path, str(error)) from None

    # The files that it extends: one path, or several.
    extends = values.pop("extends", [])
    if isinstance(extends, str):
        extends = [extends]
    is_list = isinstance(extends, list)
    if not is_list or not all(isinstance(base, str) for base in extends):
        raise UserError(
            "config.type",
            f"{path}: `extends` = {extends!r}: expected a path or a list of paths",
            key="extends",
        )

    # A base overrides earlier bases, and the file overrides all of them.
    merged: dict[str, Any] = {}
    for base in extends:
        base_values = read_experiment(path.parent / base, (*extended_by, resolved))
        merged = merge(merged, base_values)
    return merge(merged, values)


def _not_toml(path: Path, fault: str) -> UserError:
    return UserError("config.toml", f"{path} is not valid TOML: {fault}", path=path)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `over`: tables are merged, any other value is replaced."""
    merged = {**base, **over}
    for key in base.keys() & over.keys():
        if isinstance(base[key], dict) and isinstance(over[key], dict):
            merged[key] = merge(base[key], over[key])
    return merged


def to_toml(values: Mapping[str, Any]) -> str:
    """Return `values`, as read by `read_experiment`, as TOML with one line per section."""
    return "".join(f"{pair}\n" for pair in _pairs(values))


def _pairs(values: Mapping[str, Any]) -> list[str]:
    """Return `KEY = VALUE` in TOML syntax for each of the values."""
    return [f"{_text(key)} = {_text(value)}" for key, value in values.items()]


def _text(value: Any) -> str:
    """Return a key or a value in TOML syntax."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(_pairs(value))}}}"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # numbers, and dates by ISO 8601


def build(cls: type[T], values: Mapping[str, Any], source: str, prefix: str = "") -> T:
    """Return an instance of dataclass `cls` from TOML `values`, with all keys and types checked."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments = dict(values)
    for key, value in values.items():
        if key not in names:
            raise unknown_key(key, names, source, prefix)
        dotted = f"{prefix}{key}"
        hint = cast(Any, hints[key])

        # Sections and tables are built by this function, any other value checked by pydantic.
        table = _table_class(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            check_section(value, source, dotted)
            arguments[key] = build(hint, value, source, prefix=f"{dotted}.")
        elif table is not None and _are_tables(value):
            arguments[key] = build_tables(table, value, source, dotted)
        else:
            check_type(value, hint, source, dotted)
    return cls(**arguments)


def _table_class(hint: Any) -> Any:
    """Return the dataclass of a hint list[dataclass], perhaps annotated; None for other hints."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is not list:
        return None
    (item,) = typing.get_args(hint)
    return item if dataclasses.is_dataclass(item) else None


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(table, dict) for table in value)


def build_tables(cls: type[T], tables: Any, source: str, dotted: str) -> list[T]:
    """Return an instance of dataclass `cls` for each of the TOML tables `[[dotted]]`."""
    if not _are_tables(tables):
        raise _type_error(tables, source, dotted, f"expected tables, [[{dotted}]]")
    return [
        build(cls, table, source, prefix=f"{dotted}[{number}].")
        for number, table in enumerate(tables)
    ]


def check_section(value: Any, source: str, dotted: str) -> None:
    """Raise UserError unless a TOML value is a section."""
    if not isinstance(value, dict):
        raise _type_error(value, source, dotted, f"expected a section, [{dotted}]")


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Return the checker of a type, which takes milliseconds to make: a board has hundreds."""
    return TypeAdapter(hint)


def check_type(value: Any, hint: Any, source: str, dotted: str) -> None:
    """Raise UserError unless a TOML value has the type `hint`."""
    try:
        _adapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]["msg"]
        raise _type_error(value, source, dotted, fault) from None


def _type_error(value: Any, source: str, dotted: str, fault: str) -> UserError:
    return UserError(
        "config.type",
        f"{source}: '{dotted}' = {value!r}: {fault}",
        key=dotted,
    )


def split_arguments(argv: Sequence[str] | None) -> tuple[Sequence[str], Sequence[str]]:
    """Split a command line, sys.argv if None, at `--`: a program's arguments, and the trainer's."""
    if argv is None:
        argv = sys.argv[1:]
    if "--" not in argv:
        return argv, []
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def check_keys(
    values: Mapping[str, Any], valid: Mapping[str, Any], source: str, prefix: str = ""
) -> None:
    """Raise UserError for a key of TOML `values`, also in tables, that `valid` does not have."""
    for key, value in values.items():
        if key not in valid:
            raise unknown_key(key, valid, source, prefix)
        if isinstance(value, dict) and isinstance(valid[key], dict):
            check_keys(value, valid[key], source, f"{prefix}{key}.")


def unknown_key(key: str, valid: Iterable[str], source: str, prefix: str) -> UserError:
    """Return the error for a key of a TOML section, with the nearest of the `valid` ones."""
    near = nearest(key, valid)
    hint = f"expected one of {', '.join(sorted(valid))}"
    if near:
        hint = f"did you mean '{near}'?"
    dotted = f"{prefix}{key}"
    kind = "key" if prefix else "section"
    return UserError(
        "config.unknown_key",
        f"{source}: unknown {kind} '{dotted}': {hint}",
        key=dotted,
        nearest=near,
    )

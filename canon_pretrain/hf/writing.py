"""Write the folder of an export: safetensors files and the model's code."""

import functools
import json
import keyword
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import locked
from canon_pretrain.model.mixer_table import RECURRENT

MAX_FILE_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
PACKAGE = "canon_pretrain"
MODELING_MODULE = f"{PACKAGE}.hf.modeling_canon"
_REPOSITORY = Path(__file__).resolve().parents[2]
_IMPORT = re.compile(rf"^([ \t]*from)[ \t]+({PACKAGE}(?:\.\w+)*)(?=[ \t]+import\b)", re.MULTILINE)
_FLAT_IMPORT = re.compile(r"^([ \t]*from)[ \t]+\.(\w+)(?=[ \t]+import\b)", re.MULTILINE)
_OTHER_IMPORT = re.compile(rf"^[ \t]*import[ \t]+{PACKAGE}\b.*", re.MULTILINE)
_HEADER = re.compile(rf"# ({PACKAGE}/[\w/]+)\.py of {PACKAGE}\b.*\n")
Plans = Mapping[str, Mapping[str, torch.Size]]
"""Shapes of tensors by file and name."""
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@contextmanager
def folder_beside(out: Path, purpose: str) -> Iterator[Path]:
    """Create the folder .OUT.`purpose`, for one process at a time; remove it at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.{purpose}")
    lock = out.with_name(f".{out.name}.{purpose}.lock")
    with locked(lock, str(out)):
        try:
            if os.path.lexists(folder):  # of a process that was killed
                shutil.rmtree(folder)
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def plan_files(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, max_bytes: int
) -> dict[str, dict[str, torch.Size]]:
    """Split tensors into files of at most `max_bytes` of weights, or one tensor."""
    files: list[dict[str, torch.Size]] = [{}]
    bytes_left = max_bytes
    for name, shape in shapes.items():
        num_bytes = shape.numel() * dtype.itemsize
        if num_bytes > bytes_left and files[-1]:
            files.append({})
            bytes_left = max_bytes
        files[-1][name] = shape
        bytes_left -= num_bytes

    # The names that transformers looks for.
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05}-of-{len(files):05}.safetensors": file_shapes
        for number, file_shapes in enumerate(files, 1)
    }


def write_files(
    folder: Path, plans: Plans, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write the files of `plans`; `tensors` in that order, one in memory at a time."""
    stream = iter(tensors)
    file_of: dict[str, str] = {}
    total_bytes = 0
    for file_name, shapes in plans.items():
        with open(folder / file_name, "xb") as file:
            file.write(_safetensors_header(shapes, dtype))
            for planned_name, shape in shapes.items():
                name, tensor = next(stream)
                is_planned = (name, tensor.shape, tensor.dtype) == (planned_name, shape, dtype)
                assert is_planned, (name, planned_name)
                file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                file_of[name] = file_name
                total_bytes += tensor.nbytes

    # Several files need an index, as transformers reads it.
    if len(plans) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _safetensors_header(shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> bytes:
    """Return what precedes the data of tensors stored in this order: 8 bytes of length, JSON."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    padding = b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    return (len(text) + len(padding)).to_bytes(8, "little") + text + padding


class MixerSource(NamedTuple):
    """A file of the user's own mixer, and the name that it has in an export."""

    path: Path
    name: str
    text: str


def mixer_sources(paths: Iterable[Path]) -> tuple[MixerSource, ...]:
    """Read the files of the user's own mixers, to export them under their names.

    A name that no module can have, or that one of our modules has, gets a prefix. Raises UserError
    for a file whose imports of our modules can't be made relative.
    """
    taken = set(bundled_code(None))
    sources: list[MixerSource] = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        _check_mixer_imports(path, text)
        taken |= {f"{_flat(module)}.py" for module in _imported_modules(text)}

        stem = re.sub(r"\W", "_", path.stem)
        while f"{stem}.py" in taken or not stem.isidentifier() or keyword.iskeyword(stem):
            stem = f"mixer_{stem}"
        taken.add(f"{stem}.py")
        sources.append(MixerSource(path, f"{stem}.py", text))
    return tuple(sources)


@functools.cache
def bundled_code(version: str | None, mixers: tuple[MixerSource, ...] = ()) -> Mapping[str, str]:
    """Return modeling_canon.py and all it imports from this package, by file name.

    `from canon_pretrain.model.args import` becomes `from .args import`, also in `mixers`.
    """
    # Follow the imports from modeling_canon.py and the mixers. `mixer_class` imports the product's
    # by the names in their rows, so that no import statement leads to them.
    sources: dict[str, str] = {}
    pending = [MODELING_MODULE, *(f"{PACKAGE}.model.{row.module}" for row in RECURRENT.values())]
    for mixer in mixers:
        pending += _imported_modules(mixer.text)
    while pending:
        module = pending.pop()
        if module not in sources:
            source = (_REPOSITORY / _path_of(module)).read_text(encoding="utf-8")
            sources[module] = source
            pending += _imported_modules(source)

    # Put all modules in one folder, under the last part of their names.
    maker = f"{PACKAGE} {version}" if version else PACKAGE
    files = {}
    for module in sorted(sources):
        header = f"# {_path_of(module)} of {maker}, imports made relative"
        files[f"{_flat(module)}.py"] = f"{header}\n{_flat_source(sources[module])}"
    if len(files) != len(sources):
        raise ValueError(f"two of {sorted(sources)} would have one name in a flat folder")
    for mixer in mixers:
        files[mixer.name] = _flat_source(mixer.text)

    # transformers 4 copies only files that the modeling file itself imports.
    modeling_file = f"{_flat(MODELING_MODULE)}.py"
    lines = ["", "# transformers 4 copies only files that are imported here"]
    for name in sorted(files.keys() - {modeling_file}):
        lines.append(f"from .{Path(name).stem} import __name__ as _  # noqa: E402, F401")
    files[modeling_file] += "\n".join([*lines, ""])
    return MappingProxyType(files)


def _check_mixer_imports(path: Path, source: str) -> None:
    """Raise UserError unless each import of ours is `from canon_pretrain.MODULE import NAME`."""
    unclear = [match[0].strip() for match in _OTHER_IMPORT.finditer(source)]
    for module in _imported_modules(source):
        if not (_REPOSITORY / _path_of(module)).is_file():
            unclear.append(f"from {module} import")
    if unclear:
        raise UserError(
            "hf.mixer_import",
            f"{path}: `{unclear[0]}` can't be made relative for an export: write "
            f"`from {PACKAGE}.FOLDER.MODULE import NAME`",
            path=path,
            given=unclear[0],
        )


def _imported_modules(source: str) -> list[str]:
    return [match[2] for match in _IMPORT.finditer(source)]


def _flat_source(source: str) -> str:
    return _IMPORT.sub(lambda match: f"{match[1]} .{_flat(match[2])}", source)


def unflatten(source: str, folder: Path) -> str:
    """Return a mixer of the export `folder` with the imports that `bundled_code` has replaced."""

    def module(flat_import: re.Match[str]) -> str:
        path = folder / f"{flat_import[2]}.py"
        header = None
        if path.is_file():
            header = _HEADER.match(path.read_text(encoding="utf-8"))
        if header is None:  # of a file that is no module of ours
            return flat_import[0]
        return f"{flat_import[1]} {header[1].replace('/', '.')}"

    return _FLAT_IMPORT.sub(module, source)


def _path_of(module: str) -> Path:
    return Path(*module.split(".")).with_suffix(".py")


def _flat(module: str) -> str:
    return module.rpartition(".")[2]

"""Write the folder of an export: safetensors files and the model's code."""

import functools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.core.lock import locked

MAX_FILE_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
PACKAGE = "canon_pretrain"
MODELING_MODULE = f"{PACKAGE}.hf.modeling_canon"
_REPOSITORY = Path(__file__).resolve().parents[2]
_IMPORT = re.compile(rf"^([ \t]*from)[ \t]+({PACKAGE}(?:\.\w+)*)(?=[ \t]+import\b)", re.MULTILINE)
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


@functools.cache
def bundled_code(version: str | None) -> Mapping[str, str]:
    """Return modeling_canon.py and all it imports from this package, by file name.

    `from canon_pretrain.model.args import` becomes `from .args import`.
    """
    # Follow the imports from modeling_canon.py.
    sources: dict[str, str] = {}
    pending = [MODELING_MODULE]
    while pending:
        module = pending.pop()
        if module not in sources:
            source = (_REPOSITORY / _path_of(module)).read_text(encoding="utf-8")
            sources[module] = source
            pending += [match[2] for match in _IMPORT.finditer(source)]

    # Put all modules in one folder, under the last part of their names.
    maker = f"{PACKAGE} {version}" if version else PACKAGE
    files = {}
    for module in sorted(sources):
        flat_source = _IMPORT.sub(lambda match: f"{match[1]} .{_flat(match[2])}", sources[module])
        header = f"# {_path_of(module)} of {maker}, imports made relative"
        files[f"{_flat(module)}.py"] = f"{header}\n{flat_source}"
    if len(files) != len(sources):
        raise ValueError(f"two of {sorted(sources)} would have one name in a flat folder")

    # transformers 4 copies only files that the modeling file itself imports.
    lines = ["", "# transformers 4 copies only files that are imported here"]
    for module in sorted(sources.keys() - {MODELING_MODULE}):
        lines.append(f"from .{_flat(module)} import __name__ as _  # noqa: E402, F401")
    files[f"{_flat(MODELING_MODULE)}.py"] += "\n".join([*lines, ""])
    return MappingProxyType(files)


def _path_of(module: str) -> Path:
    return Path(*module.split(".")).with_suffix(".py")


def _flat(module: str) -> str:
    return module.rpartition(".")[2]

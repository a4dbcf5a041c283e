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
def folder_beside(out: Path, doing: str) -> Iterator[Path]:
    """Create the folder .OUT.`doing`, for one process at a time; remove it at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder, lock = (out.with_name(f".{out.name}.{doing}{end}") for end in ("", ".lock"))
    with locked(lock, str(out)):
        try:
            if os.path.lexists(folder):
                shutil.rmtree(folder)
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def plan_files(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, max_bytes: int = MAX_FILE_BYTES
) -> dict[str, dict[str, torch.Size]]:
    """Split tensors into files of at most `max_bytes` of weights, or one tensor."""
    groups: list[dict[str, torch.Size]] = [{}]
    room = max_bytes
    for name, shape in shapes.items():
        size = shape.numel() * dtype.itemsize
        if size > room and groups[-1]:
            groups.append({})
            room = max_bytes
        groups[-1][name] = shape
        room -= size
    ends = [f"-{i:05}-of-{len(groups):05}" for i in range(1, len(groups) + 1)]
    ends = ends if len(groups) > 1 else [""]
    return {f"model{end}.safetensors": each for end, each in zip(ends, groups, strict=True)}


def write_files(
    folder: Path, plans: Plans, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write the files of `plans`; `tensors` in that order, one in memory at a time."""
    stream = iter(tensors)
    total = 0
    for file_name, shapes in plans.items():
        # 8 bytes of header length, the JSON header, the data
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + shape.numel() * dtype.itemsize
            place = [start, end]
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": place}
        total += end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
        with open(folder / file_name, "xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, shape in shapes.items():
                given, tensor = next(stream)
                assert (given, tensor.shape, tensor.dtype) == (name, shape, dtype), (given, name)
                file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    if len(plans) > 1:
        places = {name: file_name for file_name, shapes in plans.items() for name in shapes}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@functools.cache
def bundled_code(version: str | None) -> Mapping[str, str]:
    """Return modeling_canon.py and all it imports from this package, by file name.

    `from canon_pretrain.model.args import` becomes `from .args import`.
    """
    sources: dict[str, str] = {}
    paths: dict[str, Path] = {}
    wanted = [MODELING_MODULE]
    while wanted:
        if (module := wanted.pop()) not in sources:
            paths[module] = Path(*module.split(".")).with_suffix(".py")
            sources[module] = (_REPOSITORY / paths[module]).read_text(encoding="utf-8")
            wanted += [found[2] for found in _IMPORT.finditer(sources[module])]
    names = {module: module.rpartition(".")[2] for module in sorted(sources)}
    if len(set(names.values())) != len(names):
        raise ValueError(f"two of {list(names)} would have one name in a flat folder")
    maker = f"{PACKAGE} {version}" if version else PACKAGE
    files = {}
    for module, name in names.items():
        flat = _IMPORT.sub(lambda m: f"{m[1]} .{m[2].rpartition('.')[2]}", sources[module])
        files[f"{name}.py"] = f"# {paths[module]} of {maker}, imports made relative\n{flat}"
    # transformers 4 copies only files that this one imports
    others = [name for module, name in names.items() if module != MODELING_MODULE]
    tail = "".join(f"from .{name} import __name__ as _  # noqa: E402, F401\n" for name in others)
    note = "# transformers 4 copies only files that are imported here"
    files[f"{names[MODELING_MODULE]}.py"] += f"\n{note}\n{tail}"
    return MappingProxyType(files)

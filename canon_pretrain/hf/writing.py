"""Writing a folder beside its place, and weights as safetensors files, one tensor at a time.

The format: 8 bytes that say how long the header is, the header (JSON: dtype, shape and place of
each tensor), then the bytes of all tensors. The package's own writer wants them all at once.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.core.lock import locked

MAX_FILE_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@contextmanager
def folder_beside(out: Path, doing: str) -> Iterator[Path]:
    """Make .OUT.`doing` for the files of `out`, gone in the end; first that of a killed process.

    Raises UserError while another process does the same.
    """
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


@dataclass(frozen=True)
class Plan:
    """One file to be: its name, and the shape of each tensor in the order of its bytes."""

    name: str
    shapes: dict[str, torch.Size]


def plan_files(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, max_bytes: int = MAX_FILE_BYTES
) -> list[Plan]:
    """Share tensors out to files of at most `max_bytes` of weights (or one tensor), in order."""
    groups: list[dict[str, torch.Size]] = [{}]
    room = max_bytes
    for name, shape in shapes.items():
        size = shape.numel() * dtype.itemsize
        if size > room and groups[-1]:
            groups.append({})
            room = max_bytes
        groups[-1][name] = shape
        room -= size
    if len(groups) == 1:
        return [Plan("model.safetensors", groups[0])]
    total = len(groups)
    return [Plan(f"model-{i:05}-of-{total:05}.safetensors", g) for i, g in enumerate(groups, 1)]


def write_files(
    folder: Path, plans: list[Plan], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write the files of `plans`, synced; `tensors` come in their order, on the CPU, of `dtype`.

    With several files, also the index that says where each tensor is.
    """
    stream = iter(tensors)
    for plan in plans:
        _write(folder / plan.name, plan, stream, dtype)
    if len(plans) > 1:
        sizes = [shape.numel() * dtype.itemsize for plan in plans for shape in plan.shapes.values()]
        places = {name: plan.name for plan in plans for name in plan.shapes}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write(
    path: Path, plan: Plan, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in plan.shapes.items():
        start, end = end, end + shape.numel() * dtype.itemsize
        place = [start, end]
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor then lies at a multiple of 8
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in plan.shapes.items():
            given, tensor = next(tensors)
            if given != name or tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(f"{given} {tensor.shape} came where {name} {shape} was planned")
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())

"""What a node finds out about itself, and a rank when it meets the others.

`python -m canon_pretrain.preflight node` and `ranks` write it; `verdict` judges it.
"""

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes
from canon_pretrain.core.holder import host_name
from canon_pretrain.kernels.hardware import check_cuda, copy_bandwidth, matmul_flops
from canon_pretrain.run.source import code_hashes

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 600
WRITE_BYTES = 1 << 20
LEAST_FREE = 0.9
"""The share of a GPU's memory that must be free; a process of a former job may hold the rest."""
GPU_SIZE, CPU_SIZE = 8192, 512
GPU_SECONDS, CPU_SECONDS = 1.0, 0.1
CPU_BYTES = 1 << 25
GPU_ELEMENTS, CPU_ELEMENTS = 1 << 26, 1 << 20
ALL_REDUCES = 5
MATMUL, MEMORY = "matmul", "memory"
IN_NODE, TWO_NODES, ALL_NODES = "all-reduce in the node", "all-reduce of two nodes", "all-reduce"
PACKAGES = ("torch", "torchtitan", "numpy")


@dataclass(frozen=True)
class Report:
    """What a node or a rank found, as a JSON file.

    `disk`: faults of the run folder, which all nodes may share. `versions` all nodes must have
    alike. `left_alone`: a collective that failed, perhaps by another rank's fault. `clock_s`: after
    a barrier. `speeds`: FLOP/s and bytes per second, by device and measure.
    """

    faults: list[str] = field(default_factory=list)
    disk: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    left_alone: str | None = None
    clock_s: float | None = None
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)


def report_node(run: Path, checkpoint_bytes: int, gpus: int) -> Report:
    """Check this node's GPUs and what it can write to `run`."""
    faults, disk = [], []
    try:
        if (free := free_bytes(run)) < checkpoint_bytes:
            disk.append(
                f"{free:,} bytes are free in {run}, a checkpoint takes about {checkpoint_bytes:,}"
            )
        with tempfile.NamedTemporaryFile(dir=run, prefix=f".preflight-{host_name()}-") as file:
            file.write(content := os.urandom(WRITE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            if Path(file.name).read_bytes() != content:
                disk.append(f"{run}: what was written is not what is read")
    except OSError as error:
        disk.append(f"{run} cannot be written to: {error.strerror}")
    if gpus:
        import torch

        if (found := torch.cuda.device_count()) < gpus:
            faults.append(f"{found} of {gpus} GPUs can be used")
            try:
                check_cuda()
            except UserError as error:
                faults.append(str(error))
    code = hashlib.sha256(json.dumps(code_hashes()).encode()).hexdigest()[:12]
    versions = {name: metadata.version(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "canon_pretrain (its source's SHA-256)": code}
    return Report(faults, disk, versions)


def report_ranks(gpus: int) -> Report:
    """Use this rank's device by itself, all ranks at once, then all-reduce in growing groups.

    Those of a node, of two nodes, and all: a GPU or a link that does not work, or is slow, is found
    before the model is built, and a node's own fault on that node.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", timeout=timeout)
    try:
        world, node = dist.get_world_size(), host_name()
        everyone: list[str] = [""] * world
        dist.all_gather_object(everyone, node)
        dist.barrier()
        clock_s = time.time()
        device = torch.device("cpu")
        if gpus:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        faults, speeds = try_device(device)
        if gpus and not faults:
            torch.cuda.empty_cache()  # what was tried with; NCCL allocates by itself
        found: list[list[str]] = [[]] * world
        dist.all_gather_object(found, faults)
        if any(found):
            return Report(faults)
        for name, ranks in rank_groups(everyone):
            group = dist.new_group(ranks, backend="nccl" if gpus else "gloo", timeout=timeout)
            if dist.get_rank() not in ranks:
                continue
            rate = all_reduce_bandwidth(group, len(ranks), device)
            if rate is None:
                there = f"{len(ranks)} of {world} ranks, with those of {node},"
                return Report([f"an all-reduce of ones over {there} gave other sums"])
            if len(ranks) > 1:  # of a node's two neighbors, one may be slow
                speeds[name] = max(rate, speeds.get(name, 0.0))
        dist.barrier()
        label = f"{device.type}:{os.environ['LOCAL_RANK']}"
        return Report(clock_s=clock_s, speeds={label: speeds})
    except RuntimeError as error:
        # another rank's fault may be the reason: this one counts where no rank has one of its own
        return Report(left_alone=f"a collective failed: {str(error).splitlines()[0]}")
    finally:
        dist.destroy_process_group()


def try_device(device: "torch.device") -> tuple[list[str], dict[str, float]]:
    """Allocate and multiply on a device; return its faults, and FLOP/s and bytes per second."""
    import torch

    on_gpu = device.type == "cuda"
    size, num_bytes, seconds, dtype = CPU_SIZE, CPU_BYTES, CPU_SECONDS, torch.float32
    try:
        if on_gpu:
            torch.cuda.set_device(device)
            free, total = torch.cuda.mem_get_info()
            if free < LEAST_FREE * total:
                held = (total - free) / 2**30
                return [f"{device}: {held:.1f} of {total / 2**30:.1f} GiB are in use already"], {}
            size, num_bytes, seconds, dtype = GPU_SIZE, free // 4, GPU_SECONDS, torch.bfloat16
        ones = torch.ones(size, size, device=device, dtype=dtype)
        source = torch.full((num_bytes,), 90, device=device, dtype=torch.uint8)
        target = torch.zeros_like(source)
        speeds = {
            MATMUL: matmul_flops(device, dtype, size=size, seconds=seconds),
            MEMORY: copy_bandwidth(source, target, seconds=seconds / 2),
        }
        if not bool((ones @ ones == size).all()):
            return [f"{device}: a product of ones is wrong"], {}
        if not torch.equal(source, target):
            return [f"{device}: a copy of {num_bytes:,} bytes is not what was copied"], {}
        return [], speeds
    except RuntimeError as error:
        return [f"{device}: {str(error).splitlines()[0]}"], {}


def rank_groups(nodes: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the groups that all-reduce in turn, with names of their bandwidths; `nodes` by rank.

    Each node, each two neighbors on a ring of the nodes, and all. Ranks take them in one order, so
    none waits for a rank that waits for it.
    """
    names = list(dict.fromkeys(nodes))
    own = {name: [rank for rank, node in enumerate(nodes) if node == name] for name in names}
    groups = [(IN_NODE, own[name]) for name in names]
    if len(names) == 1:
        return groups
    if len(names) > 2:
        ring = [(i, (i + 1) % len(names)) for i in range(len(names))]
        for i, j in ring[::2] + ring[1::2]:  # neighbors of neighbors do not wait for each other
            groups.append((TWO_NODES, sorted(own[names[i]] + own[names[j]])))
    return [*groups, (ALL_NODES, list(range(len(nodes))))]


def all_reduce_bandwidth(group: Any, count: int, device: "torch.device") -> float | None:
    """Return bus bandwidth in bytes/s, as nccl-tests define it; None if the sums are wrong."""
    import torch
    import torch.distributed as dist

    elements = GPU_ELEMENTS if device.type == "cuda" else CPU_ELEMENTS
    ones = torch.ones(elements, device=device)
    dist.all_reduce(ones, group=group)  # connects, and lets all begin the next ones together
    begin = time.perf_counter()
    for _ in range(ALL_REDUCES):
        dist.all_reduce(ones.fill_(1), group=group)
    if not bool((ones == count).all()):  # waits for the GPU
        return None
    seconds = (time.perf_counter() - begin) / ALL_REDUCES
    return 2 * (count - 1) / count * ones.nbytes / seconds

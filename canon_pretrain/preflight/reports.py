"""What a node finds out about itself, and a rank when it meets the others.

preflight/__main__.py's `node` and `ranks` write it to a file; preflight/verdict.py reads it.
"""

import hashlib
import os
import platform
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from canon_pretrain.errors import UserError
from canon_pretrain.files import free_bytes
from canon_pretrain.hardware import check_cuda
from canon_pretrain.run.holder import host_name

TIMEOUT_S = 600
WRITE_BYTES = 1 << 20
ELEMENTS = 1 << 20
PACKAGES = ("torch", "torchtitan", "numpy")


def report_node(run: Path, checkpoint_bytes: int, gpus: int) -> dict[str, Any]:
    """This node's report: `faults` of its own, `disk` faults, which all nodes may share, and the
    versions that all must share."""
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
    return {"faults": faults, "disk": disk, "versions": _versions()}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return versions | {"canon_pretrain (its source's SHA-256)": digest.hexdigest()[:12]}


def report_ranks(gpus: int) -> dict[str, Any]:
    """What this rank finds when all ranks meet: `faults`, and `clock_s` just after a barrier.

    All of a node's ranks add up numbers first, then all ranks do: a GPU or a link that does not
    work is found before the model is built, and a node's own fault on that node.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        world, node = dist.get_world_size(), host_name()
        everyone: list[str] = [""] * world
        dist.all_gather_object(everyone, node)
        dist.barrier()
        clock_s = time.time()
        device = torch.device("cpu")
        if gpus:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        backend = "nccl" if gpus else "gloo"
        nodes = list(dict.fromkeys(everyone))
        parts = [[rank for rank in range(world) if everyone[rank] == each] for each in nodes]
        for ranks in (*parts, list(range(world))):
            group = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=TIMEOUT_S))
            if dist.get_rank() not in ranks:
                continue
            ones = torch.ones(ELEMENTS, device=device)
            dist.all_reduce(ones, group=group)
            if not bool((ones == len(ranks)).all()):
                there = f"the ranks of {node}" if len(ranks) < world else "all ranks"
                return {"faults": [f"an all-reduce of ones over {there} gave other sums"]}
        dist.barrier()
        return {"faults": [], "clock_s": clock_s}
    except RuntimeError as error:
        # another rank's fault may be the reason: this one counts where no rank has one of its own
        return {"faults": [], "left_alone": f"a collective failed: {str(error).splitlines()[0]}"}
    finally:
        dist.destroy_process_group()

"""Report what this machine has, what uses it, what is missing and how to get it; then train.

Each group of checks is a process with a timeout: a driver, disk or server that hangs, or a library
that crashes, becomes a line of the report. The training check runs a tiny model on two ranks (on
the GPUs, if there are any) in a temporary folder of DIR. Exit code 0 if nothing is broken, else 1.
With --fake, the trainer runs CONFIG on GPUs that this machine need not have: see fake_gpu/.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from canon_pretrain.core.children import kill_tree, start_child, torchrun
from canon_pretrain.core.cli import available_cores, positive, usage_error
from canon_pretrain.core.errors import UserError, check_choice, reason_in
from canon_pretrain.core.terminal import Console, Progress, duration, printable, size

if TYPE_CHECKING:
    from canon_pretrain.run.log import Event

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "train_configs" / "playground" / "tiny" / "copy.toml"
STYLES = {
    "ok": "green",
    "note": "cyan",
    "missing": "yellow",
    "broken": "bold red",
}
GROUP_TIMEOUT_S = 90.0
HUB_TIMEOUT_S = 5.0
START_TIMEOUT_S = 120.0  # until the first step
STEP_TIMEOUT_S = 60.0  # between two steps
STEPS = 40
CHECKPOINT_BYTES = 16_200_000_000  # 1.3B parameters and AdamW's two moments, float32
# the test of a disk's speed ends at either
WRITE_BYTES = 64 << 20
WRITE_S = 3.0
SLOW_DISK = 50e6  # bytes per second
MOUNTS = Path("/proc/mounts")
NETWORK_DISKS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "9p", "fuse")
CHILD = "import sys; from canon_pretrain.cluster.doctor import print_group as f; f(*sys.argv[1:])"
SCRATCH = ".canon-doctor-"  # prefix of a folder for the checks
OWNER = "owner.json"  # the process that has created it
INSTALL_CU126 = (  # as in README.md
    "TORCH=torch==2.13.0+cu126 "
    "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126 make install"
)


@dataclass(frozen=True)
class Finding:
    """A line of the report. `broken` makes the exit code 1; `missing` limits `used_for` only."""

    state: str
    what: str
    found: str
    used_for: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)  # numbers for --json


Findings = Iterator[Finding]


def judge(
    name: str,
    good: str,
    problem: str | None,
    used_for: str,
    remedy: str = "",
    severity: str = "broken",
    **numbers: Any,
) -> Finding:
    """Build a Finding: "ok" with the text `good` if `problem` is None, else of `severity`."""
    if problem is None:
        return Finding("ok", name, good, used_for, facts=numbers)
    return Finding(severity, name, problem, used_for, remedy, numbers)


# -- groups of checks, each a process


def check_machine(folder: Path) -> Findings:
    """Check Python and its packages, cores, memory and locale."""
    import locale
    import platform

    from canon_pretrain.machine.hardware import cpu_info
    from canon_pretrain.machine.memory import available_memory

    yield from _check_packages()

    cores = available_cores()
    model = cpu_info("model name") or platform.machine()
    yield Finding(
        "ok",
        "CPU",
        f"{cores} of {os.cpu_count()} cores, {model}",
        used_for="data, evaluation, training without a GPU",
        facts={"cores": cores},
    )

    memory = available_memory()
    yield Finding(
        "ok",
        "memory",
        f"{size(memory)} available",
        used_for="models on the CPU",
        facts={"bytes": memory},
    )

    # with an encoding other than UTF-8, `canon` has ended before this check
    yield Finding("ok", "locale", locale.getpreferredencoding(False), "text files")


def _check_packages() -> Findings:
    """Compare Python and its packages with pyproject.toml: a finding for each out of bounds."""
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [f"python{project['requires-python']}", *project["dependencies"]]
    within_bounds = []
    for line in [*required, *extras["dev"], *extras["cuda"]]:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # for another platform or version of Python

        name = requirement.name
        version = _installed_version(name)
        if version is None and line not in required:
            continue  # `check_kernels` reports the optional packages

        with suppress(ValueError):  # no version in its metadata
            if version is not None and requirement.specifier.contains(version, prereleases=True):
                within_bounds.append(f"{name} {version}")
                continue

        bounds = str(requirement.specifier)
        problem = "not installed"
        if version is not None:
            problem = f"{version}, outside {bounds}"
        remedy = f"pip install '{name}{bounds}'"
        if name == "python":
            remedy = "make install PYTHON=... with another Python"
        versions = {"version": version, "expected": bounds}
        if line in required:
            yield Finding("broken", name, problem, "all", remedy, versions)
        else:
            yield Finding("note", name, problem, "an option", remedy, versions)

    count = len(within_bounds)
    examples = ", ".join(within_bounds[:4])
    text = f"{count} within pyproject.toml's bounds: {examples}; {sys.executable}"
    yield Finding("ok", "packages", text, "all", facts={"count": count})


def _installed_version(name: str) -> str | None:
    """Return the version of Python or of a distribution; None if it is not installed."""
    import platform
    from importlib import metadata

    if name == "python":
        return platform.python_version()
    with suppress(metadata.PackageNotFoundError):
        return str(metadata.version(name))
    return None


def check_gpu(folder: Path) -> Findings:
    """Check the GPUs, the kernels for them, collectives and compilers."""
    import torch
    import torch.distributed as dist

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield _check_cuda(num_gpus)
    yield from check_kernels("cuda" if num_gpus else "cpu")

    absent = "not in this build of torch"
    build = f"in torch {torch.__version__}"
    yield judge(
        "gloo",
        build,
        problem=None if dist.is_backend_available("gloo") else absent,
        used_for="collectives on the CPU",
        remedy="make install, in a new .venv",
    )
    if num_gpus:
        problem: str | None = absent
        version = ""
        if dist.is_backend_available("nccl"):
            problem = None
            version = ".".join(map(str, torch.cuda.nccl.version()))
        yield judge(
            "nccl",
            f"{version} {build}",
            problem,
            used_for="collectives on the GPU",
            remedy=INSTALL_CU126,
        )

    yield _check_compiler()


def _check_cuda(num_gpus: int) -> Finding:
    """Check that torch, which sees `num_gpus`, can use the GPUs of this machine."""
    import torch

    from canon_pretrain.machine.device import check_cuda
    from canon_pretrain.machine.hardware import find_gpu, query_gpu

    used_for = "training and evaluation"
    evidence = find_gpu()
    details: dict[str, Any] = {"gpus": num_gpus, "evidence": evidence}

    # A GPU that torch cannot use is an error; none at all is not.
    try:
        check_cuda()
    except UserError as error:
        problem, _, remedy = error.message.rpartition(". ")  # its last sentence is the remedy
        remedy = f"{remedy}; for drivers from 525 on: {INSTALL_CU126}"
        return Finding("broken", "GPU", problem, used_for, remedy, details)
    if not num_gpus:
        reason = "hidden by CUDA_VISIBLE_DEVICES" if evidence else "none"
        return Finding("note", "GPU", f"{reason}: the CPU trains", used_for, facts=details)

    # The models as torch names them, the driver and the clocks from nvidia-smi.
    models = set()
    for index in range(num_gpus):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"sm_{gpu.major}{gpu.minor}"
        models.add(f"{gpu.name}, {capability}, {size(gpu.total_memory)}")
    versions = f"torch's CUDA {torch.version.cuda}"
    state = query_gpu("0") or {}  # empty without nvidia-smi
    if state:
        versions = f"driver {state['driver']}, {versions}"
    model_names = " or ".join(sorted(models))
    text = f"{num_gpus} x {model_names}; {versions}"
    return Finding("ok", "GPU", text, used_for, facts=details | state)


def check_kernels(device_type: str) -> Findings:
    """Report the backends that `auto` selects on this device, and why not the faster ones."""
    from dataclasses import replace

    from canon_pretrain.kernels.backends import (
        OPTIONAL,
        RECURRENCES,
        backend_problem,
        mixer_problem,
    )
    from canon_pretrain.model.args import flavor
    from canon_pretrain.model.attend import FLASH_IMPLS, Attend, check_backend
    from canon_pretrain.model.mixer_table import RECURRENT

    # Why each optional backend cannot run the paper's largest model with all Canon layers.
    args = replace(flavor("1b3"), canon_set="ABCD")
    problems = {f"canon {name}": backend_problem(name, device_type) for name in OPTIONAL}
    for name in RECURRENCES:
        mixer_problems = [mixer_problem(mixer, args.head_dim, name) for mixer in RECURRENT]
        problems[f"mixer {name}"] = next(filter(None, mixer_problems), None)
    for name in (*FLASH_IMPLS, "flash_attn"):
        problems[f"attention {name}"] = None
        try:
            check_backend(args, name)
        except UserError as error:
            problems[f"attention {name}"] = str(error.fields["reason"])

    on_gpu = device_type == "cuda"
    has_triton = on_gpu and problems["canon triton"] is None
    mixer = "chunked"
    for name in reversed(RECURRENCES):
        if on_gpu and problems[f"mixer {name}"] is None:
            mixer = f"{name}, checked at startup"
    selected = {
        "attention": Attend(args).describe(device_type),
        "canon": "triton, checked at startup" if has_triton else "compiled",
        "mixer": mixer,
    }
    for key, text in selected.items():
        if not on_gpu:
            text = f"{text}; faster ones need a GPU"
        yield Finding(
            "ok",
            f"{key} auto",
            text,
            used_for=f'model.{key}_backend = "auto"',
        )

    # On a GPU, each optional backend that a config may name.
    if not on_gpu:
        return
    for backend, problem in problems.items():
        key, name = backend.split()
        remedy = ""
        # "REASON: pip install PACKAGE", if a package is all that is missing
        reason, _, install = (problem or "").rpartition(": ")
        if install.startswith("pip install"):
            problem = reason
            remedy = install
        yield judge(
            backend,
            "works here",
            problem,
            used_for=f'model.{key}_backend = "{name}"',
            remedy=remedy,
            severity="missing",
        )


def _check_compiler() -> Finding:
    """Compile what torch.compile generates for a CPU: C++ with OpenMP and Python's headers."""
    import sysconfig

    import torch._inductor.cpp_builder as builder

    # The features that the generated code needs, in the smallest source that has them.
    problem = None
    compiler = ""
    try:
        compiler = builder.get_cpp_compiler()
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "try.cpp"
            source.write_text("#include <Python.h>\n#include <omp.h>\n#include <vector>\n")
            include = sysconfig.get_path("include")
            options = ["-shared", "-fPIC", "-fopenmp", f"-I{include}"]
            command = [compiler, *options, "-o", f"{source}.so", str(source)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            problem = " ".join([compiler, *errors[:1]])
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        problem = str(error).splitlines()[0]
    return judge(
        "C++ compiler",
        str(shutil.which(compiler)),
        problem,
        used_for="compile.enable (torch.compile)",
        remedy="apt install g++ python3-dev, or conda install cxx-compiler; CXX names another",
        severity="missing",
    )


OTHER_DISK = "--dir with a folder on another file system"


def check_disk(folder: Path) -> Findings:
    """Check the file system of `folder`: space, speed, clock and locks."""
    from canon_pretrain.cluster.preflight import disk_faults

    if not folder.exists():
        create = shlex.join(["mkdir", "-p", str(folder)])
        yield Finding("broken", "disk", f"{folder} does not exist", "run folders", create)
        return

    # A disk that cannot be written gets one finding for that, not one for each check.
    file_system = _file_system(folder)
    yield _check_space(folder, file_system)
    if faults := disk_faults(folder, 1 << 20):
        yield Finding("broken", "disk", "; ".join(faults), "run folders", OTHER_DISK)
        return
    yield from _check_writes(folder)
    yield _check_locks(folder, file_system)


def _file_system(folder: Path) -> str:
    """Return the type of the file system that holds `folder`, such as ext4 or lustre."""
    deepest = ""
    file_system = "unknown"
    for line in MOUNTS.read_text().splitlines():
        _, mount_point, kind, *_ = line.split()
        is_above = folder.resolve().is_relative_to(mount_point.replace("\\040", " "))
        # the last one at the same mount point is on top: autofs lists itself below the disk
        if is_above and len(mount_point) >= len(deepest):
            deepest = mount_point
            file_system = kind
    return file_system


def _check_space(folder: Path, file_system: str) -> Finding:
    """Compare the free space with the size of the paper's largest checkpoint."""
    from canon_pretrain.core.files import free_bytes

    free = free_bytes(folder)
    text = f"{size(free)} free in {folder.resolve()} ({file_system})"
    problem = None
    if free < CHECKPOINT_BYTES:
        problem = f"{text}; a checkpoint of 1.3B parameters has {size(CHECKPOINT_BYTES)}"
    return judge(
        "disk space",
        text,
        problem,
        used_for="run folders",
        remedy=OTHER_DISK,
        severity="note",
        free=free,
        kind=file_system,
    )


def _check_writes(folder: Path) -> Findings:
    """Write to a file of `folder`: compare its time with this machine's, and time the writes."""
    from canon_pretrain.cluster.preflight import CLOCK_FAULT_S

    # Each block is synced, as a checkpoint is: else the page cache would be measured.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=SCRATCH) as file:
        ahead_s = os.fstat(file.fileno()).st_mtime - time.time()
        block = os.urandom(1 << 20)
        written = 0
        start = time.monotonic()
        while written < WRITE_BYTES and time.monotonic() - start < WRITE_S:
            written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rate = written / (time.monotonic() - start)

    text = f"{size(rate)}/s, each MB synced"
    problem = None
    if rate < SLOW_DISK:
        checkpoint = f"a checkpoint of 1.3B parameters ({size(CHECKPOINT_BYTES)})"
        problem = f"{text}: {checkpoint} takes {duration(CHECKPOINT_BYTES / rate)}"
    yield judge(
        "disk speed",
        text,
        problem,
        used_for="checkpoints",
        remedy=OTHER_DISK,
        severity="note",
        bytes_per_s=rate,
    )

    difference_s = abs(ahead_s)
    text = f"this machine's and the disk's are {difference_s:.2f} s apart"
    yield judge(
        "clock",
        text,
        problem=text if difference_s > CLOCK_FAULT_S else None,
        used_for="heartbeats",
        remedy="synchronize clocks (NTP)",
        s=ahead_s,
    )


def _check_locks(folder: Path, file_system: str) -> Finding:
    """Check that a second launch is refused; of a network disk, on this machine only."""
    text = "a second launch is kept out"
    problem = _lock_problem(folder)
    if problem is None and file_system.startswith(NETWORK_DISKS):
        text = f"{text} on this machine; other machines were not tried ({file_system})"
        return Finding("note", "file locks", text, "one launch per run")
    return judge("file locks", text, problem, "one launch per run", OTHER_DISK)


def _lock_problem(folder: Path) -> str | None:
    """Take a run lock and a flock in `folder` twice each; return the problem if both succeed."""
    from canon_pretrain.core.lock import LinkLock, locked

    def quiet(text: str) -> None:
        pass

    problem = None
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
            path = Path(scratch) / "lock.json"
            run_lock = LinkLock.acquire(path, log=quiet)
            if LinkLock(path, log=quiet).try_acquire() or not run_lock.is_owner():
                problem = "two launches hold one run lock"
            run_lock.release()

            with suppress(UserError), locked(path, ""), locked(path, ""):
                problem = "two processes hold one flock"
    except (OSError, UserError) as error:
        problem = str(error)
    return problem


def check_network(folder: Path) -> Findings:
    """Check the hub: answer, token and cache; and the login of wandb."""
    from huggingface_hub import constants, get_token

    yield _check_hub(constants.ENDPOINT, is_offline=constants.HF_HUB_OFFLINE)

    yield judge(
        "hub token",
        "found",
        problem=None if get_token() else "none",
        used_for="gated data, hf push",
        remedy="hf auth login, or set HF_TOKEN",
        severity="missing",
    )

    cache = Path(constants.HF_HOME).expanduser()
    problem = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        problem = f"{cache} cannot be written: {error.strerror}"
    yield judge(
        "hub cache",
        str(cache),
        problem,
        used_for="downloads",
        remedy="set HF_HOME to another folder",
    )

    yield _check_wandb()


def _check_hub(url: str, *, is_offline: bool) -> Finding:
    """Send a request to the hub, unless an environment variable forbids it."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    problem = None
    remedy = "on a node with network: canon eval stage --suite all --to outputs/eval_data"
    if is_offline:
        problem = "not asked: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
        remedy = "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"
    else:
        try:
            urlopen(Request(url, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
        except HTTPError:  # a status such as 404 is an answer
            pass
        except (OSError, ValueError, HTTPException) as error:
            problem = f"{url} cannot be reached: {getattr(error, 'reason', error)}"

    return judge(
        "hub",
        f"{url} answers",
        problem,
        used_for="data, tokenizers",
        remedy=remedy,
        severity="note",
        url=url,
    )


def _check_wandb() -> Finding:
    """Check for a login as wandb finds it: a key in the environment, or a host of ~/.netrc."""
    import netrc
    from urllib.parse import urlsplit

    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    logins: dict[str, Any] = {}
    with suppress(OSError, netrc.NetrcParseError):
        logins = netrc.netrc(os.environ.get("NETRC")).hosts
    host = urlsplit(url).hostname
    has_login = "WANDB_API_KEY" in os.environ or host in logins
    return judge(
        "wandb",
        url,
        problem=None if has_login else f"no login for {url}",
        used_for="metrics.enable_wandb, online",
        remedy="wandb login",
        severity="missing",
    )


def check_slurm(folder: Path) -> Findings:
    """Check Slurm's commands, its controller and the settings of the cluster."""
    from canon_pretrain.cluster.leases import parse_config
    from canon_pretrain.cluster.preflight import scontrol

    if absent := [name for name in ("sbatch", "squeue") if shutil.which(name) is None]:
        text = f"not on PATH: {', '.join(absent)}"
        yield Finding("missing", "Slurm", text, "jobs", "a login node of a cluster")
        return

    output = scontrol("config")
    config = parse_config(output)
    problem = None
    if "ClusterName" not in config:
        last_line = output.splitlines()[-1:]
        problem = ": ".join(["its controller does not answer", *last_line])
    yield judge(
        "Slurm",
        f"{config.get('SLURM_VERSION')}, cluster {config.get('ClusterName')}",
        problem,
        used_for="jobs",
        remedy="set SLURM_CONF, or use a login node",
        severity="missing",
    )

    # The settings that the job scripts source; a line that is empty or a comment sets nothing.
    default_file = ROOT / "slurm" / "cluster.env"
    file = Path(os.environ.get("CANON_CLUSTER_ENV") or default_file)
    problem = None
    num_set = 0
    if not file.is_file():
        problem = f"{file} does not exist"
    else:
        for line in file.read_text().splitlines():
            if line.strip() and not line.strip().startswith("#"):
                num_set += 1
        if num_set == 0:
            problem = f"{file} sets nothing"
    yield judge(
        "cluster.env",
        f"{num_set} lines in {file}",
        problem,
        used_for="jobs",
        remedy="copy slurm/cluster.env.example to it and fill it in",
        severity="missing",
    )


class GroupProcess(NamedTuple):
    """The process of a group of checks; it prints findings, a line of JSON each, to `output`."""

    name: str
    output: IO[str]
    child: "subprocess.Popen[bytes]"


GROUPS: dict[str, Callable[[Path], Findings]] = {
    "machine": check_machine,
    "GPU and kernels": check_gpu,
    "disk": check_disk,
    "network": check_network,
    "Slurm": check_slurm,
}


def _group_failure(group: str, problem: str) -> Finding:
    return Finding("broken", group, problem, "this group of checks")


def print_group(name: str, folder: str) -> None:
    """Print a group's findings, a line of JSON each; an exception is the last one."""
    try:
        for finding in GROUPS[name](Path(folder)):
            print(json.dumps(asdict(finding)), flush=True)
    except Exception as error:
        failure = _group_failure(name, f"{type(error).__name__}: {error}")
        print(json.dumps(asdict(failure)), flush=True)


def run_groups(folder: Path) -> Iterator[tuple[str, list[Finding]]]:
    """Run the groups in parallel; yield the name and the findings of each, in order."""
    # Start all; their output goes to files, which do not block as a full pipe does.
    deadline = time.monotonic() + GROUP_TIMEOUT_S
    processes = []
    for name in GROUPS:
        output = tempfile.TemporaryFile("w+", errors="replace")
        child = start_child(
            [sys.executable, "-c", CHILD, name, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        processes.append(GroupProcess(name, output, child))

    # A caller that stops early, as after Ctrl-C, leaves none behind.
    try:
        for process in processes:
            yield process.name, _findings_of(process, deadline)
    finally:
        for process in processes:
            if process.child.poll() is None:
                kill_tree(process.child.pid)


def _findings_of(process: GroupProcess, deadline: float) -> list[Finding]:
    """Wait for a group and return its findings; kill it at `deadline`, of time.monotonic()."""
    name, output, child = process
    problem = None
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        problem = _timeout_problem("end", GROUP_TIMEOUT_S)
        kill_tree(child.pid)
        with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
            child.wait(1.0)

    # The findings before a failure count, too.
    with output:
        output.seek(0)
        lines = output.read().splitlines()
    findings = []
    for line in lines:
        with suppress(ValueError, TypeError):  # a library printed it
            findings.append(Finding(**json.loads(line)))

    if child.returncode and problem is None:
        last_line = "".join(lines[-1:])
        problem = f"ended with code {child.returncode}: {last_line}"
    if problem:
        findings.append(_group_failure(name, problem))
    return findings


def _timeout_problem(awaited: str, seconds: float) -> str:
    """Say what has not come in time, and how busy the machine is: perhaps the cause."""
    load = os.getloadavg()[0]
    cores = available_cores()
    return f"no {awaited} in {seconds:.0f} s (load average {load:.1f} on {cores} cores)"


# -- the training check


def check_training(folder: Path, num_gpus: int, console: Console) -> Findings:
    """Add up tensors over the ranks, train a tiny model, and verify its checkpoint."""
    if not folder.exists():  # `check_disk` has the remedy
        yield Finding("note", "training", f"not tried: {folder} does not exist", "training")
        return

    # Two ranks, for collectives; one if there is one GPU only.
    num_ranks = 2
    where = "2 ranks on the CPU"
    if num_gpus == 1:
        num_ranks = 1
        where = "1 rank on CUDA"
    elif num_gpus:
        where = "2 ranks on CUDA"

    # Both checks run, even if the first one fails.
    launch = torchrun(num_ranks)
    with ExitStack() as stack:
        stack.enter_context(_exit_on_signals())
        try:
            _remove_leftovers(folder)
            scratch = stack.enter_context(_scratch_folder(folder))
        except OSError as error:
            text = f"not tried: {folder} cannot be written: {error.strerror}"
            remedy = "--dir with a folder that can be written"
            yield Finding("broken", "training", text, "training", remedy)
            return

        with Progress(console) as progress:
            progress.update(0.0, f"all-reduce: {where}")
            yield _check_all_reduce(launch, scratch, where, num_gpus)
        yield _check_trainer(launch, scratch, where, num_ranks, console)


def _check_all_reduce(launch: Sequence[str], scratch: Path, where: str, num_gpus: int) -> Finding:
    """Add up tensors over the ranks that `launch` starts; reports and output go to `scratch`."""
    from canon_pretrain.cluster.preflight import IN_NODE, MATMUL, Report, read_reports
    from canon_pretrain.core.holder import host_name

    module = ["-m", "canon_pretrain.cluster.preflight", "ranks"]
    options = ["--report", str(scratch), "--gpus", str(num_gpus)]
    problem = _run(
        [*launch, *module, *options],
        scratch / "ranks.out",
        lambda: 0,
    )

    # What the ranks report is more exact than how they ended.
    node = host_name()
    reports = read_reports(scratch, [node], ranks=True)
    report = reports[node] or Report()
    faults = list(report.faults)
    if report.left_alone:
        faults.append(report.left_alone)
    if faults:
        problem = "; ".join(faults)

    # The network is at fault unless a device is; one that others use is not broken.
    severity = "broken"
    remedy = (
        "name the network interface (ip -br addr): "
        "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    )
    if report.faults:
        remedy = ""
    if faults and all(fault.endswith("GiB are in use") for fault in faults):
        severity = "note"
        remedy = "nvidia-smi shows by whom; CUDA_VISIBLE_DEVICES=N selects another GPU"

    # The speeds of one device.
    speeds = next(iter(report.speeds.values()), {})
    text = f"{where}: right sums"
    if IN_NODE in speeds:  # one rank sends nothing
        text = f"{text}, {size(speeds[IN_NODE])}/s"
    tflops = speeds.get(MATMUL, 0.0) / 1e12
    return judge(
        "all-reduce",
        f"{text}; matrix products {tflops:.3g} TFLOP/s",
        problem,
        used_for="training on several ranks",
        remedy=remedy,
        severity=severity,
        **speeds,
    )


def _check_trainer(
    launch: Sequence[str], scratch: Path, where: str, num_ranks: int, console: Console
) -> Finding:
    """Train CONFIG for STEPS steps in `scratch`, and verify the checkpoint."""
    from canon_pretrain.checkpoint.folder import CheckpointFolder
    from canon_pretrain.checkpoint.manifest import verify
    from canon_pretrain.run.folder import CHECKPOINTS, RunFolder

    # Train.
    run = RunFolder(scratch / "run")
    module = ["-m", "canon_pretrain.train", "--config", str(CONFIG)]
    options = (
        f"--training.steps {STEPS} --training.global_batch_size 8 --compile.no-enable "
        "--lr_scheduler.warmup_steps 5 --metrics.log_freq 5 --job.dump_folder"
    ).split()
    with _StepWatch(run.log_file, where, console) as watch:
        start = time.monotonic()
        problem = _run(
            [*launch, *module, *options, str(run.path)],
            scratch / "out",
            watch.poll,
        )
        seconds = time.monotonic() - start
        watch.poll()  # the lines of the last moment

    # A run that seems to have ended well must have saved its last step.
    if problem is None:
        try:
            verify(CheckpointFolder(run.path / CHECKPOINTS).step_path(STEPS))
        except (OSError, UserError) as error:
            problem = str(error)

    # The speed from the first logged step to the last: without the start.
    text = where
    steps_per_s = None
    if len(watch.steps) > 1:
        first = watch.steps[0]
        last = watch.steps[-1]
        first_time = datetime.fromisoformat(first["time"])
        last_time = datetime.fromisoformat(last["time"])
        passed_s = (last_time - first_time).total_seconds()
        steps_per_s = (last.step - first.step) / passed_s
        first_loss = first["loss"]
        last_loss = last["loss"]
        change = f"{first_loss:.2f} to {last_loss:.2f}"
        is_finite = math.isfinite(first_loss) and math.isfinite(last_loss)
        if problem is None and not is_finite:
            problem = f"the loss goes from {change}"
        text = (
            f"{where}: {steps_per_s:.1f} steps/s, not compiled, {seconds:.0f} s with the "
            f"start; loss {change}; checkpoint verified"
        )
    return judge(
        "training",
        text,
        problem,
        used_for="training",
        remedy=f"train it yourself: canon train --config {CONFIG}",
        steps_per_s=steps_per_s,
        seconds=seconds,
        ranks=num_ranks,
    )


class _StepWatch(ExitStack):
    """Reads the `steps` of a run from its log while it trains, and shows the progress."""

    def __init__(self, log: Path, where: str, console: Console) -> None:
        from canon_pretrain.run.log import LogFollower

        super().__init__()
        self.steps: list[Event] = []
        self._follower = LogFollower(log)
        self._where = where
        self._console = console
        self._progress = self.enter_context(Progress(console))

    def poll(self) -> int:
        """Read the new lines and show the progress; return the last step, or 0."""
        new_steps = []
        with suppress(OSError, UserError):  # the log is not there yet
            new_steps = [event for event in self._follower.poll() if event.kind == "step"]

        # The time left counts from the first step: the start takes longer than all steps.
        if new_steps and not self.steps:
            self.close()
            self._progress = self.enter_context(Progress(self._console))

        self.steps += new_steps
        if not self.steps:
            self._progress.update(0.0, f"training check: starting, {self._where}")
            return 0
        start = self.steps[0].step
        step = self.steps[-1].step
        self._progress.update(
            (step - start) / (STEPS - start),
            f"training check: step {step} of {STEPS}, {self._where}",
        )
        return step


@contextmanager
def _scratch_folder(folder: Path) -> Iterator[Path]:
    """Create a folder for the checks, which names its owner; remove it after the block.

    Raises OSError.
    """
    from canon_pretrain.core.holder import Holder, content_of

    with tempfile.TemporaryDirectory(
        prefix=SCRATCH, dir=folder, ignore_cleanup_errors=True
    ) as name:
        scratch = Path(name)
        (scratch / OWNER).write_bytes(content_of(Holder.of_this_process()))
        yield scratch


def _remove_leftovers(folder: Path) -> None:
    """Remove the scratch folders of doctors that were killed."""
    from canon_pretrain.core.holder import process_lives
    from canon_pretrain.core.lock import read_holder

    for scratch in folder.glob(f"{SCRATCH}*/"):
        owner = read_holder(scratch / OWNER)
        # None: on another machine, where it may still run
        if owner is not None and process_lives(owner) is False:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit within the block, so that it cleans up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # the exit code of a shell

    # one that is ignored, as by nohup, stays ignored
    changed = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, leave)
            changed.append(number)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: Sequence[str], log: Path, poll_step: Callable[[], int]) -> str | None:
    """Run Python with `arguments` and its output in `log`; return why it failed, or None.

    `poll_step` returns the last step, or 0. The timeout restarts at each new one. The reason ends
    with the error that the output names, else its last lines.
    """
    with log.open("wb") as output:
        child = start_child(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )

    # Wait for its end, as long as it makes progress.
    awaited = "progress"
    timeout_s = START_TIMEOUT_S
    last_step = 0
    last_change = time.monotonic()
    try:
        while child.poll() is None and time.monotonic() - last_change < timeout_s:
            time.sleep(0.1)
            step = poll_step()
            if step != last_step:
                awaited = "new step"
                timeout_s = STEP_TIMEOUT_S
                last_step = step
                last_change = time.monotonic()
        exit_code = child.poll()
    finally:
        if child.poll() is None:  # else the process id may be another's
            kill_tree(child.pid)
        with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
            child.wait(5.0)
    if exit_code == 0:
        return None

    # How it ended, and what it said last.
    problem = f"exit code {exit_code}"
    if exit_code is None:
        problem = _timeout_problem(awaited, timeout_s)
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    detail = reason_in(text) or "\n".join(lines[-8:])
    return f"{problem}\n{detail}"


# -- the command


def show(console: Console, group: str, findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for width in (7, 20, None):  # state, what; the text takes the rest
        table.add_column(width=width, overflow="fold")
    for finding in findings:
        # the remedy is on a line of its own, to be copied
        text = Text(printable(finding.found, "\n"))
        text.append(f"  for: {finding.used_for}", "dim")
        if finding.remedy:
            text.append(printable(f"\n-> {finding.remedy}", "\n"), "bold")
        table.add_row(
            Text(finding.state, STYLES[finding.state]),
            Text(finding.what),
            text,
        )
    console.print(Text(group, "bold"))
    console.print(table)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "What this machine has, what uses it, what is missing and how to get it."
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where runs will be written (default: this folder)",
    )
    parser.add_argument("--no-train", action="store_true", help="skip the training check")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--fake",
        metavar="GPU",
        help="run CONFIG on fake GPUs (a100, h100, h200): does it run, memory, waits of the host",
    )
    parser.add_argument("--world", type=positive, metavar="N", help="fake GPUs (default: 8)")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="TOML of the fake run")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return exit code 1 if something is broken."""
    if arguments.fake is not None:
        return _run_fake(arguments)
    if arguments.overrides:
        overrides = " ".join(arguments.overrides)
        raise usage_error("canon doctor", f"unrecognized arguments: {overrides}")
    if arguments.world or arguments.config:
        raise UserError("option.conflict", "--world and CONFIG: only with --fake")

    # In order, each group once it and those before it have ended; JSON is one object, at the end.
    console = Console(highlight=False)
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for group, findings in _run_checks(arguments.dir, trains=not arguments.no_train):
        if not arguments.json:
            show(console, group, findings)
        rows += [{"group": group, **asdict(finding)} for finding in findings]
        broken += [finding.what for finding in findings if finding.state == "broken"]

    if arguments.json:
        print(json.dumps({"works": not broken, "findings": rows}, indent=2))
    elif broken:
        console.print(f"broken: {', '.join(broken)}")
    else:
        console.print("nothing is broken")
    return 1 if broken else 0


def _run_checks(folder: Path, *, trains: bool) -> Iterator[tuple[str, list[Finding]]]:
    """Run the groups, then the training check on the GPUs that they found."""
    num_gpus = 0
    for group, findings in run_groups(folder):
        yield group, findings
        for finding in findings:
            num_gpus += finding.facts.get("gpus", 0)
    if trains:
        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        yield "training", list(check_training(folder, num_gpus, errors))


def _run_fake(arguments: argparse.Namespace) -> int:
    """Run a config on fake GPUs and print the report; return the exit code."""
    from canon_pretrain.fake_gpu.check import problems_of, run_in_subprocess, show_fake_run
    from canon_pretrain.fake_gpu.record import Options
    from canon_pretrain.machine.gpus import GPUS

    check_choice("--fake", arguments.fake, GPUS)
    if arguments.config is None:
        raise UserError("option.missing", "--fake needs the TOML of a run: CONFIG")

    report = run_in_subprocess(
        ["--config", arguments.config, *arguments.overrides],
        Options(arguments.fake, arguments.world or 8),
    )
    if arguments.json:
        print(json.dumps(report, default=vars, indent=2))
    else:
        show_fake_run(report, Console(highlight=False))
    return 1 if problems_of(report) else 0

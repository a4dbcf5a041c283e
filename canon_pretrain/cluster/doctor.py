"""Report what this machine has, what uses it, what is missing and how to get it; then train.

    canon doctor [--dir DIR] [--no-train] [--json]
    canon doctor --fake h100 --world 64 CONFIG [--section.key VALUE ...]

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
from typing import IO, Any

from canon_pretrain.core.children import kill_tree, start_child
from canon_pretrain.core.cli import available_cores, positive, usage_error
from canon_pretrain.core.errors import UserError, check_choice, reason_in
from canon_pretrain.core.terminal import Console, Progress, duration, printable, size

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "train_configs" / "playground" / "tiny" / "copy.toml"
STYLES = {"ok": "green", "note": "cyan", "missing": "yellow", "broken": "bold red"}
GROUP_TIMEOUT_S, HUB_TIMEOUT_S = 90.0, 5.0
START_TIMEOUT_S, STEP_TIMEOUT_S = 120.0, 60.0  # until the first step, and between two
STEPS = 40
CHECKPOINT_BYTES = 16_200_000_000  # 1.3B parameters and AdamW's two moments, float32
WRITE_BYTES, WRITE_S = 64 << 20, 3.0
SLOW_DISK = 50e6  # bytes per second
MOUNTS = Path("/proc/mounts")
NETWORK_DISKS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "9p", "fuse")
CHILD = "import sys; from canon_pretrain.cluster.doctor import print_group as f; f(*sys.argv[1:])"
SCRATCH, OWNER = ".canon-doctor-", "owner.json"  # a folder for the checks, and whose it is
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
    remedy: str
    facts: dict[str, Any] = field(default_factory=dict)  # numbers for --json


Findings = Iterator[Finding]


def judge(
    what: str,
    good: str,
    problem: str | None,
    used_for: str,
    remedy: str = "",
    bad: str = "broken",
    **facts: Any,
) -> Finding:
    """Return a finding that is ok, and shows `good`, unless there is a problem."""
    if problem is None:
        return Finding("ok", what, good, used_for, "", facts)
    return Finding(bad, what, problem, used_for, remedy, facts)


# -- groups of checks, each a process


def check_machine(folder: Path) -> Findings:
    """Check Python and its packages, cores, memory and locale."""
    import locale
    import platform
    import tomllib
    from importlib import metadata

    from packaging.requirements import Requirement

    from canon_pretrain.machine.hardware import cpu_info
    from canon_pretrain.machine.memory import available_memory

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [f"python{project['requires-python']}", *project["dependencies"]]
    good = []
    for line in [*required, *extras["dev"], *extras["cuda"]]:
        each, is_needed = Requirement(line), line in required
        if each.marker is not None and not each.marker.evaluate():
            continue
        found = platform.python_version() if each.name == "python" else None
        with suppress(metadata.PackageNotFoundError):
            found = found or str(metadata.version(each.name))
        with suppress(ValueError):  # no version in its metadata
            if found is not None and each.specifier.contains(found, prereleases=True):
                good.append(f"{each.name} {found}")
                continue
        if found is None and not is_needed:
            continue  # the kernels report theirs
        bounds = str(each.specifier)
        problem = "not installed" if found is None else f"{found}, outside {bounds}"
        state, uses = ("broken", "all") if is_needed else ("note", "an option")
        remedy = f"pip install '{each.name}{bounds}'"
        if each.name == "python":
            remedy = "make install PYTHON=... with another Python"
        facts = {"version": found, "expected": bounds}
        yield Finding(state, each.name, problem, uses, remedy, facts)
    text = f"{len(good)} within pyproject.toml's bounds: {', '.join(good[:4])}; {sys.executable}"
    yield judge("packages", text, None, "all", count=len(good))
    cores, memory = available_cores(), available_memory()
    text = f"{cores} of {os.cpu_count()} cores, {cpu_info('model name') or platform.machine()}"
    yield judge("CPU", text, None, "data, evaluation, training without a GPU", cores=cores)
    yield judge("memory", f"{size(memory)} available", None, "models on the CPU", bytes=memory)
    # another encoding has ended the command
    yield judge("locale", locale.getpreferredencoding(False), None, "text files")


def check_gpu(folder: Path) -> Findings:
    """Check the GPUs, the kernels for them, collectives and compilers."""
    import torch
    import torch.distributed as dist

    from canon_pretrain.machine.device import check_cuda
    from canon_pretrain.machine.hardware import find_gpu, query_gpu

    evidence, uses = find_gpu(), "training and evaluation"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts: dict[str, Any] = {"gpus": count, "evidence": evidence}
    try:
        check_cuda()
        each = [torch.cuda.get_device_properties(k) for k in range(count)]
        names = sorted({f"{x.name}, sm_{x.major}{x.minor}, {size(x.total_memory)}" for x in each})
        state: dict[str, Any] = query_gpu("0") or {} if count else {}
        driver = f"driver {state['driver']}, " if state else ""  # empty without nvidia-smi
        none = "hidden by CUDA_VISIBLE_DEVICES" if evidence else "none"
        problem = None if count else f"{none}: the CPU trains"
        text = f"{count} x {' or '.join(names)}; {driver}torch's CUDA {torch.version.cuda}"
        yield judge("GPU", text, problem, uses, "", "note", **facts, **state)
    except UserError as error:
        problem, _, remedy = error.message.rpartition(". ")
        remedy = f"{remedy}; for drivers from 525 on: {INSTALL_CU126}"
        yield judge("GPU", "", problem, uses, remedy, **facts)
    yield from check_kernels("cuda" if count else "cpu")
    absent, text = "not in this build of torch", f"in torch {torch.__version__}"
    problem = None if dist.is_backend_available("gloo") else absent
    yield judge("gloo", text, problem, "collectives on the CPU", "make install, in a new .venv")
    if count:
        has_nccl = dist.is_backend_available("nccl")
        text = f"{'.'.join(map(str, torch.cuda.nccl.version()))} {text}" if has_nccl else ""
        problem = None if has_nccl else absent
        yield judge("nccl", text, problem, "collectives on the GPU", INSTALL_CU126)
    yield _check_compiler()


def check_kernels(device_type: str) -> Findings:
    """Report the backends that `auto` selects on this device, and why not the faster ones."""
    from dataclasses import replace

    from canon_pretrain.kernels.backends import OPTIONAL, backend_problem, fla_mixers
    from canon_pretrain.model.args import flavor
    from canon_pretrain.model.attend import FLASH_IMPLS, Attend, check_backend

    args, on_gpu = replace(flavor("1b3"), canon_set="ABCD"), device_type == "cuda"
    problems = {f"canon {name}": backend_problem(name, device_type) for name in OPTIONAL}
    problems |= {"mixer fla": fla_mixers().fla_problem("gla", args.head_dim)}
    for name in (*FLASH_IMPLS, "flash_attn"):
        problems[f"attention {name}"] = None
        try:
            check_backend(args, name)
        except UserError as error:
            problems[f"attention {name}"] = str(error.fields["reason"])
    fast = {name for name, problem in problems.items() if on_gpu and problem is None}
    auto = {
        "attention": Attend(args).describe(device_type),
        "canon": "triton, checked at startup" if "canon triton" in fast else "compiled",
        "mixer": "fla, checked at startup" if "mixer fla" in fast else "chunked",
    }
    for key, text in auto.items():
        text += "" if on_gpu else "; faster ones need a GPU"
        yield judge(f"{key} auto", text, None, f'model.{key}_backend = "auto"')
    for words, problem in problems.items() if on_gpu else ():
        key, name = words.split()
        reason, _, remedy = (problem or "").rpartition(": ")
        why, uses = problem and reason, f'model.{key}_backend = "{name}"'
        if not remedy.startswith("pip install"):
            why, remedy = problem, ""
        yield judge(words, "works here", why, uses, remedy, "missing")


def _check_compiler() -> Finding:
    import sysconfig

    import torch._inductor.cpp_builder as builder

    problem, compiler = None, ""
    try:
        compiler = builder.get_cpp_compiler()
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "try.cpp"
            source.write_text("#include <Python.h>\n#include <omp.h>\n#include <vector>\n")
            options = ["-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_path('include')}"]
            words = [compiler, *options, "-o", f"{source}.so", str(source)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            problem = " ".join([compiler, *lines[:1]])
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        problem = str(error).splitlines()[0]
    remedy = "apt install g++ python3-dev, or conda install cxx-compiler; CXX names another"
    found = str(shutil.which(compiler))
    return judge(
        "C++ compiler", found, problem, "compile.enable (torch.compile)", remedy, "missing"
    )


def check_disk(folder: Path) -> Findings:
    """Check the file system of `folder`: space, speed, clock and locks."""
    from canon_pretrain.cluster.preflight import CLOCK_FAULT_S, report_node
    from canon_pretrain.core.files import free_bytes

    uses, remedy = "run folders", "--dir with a folder on another file system"
    if not folder.exists():
        create = shlex.join(["mkdir", "-p", str(folder)])
        yield judge("disk", "", f"{folder} does not exist", uses, create)
        return
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    above = [m for m in mounts if folder.resolve().is_relative_to(m[1].replace("\\040", " "))]
    # the last of those at one place is on top: autofs lists itself below the disk
    kind = max(reversed(above), key=lambda mount: len(mount[1]), default=["", "", "unknown"])[2]
    free = free_bytes(folder)
    text = f"{size(free)} free in {folder.resolve()} ({kind})"
    few = f"{text}; a checkpoint of 1.3B parameters has {size(CHECKPOINT_BYTES)}"
    problem = few if free < CHECKPOINT_BYTES else None
    yield judge("disk space", text, problem, uses, remedy, "note", free=free, kind=kind)
    if faults := report_node(folder, 1 << 20, 0).disk:
        yield judge("disk", "", "; ".join(faults), uses, remedy)
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=SCRATCH) as file:
        ahead_s = os.fstat(file.fileno()).st_mtime - time.time()
        block, count, start = os.urandom(1 << 20), 0, time.monotonic()
        while count < WRITE_BYTES and time.monotonic() - start < WRITE_S:
            count += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rate = count / (time.monotonic() - start)
    text = f"{size(rate)}/s, each MB synced"
    large = f"1.3B parameters ({size(CHECKPOINT_BYTES)})"
    slow = f"{text}: a checkpoint of {large} takes {duration(CHECKPOINT_BYTES / rate)}"
    problem = slow if rate < SLOW_DISK else None
    yield judge("disk speed", text, problem, "checkpoints", remedy, "note", bytes_per_s=rate)
    text = f"this machine's and the disk's are {abs(ahead_s):.2f} s apart"
    problem = text if abs(ahead_s) > CLOCK_FAULT_S else None
    yield judge("clock", text, problem, "heartbeats", "synchronize clocks (NTP)", s=ahead_s)
    problem = _lock_problem(folder)
    text = "a second launch is kept out"
    if problem is None and kind.startswith(NETWORK_DISKS):
        note = f"{text} on this machine; other machines were not tried ({kind})"
        yield judge("file locks", "", note, "one launch per run", "", "note")
    else:
        yield judge("file locks", text, problem, "one launch per run", remedy)


def _lock_problem(folder: Path) -> str | None:
    from canon_pretrain.core.lock import LinkLock, locked

    problem = None
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
            path, quiet = Path(scratch) / "lock.json", lambda text: None
            held = LinkLock.acquire(path, log=quiet)
            if LinkLock(path, log=quiet).try_acquire() or not held.is_owner():
                problem = "two launches hold one run lock"
            held.release()
            with suppress(UserError), locked(path, ""), locked(path, ""):
                problem = "two processes hold one flock"
    except (OSError, UserError) as error:
        problem = str(error)
    return problem


def check_network(folder: Path) -> Findings:
    """Check the hub: answer, token and cache; and the login of wandb."""
    import netrc
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import urlsplit
    from urllib.request import Request, urlopen

    from huggingface_hub import constants, get_token

    url, problem = constants.ENDPOINT, None
    remedy = "on a node with network: canon eval stage --suite all --to outputs/eval_data"
    if constants.HF_HUB_OFFLINE:
        problem = "not asked: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
        remedy = "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"
    else:
        try:
            urlopen(Request(url, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
        except HTTPError:  # an answer
            pass
        except (OSError, ValueError, HTTPException) as error:
            problem = f"{url} cannot be reached: {getattr(error, 'reason', error)}"
    yield judge("hub", f"{url} answers", problem, "data, tokenizers", remedy, "note", url=url)
    problem, remedy = None if get_token() else "none", "hf auth login, or set HF_TOKEN"
    yield judge("hub token", "found", problem, "gated data, hf push", remedy, "missing")
    cache, problem = Path(constants.HF_HOME).expanduser(), None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        problem = f"{cache} cannot be written: {error.strerror}"
    yield judge("hub cache", str(cache), problem, "downloads", "set HF_HOME to another folder")
    base, logins = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"), dict[str, Any]()
    with suppress(OSError, netrc.NetrcParseError):
        logins = netrc.netrc(os.environ.get("NETRC")).hosts
    known = "WANDB_API_KEY" in os.environ or urlsplit(base).hostname in logins
    problem, remedy = None if known else f"no login for {base}", "wandb login"
    yield judge("wandb", base, problem, "metrics.enable_wandb, online", remedy, "missing")


def check_slurm(folder: Path) -> Findings:
    """Check Slurm's commands, its controller and the settings of the cluster."""
    from canon_pretrain.cluster.preflight import scontrol

    if absent := [name for name in ("sbatch", "squeue") if shutil.which(name) is None]:
        text = f"not on PATH: {', '.join(absent)}"
        yield judge("Slurm", "", text, "jobs", "a login node of a cluster", "missing")
        return
    lines = scontrol("config").splitlines()
    pairs = (line.partition("=") for line in lines)
    found = {key.strip(): value.strip() for key, _, value in pairs}
    why = ": ".join(["its controller does not answer", *lines[-1:]])
    problem = None if "ClusterName" in found else why
    text = f"{found.get('SLURM_VERSION')}, cluster {found.get('ClusterName')}"
    remedy = "set SLURM_CONF, or use a login node"
    yield judge("Slurm", text, problem, "jobs", remedy, "missing")
    file = Path(os.environ.get("CANON_CLUSTER_ENV") or ROOT / "slurm" / "cluster.env")
    lines = file.read_text().splitlines() if file.is_file() else []
    count = sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)
    problem = None if count else f"{file} {'sets nothing' if lines else 'does not exist'}"
    remedy = "copy slurm/cluster.env.example to it and fill it in"
    yield judge("cluster.env", f"{count} lines in {file}", problem, "jobs", remedy, "missing")


GROUPS: dict[str, Callable[[Path], Findings]] = {
    "machine": check_machine,
    "GPU and kernels": check_gpu,
    "disk": check_disk,
    "network": check_network,
    "Slurm": check_slurm,
}


def print_group(name: str, folder: str) -> None:
    """Print a group's findings, a line of JSON each; an exception is the last one."""
    try:
        for each in GROUPS[name](Path(folder)):
            print(json.dumps(asdict(each)), flush=True)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        print(json.dumps(asdict(judge(name, "", problem, "this group of checks"))), flush=True)


def run_groups(folder: Path) -> Iterator[tuple[str, list[Finding]]]:
    """Run the groups side by side; yield the findings of each, in order."""
    started, end = [], time.monotonic() + GROUP_TIMEOUT_S
    for name in GROUPS:
        output = tempfile.TemporaryFile("w+", errors="replace")
        words, nothing = [sys.executable, "-c", CHILD, name, str(folder)], subprocess.DEVNULL
        child = start_child(words, stdin=nothing, stdout=output, stderr=subprocess.STDOUT)
        started.append((name, output, child))
    try:
        for name, output, child in started:
            yield name, _findings_of(name, output, child, end)
    finally:
        for _, _, child in started:
            if child.poll() is None:
                kill_tree(child.pid)


def _findings_of(
    name: str, output: IO[str], child: "subprocess.Popen[bytes]", end: float
) -> list[Finding]:
    """Return the findings of a group's process, which is killed at `end`."""
    problem, found = None, list[Finding]()
    try:
        child.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        problem = _late("end", GROUP_TIMEOUT_S)
        kill_tree(child.pid)
        with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
            child.wait(1.0)
    with output:
        output.seek(0)
        lines = output.read().splitlines()
    for line in lines:
        with suppress(ValueError, TypeError):  # a library printed it
            found.append(Finding(**json.loads(line)))
    if child.returncode and problem is None:
        problem = f"ended with code {child.returncode}: {''.join(lines[-1:])}"
    if problem:
        found.append(judge(name, "", problem, "this group of checks"))
    return found


def _late(awaited: str, seconds: float) -> str:
    load, cores = os.getloadavg()[0], available_cores()
    return f"no {awaited} in {seconds:.0f} s (load average {load:.1f} on {cores} cores)"


# -- the training check


def check_training(folder: Path, gpus: int, console: Console) -> Findings:
    """Add up tensors over the ranks, train a tiny model, and verify its checkpoint."""
    from canon_pretrain.checkpoint.folder import CheckpointFolder
    from canon_pretrain.checkpoint.manifest import verify
    from canon_pretrain.run.folder import CHECKPOINTS, RunFolder
    from canon_pretrain.run.log import Event, LogFollower

    ranks, uses = min(gpus, 2) or 2, "training"
    where = f"{'1 rank' if ranks == 1 else f'{ranks} ranks'} on {'CUDA' if gpus else 'the CPU'}"
    if not folder.exists():  # `check_disk` has the remedy
        yield judge("training", "", f"not tried: {folder} does not exist", uses, "", "note")
        return
    try:
        _remove_leftovers(folder)
        scratch = _make_scratch(folder)
    except OSError as error:
        text = f"not tried: {folder} cannot be written: {error.strerror}"
        yield judge("training", "", text, uses, "--dir with a folder that can be written")
        return
    bars, signals = ExitStack(), ExitStack()
    try:
        signals.enter_context(_exit_on_signals())
        progress = bars.enter_context(Progress(console))
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        progress.update(0.0, f"all-reduce: {where}")
        yield _check_all_reduce(launch, scratch, where, gpus)

        run = RunFolder(scratch / "run")
        follower = LogFollower(run.log_file)
        steps: list[Event] = []

        def follow() -> int:
            """Show the progress; return the last step in the log, or 0."""
            nonlocal progress
            new = []
            with suppress(OSError, UserError):  # not there yet
                new = [event for event in follower.poll() if event.kind == "step"]
            if new and not steps:  # the time left counts from here
                bars.close()
                progress = bars.enter_context(Progress(console))
            steps.extend(new)
            if not steps:
                progress.update(0.0, f"training check: starting, {where}")
                return 0
            first, last = steps[0].step, steps[-1].step
            share = (last - first) / (STEPS - first)
            progress.update(share, f"training check: step {last} of {STEPS}, {where}")
            return last

        options = (
            f"--training.steps {STEPS} --training.global_batch_size 8 --compile.no-enable "
            "--lr_scheduler.warmup_steps 5 --metrics.log_freq 5"
        )
        words = ["canon_pretrain.train", "--config", str(CONFIG), *options.split()]
        start = time.monotonic()
        problem = _run(
            [*launch, *words, "--job.dump_folder", str(run.path)], scratch / "out", follow
        )
        seconds = time.monotonic() - start
        follow()
        try:
            if problem is None:
                verify(CheckpointFolder(run.path / CHECKPOINTS).step_path(STEPS))
        except (OSError, UserError) as error:
            problem = str(error)
        text, steps_per_s = where, None
        if len(steps) > 1:
            ends = steps[0], steps[-1]
            first, last = (datetime.fromisoformat(event["time"]) for event in ends)
            steps_per_s = (ends[1].step - ends[0].step) / (last - first).total_seconds()
            losses = [event["loss"] for event in ends]
            change = f"{losses[0]:.2f} to {losses[1]:.2f}"
            if problem is None and not all(map(math.isfinite, losses)):
                problem = f"the loss goes from {change}"
            text = (
                f"{where}: {steps_per_s:.1f} steps/s, not compiled, {seconds:.0f} s with the "
                f"start; loss {change}; checkpoint verified"
            )
        remedy = f"train it yourself: canon train --config {CONFIG}"
        facts: dict[str, Any] = {"steps_per_s": steps_per_s, "seconds": seconds, "ranks": ranks}
        yield judge("training", text, problem, uses, remedy, **facts)
    finally:
        bars.close()
        shutil.rmtree(scratch, ignore_errors=True)
        signals.close()


def _make_scratch(folder: Path) -> Path:
    """Create a folder for the checks, which names its owner. Raises OSError, and leaves none."""
    from canon_pretrain.core.holder import Holder, content_of

    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=folder))
    try:
        (scratch / OWNER).write_bytes(content_of(Holder.of_this_process()))
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return scratch


def _remove_leftovers(folder: Path) -> None:
    """Remove what a doctor that was killed left in `folder`."""
    from canon_pretrain.core.holder import process_lives
    from canon_pretrain.core.lock import read_holder

    for left in folder.glob(f"{SCRATCH}*"):
        owner = read_holder(left / OWNER) if left.is_dir() else None
        if owner is not None and process_lives(owner) is False:
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit within the block, so that it cleans up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:  # one that is ignored, as by nohup, stays ignored
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _check_all_reduce(launch: Sequence[str], scratch: Path, where: str, gpus: int) -> Finding:
    """Add up tensors over the ranks that `launch` starts; reports and output go to `scratch`."""
    from canon_pretrain.cluster.preflight import IN_NODE, MATMUL, read_reports
    from canon_pretrain.core.holder import host_name

    words = [
        "canon_pretrain.cluster.preflight",
        "ranks",
        "--report",
        str(scratch),
        "--gpus",
        str(gpus),
    ]
    problem = _run([*launch, *words], scratch / "ranks.out", lambda: 0)
    report = read_reports(scratch, [host_name()], ranks=True)[host_name()]
    speeds: dict[str, Any] = next(iter(report.speeds.values()), {}) if report else {}
    state = "broken"
    remedy = (
        "name the network interface (ip -br addr): "
        "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    )
    if report and (faults := [*report.faults, *filter(None, [report.left_alone])]):
        problem = "; ".join(faults)
        if report.faults:  # of a device
            remedy = ""
        if all(fault.endswith("GiB are in use") for fault in faults):
            state = "note"
            remedy = "nvidia-smi shows by whom; CUDA_VISIBLE_DEVICES=N selects another GPU"
    rate = f", {size(speeds[IN_NODE])}/s" if IN_NODE in speeds else ""
    return judge(
        "all-reduce",
        f"{where}: right sums{rate}; matrix products {speeds.get(MATMUL, 0.0) / 1e12:.3g} TFLOP/s",
        problem,
        "training on several ranks",
        remedy,
        state,
        **speeds,
    )


def _run(words: Sequence[str], log: Path, watch: Callable[[], int]) -> str | None:
    """Run Python with `words` and its output in `log`; return why it failed and the last lines.

    `watch` returns the last step, or 0. The timeout restarts at each new one.
    """
    environ = {"OMP_NUM_THREADS": "1"} | os.environ
    awaited, limit_s, step, since = "progress", START_TIMEOUT_S, 0, time.monotonic()
    with log.open("wb") as output:
        words, nothing = [sys.executable, *words], subprocess.DEVNULL
        child = start_child(words, stdin=nothing, stdout=output, stderr=output, env=environ)
    try:
        while child.poll() is None and time.monotonic() - since < limit_s:
            time.sleep(0.1)
            if (seen := watch()) != step:
                awaited, limit_s, step, since = "new step", STEP_TIMEOUT_S, seen, time.monotonic()
        code = child.poll()
    finally:
        if child.poll() is None:  # else the number may be another's
            kill_tree(child.pid)
        with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
            child.wait(5.0)
    if code == 0:
        return None
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    why = _late(awaited, limit_s) if code is None else f"exit code {code}"
    return "\n".join([why, reason_in(text) or "\n".join(lines[-8:])])


# -- the command


def show(console: Console, name: str, found: Sequence[Finding]) -> None:
    """Print a group as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for width in (7, 20, None):
        table.add_column(width=width, overflow="fold")
    for each in found:
        text = Text(printable(each.found, "\n"))
        text.append(f"  for: {each.used_for}", "dim")
        text.append(printable(f"\n-> {each.remedy}", "\n") if each.remedy else "", "bold")
        table.add_row(Text(each.state, STYLES[each.state]), Text(each.what), text)
    console.print(Text(name, "bold"))
    console.print(table)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "What this machine has, what uses it, what is missing and how to get it."
    where = "where runs will be written (default: this folder)"
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help=where)
    parser.add_argument("--no-train", action="store_true", help="skip the training check")
    parser.add_argument("--json", action="store_true", help="print JSON")
    about = "run CONFIG on fake GPUs (a100, h100, h200): does it run, memory, waits of the host"
    parser.add_argument("--fake", metavar="GPU", help=about)
    parser.add_argument("--world", type=positive, metavar="N", help="fake GPUs (default: 8)")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="TOML of the fake run")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return exit code 1 if something is broken."""
    if arguments.fake is not None:
        return _run_fake(arguments)
    if arguments.overrides:
        words = " ".join(arguments.overrides)
        raise usage_error("canon doctor", f"unrecognized arguments: {words}")
    if arguments.world or arguments.config:
        raise UserError("option.conflict", "--world and CONFIG: only with --fake")

    console = Console(highlight=False)
    findings: list[tuple[str, Finding]] = []

    def add(name: str, found: Sequence[Finding]) -> None:
        findings.extend((name, finding) for finding in found)
        if not arguments.json:
            show(console, name, found)

    for name, found in run_groups(arguments.dir):
        add(name, found)
    gpus = sum(finding.facts.get("gpus", 0) for _, finding in findings)
    if not arguments.no_train:
        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        add("training", list(check_training(arguments.dir, gpus, errors)))

    broken = [finding.what for _, finding in findings if finding.state == "broken"]
    if arguments.json:
        rows = [{"group": name, **asdict(finding)} for name, finding in findings]
        print(json.dumps({"works": not broken, "findings": rows}, indent=2))
    else:
        console.print(f"broken: {', '.join(broken)}" if broken else "nothing is broken")
    return 1 if broken else 0


def _run_fake(given: argparse.Namespace) -> int:
    """Run a config on fake GPUs and print what happened; return the exit code."""
    from canon_pretrain.fake_gpu.check import problems_of, run_in_subprocess, show_fake_run
    from canon_pretrain.fake_gpu.record import Options, to_plain
    from canon_pretrain.machine.gpus import GPUS

    check_choice("--fake", given.fake, GPUS)
    if given.config is None:
        raise UserError("option.missing", "--fake needs the TOML of a run: CONFIG")
    options = Options(given.fake, given.world or 8)
    report = run_in_subprocess(["--config", given.config, *given.overrides], options)
    if given.json:
        print(json.dumps(to_plain(report), indent=2))
    else:
        show_fake_run(report, Console(highlight=False))
    return 1 if problems_of(report) else 0

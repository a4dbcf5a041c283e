"""The launches of a run: their numbers, their records, and one-shot options.

    RUN/run.json            the run's id, and the number of its newest launch
    RUN/obeyed.json         one-shot option -> the job that applied it, and its restart count
    RUN/launches/NNN/       launch.json, config.json, packages.txt, environment.json, source.patch

A launch takes its number under the run's lock and releases it if it has trained nothing. A requeued
job repeats `--checkpoint.fresh` and `--checkpoint.load_step`, which must not be applied again: they
would discard what it has trained since. A record is written by one rename, with mode 0600, since it
may hold a secret; a run continues if it cannot be written. No torch.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import canon_pretrain
from canon_pretrain.core import files
from canon_pretrain.core.files import UnreadableFile
from canon_pretrain.core.holder import Holder, boot_of, read_count, utc_now
from canon_pretrain.core.terminal import printable
from canon_pretrain.run import folder as run_folder
from canon_pretrain.run.folder import RunFolder, numbers_in
from canon_pretrain.run.log import RunFacts, read_tail
from canon_pretrain.run.source import SourceTree, read_source_tree

FRESH = "checkpoint.fresh"
GATHER_TIMEOUT_S = 10.0  # for git and packages, which are read while the launch starts
IS_OURS = "<!-- canon_pretrain writes this file at each launch; without this line it is yours -->"
README = """\
{ours}

# {title}

Run `{launch[run_id]}`, {step} steps. Created {launch[created]:.16} UTC.
Launch {launch[launch]}, started {launch[time]:.16} UTC: {launch[world_size]} rank(s), rank 0 on
{launch[host]}. Code: {code}.

## Inspect, resume, stop and evaluate

    cd {here}
    canon run status {folder}
    canon run plot {folder} --out plot.html
    canon checkpoint list {folder}

    {launch[command][again]}
    touch {folder}/STOP

    canon eval run --checkpoint {folder}/checkpoint/step-{step} --suite {suite}
    canon eval report {folder}

## Files

{files}
"""

# settings of libraries and of the job; not all of SLURM_*: SLURM_JWT is a secret
_ALLOWED = re.compile(
    r"(CUBLAS|CUDA|CUDNN|GLOO|GOMP|KMP|MKL|NCCL|NVIDIA|OMP|OPENBLAS|PYTORCH|TORCH|TORCHELASTIC"
    r"|TORCHINDUCTOR|TRITON|UCX)_.*|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|PYTHON(PATH|HASHSEED)|VIRTUAL_ENV|CONDA_PREFIX|LD_(LIBRARY_PATH|PRELOAD)|HOSTNAME|LANG"
    r"|LC_ALL|TZ|TMPDIR|HF_(HOME|HUB_OFFLINE)|WANDB_(MODE|PROJECT|ENTITY|DIR)|SLURMD_NODENAME"
    r"|SLURM_(CLUSTER_NAME|SUBMIT_HOST|RESTART_COUNT|NNODES|NODEID|PROCID|LOCALID|NTASKS"
    r"|NTASKS_PER_NODE|CPUS_PER_TASK|CPUS_ON_NODE|GPUS|GPUS_PER_NODE|GPUS_ON_NODE)"
    r"|SLURM_JOB_(ID|NAME|NODELIST|NUM_NODES|PARTITION|QOS|START_TIME|END_TIME|GPUS)"
    r"|SLURM_(ARRAY_JOB_ID|ARRAY_TASK_ID|MEM_PER_(NODE|GPU|CPU))"
)

# -- numbers


def read_run(folder: RunFolder) -> RunFacts | None:
    """Return the content of run.json; None if it is missing or damaged."""
    return files.find_record(folder.run_file, RunFacts)


class BegunLaunch(NamedTuple):
    """The content of run.json for a launch, and the error if it could not be written."""

    run: RunFacts
    problem: str | None


def begin_launch(folder: RunFolder) -> BegunLaunch:
    """Increment the launches in run.json; a disk that is full must not end the run."""
    run = known_run(folder)
    if run is None:
        run = RunFacts(_new_run_id(), utc_now(), launches=0)
    run = replace(run, launches=run.launches + 1)
    problem = None
    try:
        files.write_json(folder.run_file, asdict(run))
    except OSError as error:
        problem = f"{folder.run_file} cannot be written ({error.strerror})"
    return BegunLaunch(run, problem)


def _new_run_id() -> str:
    return uuid.uuid4().hex[:8]


def known_run(folder: RunFolder) -> RunFacts | None:
    """Return run.json or, if lost, its content from launch records and log; None for a new run."""
    run = read_run(folder)
    if run is not None:
        return run

    # Either may lack launches that the other has: the next number must be new in both.
    launch = newest_launch(folder) or {}
    event = _last_event(folder.log_file)
    if not launch and not event:
        return None
    return RunFacts(
        run_id=str(launch.get("run_id") or event.get("run_id") or _new_run_id()),
        created=str(launch.get("created", utc_now())),
        launches=max(int(launch.get("launch", 0)), int(event.get("segment", 1))),
    )


def _last_event(log: Path) -> dict[str, Any]:
    """Return the log's last event; {} if there is none."""
    if not os.path.lexists(log):
        return {}
    events = read_tail(log, until=None)
    return events[-1] if events else {}


def launch_numbers(folder: RunFolder) -> list[int]:
    """Return the numbers of the recorded launches, ascending."""
    return numbers_in(folder.launches)


def newest_launch(folder: RunFolder) -> dict[str, Any] | None:
    """Return launch.json of the newest launch with a readable record; None if there is none."""
    for number in reversed(launch_numbers(folder)):
        record = read_launch(folder, number)
        if record is not None:
            return record
    return None


def read_launch(folder: RunFolder, number: int) -> dict[str, Any] | None:
    """Return launch.json of a launch; None if it has no readable record."""
    path = folder.launch_path(number) / "launch.json"
    with contextlib.suppress(UnreadableFile), files.parsing(path):
        record = files.read_json(path, finite=False)
        if int(record["launch"]) >= 0 and record["run_id"]:
            return dict(record)
    return None


# -- one-shot options


class _Attempt(NamedTuple):
    """One start of a command: Slurm job and restart count, torchrun run id and attempt."""

    job: str
    restart: int
    run: str
    attempt: int


def _attempt(environ: Mapping[str, str]) -> _Attempt:
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if run == "none":  # torchrun without --rdzv_id: use its process id
        agent = os.getppid()
        run = f"agent {agent} {boot_of(agent)}"
    return _Attempt(
        job=environ.get("SLURM_JOB_ID", ""),
        restart=read_count(environ, "SLURM_RESTART_COUNT"),
        run=run,
        attempt=read_count(environ, "TORCHELASTIC_RESTART_COUNT"),
    )


def already_applied(path: Path, option: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this launch is a restart (Slurm, torchrun) of one that applied `option`."""
    old = _read_applied(path).get(option)
    new = _attempt(environ)
    if old is None or new.job != old.job:
        return False
    is_requeued = new.job != "" and new.restart > old.restart
    is_same_agent = new.run != "" and new.run == old.run
    is_restarted_by_torchrun = is_same_agent and new.attempt > old.attempt
    return is_requeued or is_restarted_by_torchrun


def mark_applied(path: Path, option: str, environ: Mapping[str, str] = os.environ) -> None:
    applied = _read_applied(path) | {option: _attempt(environ)}
    content = {name: attempt._asdict() for name, attempt in applied.items()}
    files.write_json(path, content)


def _read_applied(path: Path) -> dict[str, _Attempt]:
    return files.find_record(path, dict[str, _Attempt]) or {}


# -- records


def allowed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be recorded (no secrets), sorted by name."""
    allowed = {}
    for name, value in sorted(environ.items()):
        if _ALLOWED.fullmatch(name):
            allowed[name] = value
    return allowed


def config_hash(config: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """Return a hash of `config` without the keys `without`: 16 hexadecimal digits."""
    hashed = dict(config)
    for section, keys in config.items():
        if isinstance(keys, Mapping):
            hashed[section] = {
                key: value for key, value in keys.items() if f"{section}.{key}" not in without
            }
    text = json.dumps(hashed, sort_keys=True, default=str)
    return files.sha256_text(text)[:16]


def packages() -> list[str]:
    """Return `name==version` of every installed distribution, sorted, without broken ones."""
    # setuptools adds its vendored packages to the path, which are not installed
    path = [folder for folder in sys.path if Path(folder).name != "_vendor"]
    pins = set()
    for distribution in importlib.metadata.distributions(path=path):
        metadata = distribution.metadata
        if "Name" in metadata and "Version" in metadata:  # else it is broken
            pins.add(f"{metadata['Name']}=={metadata['Version']}")
    return sorted(pins, key=str.lower)


def own_version() -> str | None:
    """Return the installed version of canon_pretrain; None if not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("canon_pretrain")
    return None


@dataclass
class LaunchRecord:
    """The record of one launch, collected in a thread; `write` writes it to the run folder."""

    run: RunFacts
    arguments: Sequence[str]
    _: KW_ONLY
    fingerprint: str
    folders: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        self._source = SourceTree(problem=f"git took longer than {GATHER_TIMEOUT_S:.0f} s")
        self._packages: list[str] = []
        self._problems: list[str] = []
        self._is_written = False
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()

    def _gather(self) -> None:
        try:
            self._packages = packages()
            self._source = read_source_tree(Path(canon_pretrain.__file__).resolve())
        except Exception as error:  # must not end the run
            self._problems.append(f"the launch record is incomplete: {error!r}")

    def _wait(self) -> Holder:
        """Wait for the thread, at most GATHER_TIMEOUT_S; return the holder of this launch."""
        self._thread.join(GATHER_TIMEOUT_S)
        return Holder.of_this_process(self.environ)

    def header(self) -> dict[str, Any]:
        """Return fields for the launch's first event; waits for git, at most GATHER_TIMEOUT_S."""
        launch = self._wait()
        return {
            "canon_pretrain": own_version(),
            "python": platform.python_version(),
            "job_id": launch.job_id,
            "restart_count": launch.restart_count if launch.job_id else None,
            "git_commit": self._source.commit,
            "git_dirty": self._source.dirty,
        }

    def write(self, folder: RunFolder, trainer_fields: dict[str, Any]) -> list[str]:
        """Write the record, with the trainer's fields, and README.md; return the problems."""
        self._is_written = True
        target = folder.launch_path(self.run.launches)
        try:
            launch = self._launch() | trainer_fields
            contents = {
                "config.json": files.read_bytes(folder.config_file),
                "packages.txt": "".join(f"{line}\n" for line in self._packages).encode(),
                "environment.json": _json(allowed_environment(self.environ)),
                "launch.json": _json(launch),
            }
            if self._source.patch:
                contents["source.patch"] = self._source.patch
            files.write_folder(target, contents)

            # a README.md that a user has written stays
            path = folder.readme_file
            if not path.exists() or IS_OURS in path.read_text(errors="replace"):
                files.write_atomic(path, self._readme(folder, launch))
        except Exception as error:  # such as a full disk: must not end the run
            self._problems.append(f"the launch record {target} was not written: {error}")
        return self._problems

    def release_if_unused(self, folder: RunFolder) -> None:
        """Release the launch's number if it has written neither a record nor a log line."""
        number = self.run.launches
        with contextlib.suppress(OSError, UnreadableFile):  # harmless: a gap in the numbers
            if self._is_written or _last_event(folder.log_file).get("segment") == number:
                return
            if number == 1:  # then it has created run.json
                folder.run_file.unlink(missing_ok=True)
            else:
                released = replace(self.run, launches=number - 1)
                files.write_json(folder.run_file, asdict(released))

    def _launch(self) -> dict[str, Any]:
        """Return the content of launch.json."""
        holder = self._wait()
        patch = self._source.patch
        return {
            # which launch, of which run
            "launch": self.run.launches,
            "run_id": self.run.run_id,
            "created": self.run.created,
            "time": utc_now(),
            # how it was started, and how to continue it
            "command": {
                "again": resume_command(self.arguments, self.environ),
                "arguments": list(self.arguments),
                "process": sys.orig_argv,
                "folder": os.getcwd(),
            },
            # where it runs
            "host": holder.host,
            "pid": holder.pid,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "job": {
                "id": holder.job_id,
                "restart_count": holder.restart_count,
                "nodes": self.environ.get("SLURM_JOB_NODELIST"),
            },
            # what it trains on, with which code
            "data": {"fingerprint": self.fingerprint, "folders": list(self.folders)},
            "git": {
                **asdict(self._source),
                "patch": "source.patch" if patch else None,
                "patch_bytes": len(patch),
            },
        }

    def _readme(self, folder: RunFolder, launch: Mapping[str, Any]) -> bytes:
        """Return the run folder's README.md; `launch` is launch.json."""
        path = folder.path.resolve()
        config = folder.read_config()["config"]
        task = config.get("data", {}).get("task")  # an import has no data
        # the list of files is the docstring of run/folder.py, without its first and last paragraph
        _, _, files_of_run = str(run_folder.__doc__).partition("\n\n")
        files_of_run, _, _ = files_of_run.rpartition("\n\n")
        page = README.format(
            ours=IS_OURS,
            title=config.get("job", {}).get("description") or path.name,
            step=config.get("training", {}).get("steps", "N"),
            suite="playground" if task and task["name"] else "validation",
            launch=launch,
            code=self._describe_code(),
            here=shlex.quote(os.getcwd()),
            folder=shlex.quote(str(path)),
            files=files_of_run,
        )
        # a title may hold control characters
        return printable(page, "\n").encode(errors="replace")

    def _describe_code(self) -> str:
        """Return the commit of the source and, if it has changes, where they are."""
        source = self._source
        if not source.commit:
            return "not in a git commit"
        origin = source.origin or source.folder
        code = f"commit {source.commit[:12]} of {origin}"
        if source.dirty:
            return f"{code}, with the changes in launches/{self.run.launches:03}/source.patch"
        return code


def _json(value: Any) -> bytes:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
    return text.encode(errors="replace")


def resume_command(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the shell command that resumes the run, without options for one launch only."""
    # readers of runs need no sections
    from canon_pretrain.run.identity import ONE_SHOT_KEYS
    from canon_pretrain.run.setting import option_key

    # How this launch was started; a user fills in HOST:PORT.
    launcher = "python"
    world_size = environ.get("WORLD_SIZE", "1")
    local_world_size = environ.get("LOCAL_WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in environ or world_size != "1":
        num_nodes = int(world_size) // max(int(local_world_size), 1)
        nodes = ""
        if num_nodes > 1:
            nodes = f"--nnodes {num_nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
        launcher = f"torchrun {nodes}--nproc-per-node {local_world_size}"

    # An option is dropped together with the values that follow it.
    repeated: list[str] = []
    is_dropped = False
    for argument in arguments:
        if argument.startswith("--"):
            is_dropped = option_key(argument) in ONE_SHOT_KEYS
        if not is_dropped:
            repeated.append(argument)
    return f"{launcher} -m canon_pretrain.train {shlex.join(repeated)}".rstrip()

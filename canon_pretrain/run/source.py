"""The program's own source: hashes, git state, and the snapshots that a run keeps of it.

    RUN/code/001/           written by one rename, never changed
      canon_pretrain/       the package's *.py files
      slurm/lib.sh          shared by the job scripts
      source_tree.json      git state of the original
      manifest.json         each file's SHA-256

slurm/lib.sh takes a snapshot before a run's first launch, and puts the newest one on PYTHONPATH in
later ones, with the rights of whoever starts the job: others must not be able to write it. A git
that is missing or slow is a `problem`, not an error. No torch.
"""

import contextlib
import grp
import hashlib
import json
import os
import pwd
import stat
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import canon_pretrain
from canon_pretrain.core import files
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, sha256_file
from canon_pretrain.run.folder import RunFolder

PLAIN = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
"""Options of git diff: a patch that `git apply` reads, whatever the user's settings."""
PATCH_BYTES = 1 << 20
UNTRACKED_KINDS = ("*.py", "*.toml")
MAX_NAMES = 200
GIT_TIMEOUT_S = 8.0  # less than GATHER_TIMEOUT_S in run/launches.py
OWN_FOLDERS = ("data_prep", "eval")  # beside canon_pretrain/: their *.py files are in the patch
KEPT, MANIFEST, SCRIPT = "source_tree.json", "manifest.json", "slurm/lib.sh"
_TRAINING = (
    "checkpoint/[!_]*",
    "core/*",
    "data/*",
    "kernels/**/*",
    "machine/*",
    "model/*",
    "run/[!_]*",
    "synthetic/[!_]*",
)
# files of canon_pretrain that training imports; a room's commands.py is of its command line
TRAINING_CODE = ("train.py", *(f"{pattern}.py" for pattern in (*_TRAINING, "titan/*")))


def code_hashes(package: Path = Path(canon_pretrain.__file__).parent) -> dict[str, str]:
    """Return the first 16 digits of the SHA-256 of each file of TRAINING_CODE, by path."""
    hashes = {}
    for path in sorted({path for pattern in TRAINING_CODE for path in package.glob(pattern)}):
        if path.name == "commands.py":
            continue
        with contextlib.suppress(OSError):
            hashes[path.relative_to(package).as_posix()] = sha256_file(path)[:16]
    return hashes


# -- git


@dataclass(frozen=True)
class SourceTree:
    """The git state of the program's source; None: unknown, see `problem`."""

    folder: str | None = None  # root of the working tree
    commit: str | None = None
    origin: str | None = None  # URL without user and password
    dirty: bool | None = None
    untracked: list[str] = field(default_factory=list)  # of UNTRACKED_KINDS, at most MAX_NAMES
    left_out: list[str] = field(default_factory=list)  # changed files not in the patch
    patch: bytes = b""  # `git diff HEAD` of the project's *.py files, at most PATCH_BYTES
    patch_cut: bool = False
    problem: str | None = None


def read_source_tree(
    inside: Path, *, patch_bytes: int = PATCH_BYTES, timeout_s: float = GIT_TIMEOUT_S
) -> SourceTree:
    """Return the source tree that tracks the file `inside`; in a snapshot, that of its original."""
    if (kept := inside.parent.parent / KEPT).is_file():
        tree = files.read_json(kept)
        return SourceTree(**tree | {"patch": tree["patch"].encode(errors="surrogateescape")})
    deadline, root, problems = time.monotonic() + timeout_s, inside.parent, list[str]()

    def ask(*arguments: str, is_needed: bool = True) -> str:
        text, fault = _git(root, deadline, *arguments)
        problems.extend([fault] if fault and is_needed else [])
        return text

    top = ask("rev-parse", "--show-toplevel").rstrip("\n")
    ask("ls-files", "--error-unmatch", "--", inside.name)
    if problems:
        return SourceTree(problem=f"{root} is not tracked by git: {problems[0]}")
    root = Path(top)
    # each record: two letters, a space, a path
    status = ask("status", "--porcelain", "-z", "--no-renames", "--untracked-files=no")
    changed = [record[3:] for record in status.split("\0")[:-1]]
    if problems:
        return SourceTree(folder=top, problem=problems[0])
    commit = ask("rev-parse", "--verify", "HEAD", is_needed=False).strip() or None
    package = inside.parent.resolve().relative_to(root.resolve())
    own = [package, *(package.parent / name for name in OWN_FOLDERS)]
    scripts = [name for name in changed if name.endswith(".py")]
    shown = [name for name in scripts if any(Path(name).is_relative_to(f) for f in own)]
    patch = b""
    if shown:
        # without a commit all files are new
        since = "HEAD" if commit else "--cached"
        names = [f":(top,literal){name}" for name in shown]
        diff = ask("diff", *PLAIN, since, "--", *names)
        patch = diff.encode(errors="surrogateescape")
    is_cut = len(patch) > patch_bytes
    url = urlsplit(ask("remote", "get-url", "origin", is_needed=False).strip())
    # last: slow in a tree with runs and data
    others = ask("ls-files", "--others", "--exclude-standard", "-z", "--", *UNTRACKED_KINDS)
    return SourceTree(
        folder=top,
        commit=commit,
        origin=url._replace(netloc=url.netloc.rpartition("@")[2]).geturl() or None,
        dirty=bool(changed),
        untracked=others.split("\0")[:-1][:MAX_NAMES],
        left_out=[name for name in changed if name not in shown][:MAX_NAMES],
        patch=patch[: patch.rfind(b"\n", 0, patch_bytes) + 1] if is_cut else patch,
        patch_cut=is_cut,
        problem=problems[0] if problems else None,
    )


def _git(folder: Path, deadline: float, *arguments: str) -> tuple[str, str | None]:
    """Return git's output, and the reason if it failed; `deadline`: of time.monotonic()."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "-c", "core.quotepath=off"]
    # without GIT_DIR and others, which a hook sets
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    left_s = max(deadline - time.monotonic(), 0.1)
    given: Any = {"env": environ, "stdin": subprocess.DEVNULL, "timeout": left_s}
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, **given)
    except subprocess.TimeoutExpired:
        return "", f"git {arguments[0]} took longer than {left_s:.0f} s"
    except OSError as error:
        return "", f"git failed to start: {error}"
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        return "", message or f"git exited with code {done.returncode}"
    return done.stdout.decode(errors="surrogateescape"), None


# -- snapshots


def newest_snapshot(run: RunFolder) -> Path | None:
    """Return RUN/code/NNN with the highest number; None if there is none."""
    numbers = [int(path.name) for path in run.code.glob("[0-9]*") if path.name.isdecimal()]
    return run.code / f"{max(numbers):03}" if numbers else None


def take_snapshot(run: RunFolder) -> Path:
    """Return a snapshot of the program's source: RUN/code/NNN, a new one if the newest differs.

    Raises UserError if it cannot be written, or others may write it.
    """
    try:
        run.code.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run.code, error) from None
    check_private(run)
    newest = newest_snapshot(run)
    if newest is not None and not _faults(newest) and not differences(newest):
        return newest
    target = run.code / f"{int(newest.name) + 1 if newest else 1:03}"
    tree = asdict(read_source_tree(Path(canon_pretrain.__file__).resolve()))
    tree["patch"] = tree["patch"].decode(errors="surrogateescape")
    contents = {name: files.read_bytes(path) for name, path in _program().items()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    contents[KEPT] = json.dumps(tree, indent=2).encode()
    contents[MANIFEST] = (json.dumps({"files": hashes}, indent=2) + "\n").encode()
    try:
        files.write_folder(target, contents)
    except OSError as error:
        raise _unwritable(target, error) from None
    return target


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError("run.unwritable", f"{path} cannot be written: {error.strerror}", path=path)


def check_private(run: RunFolder) -> None:
    """Raise UserError if others than this user may write the run's folder, or its `code`.

    Job scripts run what is in it.
    """
    for path in (run.path, run.code):
        with contextlib.suppress(FileNotFoundError):
            if who := _other_writers(path):
                raise UserError(
                    "run.others_write",
                    f"{who} may write {path}: a job would run their code as you. Remove that "
                    f"right with `chmod go-w {path}`, or choose another --job.dump_folder",
                    path=path,
                )


def _other_writers(path: Path) -> str:
    """Return who may write a folder, besides this user and root; empty if nobody."""
    info, user = os.stat(path), os.geteuid()
    if info.st_uid not in (user, 0):
        return f"user {info.st_uid}"
    if info.st_mode & stat.S_IWOTH:
        return "everybody"
    if not info.st_mode & stat.S_IWGRP:
        return ""
    with contextlib.suppress(KeyError, OSError):
        # many systems give each user a group, and its members the right to write
        group, own = grp.getgrgid(info.st_gid), pwd.getpwuid(user)
        is_own = group.gr_gid == own.pw_gid and group.gr_name == own.pw_name
        has_list = "system.posix_acl_access" in os.listxattr(path)
        if is_own and not has_list and {*group.gr_mem} <= {own.pw_name}:
            return ""
    return f"group {info.st_gid}"


def check_snapshot(snapshot: Path) -> None:
    """Raise UserError unless `snapshot` is unchanged and owned by this user."""
    if faults := _faults(snapshot):
        raise UserError(
            "run.code_damaged",
            f"{snapshot}, the run's code, is damaged: {'; '.join(faults[:5])}. Restore it, or "
            "use this repository's code with --run.allow_changes code",
        )


def differences(snapshot: Path) -> list[str]:
    """Return the files of this program that differ from those in `snapshot`."""
    ours = {name: sha256_file(path) for name, path in _program().items()}
    kept = _recorded(snapshot)
    return [name for name in sorted(ours | kept) if ours.get(name) != kept.get(name)]


def _program() -> dict[str, Path]:
    """Return the files of this program that a snapshot contains, by name."""
    root = Path(canon_pretrain.__file__).resolve().parent.parent
    package = root / "canon_pretrain"
    paths = [*package.rglob("*.py"), package / "titan" / "keys.json", root / SCRIPT]
    return {path.relative_to(root).as_posix(): path for path in sorted(paths) if path.is_file()}


def _recorded(snapshot: Path) -> dict[str, str]:
    return files.read_record(snapshot / MANIFEST, dict[str, dict[str, str]]).get("files", {})


def _faults(snapshot: Path) -> list[str]:
    """Return the differences of `snapshot` from its manifest, except for compiled files."""
    try:
        info = os.lstat(snapshot)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return ["not a folder of this user"]
        recorded = _recorded(snapshot)
    except (OSError, UnreadableFile) as error:
        return [str(error)]
    found: dict[str, str | None] = {}
    for path in snapshot.rglob("*"):
        name, is_link = path.relative_to(snapshot).as_posix(), path.is_symlink()
        is_file = is_link or not path.is_dir()
        if is_file and "__pycache__" not in name.split("/") and name not in (MANIFEST, KEPT):
            found[name] = None
            with contextlib.suppress(OSError):
                found[name] = None if is_link else sha256_file(path)
    names = sorted(found | recorded)
    return [f"{n} differs from the manifest" for n in names if found.get(n) != recorded.get(n, "")]

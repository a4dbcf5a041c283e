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
from urllib.parse import urlsplit

import canon_pretrain
from canon_pretrain.core import files
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, sha256_file
from canon_pretrain.run.folder import RunFolder, numbers_in

PLAIN = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
"""Options of git diff: a patch that `git apply` reads, whatever the user's settings."""
PATCH_BYTES = 1 << 20
UNTRACKED_KINDS = ("*.py", "*.toml")
MAX_NAMES = 200
GIT_TIMEOUT_S = 8.0  # less than GATHER_TIMEOUT_S in run/launches.py
OWN_FOLDERS = ("data_prep", "eval")  # next to canon_pretrain/: their *.py files are in the patch
ORIGINAL = "source_tree.json"
MANIFEST = "manifest.json"
SCRIPT = "slurm/lib.sh"
# files of canon_pretrain that training imports; a room's commands.py is of its command line
TRAINING_CODE = (
    "train.py",
    "checkpoint/[!_]*.py",
    "core/*.py",
    "data/*.py",
    "kernels/**/*.py",
    "machine/*.py",
    "model/*.py",
    "run/[!_]*.py",
    "synthetic/[!_]*.py",
    "titan/*.py",
)


def code_hashes(package: Path = Path(canon_pretrain.__file__).parent) -> dict[str, str]:
    """Return the first 16 digits of the SHA-256 of each file of TRAINING_CODE, by path."""
    paths: set[Path] = set()
    for pattern in TRAINING_CODE:
        paths.update(package.glob(pattern))

    hashes = {}
    for path in sorted(paths):
        name = path.relative_to(package).as_posix()
        if path.name != "commands.py":
            with contextlib.suppress(OSError):
                hashes[name] = sha256_file(path)[:16]
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
    stored = inside.parent.parent / ORIGINAL
    if stored.is_file():
        tree = files.read_json(stored)
        tree["patch"] = tree["patch"].encode(errors="surrogateescape")
        return SourceTree(**tree)

    # A virtual environment may be inside of another project's tree, which does not track it.
    git = _Git(inside.parent, timeout_s)
    top = git.run("rev-parse", "--show-toplevel").rstrip("\n")
    git.run("ls-files", "--error-unmatch", "--", inside.name)
    if git.problems:
        return SourceTree(problem=f"{inside.parent} is not tracked by git: {git.problems[0]}")

    # All changed files of the tree, of which the patch has a part.
    git.folder = Path(top)
    status = git.run("status", "--porcelain", "-z", "--no-renames", "--untracked-files=no")
    records = status.split("\0")[:-1]  # each: two letters, a space, a path
    changed = [record[3:] for record in records]
    if git.problems:
        return SourceTree(folder=top, problem=git.problems[0])
    commit = git.run("rev-parse", "--verify", "HEAD", is_needed=False).strip() or None

    # The patch has this project's Python files, not others of a larger repository.
    package = inside.parent.resolve().relative_to(git.folder.resolve())
    folders = [package, *(package.parent / name for name in OWN_FOLDERS)]
    in_patch = []
    left_out = []
    for name in changed:
        is_ours = any(Path(name).is_relative_to(folder) for folder in folders)
        if is_ours and name.endswith(".py"):
            in_patch.append(name)
        else:
            left_out.append(name)
    patch = b""
    if in_patch:
        base = "HEAD" if commit else "--cached"  # without a commit all files are new
        paths = [f":(top,literal){name}" for name in in_patch]  # a name may have a *
        diff = git.run("diff", *PLAIN, base, "--", *paths)
        patch = diff.encode(errors="surrogateescape")
    is_cut = len(patch) > patch_bytes
    if is_cut:  # after the last whole line
        line_end = patch.rfind(b"\n", 0, patch_bytes)
        patch = patch[: line_end + 1]

    origin = git.run("remote", "get-url", "origin", is_needed=False)
    url = urlsplit(origin.strip())
    host = url.netloc.rpartition("@")[2]  # without user and password
    # last: slow in a tree with runs and data
    untracked = git.run("ls-files", "--others", "--exclude-standard", "-z", "--", *UNTRACKED_KINDS)
    return SourceTree(
        folder=top,
        commit=commit,
        origin=url._replace(netloc=host).geturl() or None,
        dirty=bool(changed),
        untracked=untracked.split("\0")[:-1][:MAX_NAMES],
        left_out=left_out[:MAX_NAMES],
        patch=patch,
        patch_cut=is_cut,
        problem=next(iter(git.problems), None),
    )


class _Git:
    """git in `folder`, for `timeout_s` in total; `problems`: why needed commands failed."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._deadline = time.monotonic() + timeout_s
        # without GIT_DIR and others, which a hook sets
        self._environ = {
            name: value for name, value in os.environ.items() if not name.startswith("GIT_")
        }
        self._environ |= {
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }

    def run(self, *arguments: str, is_needed: bool = True) -> str:
        """Return the output of a git command; empty if it fails, which is a problem if needed."""
        # Settings of the user must not change the output.
        settings = ["-c", "core.fsmonitor=false", "-c", "core.quotepath=off"]
        left_s = max(self._deadline - time.monotonic(), 0.1)
        try:
            done = subprocess.run(
                ["git", "-C", str(self.folder), *settings, *arguments],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=left_s,
            )
        except subprocess.TimeoutExpired:
            problem = f"git {arguments[0]} took longer than {left_s:.0f} s"
        except OSError as error:
            problem = f"git failed to start: {error}"
        else:
            if done.returncode == 0:
                return done.stdout.decode(errors="surrogateescape")
            errors = done.stderr.decode(errors="replace").strip()
            first_line = errors.partition("\n")[0]
            problem = first_line or f"git exited with code {done.returncode}"

        # Without a remote or a commit, for example, some commands fail.
        if is_needed:
            self.problems.append(problem)
        return ""


# -- snapshots


def newest_snapshot(run: RunFolder) -> Path | None:
    """Return RUN/code/NNN with the highest number; None if there is none."""
    numbers = numbers_in(run.code)
    if not numbers:
        return None
    return run.code / f"{numbers[-1]:03}"


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

    # The files, the git state of the original, and the manifest.
    contents = {}
    hashes = {}
    for name, path in _program().items():
        contents[name] = files.read_bytes(path)
        hashes[name] = hashlib.sha256(contents[name]).hexdigest()
    tree = asdict(read_source_tree(Path(canon_pretrain.__file__).resolve()))
    tree["patch"] = tree["patch"].decode(errors="surrogateescape")
    contents[ORIGINAL] = json.dumps(tree, indent=2).encode()
    manifest = json.dumps({"files": hashes}, indent=2)
    contents[MANIFEST] = f"{manifest}\n".encode()

    number = 1
    if newest is not None:
        number = int(newest.name) + 1
    target = run.code / f"{number:03}"
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
            if writers := _other_writers(path):
                raise UserError(
                    "run.others_write",
                    f"{writers} may write {path}: a job would run their code as you. Remove that "
                    f"right with `chmod go-w {path}`, or choose another --job.dump_folder",
                    path=path,
                )


def _other_writers(path: Path) -> str:
    """Return the other users, except root, with write access to a folder; empty if none."""
    info = os.stat(path)
    user_id = os.geteuid()
    if info.st_uid not in (user_id, 0):
        return f"user {info.st_uid}"
    if info.st_mode & stat.S_IWOTH:
        return "everybody"
    if not info.st_mode & stat.S_IWGRP:
        return ""

    # Many systems create a group per user and let it write by default: harmless, if the user is
    # its only member and no access list adds others.
    with contextlib.suppress(KeyError, OSError):
        group = grp.getgrgid(info.st_gid)
        user = pwd.getpwuid(user_id)
        is_private = group.gr_gid == user.pw_gid and group.gr_name == user.pw_name
        has_access_list = "system.posix_acl_access" in os.listxattr(path)
        if is_private and not has_access_list and {*group.gr_mem} <= {user.pw_name}:
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
    current = {name: sha256_file(path) for name, path in _program().items()}
    recorded = _recorded(snapshot)
    names = sorted(current | recorded)
    return [name for name in names if current.get(name) != recorded.get(name)]


def _program() -> dict[str, Path]:
    """Return the files of this program that a snapshot contains, by name."""
    root = Path(canon_pretrain.__file__).resolve().parent.parent
    package = root / "canon_pretrain"
    paths = [*package.rglob("*.py"), package / "titan" / "keys.json", root / SCRIPT]
    program = {}
    for path in sorted(paths):
        if path.is_file():
            name = path.relative_to(root).as_posix()
            program[name] = path
    return program


def _recorded(snapshot: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, by the manifest of a snapshot. Raises UnreadableFile."""
    manifest = files.read_record(snapshot / MANIFEST, dict[str, dict[str, str]])
    return manifest.get("files", {})


def _faults(snapshot: Path) -> list[str]:
    """Return the differences of `snapshot` from its manifest, except for compiled files."""
    try:
        info = os.lstat(snapshot)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return ["not a folder of this user"]
        recorded = _recorded(snapshot)
    except (OSError, UnreadableFile) as error:
        return [str(error)]

    # None: a link, since what it points to may change, or a file that cannot be read.
    hashes: dict[str, str | None] = {}
    for path in snapshot.rglob("*"):
        name = path.relative_to(snapshot).as_posix()
        is_compiled = "__pycache__" in name.split("/")
        is_folder = path.is_dir() and not path.is_symlink()
        if is_compiled or is_folder or name in (MANIFEST, ORIGINAL):
            continue
        hashes[name] = None
        if not path.is_symlink():
            with contextlib.suppress(OSError):
                hashes[name] = sha256_file(path)

    # "": a file that is not in the manifest differs, even if it cannot be read
    names = sorted(hashes | recorded)
    different = [name for name in names if hashes.get(name) != recorded.get(name, "")]
    return [f"{name} differs from the manifest" for name in different]

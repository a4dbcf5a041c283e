"""The program's own source: the hash of each file; by git, which commit, and what differs from it.

A launch's record holds it (run/provenance.py), so that a year later the code can be put together
again. git may be missing, slow, or have nothing to say: then there is a sentence about that, and
never an error.
"""

import contextlib
import os
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import canon_pretrain
from canon_pretrain.core.files import read_json, sha256_file

PATCH_BYTES = 1 << 20
UNTRACKED_KINDS = (".py", ".toml")
UNTRACKED_NAMES = 200
UNTRACKED_BYTES = 1 << 16
UNTRACKED_S = 5.0
KEPT = "source_tree.json"
"""Beside a snapshot's canon_pretrain/: the SourceTree of the place that it was taken from."""
OWN_FOLDERS = ("data_prep", "eval")
"""The project's source folders beside canon_pretrain/: the patch shows their *.py files only."""


TRAINING_CODE = (
    *(
        "train.py",
        "core/*.py",
        "checkpoint/[!_]*.py",
        "data/*.py",
        "kernels/**/*.py",
        "model/*.py",
        "run/[!_]*.py",
    ),
    "titan/*.py",
)
"""What a training run imports of canon_pretrain."""


def code_hashes(package: Path = Path(canon_pretrain.__file__).parent) -> dict[str, str]:
    """The first 16 hexadecimal digits of the SHA-256 of each file of TRAINING_CODE, by its path.

    Equal for an installed package and a clone. A file that can't be read is left out.
    """
    hashes = {}
    for path in sorted({path for pattern in TRAINING_CODE for path in package.glob(pattern)}):
        with contextlib.suppress(OSError):
            hashes[path.relative_to(package).as_posix()] = sha256_file(path)[:16]
    return hashes


@dataclass(frozen=True)
class SourceTree:
    """What git says of the folder that the program runs from."""

    folder: str | None = None
    """The root of its working tree; None where there is none, see `problem`."""
    commit: str | None = None
    """HEAD; None before the first commit."""
    branch: str | None = None
    """None where HEAD is detached."""
    origin: str | None = None
    """Its URL without user and password."""
    dirty: bool | None = None
    """Whether tracked files differ from `commit`; None where git did not say."""
    untracked: list[str] = field(default_factory=list)
    """Files of UNTRACKED_KINDS that git neither tracks nor ignores, UNTRACKED_NAMES at most."""
    left_out: list[str] = field(default_factory=list)
    """Changed files that the patch does not show, UNTRACKED_NAMES at most."""
    patch: bytes = b""
    """`git diff HEAD` of the project's own *.py files, its first PATCH_BYTES."""
    patch_cut: bool = False
    problem: str | None = None
    """Why something of this is missing."""


class _GitFailed(Exception):
    """git is missing, took too long, or ended with an error: the message says which."""


def look_at_source(
    inside: Path, *, patch_bytes: int = PATCH_BYTES, timeout_s: float = 20
) -> SourceTree:
    """The source tree that the file `inside` is tracked in; git gets `timeout_s` for all of it.

    That of a snapshot (run/snapshot.py) is what was found when it was taken.
    """
    if (kept := inside.parent.parent / KEPT).is_file():
        tree = read_json(kept)
        return SourceTree(**tree | {"patch": tree["patch"].encode(errors="surrogateescape")})
    git = _Git(inside.parent, time.monotonic() + timeout_s)
    try:
        root = Path(git.text("rev-parse", "--show-toplevel").rstrip("\n"))
        git.text("ls-files", "--error-unmatch", "--", inside.name)
    except _GitFailed as failure:
        return SourceTree(problem=f"{inside.parent}: no git repository tracks it: {failure}")
    git.folder = root
    try:
        facts = _parse_status(git.text(*_STATUS))
    except _GitFailed as failure:
        return SourceTree(folder=str(root), problem=str(failure))
    patch, cut, problem = b"", False, None
    package = inside.parent.resolve().relative_to(root.resolve())
    own = [package, *(package.parent / name for name in OWN_FOLDERS)]
    shown = [
        name
        for name in facts.changed
        if name.endswith(".py") and any(Path(name).is_relative_to(folder) for folder in own)
    ]
    if shown:
        # without a commit everything is new, and there is nothing to differ from
        since = "HEAD" if facts.commit else "--cached"
        try:
            patch, cut = git.bounded(
                patch_bytes, *_DIFF, since, "--", *(f":(top,literal){name}" for name in shown)
            )
        except _GitFailed as failure:
            problem = str(failure)
    try:
        origin = _without_user(git.text("remote", "get-url", "origin").strip())
    except _GitFailed:
        origin = None
    untracked: list[str] = []
    git.hurry(UNTRACKED_S)  # a tree of runs and data takes long to walk, and the rest waits for it
    try:
        names, _ = git.bounded(UNTRACKED_BYTES, *_UNTRACKED)
        untracked = names.decode(errors="surrogateescape").split("\0")[:-1]
    except _GitFailed as failure:
        problem = problem or f"untracked files are not known: {failure}"
    return SourceTree(
        folder=str(root),
        commit=facts.commit,
        branch=facts.branch,
        origin=origin,
        dirty=bool(facts.changed),
        untracked=untracked[:UNTRACKED_NAMES],
        left_out=[name for name in facts.changed if name not in shown][:UNTRACKED_NAMES],
        patch=patch,
        patch_cut=cut,
        problem=problem,
    )


_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--no-renames", "-z")
_UNTRACKED = (
    *("ls-files", "--others", "--exclude-standard", "-z", "--"),
    *(f"*{kind}" for kind in UNTRACKED_KINDS),
)
_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")


@dataclass
class _Facts:
    commit: str | None = None
    branch: str | None = None
    changed: list[str] = field(default_factory=list)


def _parse_status(text: str) -> _Facts:
    """The answer to _STATUS: records that end in NUL, each with its kind first."""
    facts = _Facts()
    for record in text.split("\0"):
        kind, _, rest = record.partition(" ")
        if record.startswith("# branch.oid "):
            facts.commit = None if rest.endswith("(initial)") else rest.rpartition(" ")[2]
        elif record.startswith("# branch.head "):
            facts.branch = None if rest.endswith("(detached)") else rest.partition(" ")[2]
        elif kind == "1":  # XY sub mH mI mW hH hI path
            facts.changed.append(rest.split(" ", 7)[7])
        elif kind == "u":  # XY sub m1 m2 m3 mW h1 h2 h3 path
            facts.changed.append(rest.split(" ", 9)[9])
    return facts


def _without_user(url: str) -> str:
    """`url` without `user:password@`; git@host:path, which is no URL, as it is."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class _Git:
    """git in one folder, until a deadline of time.monotonic(); it asks nobody and locks nothing."""

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder, self._deadline = folder, deadline

    def hurry(self, seconds: float) -> None:
        """Let all that follows take no longer than this."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def text(self, *arguments: str) -> str:
        """What it prints; raises _GitFailed."""
        try:
            done = subprocess.run(
                self._command(arguments),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._left_s(),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise self._failed(arguments, error) from None
        if done.returncode:
            message = done.stderr.decode(errors="replace").strip().splitlines()
            raise _GitFailed(message[0] if message else f"git ended with {done.returncode}")
        return done.stdout.decode(errors="surrogateescape")

    def bounded(self, num_bytes: int, *arguments: str) -> tuple[bytes, bool]:
        """The first `num_bytes` of what it prints, and whether there was more; a line ends them
        (with -z, a NUL)."""
        try:
            process = subprocess.Popen(
                self._command(arguments),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise self._failed(arguments, error) from None
        assert process.stdout is not None
        alarm = threading.Timer(self._left_s(), process.kill)
        alarm.start()
        try:
            output = process.stdout.read(num_bytes + 1)
            cut = len(output) > num_bytes
            if cut:
                process.kill()
        finally:
            process.stdout.close()
            code = process.wait()
            alarm.cancel()
        if code and not cut:
            raise _GitFailed(f"git {arguments[0]} ended with {code}, or took too long")
        end = b"\0" if "-z" in arguments else b"\n"
        return (output[: output.rfind(end, 0, num_bytes) + 1] if cut else output), cut

    def _command(self, arguments: tuple[str, ...]) -> list[str]:
        options = ("-c", "core.fsmonitor=false", "-c", "core.quotepath=off")
        return ["git", "-C", str(self.folder), *options, *arguments]

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.1)

    def _failed(self, arguments: tuple[str, ...], error: Exception) -> _GitFailed:
        if isinstance(error, subprocess.TimeoutExpired):
            return _GitFailed(f"git {arguments[0]} took longer than {error.timeout:.0f} s")
        missing = isinstance(error, FileNotFoundError)
        return _GitFailed("git is not installed" if missing else f"git cannot run: {error}")


def _environment() -> dict[str, str]:
    """This process's, without what points git elsewhere (GIT_DIR, in a hook)."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return own | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}

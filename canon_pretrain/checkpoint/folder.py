"""The folder of a run's checkpoints: what lies in it, and moves that a kill leaves understandable.

    RUN/checkpoint/step-N              a whole checkpoint
                  /.saving-step-N      a save in progress, or a killed one
                  /.replaced-step-N    a full one whose weights alone take its place
                  /.deleting-step-N    one on its way out
                  /quarantine/NAME.K   set aside, with NAME.K.reason.txt
    RUN/archive/K-LABEL/               an abandoned branch, or the run before a fresh start

The trainer saves into it, retention.py prunes it, `python -m canon_pretrain.checkpoint` shows it.
A step appears under its name by one rename of a finished folder and leaves it by one rename, so
what is called step-N was once whole. `recover` finishes what a kill interrupted. No torch here.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from canon_pretrain.core.files import free_bytes, fsync_folder, rename, write_atomic
from canon_pretrain.run.folder import CHECKPOINTS, EVALS, RunFolder

QUARANTINE = "quarantine"
ARCHIVE = "archive"
HOLDS = "holds"
INTERRUPTED = "a save that was interrupted"

_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
_REASON = ".reason.txt"
_IS_REASON = re.compile(rf"{re.escape(_REASON)}(\.[0-9a-f]*\.?tmp)?$")
_NO_REASON = "no reason was recorded: the launch that moved it was killed, or the disk was full"

logger = logging.getLogger(__name__)


class Quarantined(NamedTuple):
    """Something that was set aside, and why."""

    path: Path
    reason: str
    bytes: int


class CheckpointFolder:
    """RUN/checkpoint, whatever its name; it need not be there yet.

    `may_change` is asked before anything is moved or deleted: a launch that was stopped may find
    the folder another's. Where it is False, PermissionError is raised.
    """

    def __init__(self, path: Path, *, may_change: Callable[[], bool] = lambda: True) -> None:
        self.path = path
        self._may_change = may_change

    def _check_may_change(self) -> None:
        if not self._may_change():
            text = "no longer this launch's: another one took the run folder over"
            raise PermissionError(errno.EPERM, text, str(self.path))

    @classmethod
    def of_run(cls, run: RunFolder) -> "CheckpointFolder":
        """Where the run's config.json says that they are; raises UserError if there is none."""
        section = run.read_config().get("config", {}).get("checkpoint", {})
        return cls(run.path / section.get("folder", CHECKPOINTS))

    def steps(self) -> list[int]:
        """The N of each folder (or link to one) named exactly step-N, ascending; none is opened."""
        found = ((step_number(path.name), path) for path in entries(self.path))
        return sorted(step for step, path in found if step is not None and path.is_dir())

    def step_path(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def saving_path(self, step: int) -> Path:
        """Where step N is written before it gets its name."""
        return self.path / f"{_SAVING}step-{step}"

    def of_other_runs(self, run_id: str | None) -> dict[int, str]:
        """By step, the run_id of each checkpoint that names another run than `run_id`."""
        found: dict[int, str] = {}
        for step in self.steps():
            with contextlib.suppress(DamagedCheckpoint):  # says nothing that can be relied on
                other = Manifest.read(self.step_path(step)).run_id
                if other not in (None, run_id):
                    found[step] = str(other)
        return found

    @property
    def trial_path(self) -> Path:
        """A folder for files that show whether a save could be written; `recover` deletes it."""
        return self.path / f"{_DELETING}step-0"

    def make_trial(self) -> None:
        """Make `trial_path`, empty. Raises OSError where no save could be made either."""
        self._check_may_change()
        _make_folder(self.path)
        remove_tree(self.trial_path)
        self.trial_path.mkdir()

    def unfinished(self) -> list[Path]:
        """Saves in progress or killed, by step."""
        return self._marked(_SAVING)

    def leftovers(self) -> list[Path]:
        """What `recover` will put back or delete: replaced and half deleted steps."""
        return self._marked(_REPLACED) + self._marked(_DELETING)

    def strays(self) -> list[str]:
        """Names of what does not belong here: nothing reads, moves or deletes it."""
        known = {path.name for path in self.unfinished() + self.leftovers()}
        known |= {f"step-{step}" for step in self.steps()} | {QUARANTINE, ARCHIVE}
        # the lock of a folder outside the run folder
        known |= {path.name for path in self.path.glob(f"{RunFolder(self.path).lock_file.name}*")}
        return [path.name for path in entries(self.path) if path.name not in known]

    def _marked(self, mark: str) -> list[Path]:
        found = [
            (step, path)
            for path in entries(self.path)
            if (step := step_number(path.name, mark)) is not None
        ]
        return [path for _, path in sorted(found)]

    # ---- quarantine

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move `path` to quarantine/NAME.K, K the first free number, and write the reason beside.

        Durable, and nothing is deleted. The rename comes first: it is what keeps a damaged step
        from being read, and a kill or a full disk after it costs only the reason. Raises OSError
        where the rename can't be done; `path` is then where it was.
        """
        self._check_may_change()
        folder = self.path / QUARANTINE
        _make_folder(folder)
        number = 1
        while True:
            target = folder / f"{path.name}.{number}"
            if not (os.path.lexists(target) or os.path.lexists(_reason_file(target))):
                try:
                    _move(path, target)
                    break
                except OSError as error:
                    # another thread took the number since
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
            number += 1
        _write_note(_reason_file(target), f"{_now()}\n{reason}\n")
        return target

    def quarantined(self) -> list[Quarantined]:
        """All that was set aside, by name."""
        return [
            Quarantined(path, _read_reason(path), tree_bytes(path))
            for path in self._quarantine_entries()
        ]

    def lack_of_room(self, num_bytes: int) -> str | None:
        """What to report if the disk can't take `num_bytes`, even without interrupted saves."""
        if free_bytes(self.path) >= num_bytes:
            return None
        freed = self.reclaim()
        if freed and free_bytes(self.path) >= num_bytes:
            logger.warning(f"deleted {freed:,} bytes of interrupted saves to make room")
            return None
        return (
            f"no room in {self.path}: a checkpoint takes {num_bytes:,} bytes, "
            f"{free_bytes(self.path):,} are free"
        )

    def reclaim(self) -> int:
        """Delete the interrupted saves in quarantine, for a full disk; returns the bytes freed."""
        return sum(self.discard(path) for path in self._quarantined_saves())

    def discard(self, path: Path) -> int:
        """Delete an entry of quarantine with its reason, or an archive; returns the bytes freed."""
        self._check_may_change()
        freed = remove_tree(path)
        _reason_file(path).unlink(missing_ok=True)
        return freed

    def _quarantine_entries(self) -> list[Path]:
        folder = self.path / QUARANTINE
        return [p for p in entries(folder) if not _IS_REASON.search(p.name)]

    def _quarantined_saves(self) -> list[Path]:
        """Interrupted saves in quarantine, the oldest first.

        By their files' times: numbers go back after a roll-back, and a folder's own time is that
        of a deletion in it.
        """
        found = [path for path in self._quarantine_entries() if path.name.startswith(_SAVING)]
        return sorted(found, key=lambda path: (_last_write_ns(path), path.name))

    # ---- steps that leave

    def delete_step(self, step: int) -> int:
        """Delete step N; returns the bytes freed. A kill leaves step-N whole, or no step-N."""
        self._check_may_change()
        doomed = self.path / f"{_DELETING}step-{step}"
        remove_tree(doomed)  # of an earlier step N, whose deletion failed
        _move(self.step_path(step), doomed)
        return remove_tree(doomed)

    def replace_step(self, step: int) -> int:
        """Put the whole checkpoint at `saving_path` in the place of step N, which is deleted.

        Returns the bytes freed. A kill leaves the old one, which `recover` may have to rename
        back, or the new one. Raises OSError with the old one in its place where a rename fails.
        """
        self._check_may_change()
        final, replaced = self.step_path(step), self.path / f"{_REPLACED}step-{step}"
        _move(final, replaced)
        try:
            _move(self.saving_path(step), final)
        except OSError:
            rename(replaced, final)
            raise
        return remove_tree(replaced) - tree_bytes(final)

    # ---- after a kill

    def recover(self) -> list[str]:
        """Finish what a kill interrupted; returns one sentence for each act.

        For one process, under the run lock, before anything reads or saves here. Half deleted
        steps are deleted. A replaced step is deleted where a whole one has its name, else it gets
        the name back. Interrupted saves go to quarantine, where only the newest is kept: they hold
        nothing that can be used, and would fill the disk. A deletion that fails is reported, not
        raised: it must not keep a run from going on. Raises OSError where a step that is whole
        can't get its name back.
        """
        said = [self._try_delete(path, "half deleted") for path in self._marked(_DELETING)]
        for replaced in self._marked(_REPLACED):
            said += self._settle(replaced)
        for saving in self.unfinished():
            try:
                target = self.quarantine(saving, INTERRUPTED)
                said.append(f"{saving.name} is {INTERRUPTED}; it was moved to {target}")
            except OSError as error:
                # on a full disk its bytes are what the next save needs
                said.append(
                    f"{saving.name} is {INTERRUPTED}, and quarantine can't take it "
                    f"({error.strerror})"
                )
                said.append(self._try_delete(saving, INTERRUPTED))
        for old in self._quarantined_saves()[:-1]:
            said.append(self._try_delete(old, "an older interrupted save"))
        return said

    def _settle(self, replaced: Path) -> Iterator[str]:
        """End the replacement of a step by its weights."""
        final = self.path / replaced.name.removeprefix(_REPLACED)
        if os.path.lexists(final):
            try:
                verify(final)
                yield self._try_delete(replaced, f"replaced by the weights in {final.name}")
                return
            except DamagedCheckpoint as error:
                target = self.quarantine(final, str(error))
                yield f"{error}; it was moved to {target}"
        _move(replaced, final)
        yield f"{final.name} was being replaced by its weights; the full one is in its place again"

    def _try_delete(self, path: Path, what: str) -> str:
        try:
            freed = self.discard(path)
        except OSError as error:
            return f"{path}, {what}, can't be deleted: {error.strerror or error}"
        return f"{path.name}, {what}, was deleted ({freed:,} bytes)"

    # ---- branches that are left

    def archive_after(self, step: int, run: Path, why: str) -> Path | None:
        """Move all that the run did after `step` to RUN/archive/K-back-to-step-N; None if nothing.

        Steps, results in RUN/evals and holds above `step`, and DONE. Nothing is deleted. For one
        process, under the run lock, after `recover`. The order: README.txt, DONE, results, then
        steps, the newest first. Killed before the first step, the run is as it was, not done (the
        next start goes on at its end, and says so again); killed later, its steps are an unbroken
        beginning of the old branch. The same call then moves the rest, into an archive of its own.
        """
        later: list[tuple[Path, str]] = []
        for folder, name in ((run / EVALS, EVALS), (run / EVALS / HOLDS, f"{EVALS}/{HOLDS}")):
            for path in entries(folder):
                number = step_number(path.name.split(".")[0])
                if number is not None and number > step:
                    later.append((path, f"{name}/{path.name}"))
        later += [self._archived_step(old) for old in reversed(self.steps()) if old > step]
        if not later:
            return None
        done = [(RunFolder(run).done_file, RunFolder(run).done_file.name)]
        return self._archive(run, f"back-to-step-{step}", why, done + later)

    def archive_all(self, run: Path, why: str) -> Path | None:
        """Move what makes the run to RUN/archive/K-before-a-fresh-start; None if there is nothing.

        Nothing is deleted. For one process, under the run lock, after `recover`. The order:
        README.txt, DONE, steps newest first, quarantine, evals/, report/, copies of the log, what
        its launches were, log.jsonl, config.json.
        Killed in between, the steps that remain are an unbroken beginning of the run with its log
        and configuration, from which it can go on; or there is no step and a log that says that
        there were some. The same call then moves the rest, into an archive of its own.
        """
        files = RunFolder(run)
        moves = [(files.done_file, files.done_file.name)]
        moves += [self._archived_step(old) for old in reversed(self.steps())]
        moves.append((self.path / QUARANTINE, f"{self.path.name}/{QUARANTINE}"))
        names = [EVALS, "report", "wandb", "tb", files.run_file.name, files.launches.name]
        names += [files.log_file.name, files.config_file.name]
        moves += [(run / name, name) for name in names]
        if files.log_file.is_file() and not files.log_file.stat().st_size:
            moves.remove((files.log_file, files.log_file.name))  # of a launch that was refused
        return self._archive(run, "before-a-fresh-start", why, moves)

    def archives(self, run: Path) -> list[Path]:
        """What `archive_after` and `archive_all` made, the oldest first."""
        places = (run / ARCHIVE, self.path / ARCHIVE)
        found = (path for place in places for path in entries(place))
        return sorted((p for p in found if _archive_number(p)), key=_archive_number)

    def _archived_step(self, step: int) -> tuple[Path, str]:
        path = self.step_path(step)
        return path, f"{self.path.name}/{path.name}"

    def _archive(
        self, run: Path, label: str, why: str, moves: list[tuple[Path, str]]
    ) -> Path | None:
        """Move the sources that exist, in this order, to their names in a new archive of `run`."""
        moves = [(source, name) for source, name in moves if os.path.lexists(source)]
        if not moves:
            return None
        self._check_may_change()
        number = 1 + max(map(_archive_number, self.archives(run)), default=0)
        archive = run / ARCHIVE / f"{number}-{label}"
        _make_folder(archive)
        beside = self.path / ARCHIVE / archive.name

        def target(source: Path, name: str) -> Path:
            # a rename needs one file system, and RUN/checkpoint may be a link to a larger one
            far = source.parent == self.path and _device(self.path) != _device(archive)
            return beside / source.name if far else archive / name

        pairs = [(source, target(source, name)) for source, name in moves]
        _write_note(archive / "README.txt", _readme(archive, why, pairs))
        for source, goal in pairs:
            _make_folder(goal.parent)
            _move(source, goal)
        return archive


def step_number(name: str, mark: str = "") -> int | None:
    """The N of a name that is exactly `mark`step-N, without leading zeros; None for any other."""
    match = re.fullmatch(rf"{re.escape(mark)}step-(0|[1-9][0-9]{{0,17}})", name)
    return int(match.group(1)) if match else None


def entries(folder: Path) -> list[Path]:
    """What lies in `folder`, by name; nothing where it does not exist."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def tree_bytes(path: Path) -> int:
    """The sizes of the files at and below `path`; links are not followed.

    What vanishes meanwhile counts nothing: a launch may be deleting it.
    """
    if path.is_symlink() or not path.is_dir():
        return _file_bytes(path)
    walk = os.walk(path)
    return sum(_file_bytes(Path(folder, name)) for folder, _, names in walk for name in names)


def _file_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _last_write_ns(folder: Path) -> int:
    """When the youngest file below `folder` was written; 0 without any."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return max((path.lstat().st_mtime_ns for path in files), default=0)


def remove_tree(path: Path) -> int:
    """Delete `path`, a folder with all that is in it; returns the bytes freed.

    Of a link only the link goes. What is not there frees nothing.
    """
    if not os.path.lexists(path):
        return 0
    size = tree_bytes(path)
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
    return size


def _move(source: Path, target: Path) -> None:
    """Rename durably, to a name that is free or that of an empty folder."""
    rename(source, target)
    fsync_folder(target.parent)
    if source.parent != target.parent:
        fsync_folder(source.parent)


def _make_folder(folder: Path) -> None:
    """Make `folder` and those above it, durably."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def _device(folder: Path) -> int:
    return folder.stat().st_dev


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _reason_file(path: Path) -> Path:
    return path.with_name(path.name + _REASON)


def _read_reason(path: Path) -> str:
    """The reason without the line of the time."""
    try:
        _, _, reason = _reason_file(path).read_text(errors="replace").partition("\n")
    except OSError:
        return _NO_REASON
    return reason.strip() or _NO_REASON


def _write_note(path: Path, text: str) -> None:
    """Write what explains a move to people; a full disk must not stop the move itself."""
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        logger.warning(f"{path} can't be written ({error.strerror}); it would say: {text.strip()}")


def _archive_number(archive: Path) -> int:
    """The K of K-LABEL; 0 for a name without one."""
    match = re.match(r"([1-9][0-9]*)-", archive.name)
    return int(match.group(1)) if match else 0


def _readme(archive: Path, why: str, pairs: list[tuple[Path, Path]]) -> str:
    lines = [
        f"{archive.name}, {_now()}",
        "",
        f"Why: {why}",
        "",
        "Moved in this order. A launch that was killed meanwhile left the rest in its place; the",
        "next one moves that into an archive of its own. To go back, move all of it back while no",
        "launch is running.",
        "",
        *(f"{source} -> {target}" for source, target in pairs),
    ]
    return "\n".join(lines) + "\n"

"""The folder of a run's checkpoints, and changes to it that survive a kill. No torch.

    RUN/checkpoint/step-N              a complete checkpoint
                  /.saving-step-N      a save in progress, or interrupted
                  /.replaced-step-N    a full checkpoint that is being replaced by its weights
                  /.deleting-step-N    a checkpoint that is being deleted
                  /quarantine/NAME.K   damaged or interrupted, with NAME.K.reason.txt
    RUN/archive/K-LABEL/               an abandoned branch, or the run before a fresh start

A checkpoint gets and loses the name step-N by one rename, so it was complete at some time.
`recover` finishes what a kill interrupted.
"""

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from canon_pretrain.core.files import free_bytes, fsync_folder, parsing, rename, write_atomic
from canon_pretrain.core.holder import utc_now
from canon_pretrain.run.folder import CHECKPOINTS, EVALS, RunFolder

QUARANTINE = "quarantine"
ARCHIVE = "archive"
HOLDS = "holds"
INTERRUPTED = "a save that was interrupted"

_SAVING = ".saving-"
_REPLACED = ".replaced-"
_DELETING = ".deleting-"
_REASON = ".reason.txt"
_IS_REASON = re.compile(rf"{re.escape(_REASON)}(\.[0-9a-f]*\.?tmp)?$")
_ARCHIVE_NOTE = "Moved in this order. To undo, move everything back while no launch is running."

logger = logging.getLogger(__name__)


class Quarantined(NamedTuple):
    path: Path
    reason: str
    bytes: int


class CheckpointFolder:
    """RUN/checkpoint, which may not exist. Changes raise PermissionError unless `may_change()`."""

    def __init__(self, path: Path, *, may_change: Callable[[], bool] = lambda: True) -> None:
        self.path = path
        self.may_change = may_change
        self._quarantine_path = path / QUARANTINE
        # a folder for a trial save, under a name that `recover` deletes
        self.trial_path = self.step_path(0, _DELETING)

    def _check_may_change(self) -> None:
        if not self.may_change():
            raise PermissionError(
                errno.EPERM, "another launch took over the run folder", str(self.path)
            )

    @classmethod
    def of_run(cls, run: RunFolder) -> "CheckpointFolder":
        """Return the folder that the run's config.json names. Raises UserError without one."""
        with parsing(run.config_file):
            config = run.read_config().get("config", {})
            section = config.get("checkpoint", {})
            return cls(run.path / section.get("folder", CHECKPOINTS))

    def steps(self) -> list[int]:
        """Return N of each folder (or link to one) named exactly step-N, ascending."""
        return [step for step, path in self._named().items() if path.is_dir()]

    def _named(self, prefix: str = "") -> dict[int, Path]:
        """Return the path by N of each entry named exactly `prefix`step-N, ascending."""
        paths: dict[int, Path] = {}
        for path in entries(self.path):
            step = step_number(path.name, prefix)
            if step is not None:
                paths[step] = path
        return dict(sorted(paths.items()))

    def step_path(self, step: int, prefix: str = "") -> Path:
        return self.path / f"{prefix}step-{step}"

    def saving_path(self, step: int) -> Path:
        """Return where step N is written before it is complete."""
        return self.step_path(step, _SAVING)

    def steps_of_other_runs(self, run_id: str | None) -> dict[int, str]:
        """Return the run_id by step of each checkpoint of another run than `run_id`."""
        others: dict[int, str] = {}
        for step in self.steps():
            with contextlib.suppress(DamagedCheckpoint):
                step_run_id = Manifest.read(self.step_path(step)).run_id
                if step_run_id not in (None, run_id):
                    others[step] = str(step_run_id)
        return others

    def make_trial(self) -> None:
        """Create `trial_path`, empty. Raises OSError if a save would."""
        self._check_may_change()
        _make_folder(self.path)
        remove_tree(self.trial_path)
        self.trial_path.mkdir()

    def unfinished(self) -> list[Path]:
        """Return saves in progress or interrupted, by step."""
        return [*self._named(_SAVING).values()]

    def leftovers(self) -> list[Path]:
        """Return what `recover` will restore or delete: replaced and half deleted steps."""
        replaced = self._named(_REPLACED).values()
        half_deleted = self._named(_DELETING).values()
        return [*replaced, *half_deleted]

    def strays(self) -> list[str]:
        """Return the names of unknown files, which are never read, moved or deleted."""
        expected = self.unfinished() + self.leftovers()
        expected += map(self.step_path, self.steps())
        # the lock of a folder outside the run folder
        expected += self.path.glob(f"{RunFolder(self.path).lock_file.name}*")
        names = {path.name for path in expected} | {QUARANTINE, ARCHIVE}
        return [path.name for path in entries(self.path) if path.name not in names]

    # -- quarantine

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move `path` to quarantine/NAME.K and write the reason. Raises OSError if not moved."""
        self._check_may_change()
        _make_folder(self._quarantine_path)

        # the first K without an entry, and without the reason of a deleted one
        for k in itertools.count(1):
            target = self._quarantine_path / f"{path.name}.{k}"
            reason_file = _reason_file(target)
            if not os.path.lexists(target) and not os.path.lexists(reason_file):
                break

        _move(path, target)
        _write_note(reason_file, f"{utc_now()}\n{reason}\n")
        return target

    def quarantined(self) -> list[Quarantined]:
        """Return the entries of quarantine, by name."""
        quarantined: list[Quarantined] = []
        for path in self._quarantine_entries():
            reason = "no reason was recorded"
            with contextlib.suppress(OSError):
                note = _reason_file(path).read_text(errors="replace")
                # the first line is the time
                reason = note.partition("\n")[2].strip()
            quarantined.append(
                Quarantined(
                    path=path,
                    reason=reason,
                    bytes=tree_bytes(path),
                )
            )
        return quarantined

    def make_room(self, num_bytes: int) -> str | None:
        """Delete interrupted saves if needed; return why `num_bytes` still don't fit, or None."""
        if free_bytes(self.path) < num_bytes:
            freed = sum(map(self.discard, self._quarantined_saves()))
            if freed:
                logger.warning(f"deleted {freed:,} bytes of interrupted saves to make room")
        free = free_bytes(self.path)
        if free >= num_bytes:
            return None
        return f"no room in {self.path}: a checkpoint takes {num_bytes:,} bytes, {free:,} are free"

    def discard(self, path: Path) -> int:
        """Delete an entry of quarantine with its reason, or an archive; return the bytes freed."""
        self._check_may_change()
        freed = remove_tree(path)
        _reason_file(path).unlink(missing_ok=True)
        return freed

    def _quarantine_entries(self) -> list[Path]:
        paths = entries(self._quarantine_path)
        return [path for path in paths if not _IS_REASON.search(path.name)]

    def _quarantined_saves(self) -> list[Path]:
        """Return interrupted saves in quarantine, the oldest first, by mtime of their files."""

        def age_key(path: Path) -> tuple[int, Path]:
            times = [file.lstat().st_mtime_ns for file in _files(path)]
            return max(times, default=0), path

        saves = [path for path in self._quarantine_entries() if path.name.startswith(_SAVING)]
        return sorted(saves, key=age_key)

    # -- delete and replace

    def delete_step(self, step: int) -> int:
        """Delete step N; return the bytes freed. A kill leaves a complete step-N, or none."""
        self._check_may_change()
        deleting = self.step_path(step, _DELETING)
        remove_tree(deleting)  # of an earlier step N, whose deletion failed
        _move(self.step_path(step), deleting)
        return remove_tree(deleting)

    def replace_step(self, step: int) -> int:
        """Replace step N by `saving_path`; return the bytes freed. A kill leaves either of them."""
        self._check_may_change()
        final = self.step_path(step)
        replaced = self.step_path(step, _REPLACED)
        _move(final, replaced)
        try:
            _move(self.saving_path(step), final)
        except OSError:
            rename(replaced, final)  # back to the full checkpoint
            raise
        return remove_tree(replaced) - tree_bytes(final)

    def recover(self) -> list[str]:
        """Finish what a kill interrupted, under the run lock; return one log line per action.

        Quarantine keeps the newest interrupted save only. A failed deletion is only reported.
        """
        half_deleted = self._named(_DELETING).values()
        lines = [self._try_delete(path, "half deleted") for path in half_deleted]

        for step, replaced in self._named(_REPLACED).items():
            lines += self._finish_replacement(self.step_path(step), replaced)

        for saving in self.unfinished():
            try:
                target = self.quarantine(saving, INTERRUPTED)
                lines.append(f"{saving.name} is {INTERRUPTED}; it was moved to {target}")
            except OSError as error:
                # on a full disk the next save needs its bytes
                lines.append(f"{saving.name}: quarantine can't take it ({error.strerror})")
                lines.append(self._try_delete(saving, INTERRUPTED))

        for path in self._quarantined_saves()[:-1]:
            lines.append(self._try_delete(path, "an older interrupted save"))
        return lines

    def _finish_replacement(self, final: Path, replaced: Path) -> list[str]:
        """Delete the full checkpoint `replaced` if its weights are complete, else restore it."""
        lines: list[str] = []
        if os.path.lexists(final):
            try:
                verify(final)
                return [self._try_delete(replaced, f"now the weights in {final.name}")]
            except DamagedCheckpoint as error:
                target = self.quarantine(final, str(error))
                lines.append(f"{error}; it was moved to {target}")
        _move(replaced, final)
        lines.append(f"{final.name} was being replaced by its weights; the full one is restored")
        return lines

    def _try_delete(self, path: Path, description: str) -> str:
        try:
            freed = self.discard(path)
        except OSError as error:
            return f"{path}, {description}, can't be deleted: {error.strerror or error}"
        return f"{path.name}, {description}, was deleted ({freed:,} bytes)"

    # -- abandoned branches

    def archive_after(self, step: int, run: Path, reason: str) -> Path | None:
        """Move what the run did after `step` to RUN/archive/K-back-to-step-N; None if nothing.

        Under the run lock, after `recover`. Checkpoints are moved last, the newest first: a kill
        leaves the first steps of the old branch, and the same call moves the rest.
        """
        # folders step-N of results, and files step-N.NAME of holds
        later: list[Path] = []
        evals = run / EVALS
        for path in entries(evals) + entries(evals / HOLDS):
            evaluated_step = step_number(path.name.split(".")[0])
            if evaluated_step is not None and evaluated_step > step:
                later.append(path)

        later_steps = [later_step for later_step in self.steps() if later_step > step]
        later += map(self.step_path, reversed(later_steps))
        moves = [RunFolder(run).done_file, *later]
        return self._archive(run, f"back-to-step-{step}", reason, moves, later)

    def archive_all(self, run: Path, reason: str) -> Path | None:
        """Move the run's files to RUN/archive/K-before-a-fresh-start; None if there is nothing.

        Under the run lock, after `recover`. A kill leaves a run that can resume, or one without
        checkpoints whose log records them.
        """
        files = RunFolder(run)
        moves = [
            files.done_file,
            *map(self.step_path, reversed(self.steps())),
            self._quarantine_path,
            run / EVALS,
            *files.fresh_start,
        ]
        if files.log_file.is_file() and not files.log_file.stat().st_size:
            moves.remove(files.log_file)  # of a launch that did not start
        return self._archive(run, "before-a-fresh-start", reason, moves, moves)

    def archives(self, run: Path) -> list[Path]:
        """Return the archives of `archive_after` and `archive_all`, the oldest first."""
        paths = entries(run / ARCHIVE) + entries(self.path / ARCHIVE)
        return sorted(filter(_archive_number, paths), key=_archive_number)

    def _archive(
        self, run: Path, label: str, reason: str, moves: list[Path], needed: list[Path]
    ) -> Path | None:
        """Move the paths that exist, in this order; return None if none of `needed` exists."""
        if not any(map(os.path.lexists, needed)):
            return None
        self._check_may_change()
        numbers = map(_archive_number, self.archives(run))
        number = 1 + max(numbers, default=0)
        archive = run / ARCHIVE / f"{number}-{label}"
        _make_folder(archive)

        # Checkpoints stay on their file system, within which rename works: RUN/checkpoint may be a
        # link to another one.
        checkpoints = archive / self.path.name
        if self.path.is_dir() and self.path.stat().st_dev != archive.stat().st_dev:
            checkpoints = self.path / ARCHIVE / archive.name
        targets: dict[Path, Path] = {}
        for path in filter(os.path.lexists, moves):
            if path.parent == self.path:
                targets[path] = checkpoints / path.name
            else:
                targets[path] = archive / path.relative_to(run)

        # The note comes first, so that a user can undo moves that a kill interrupted.
        listing = [f"{source} -> {target}" for source, target in targets.items()]
        paragraphs = [
            f"{archive.name}, {utc_now()}",
            f"Why: {reason}",
            _ARCHIVE_NOTE,
            "\n".join(listing),
        ]
        _write_note(archive / "README.txt", "\n\n".join(paragraphs) + "\n")
        for source, target in targets.items():
            _make_folder(target.parent)
            _move(source, target)
        return archive


def step_number(name: str, prefix: str = "") -> int | None:
    """Return N if `name` is exactly `prefix`step-N, without leading zeros; else None."""
    match = re.fullmatch(rf"{re.escape(prefix)}step-(0|[1-9][0-9]{{0,17}})", name)
    return int(match[1]) if match else None


def entries(folder: Path) -> list[Path]:
    """Return the entries of `folder`, by name; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(folder.iterdir())
    return []


def _files(path: Path) -> list[Path]:
    """Return the files below `path`, or `path` itself if it is a file or a link."""
    if path.is_symlink() or not path.is_dir():
        return [path]
    files: list[Path] = []
    for folder, _, names in os.walk(path):
        files += [Path(folder, name) for name in names]
    return files


def tree_bytes(path: Path) -> int:
    """Return the total size of the files at and below `path`; links are not followed."""
    total = 0
    for file in _files(path):
        with contextlib.suppress(FileNotFoundError):
            total += file.lstat().st_size
    return total


def remove_tree(path: Path) -> int:
    """Delete a folder, a file or a link (not its target); return the bytes freed."""
    size = tree_bytes(path)
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)
    return size


def _move(source: Path, target: Path) -> None:
    """Rename durably; `target` does not exist or is an empty folder."""
    rename(source, target)
    for folder in dict.fromkeys((target.parent, source.parent)):
        fsync_folder(folder)


def _make_folder(folder: Path) -> None:
    """Create `folder` and its parents, durably."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def _reason_file(path: Path) -> Path:
    return path.with_name(path.name + _REASON)


def _write_note(path: Path, text: str) -> None:
    """Write a note about a move; a full disk must not prevent the move itself."""
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        logger.warning(f"{path} can't be written ({error.strerror}). Its text: {text.strip()}")


def _archive_number(archive: Path) -> int:
    """Return K of a name K-LABEL, else 0."""
    number = archive.name.partition("-")[0]
    return int(number) if number.isdecimal() and "-" in archive.name else 0

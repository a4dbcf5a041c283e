"""RUN/code/NNN/: the program's source as a run's launches by job scripts use it.

    code/001/             made by one rename, never changed
      canon_pretrain/     the package's *.py files
      slurm/lib.sh        what the job scripts share
      source_tree.json    what git said of the place that they are from (run/source_tree.py)
      manifest.json       each file's SHA-256

slurm/lib.sh takes one before a run's first launch, and puts the newest first on PYTHONPATH in every
later one (cluster/chain.py): whatever happens to the repository then changes no run. Files
are the user's alone, as those of launches/. No torch here.
"""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import canon_pretrain
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import (
    UnreadableFile,
    create_file,
    fsync_folder,
    read_bytes,
    read_json,
    sha256_file,
)
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.source_tree import KEPT, look_at_source

MANIFEST = "manifest.json"
SCRIPT = "slurm/lib.sh"


def newest_snapshot(run: RunFolder) -> Path | None:
    """RUN/code/NNN with the highest number; None without one."""
    numbers = [int(path.name) for path in run.code.glob("[0-9]*") if path.name.isdecimal()]
    return run.code / f"{max(numbers):03}" if numbers else None


def take_snapshot(run: RunFolder) -> Path:
    """Copy this program's source to the next RUN/code/NNN; the newest one where it is the same.

    Raises UserError where it can't be written.
    """
    package = Path(canon_pretrain.__file__).resolve().parent
    sources = {f"{package.name}/{p.relative_to(package).as_posix()}": p for p in _modules(package)}
    if (script := package.parent / SCRIPT).is_file():
        sources[SCRIPT] = script
    hashes = {name: sha256_file(path) for name, path in sources.items()}
    newest = newest_snapshot(run)
    if newest is not None and not _faults(newest, expected=hashes):
        return newest
    number = int(newest.name) + 1 if newest is not None else 1
    target = run.code / f"{number:03}"
    temporary = run.code / f".{target.name}.{os.getpid()}.tmp"
    tree = asdict(look_at_source(package / "__init__.py"))
    tree["patch"] = tree["patch"].decode(errors="surrogateescape")
    contents = {name: read_bytes(path) for name, path in sources.items()}
    contents[KEPT] = json.dumps(tree, indent=2).encode()
    contents[MANIFEST] = (json.dumps({"files": hashes}, indent=2) + "\n").encode()
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        for name, content in contents.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            with create_file(temporary / name, mode=0o600) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        temporary.chmod(0o700)
        os.rename(temporary, target)
        fsync_folder(run.code)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"the run's code can't be kept in {target}: {error.strerror}") from None
    return target


def check_snapshot(snapshot: Path) -> None:
    """Raise UserError unless `snapshot` is as it was written, and this user's own."""
    if faults := _faults(snapshot):
        raise UserError(
            f"{snapshot}, the code of the run's launches, is damaged: {'; '.join(faults[:5])}. Put "
            "it back, or take the code of this repository with --run.allow_changes code"
        )


def differences(snapshot: Path) -> list[str]:
    """The files of the package and slurm/lib.sh in which this program differs from `snapshot`."""
    hashes = _hashes(snapshot)
    root = Path(canon_pretrain.__file__).resolve().parent.parent
    names = {f"{p.relative_to(root).as_posix()}" for p in _modules(root / "canon_pretrain")}
    return [
        name
        for name in sorted(names | hashes.keys())
        if not (root / name).is_file() or sha256_file(root / name) != hashes.get(name)
    ]


def _modules(package: Path) -> Iterator[Path]:
    return (path for path in sorted(package.rglob("*.py")) if path.is_file())


def _hashes(snapshot: Path) -> dict[str, str]:
    files = read_json(snapshot / MANIFEST).get("files")
    if not isinstance(files, dict) or not files:
        raise UnreadableFile(snapshot / MANIFEST, "is damaged: it names no files")
    return files


def _faults(snapshot: Path, expected: dict[str, str] | None = None) -> list[str]:
    """What in `snapshot` is not as its manifest, or `expected`, has it. Compiled files don't count:
    Python writes them beside the modules, and reads those only that are newer than these."""
    try:
        info = os.lstat(snapshot)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return ["it is no folder of yours"]
        hashes = _hashes(snapshot)
    except (OSError, UnreadableFile) as error:
        return [str(error)]
    if expected is not None and hashes != expected:
        return ["another version"]
    found, faults = set(), []
    for folder, folders, names in os.walk(snapshot):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        for name in [*names, *(n for n in folders if (Path(folder) / n).is_symlink())]:
            path = Path(folder) / name
            relative = path.relative_to(snapshot).as_posix()
            if relative in (MANIFEST, KEPT):
                continue
            found.add(relative)
            try:
                as_written = not path.is_symlink() and sha256_file(path) == hashes.get(relative)
            except OSError:
                as_written = False
            if not as_written:
                faults.append(f"{relative} is not as written")
    return faults + [f"{name} is missing" for name in sorted(hashes.keys() - found)]

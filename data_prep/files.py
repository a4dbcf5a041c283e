"""Files on disk as inputs: found below what a user names, in an order that is never the disk's.

`sources.py` uses it for the source local and for mirrors of the hub's datasets. Paths of inputs are
relative to one root, so that a folder may move, and a mirror gives the same plan as a download.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from canon_pretrain.core.errors import UserError
from data_prep.plan import Input

# enough to see what kind of files they are
MAX_NAMED = 3


def natural_key(path: str) -> list[tuple[int, int, str]]:
    """A sort key in which chunk2 comes before chunk10."""
    pieces = re.findall(r"[0-9]+|[^0-9]+", path)
    return [(0, int(piece), "") if piece[0] in "0123456789" else (1, 0, piece) for piece in pieces]


def find_files(given: Sequence[Path]) -> tuple[list[Path], frozenset[Path]]:
    """All files named by, or below, `given` as absolute paths, and those named themselves.

    Hidden files and folders are left out below a folder; symbolic links are followed, since that is
    what a hub cache is made of, and never resolved, since their targets have no suffix. Raises
    UserError for a path that is not there, or a file that is reached twice.
    """
    found: dict[Path, Path] = {}
    named = set()
    for path in given:
        absolute = Path(os.path.abspath(path))
        if absolute.is_dir():
            files: Iterable[Path] = _walk(absolute)
        elif absolute.is_file():
            files = [absolute]
            named.add(absolute)
        else:
            raise UserError(f"--files {path}: no file or folder of this name")
        for file in files:
            if file in found:
                raise UserError(
                    f"--files {path}: {file} is already given by {found[file]}; name it once, or "
                    f"its documents would be in the stream twice"
                )
            found[file] = path
    return list(found), frozenset(named)


def _walk(root: Path) -> Iterator[Path]:
    seen = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_refuse):
        identity = os.stat(folder)
        if (identity.st_dev, identity.st_ino) in seen:
            raise UserError(
                f"--files {root}: {folder} is a link to a folder that was reached before; name the "
                f"folders that are meant"
            )
        seen.add((identity.st_dev, identity.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise UserError(f"{error.filename}: cannot be listed: {error.strerror}; every input is needed")


def match_tails(files: Iterable[Path], tail: Sequence[str]) -> tuple[Path, dict[str, Path]] | None:
    """The files whose last path components match the patterns of `tail`, below their one root.

    Shorter tails are tried where no file matches the whole, so the folder that holds the files does
    as well as the dataset's own. Returns (root, {path below root: file}), None without a match.
    Raises UserError where the matches have several roots: which of two copies is meant?
    """
    files = list(files)
    for first in range(len(tail)):
        patterns = [re.compile(pattern) for pattern in tail[first:]]
        matches: dict[Path, dict[str, Path]] = {}
        for file in files:
            last = file.parts[-len(patterns) :]
            if len(last) == len(patterns) and all(
                pattern.fullmatch(part) for pattern, part in zip(patterns, last, strict=True)
            ):
                root = file.parents[len(patterns) - 1]
                matches.setdefault(root, {})["/".join(last)] = file
        if len(matches) > 1:
            raise UserError(
                f"--files: several folders hold {'/'.join(tail[first:])}: "
                f"{name_some(str(root) for root in matches)}; name the one that is meant"
            )
        if matches:
            return matches.popitem()
    return None


def to_inputs(root: Path, files: dict[str, Path], hashes: dict[str, str]) -> tuple[Input, ...]:
    """Inputs in natural order, with the sizes that the files have. Raises UserError."""
    paths = sorted(files, key=lambda path: (natural_key(path), path))
    inputs = []
    for path in paths:
        try:
            size = files[path].stat().st_size
        except OSError as error:
            raise UserError(
                f"{root / path}: cannot be read: {error.strerror}; every input is needed"
            ) from None
        inputs.append(Input(path, size, hashes.get(path, "")))
    return tuple(inputs)


def name_some(names: Iterable[str]) -> str:
    """The first few of the names, and how many more there are."""
    names = sorted(names, key=natural_key)
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

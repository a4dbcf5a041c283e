"""The texts that shards are made from: which files a source has, in which order and units.

Paths of inputs are relative to one root and their order is never the disk's, so that a folder may
move, and a mirror makes the same plan as a download.
"""

import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.data import hub
from data_prep.folder import log
from data_prep.plan import Input
from data_prep.readers import SUFFIXES, TOPICS

STDLIB = "stdlib"
LOCAL = "local"
INPUT_GROUP_BYTES = 2_000_000
TEXT_FIELD = "text"
HUB_HINTS = hub.HubHints(
    revision="give --revision a commit, tag or branch that has it",
    without_hub="or give a copy of the files with --files FOLDER",
)
ON_DISK = "files"
"""The version of inputs whose commit is not known."""
EXCLUDED_FOLDERS = "site-packages dist-packages test tests idle_test __pycache__".split()
MAX_NAMED = 3


@dataclass(frozen=True)
class HubSource:
    """A dataset of the hub; `tail` has a pattern for each component of a file's path."""

    repo: str
    commit: str
    folder: str
    tail: tuple[str, ...]
    num_files: int
    group_field: str
    unit_files: int


HUB_SOURCES = {
    "fineweb-edu": HubSource(
        repo="HuggingFaceFW/fineweb-edu",
        commit="87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        folder="sample/100BT",
        tail=("sample", "100BT", r"[0-9]{3}_[0-9]{5}\.parquet"),
        num_files=140,
        group_field="dump",
        unit_files=1,
    ),
    "slimpajama": HubSource(
        repo="cerebras/SlimPajama-627B",
        commit="2d0accdd58c5d5511943ca1f5ff0e3eb5e293543",
        folder="train",
        tail=("train", "chunk[0-9]+", r"example_train_[0-9]+\.jsonl\.zst"),
        num_files=59_166,
        group_field="meta.redpajama_set_name",
        unit_files=24,
    ),
}
SOURCES = (STDLIB, *HUB_SOURCES, LOCAL)


@dataclass(frozen=True)
class Selection:
    """A build's inputs in order, which may be yet to fetch, and how they are read and cut."""

    source: str
    version: str
    root: Path
    inputs: tuple[Input, ...]
    text_field: str = TEXT_FIELD
    group_field: str | None = None
    unit_files: int | None = None
    unit_bytes: int | None = None


def select(
    source: str,
    files: Sequence[Path] = (),
    *,
    revision: str | None = None,
    text_field: str | None = None,
) -> Selection:
    """Return what --source, --files, --revision and --text-field name. Raises UserError."""
    check_choice("--source", source, SOURCES)
    for option, value, takers in (
        ("--text-field", text_field, (LOCAL,)),
        ("--revision", revision, tuple(HUB_SOURCES)),
        ("--files", files or None, (*HUB_SOURCES, LOCAL)),
    ):
        if value is not None and source not in takers:
            raise UserError(
                "todo.sources", f"{option} with --source {source}: only {', '.join(takers)} take it"
            )
    if source == STDLIB:
        return _select_stdlib()
    if source == LOCAL:
        return _select_local(files, text_field or TEXT_FIELD)
    known = HUB_SOURCES[source]
    if files:
        version, root, inputs = _list_mirror(source, known, files, revision)
    else:
        version, root, inputs = _list_hub(source, known, revision or known.commit)
    if len(inputs) != known.num_files:
        log(f"{source}: {len(inputs):,} files, the whole dataset has {known.num_files:,}")
    group, unit_files = known.group_field, known.unit_files
    return Selection(source, version, root, inputs, group_field=group, unit_files=unit_files)


def _select_stdlib() -> Selection:
    """The help topics, then the .py files of the library without its tests."""
    root = source_root(STDLIB)
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            found[path.relative_to(root).as_posix()] = path
    if not found:
        raise UserError(
            "todo.sources",
            f"{root}: no .py sources here; use a Python that has its library as files",
        )
    inputs = sorted(to_inputs(found, {}), key=lambda known: known.path != TOPICS)
    version = f"python {platform.python_version()}"
    return Selection(STDLIB, version, root, tuple(inputs), unit_bytes=INPUT_GROUP_BYTES)


def _select_local(files: Sequence[Path], text_field: str) -> Selection:
    if not files:
        raise UserError("todo.sources", f"--source {LOCAL} needs --files FILE_OR_FOLDER ...")
    found, named = find_files(files)
    others = [path for path in found if not path.name.endswith(SUFFIXES)]
    readable = [path for path in found if path.name.endswith(SUFFIXES)]
    if not readable or named.intersection(others):
        raise UserError(
            "todo.sources",
            f"--files {summarize_paths(named.intersection(others) or files)}: no file of a known "
            f"format; expected one of: {', '.join(SUFFIXES)}",
        )
    if others:
        log(f"{LOCAL}: {len(others):,} files of other formats skipped: {summarize_paths(others)}")
    root = Path(os.path.commonpath([path.parent for path in readable]))
    inputs = to_inputs({path.relative_to(root).as_posix(): path for path in readable}, {})
    return Selection(LOCAL, ON_DISK, root, inputs, text_field, unit_bytes=INPUT_GROUP_BYTES)


def _list_hub(source: str, known: HubSource, commit: str) -> tuple[str, Path, tuple[Input, ...]]:
    """The version, root and inputs of a dataset on the hub."""
    if not hub.COMMIT.fullmatch(commit):
        commit = hub.find_commit(known.repo, commit, HUB_HINTS)
    root = hub.snapshot_folder(known.repo, commit)
    pattern = re.compile("/".join(known.tail))
    inputs = [
        Input(*file)
        for file in hub.list_files(known.repo, commit, known.folder, HUB_HINTS)
        if pattern.fullmatch(file.path)
    ]
    if not inputs:
        raise UserError(
            "todo.sources",
            f"{known.repo}@{commit[:12]}: no files {'/'.join(known.tail)} in it; give the "
            f"--revision of a commit that has them, or leave it out",
        )
    log(f"{source}: commit {commit[:12]}, fetched when needed into {root}")
    return commit, root, tuple(sorted(inputs, key=lambda file: natural_order(file.path)))


def _list_mirror(
    source: str, known: HubSource, files: Sequence[Path], revision: str | None
) -> tuple[str, Path, tuple[Input, ...]]:
    """The version, root and inputs of a copy on disk."""
    if revision is not None and not hub.COMMIT.fullmatch(revision):
        raise UserError(
            "todo.sources",
            f"--revision {revision} with --files: a copy on disk has no branches or tags; give the "
            f"40-digit commit that it was made from, or leave --revision out",
        )
    found, named = find_files(files)
    root, paths = match_tails(found, known.tail)
    if wrong := named - set(paths.values()) if paths else files:
        raise UserError(
            "todo.sources",
            f"--files {summarize_paths(wrong)}: no files {'/'.join(known.tail)} of {source}; give "
            f"--source {LOCAL} for other files",
        )
    for literal in (name for name in known.tail[:-1] if "[" not in name):
        shape = re.sub("[0-9]+", "[0-9]+", literal)  # that of the folder's siblings
        siblings = [name for name in root.parts if re.fullmatch(shape, name) and name != literal]
        if siblings:
            raise UserError(
                "todo.sources",
                f"--files {root}: this is {siblings[0]} by its name, {source} is {literal}; give "
                f"that folder, or --source {LOCAL} for other files",
            )
    commit, hashes = hub.known_hashes(root, paths)
    if revision and commit and commit != revision:
        raise UserError(
            "todo.sources",
            f"--revision {revision}: the files below {root} were fetched at commit {commit}; leave "
            f"--revision out, or fetch the other one",
        )
    return revision or commit or ON_DISK, root, to_inputs(paths, hashes)


def fetch(source: str, version: str, root: Path, inputs: Sequence[Input]) -> None:
    """Make sure that the inputs are on disk, downloading what the hub's cache does not hold yet."""
    missing = [known for known in inputs if not (root / known.path).exists()]
    if not missing:
        return
    hub_source = HUB_SOURCES.get(source)
    if hub_source is None or not hub.is_cached_snapshot(root, hub_source.repo, version):
        raise UserError(
            "todo.sources", f"{root / missing[0].path}: is missing; every input is needed"
        )
    files = [hub.HubFile(known.path, known.size, known.sha256) for known in missing]
    hub.fetch(hub_source.repo, version, root, files, HUB_HINTS)


def source_root(source: str) -> Path:
    """The folder of stdlib's inputs."""
    return Path(os.__file__).resolve().parent


def natural_order(path: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key in which chunk2 comes before chunk10."""
    words = re.findall(r"[0-9]+|[^0-9]+", path)
    return [(0, int(w), "") if w[0] in "0123456789" else (1, 0, w) for w in words], path


def find_files(given: Sequence[Path]) -> tuple[list[Path], frozenset[Path]]:
    """Return all files named by, or below, `given` as absolute paths, and those named themselves.

    Hidden ones are left out below a folder. Links are followed, since a hub's cache is made of
    them, and never resolved, since their targets have no suffix. Raises UserError.
    """
    found: dict[Path, Path] = {}
    named = set()
    for path in given:
        absolute = Path(os.path.abspath(path))
        if absolute.is_file():
            named.add(absolute)
        elif not absolute.is_dir():
            raise UserError("todo.sources", f"--files {path}: no file or folder of this name")
        for file in [absolute] if absolute in named else _walk(absolute):
            if file in found:
                raise UserError(
                    "todo.sources", f"--files {path}: {file} is already given by {found[file]}"
                )
            found[file] = path
    return list(found), frozenset(named)


def _walk(root: Path) -> Iterator[Path]:
    seen = set()

    def refuse(error: OSError) -> None:
        raise UserError("todo.sources", f"{error.filename}: cannot be listed: {error.strerror}")

    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        if (identity := os.path.realpath(folder)) in seen:
            raise UserError(
                "todo.sources", f"--files {root}: {folder} was reached before, through another link"
            )
        seen.add(identity)
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def match_tails(files: Sequence[Path], tail: Sequence[str]) -> tuple[Path, dict[str, Path]]:
    """Return the one root of the files that end as `tail` does, and {path below it: file}.

    Shorter tails are tried where none matches the whole. Raises UserError for several roots.
    """
    for first in range(len(tail)):
        shape = "/".join(tail[first:])
        matches: dict[Path, dict[str, Path]] = {}
        for file in files:
            if match := re.fullmatch(f"(.*/)({shape})", str(file)):
                matches.setdefault(Path(match[1]), {})[match[2]] = file
        if len(matches) > 1:
            raise UserError(
                "todo.sources",
                f"--files: several folders hold {shape}: {summarize_paths(matches)}; name one of "
                f"them",
            )
        if matches:
            return matches.popitem()
    return Path(), {}


def to_inputs(files: Mapping[str, Path], hashes: Mapping[str, str]) -> tuple[Input, ...]:
    """Return inputs in natural order, with the sizes that the files have. Raises OSError."""
    paths = sorted(files, key=natural_order)
    return tuple(Input(p, files[p].stat().st_size, hashes.get(p, "")) for p in paths)


def summarize_paths(paths: Iterable[Path]) -> str:
    """The first few of the paths, and how many more there are."""
    names = sorted(map(str, paths), key=natural_order)
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

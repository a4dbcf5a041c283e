"""Sources of text: which files they have, in which order, and how many per input group.

Paths are relative to one root and their order does not depend on the disk, so that a folder may
move, and a copy has the same plan as a download.
"""

import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.data import hub
from data_prep.folder import log
from data_prep.formats import SUFFIXES, check_file, first_object, has_rows, suffix_of
from data_prep.plan import Input
from data_prep.readers import TOPICS, has_field

STDLIB = "stdlib"
LOCAL = "local"
INPUT_GROUP_BYTES = 2_000_000
TEXT_FIELD = "text"
FILES_OPTION = "--files"
HUB_HINTS = hub.HubHints(
    revision="pass another commit, tag or branch with --revision",
    without_hub="or pass a copy of the files with --files FOLDER",
)
OTHER_FILES = f"pass --source {LOCAL} for other files"
ON_DISK = "files"
"""The version of inputs of unknown commit."""
EXCLUDED_FOLDERS = "site-packages dist-packages test tests idle_test __pycache__".split()
MAX_NAMED = 3


@dataclass(frozen=True)
class HubSource:
    """A dataset on the hub; `tail` has one regex per component of a file's path."""

    repo: str
    commit: str
    folder: str
    tail: tuple[str, ...]
    num_files: int
    group_field: str | None
    unit_files: int


TINY_STORIES = HubSource(
    repo="roneneldan/TinyStories",
    commit="f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
    folder="data",
    tail=("data", r"train-[0-9]{5}-of-[0-9]{5}-[0-9a-f]{16}\.parquet"),
    num_files=4,
    group_field=None,
    unit_files=1,
)
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
    "tinystories": TINY_STORIES,
    "tinystories-validation": replace(
        TINY_STORIES,
        tail=("data", r"validation-[0-9]{5}-of-[0-9]{5}-[0-9a-f]{16}\.parquet"),
        num_files=1,
    ),
}
SOURCES = (STDLIB, *HUB_SOURCES, LOCAL)


@dataclass(frozen=True)
class SourceOptions:
    """The options of a build that select its inputs; `files_option` is what errors call --files."""

    source: str
    files: Sequence[Path] = ()
    revision: str | None = None
    text_field: str | None = None
    text_suffixes: Sequence[str] = ()
    files_option: str = FILES_OPTION

    @property
    def is_download(self) -> bool:
        """Whether the inputs are the hub's, not a copy of them on disk."""
        return self.source in HUB_SOURCES and not self.files


class Listing(NamedTuple):
    """Absolute paths of files, and of those that the user named, rather than a folder of them."""

    paths: list[Path]
    named_files: frozenset[Path]

    @property
    def existing(self) -> list[Path]:
        """The paths that are not dangling links."""
        return [path for path in self.paths if path.exists()]


@dataclass(frozen=True)
class Selection:
    """A build's inputs in order, some not yet downloaded, and how to read and group them."""

    source: str
    version: str
    root: Path
    inputs: tuple[Input, ...]
    text_field: str = TEXT_FIELD
    group_field: str | None = None
    unit_files: int | None = None
    unit_bytes: int | None = None


def check_options(options: SourceOptions) -> None:
    """Raise UserError for options that do not apply to the source."""
    check_choice("--source", options.source, SOURCES)

    # An option without an effect on the source is an error.
    for option, is_set, allowed_sources in (
        ("--text-field", options.text_field is not None, (LOCAL,)),
        ("--text-suffixes", bool(options.text_suffixes), (LOCAL,)),
        ("--revision", options.revision is not None, tuple(HUB_SOURCES)),
        ("--files", bool(options.files), (*HUB_SOURCES, LOCAL)),
    ):
        if is_set and options.source not in allowed_sources:
            raise UserError(
                "option.conflict",
                f"{option} with --source {options.source}: "
                f"it is for {', '.join(allowed_sources)} only",
                option=option,
            )


def select(options: SourceOptions) -> Selection:
    """Return a build's inputs; those of a download are not on disk yet. Raises UserError."""
    check_options(options)
    if options.source == STDLIB:
        return _select_stdlib()
    if options.source == LOCAL:
        return _select_local(options)

    selection = _select_download(options) if options.is_download else _select_mirror(options)

    # A copy may have some of the files only.
    num_files = HUB_SOURCES[options.source].num_files
    num_present = len(selection.inputs)
    if num_present != num_files:
        log(f"{options.source}: {num_present:,} of {num_files:,} files")
    return selection


def _select_stdlib() -> Selection:
    """Select the help topics, then the .py files of the library without tests."""
    root = stdlib_root()
    files = {}
    for folder, subfolders, names in os.walk(root):
        # os.walk enters what is left in this list
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                files[path.relative_to(root).as_posix()] = path
    if not files:
        raise UserError(
            "input.none", f"{root}: no .py files; use a Python with its library as files", path=root
        )

    inputs = sorted(to_inputs(files, {}), key=lambda source_input: source_input.path != TOPICS)
    return Selection(
        source=STDLIB,
        version=f"python {platform.python_version()}",
        root=root,
        inputs=tuple(inputs),
        unit_bytes=INPUT_GROUP_BYTES,
    )


def _select_local(options: SourceOptions) -> Selection:
    """Select the files of known formats. Raises UserError for another that the user named."""
    if not options.files:
        raise UserError(
            "option.missing", f"--source {LOCAL} needs --files FILE_OR_FOLDER ...", option="--files"
        )
    listing = find_files(options)
    dangling = set(listing.paths).difference(listing.existing)
    if dangling:
        log(f"{LOCAL}: skipped {len(dangling):,} dangling links: {summarize_paths(dangling)}")

    # Every file that the user named must be read; of a folder, at least one.
    readable, others = divide_files(listing, options)
    unknown: Collection[Path] = listing.named_files.intersection(others)
    if not readable:
        unknown = others or options.files
    if unknown:
        raise _unknown_format(unknown, options)
    if others:
        log(f"{LOCAL}: skipped {len(others):,} files of other formats: {summarize_paths(others)}")

    root = Path(os.path.commonpath([path.parent for path in readable]))
    return Selection(
        source=LOCAL,
        version=ON_DISK,
        root=root,
        inputs=to_inputs({path.relative_to(root).as_posix(): path for path in readable}, {}),
        text_field=options.text_field or TEXT_FIELD,
        unit_bytes=INPUT_GROUP_BYTES,
    )


def divide_files(listing: Listing, options: SourceOptions) -> tuple[list[Path], list[Path]]:
    """Return the existing files that are read, and those that are not. Raises UserError.

    A .json is read if it is lines of JSON objects, or as text if `text_suffixes` has it. Unless the
    user named it, its first object must have the text field if other files are read: it may
    describe them.
    """
    text_field = options.text_field or TEXT_FIELD
    existing = listing.existing
    suffixes_of_text = tuple(suffix.lower() for suffix in options.text_suffixes)
    readable = []
    lines_of_json = []
    for path in existing:
        suffix = suffix_of(path.name)
        if path.name.lower().endswith(suffixes_of_text):
            readable.append(path)
        elif suffix == ".json":
            row = first_object(path)
            if row:
                lines_of_json.append(path)
                if path in listing.named_files or has_field(row, text_field):
                    readable.append(path)
        elif suffix:
            readable.append(path)

    # Without other files, those of JSON describe nothing: they are the data.
    readable = readable or lines_of_json
    readable_set = set(readable)
    return readable, [path for path in existing if path not in readable_set]


def _unknown_format(paths: Iterable[Path], options: SourceOptions) -> UserError:
    """Return the error for files of formats that are not read."""
    expected = ", ".join((*SUFFIXES, *options.text_suffixes))
    if any(suffix_of(path.name) == ".json" for path in paths):
        advice = "a .json must have an object a line: convert a list with `jq -c '.[]' OLD > NEW`"
    else:
        advice = "--text-suffixes .md .rst reads other files as text"
    return UserError(
        "input.unknown_format",
        f"{options.files_option} {summarize_paths(paths)}: unknown format; "
        f"expected one of: {expected}; {advice}",
    )


def check_formats(selection: Selection) -> None:
    """Raise UserError if a text of the user is no text; files of rows are checked when read."""
    if selection.source != LOCAL:
        return
    for source_input in selection.inputs:
        path = selection.root / source_input.path
        if not has_rows(path):
            check_file(path)


def _select_download(options: SourceOptions) -> Selection:
    """Select the files of a dataset on the hub, which are downloaded when they are needed."""
    hub_source = HUB_SOURCES[options.source]
    commit = options.revision or hub_source.commit
    if not hub.COMMIT.fullmatch(commit):  # a branch or tag
        commit = hub.find_commit(hub_source.repo, commit, HUB_HINTS)

    # The files of the commit that have the dataset's paths, with the hub's hashes.
    root = hub.snapshot_folder(hub_source.repo, commit)
    shape = "/".join(hub_source.tail)
    inputs = [
        Input(*file)
        for file in hub.list_files(hub_source.repo, commit, hub_source.folder, HUB_HINTS)
        if re.fullmatch(shape, file.path)
    ]
    if not inputs:
        raise UserError(
            "input.none",
            f"{hub_source.repo}@{commit[:12]}: no files {shape}; {HUB_HINTS.revision}",
        )

    # In the order of a copy on disk, so that the plans are the same.
    inputs.sort(key=lambda source_input: natural_order(source_input.path))
    log(f"{options.source}: commit {commit[:12]}, downloaded when needed into {root}")
    return _hub_selection(options.source, commit, root, tuple(inputs))


def _hub_selection(source: str, version: str, root: Path, inputs: tuple[Input, ...]) -> Selection:
    return Selection(
        source=source,
        version=version,
        root=root,
        inputs=inputs,
        group_field=HUB_SOURCES[source].group_field,
        unit_files=HUB_SOURCES[source].unit_files,
    )


def _select_mirror(options: SourceOptions) -> Selection:
    """Select the files of a copy on disk. Raises UserError for files of another dataset."""
    source = options.source
    revision = options.revision
    tail = HUB_SOURCES[source].tail
    if revision is not None and not hub.COMMIT.fullmatch(revision):
        raise UserError(
            "option.conflict",
            f"--revision {revision} with --files: pass the copy's 40-digit commit, or none",
            option="--revision",
        )

    # Files with the dataset's paths; others may be next to them, but not named by the user.
    listing = find_files(options)
    root, paths = match_tails(listing.paths, tail)
    wrong_files: Collection[Path] = listing.named_files.difference(paths.values())
    if not paths:
        wrong_files = options.files
    if wrong_files:
        raise UserError(
            "input.wrong_files",
            f"--files {summarize_paths(wrong_files)}: no files {'/'.join(tail)} of {source}; "
            f"{OTHER_FILES}",
        )

    # The root must not be below a similar folder, such as sample/10BT instead of sample/100BT.
    for folder in tail[:-1]:
        if "[" in folder:  # a pattern, no name
            continue
        similar_name = re.sub("[0-9]+", "[0-9]+", folder)
        for name in root.parts:
            if name != folder and re.fullmatch(similar_name, name):
                raise UserError(
                    "input.wrong_files",
                    f"--files {root}: is {name}, {source} is {folder}; {OTHER_FILES}",
                )

    # A copy in the hub's cache knows its commit.
    commit, hashes = hub.known_hashes(root, paths)
    if revision and commit and commit != revision:
        raise UserError(
            "option.conflict",
            f"--revision {revision}: the files below {root} are of commit {commit}",
            option="--revision",
        )
    return _hub_selection(source, revision or commit or ON_DISK, root, to_inputs(paths, hashes))


def fetch(source: str, version: str, root: Path, inputs: Sequence[Input]) -> None:
    """Download the inputs that are not on disk. Raises UserError."""
    missing = [source_input for source_input in inputs if not (root / source_input.path).exists()]
    if not missing:
        return

    # Only the folder of this version in the hub's cache is downloaded into.
    hub_source = HUB_SOURCES.get(source)
    if hub_source is None or not hub.is_cached_snapshot(root, hub_source.repo, version):
        path = root / missing[0].path
        raise UserError("input.unreadable", f"{path}: is missing; restore it", path=path)
    files = [
        hub.HubFile(source_input.path, source_input.size, source_input.sha256)
        for source_input in missing
    ]
    hub.fetch(hub_source.repo, version, root, files, HUB_HINTS)


def stdlib_root() -> Path:
    """Return the folder of stdlib's inputs."""
    return Path(os.__file__).resolve().parent


def natural_order(path: str) -> tuple[list[Any], str]:
    """Return a sort key by which chunk2 comes before chunk10."""
    key: list[Any] = re.split("([0-9]+)", path)  # text, digits, text, ..., the first maybe empty
    key[1::2] = map(int, key[1::2])
    return key, path


def find_files(options: SourceOptions) -> Listing:
    """List all files in or below `options.files`. Raises UserError.

    Hidden files below a folder are skipped. Links are followed, because the hub's cache consists of
    them, but not resolved, because their targets have no suffix; some may dangle.
    """
    origins: dict[Path, Path] = {}  # by file: the path of --files that led to it
    named_files = set()
    for path in options.files:
        absolute = Path(os.path.abspath(path))
        files: Iterable[Path]
        if absolute.is_file():
            named_files.add(absolute)
            files = [absolute]
        elif absolute.is_dir():
            files = _walk(absolute, options.files_option)
        else:
            raise UserError(
                "input.none", f"{options.files_option} {path}: does not exist", path=path
            )

        # A file in two inputs would be trained on twice.
        for file in files:
            if file in origins:
                raise UserError(
                    "input.given_twice",
                    f"{options.files_option} {path}: {file} was already found by {origins[file]}",
                    path=file,
                )
            origins[file] = path
    return Listing(list(origins), frozenset(named_files))


def _walk(root: Path, option: str) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden. Raises UserError."""

    def raise_user_error(error: OSError) -> None:
        raise UserError(
            "input.unreadable",
            f"{error.filename}: cannot be listed: {error.strerror}",
            path=error.filename,
        )

    real_folders = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=raise_user_error):
        real_folder = os.path.realpath(folder)
        if real_folder in real_folders:
            raise UserError(
                "input.given_twice",
                f"{option} {root}: {folder} is reached twice, through links; remove the link, "
                "or pass the folders separately",
                path=Path(folder),
            )
        real_folders.add(real_folder)

        # os.walk enters what is left in this list
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(folder, name)


def match_tails(files: Sequence[Path], tail: Sequence[str]) -> tuple[Path, dict[str, Path]]:
    """Return the root of the files whose paths end with `tail`, and {path below it: file}.

    Try shorter tails if no file matches: the copy may be of a subfolder. Raises UserError for
    several roots.
    """
    for num_left_out in range(len(tail)):
        # the root of a file is what is before the match
        shape = "/".join(tail[num_left_out:])
        files_by_root: dict[Path, dict[str, Path]] = {}
        for file in files:
            match = re.fullmatch(f"(.*/)({shape})", str(file))
            if match:
                files_by_root.setdefault(Path(match[1]), {})[match[2]] = file

        # Several copies of the dataset, or samples of it: none of them is guessed.
        if len(files_by_root) > 1:
            raise UserError(
                "input.wrong_files",
                f"--files: several folders have {shape}: {summarize_paths(files_by_root)}; "
                "pass one of them",
            )
        if files_by_root:
            return files_by_root.popitem()
    return Path(), {}


def to_inputs(files: Mapping[str, Path], hashes: Mapping[str, str]) -> tuple[Input, ...]:
    """Return inputs in natural order, with the sizes that the files have. Raises OSError."""
    return tuple(
        Input(path, files[path].stat().st_size, hashes.get(path, ""))
        for path in sorted(files, key=natural_order)
    )


def summarize_paths(paths: Iterable[Path]) -> str:
    """Return the first few of the paths, and how many more there are."""
    names = sorted(map(str, paths), key=natural_order)
    text = ", ".join(names[:MAX_NAMED])
    num_more = len(names) - MAX_NAMED
    return f"{text} and {num_more} more" if num_more > 0 else text

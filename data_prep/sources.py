"""Sources of text: which files they have, in which order, and how many per input group.

Paths are relative to one root and their order does not depend on the disk, so that a folder may
move, and a copy has the same plan as a download.
"""

import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

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
    """A build's inputs in order, some not yet downloaded, and how to read and group them."""

    source: str
    version: str
    root: Path
    inputs: tuple[Input, ...]
    text_field: str = TEXT_FIELD
    group_field: str | None = None
    unit_files: int | None = None
    unit_bytes: int | None = None


def check_options(
    source: str,
    files: Sequence[Path] = (),
    *,
    revision: str | None = None,
    text_field: str | None = None,
    text_suffixes: Sequence[str] = (),
) -> None:
    """Raise UserError for options of these names that do not fit together."""
    check_choice("--source", source, SOURCES)
    for option, is_set, allowed_sources in (
        ("--text-field", text_field is not None, (LOCAL,)),
        ("--text-suffixes", bool(text_suffixes), (LOCAL,)),
        ("--revision", revision is not None, tuple(HUB_SOURCES)),
        ("--files", bool(files), (*HUB_SOURCES, LOCAL)),
    ):
        if is_set and source not in allowed_sources:
            raise UserError(
                "option.conflict",
                f"{option} with --source {source}: it is for {', '.join(allowed_sources)} only",
                option=option,
            )


def select(
    source: str,
    files: Sequence[Path] = (),
    *,
    revision: str | None = None,
    text_field: str | None = None,
    text_suffixes: Sequence[str] = (),
    files_option: str = FILES_OPTION,
) -> Selection:
    """Return the inputs of the options of these names; `files_option` is what errors name.

    Raises UserError.
    """
    check_options(
        source, files, revision=revision, text_field=text_field, text_suffixes=text_suffixes
    )
    if source == STDLIB:
        return _select_stdlib()
    if source == LOCAL:
        return _select_local(files, text_field or TEXT_FIELD, text_suffixes, files_option)
    hub_source = HUB_SOURCES[source]
    if files:
        selection = _select_mirror(source, hub_source, files, revision)
    else:
        selection = _select_hub(source, hub_source, revision or hub_source.commit)
    if len(selection.inputs) != hub_source.num_files:
        log(f"{source}: {len(selection.inputs):,} of {hub_source.num_files:,} files")
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
        STDLIB,
        f"python {platform.python_version()}",
        root,
        tuple(inputs),
        unit_bytes=INPUT_GROUP_BYTES,
    )


def _select_local(
    files: Sequence[Path], text_field: str, text_suffixes: Sequence[str], files_option: str
) -> Selection:
    """Select the files of known formats. Raises UserError for another that the user named."""
    if not files:
        raise UserError(
            "option.missing", f"--source {LOCAL} needs --files FILE_OR_FOLDER ...", option="--files"
        )
    listed, named_files = find_files(files, files_option)
    existing = [path for path in listed if path.exists()]
    dangling = set(listed).difference(existing)
    if dangling:
        log(f"{LOCAL}: skipped {len(dangling):,} dangling links: {summarize_paths(dangling)}")

    # Every file that the user named must be read; of a folder, at least one.
    readable, others = divide_files(existing, named_files, text_field, text_suffixes)
    unknown = named_files.intersection(others) if readable else others or files
    if unknown:
        raise _unknown_format(unknown, text_suffixes, files_option)
    if others:
        log(f"{LOCAL}: skipped {len(others):,} files of other formats: {summarize_paths(others)}")

    root = Path(os.path.commonpath([path.parent for path in readable]))
    inputs = to_inputs({path.relative_to(root).as_posix(): path for path in readable}, {})
    return Selection(LOCAL, ON_DISK, root, inputs, text_field, unit_bytes=INPUT_GROUP_BYTES)


def divide_files(
    paths: Sequence[Path], named_files: Set[Path], text_field: str, text_suffixes: Sequence[str]
) -> tuple[list[Path], list[Path]]:
    """Return the files that are read, and the others.

    A .json is read if it is lines of JSON objects, or as text if `text_suffixes` have it. Unless
    the user named it (`named_files`), its first object must have the `text_field` if other files
    are read: it may describe them.
    """
    suffixes_of_text = tuple(suffix.lower() for suffix in text_suffixes)
    readable = []
    lines_of_json = []
    for path in paths:
        suffix = suffix_of(path.name)
        if suffixes_of_text and path.name.lower().endswith(suffixes_of_text):
            readable.append(path)
        elif suffix == ".json":
            row = first_object(path)
            if row:
                lines_of_json.append(path)
                if path in named_files or has_field(row, text_field):
                    readable.append(path)
        elif suffix:
            readable.append(path)

    readable = readable or lines_of_json
    readable_set = set(readable)
    return readable, [path for path in paths if path not in readable_set]


def _unknown_format(
    paths: Iterable[Path], text_suffixes: Sequence[str], files_option: str
) -> UserError:
    """Return the error for files of formats that are not read."""
    expected = ", ".join((*SUFFIXES, *text_suffixes))
    if any(suffix_of(path.name) == ".json" for path in paths):
        advice = "a .json must have an object a line: convert a list with `jq -c '.[]' OLD > NEW`"
    else:
        advice = "--text-suffixes .md .rst reads other files as text"
    return UserError(
        "input.unknown_format",
        f"{files_option} {summarize_paths(paths)}: unknown format; expected one of: {expected}; "
        f"{advice}",
    )


def check_formats(selection: Selection) -> None:
    """Raise UserError if a text of the user is no text; files of rows are checked when read."""
    if selection.source != LOCAL:
        return
    for source_input in selection.inputs:
        path = selection.root / source_input.path
        if not has_rows(path):
            check_file(path)


def _select_hub(source: str, hub_source: HubSource, commit: str) -> Selection:
    """Select the files of a dataset on the hub; `commit` may be a branch or tag."""
    if not hub.COMMIT.fullmatch(commit):
        commit = hub.find_commit(hub_source.repo, commit, HUB_HINTS)
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
    inputs.sort(key=lambda source_input: natural_order(source_input.path))
    log(f"{source}: commit {commit[:12]}, downloaded when needed into {root}")
    return _hub_selection(source, commit, root, tuple(inputs))


def _hub_selection(source: str, version: str, root: Path, inputs: tuple[Input, ...]) -> Selection:
    return Selection(
        source,
        version,
        root,
        inputs,
        group_field=HUB_SOURCES[source].group_field,
        unit_files=HUB_SOURCES[source].unit_files,
    )


def _select_mirror(
    source: str, hub_source: HubSource, files: Sequence[Path], revision: str | None
) -> Selection:
    """Select the files of a copy on disk. Raises UserError for files of another dataset."""
    if revision is not None and not hub.COMMIT.fullmatch(revision):
        raise UserError(
            "option.conflict",
            f"--revision {revision} with --files: pass the copy's 40-digit commit, or none",
            option="--revision",
        )

    # Files with the dataset's paths; others may be next to them, but not named by the user.
    listed, named_files = find_files(files)
    root, paths = match_tails(listed, hub_source.tail)
    wrong_files = named_files.difference(paths.values()) if paths else files
    if wrong_files:
        raise UserError(
            "input.wrong_files",
            f"--files {summarize_paths(wrong_files)}: no files {'/'.join(hub_source.tail)} of "
            f"{source}; {OTHER_FILES}",
        )

    # The root must not be below a similar folder, such as sample/10BT instead of sample/100BT.
    for folder in hub_source.tail[:-1]:
        if "[" in folder:  # a pattern, no name
            continue
        similar_name = re.sub("[0-9]+", "[0-9]+", folder)
        for name in root.parts:
            if name != folder and re.fullmatch(similar_name, name):
                raise UserError(
                    "input.wrong_files",
                    f"--files {root}: is {name}, {source} is {folder}; {OTHER_FILES}",
                )

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


def natural_order(path: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return a sort key by which chunk2 comes before chunk10."""
    key = []
    for run in re.findall(r"[0-9]+|[^0-9]+", path):
        is_number = run[0] in "0123456789"
        key.append((0, int(run), "") if is_number else (1, 0, run))
    return key, path


def find_files(
    paths: Sequence[Path], option: str = FILES_OPTION
) -> tuple[list[Path], frozenset[Path]]:
    """Return the absolute paths of all files in or below `paths`, and of `paths` that are files.

    Hidden files below a folder are skipped. Links are followed, because the hub's cache consists of
    them, but not resolved, because their targets have no suffix; some may dangle. Raises UserError.
    """
    origins: dict[Path, Path] = {}  # which of `paths` a file was found by
    named_files = set()
    for path in paths:
        absolute = Path(os.path.abspath(path))
        files: Iterable[Path]
        if absolute.is_file():
            named_files.add(absolute)
            files = [absolute]
        elif absolute.is_dir():
            files = _walk(absolute, option)
        else:
            raise UserError("input.none", f"{option} {path}: does not exist", path=path)

        for file in files:
            if file in origins:
                raise UserError(
                    "input.given_twice",
                    f"{option} {path}: {file} was already found by {origins[file]}",
                    path=file,
                )
            origins[file] = path
    return list(origins), frozenset(named_files)


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

    Try shorter tails if no file matches. Raises UserError for several roots.
    """
    for num_left_out in range(len(tail)):
        shape = "/".join(tail[num_left_out:])
        files_by_root: dict[Path, dict[str, Path]] = {}
        for file in files:
            match = re.fullmatch(f"(.*/)({shape})", str(file))
            if match:
                files_by_root.setdefault(Path(match[1]), {})[match[2]] = file
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

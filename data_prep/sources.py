"""Sources of text: which files they have, in which order, and how many per input group.

Paths are relative to one root and their order does not depend on the disk, so that a folder may
move, and a copy gives the same plan as a download.
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
    revision="give another commit, tag or branch with --revision",
    without_hub="or give a copy of the files with --files FOLDER",
)
OTHER_FILES = f"give --source {LOCAL} for other files"
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
    for option, value, takers in (
        ("--text-field", text_field, (LOCAL,)),
        ("--text-suffixes", text_suffixes or None, (LOCAL,)),
        ("--revision", revision, tuple(HUB_SOURCES)),
        ("--files", files or None, (*HUB_SOURCES, LOCAL)),
    ):
        if value is not None and source not in takers:
            raise UserError(
                "option.conflict",
                f"{option} with --source {source}: it is for {', '.join(takers)} only",
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
    known = HUB_SOURCES[source]
    if files:
        version, root, inputs = _list_mirror(source, known, files, revision)
    else:
        version, root, inputs = _list_hub(source, known, revision or known.commit)
    if len(inputs) != known.num_files:
        log(f"{source}: {len(inputs):,} of {known.num_files:,} files")
    group, unit_files = known.group_field, known.unit_files
    return Selection(source, version, root, inputs, group_field=group, unit_files=unit_files)


def _select_stdlib() -> Selection:
    """Select the help topics, then the .py files of the library without tests."""
    root = source_root(STDLIB)
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            found[path.relative_to(root).as_posix()] = path
    if not found:
        raise UserError(
            "input.none", f"{root}: no .py files; use a Python with its library as files", path=root
        )
    inputs = sorted(to_inputs(found, {}), key=lambda known: known.path != TOPICS)
    version = f"python {platform.python_version()}"
    return Selection(STDLIB, version, root, tuple(inputs), unit_bytes=INPUT_GROUP_BYTES)


def _select_local(
    files: Sequence[Path], text_field: str, text_suffixes: Sequence[str], files_option: str
) -> Selection:
    if not files:
        raise UserError(
            "option.missing", f"--source {LOCAL} needs --files FILE_OR_FOLDER ...", option="--files"
        )
    listed, named = find_files(files, files_option)
    found = [path for path in listed if path.exists()]
    if dangling := set(listed).difference(found):
        log(f"{LOCAL}: skipped {len(dangling):,} dangling links: {summarize_paths(dangling)}")
    readable, others = divide_files(found, named, text_field, text_suffixes)
    if wrong := named.intersection(others) if readable else others or files:
        raise _unknown_format(wrong, text_suffixes, files_option)
    if others:
        log(f"{LOCAL}: skipped {len(others):,} files of other formats: {summarize_paths(others)}")
    root = Path(os.path.commonpath([path.parent for path in readable]))
    inputs = to_inputs({path.relative_to(root).as_posix(): path for path in readable}, {})
    return Selection(LOCAL, ON_DISK, root, inputs, text_field, unit_bytes=INPUT_GROUP_BYTES)


def divide_files(
    found: Sequence[Path], named: Set[Path], text_field: str, text_suffixes: Sequence[str]
) -> tuple[list[Path], list[Path]]:
    """Return the files that are read, and the others.

    A .json is read if it is lines of JSON objects, or as text if `text_suffixes` have it. Unless it
    is `named`, its first object must have the `text_field` if other files are read: it may describe
    them.
    """
    as_text = tuple(suffix.lower() for suffix in text_suffixes)
    readable = []
    lines_of_json = []
    for path in found:
        if as_text and path.name.lower().endswith(as_text):
            readable.append(path)
        elif suffix_of(path.name) != ".json":
            readable += [path] if suffix_of(path.name) else []
        elif first := first_object(path):
            lines_of_json.append(path)
            if path in named or has_field(first, text_field):
                readable.append(path)
    readable = readable or lines_of_json
    chosen = set(readable)
    return readable, [path for path in found if path not in chosen]


def _unknown_format(
    paths: Iterable[Path], text_suffixes: Sequence[str], files_option: str
) -> UserError:
    expected = ", ".join((*SUFFIXES, *text_suffixes))
    advice = "--text-suffixes .md .rst reads other files as text"
    if any(suffix_of(path.name) == ".json" for path in paths):
        advice = "a .json must have an object a line: convert a list with `jq -c '.[]' OLD > NEW`"
    given = summarize_paths(paths)
    message = f"{files_option} {given}: unknown format; expected one of: {expected}; {advice}"
    return UserError("input.unknown_format", message)


def check_formats(selection: Selection) -> None:
    """Raise UserError if a text of the user is no text; files of rows are checked when read."""
    if selection.source != LOCAL:
        return
    for known in selection.inputs:
        if not has_rows(path := selection.root / known.path):
            check_file(path)


def _list_hub(source: str, known: HubSource, commit: str) -> tuple[str, Path, tuple[Input, ...]]:
    """Return the version, root and inputs of a dataset on the hub."""
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
        message = f"{known.repo}@{commit[:12]}: no files {'/'.join(known.tail)}"
        raise UserError("input.none", f"{message}; {HUB_HINTS.revision}")
    log(f"{source}: commit {commit[:12]}, downloaded when needed into {root}")
    return commit, root, tuple(sorted(inputs, key=lambda file: natural_order(file.path)))


def _list_mirror(
    source: str, known: HubSource, files: Sequence[Path], revision: str | None
) -> tuple[str, Path, tuple[Input, ...]]:
    """Return the version, root and inputs of a copy on disk."""
    if revision is not None and not hub.COMMIT.fullmatch(revision):
        raise UserError(
            "option.conflict",
            f"--revision {revision} with --files: give the copy's 40-digit commit, or none",
            option="--revision",
        )
    found, named = find_files(files)
    root, paths = match_tails(found, known.tail)
    if wrong := named - set(paths.values()) if paths else files:
        shape = "/".join(known.tail)
        raise UserError(
            "input.wrong_files",
            f"--files {summarize_paths(wrong)}: no files {shape} of {source}; {OTHER_FILES}",
        )
    for literal in (name for name in known.tail[:-1] if "[" not in name):
        shape = re.sub("[0-9]+", "[0-9]+", literal)  # of the folder's siblings
        siblings = [name for name in root.parts if re.fullmatch(shape, name) and name != literal]
        if siblings:
            raise UserError(
                "input.wrong_files",
                f"--files {root}: is {siblings[0]}, {source} is {literal}; {OTHER_FILES}",
            )
    commit, hashes = hub.known_hashes(root, paths)
    if revision and commit and commit != revision:
        raise UserError(
            "option.conflict",
            f"--revision {revision}: the files below {root} are of commit {commit}",
            option="--revision",
        )
    return revision or commit or ON_DISK, root, to_inputs(paths, hashes)


def fetch(source: str, version: str, root: Path, inputs: Sequence[Input]) -> None:
    """Download the inputs that are not on disk. Raises UserError."""
    missing = [known for known in inputs if not (root / known.path).exists()]
    if not missing:
        return
    hub_source = HUB_SOURCES.get(source)
    if hub_source is None or not hub.is_cached_snapshot(root, hub_source.repo, version):
        path = root / missing[0].path
        raise UserError("input.unreadable", f"{path}: is missing; restore it", path=path)
    files = [hub.HubFile(known.path, known.size, known.sha256) for known in missing]
    hub.fetch(hub_source.repo, version, root, files, HUB_HINTS)


def source_root(source: str) -> Path:
    """Return the folder of stdlib's inputs."""
    return Path(os.__file__).resolve().parent


def natural_order(path: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return a sort key by which chunk2 comes before chunk10."""
    words = re.findall(r"[0-9]+|[^0-9]+", path)
    return [(0, int(w), "") if w[0] in "0123456789" else (1, 0, w) for w in words], path


def find_files(
    given: Sequence[Path], option: str = FILES_OPTION
) -> tuple[list[Path], frozenset[Path]]:
    """Return the absolute paths of all files in or below `given`, and those given as files.

    Hidden files below a folder are skipped. Links are followed, because the hub's cache consists of
    them, but not resolved, because their targets have no suffix; some may dangle. Raises UserError.
    """
    found: dict[Path, Path] = {}
    named = set()
    for path in given:
        absolute = Path(os.path.abspath(path))
        if absolute.is_file():
            named.add(absolute)
        elif not absolute.is_dir():
            raise UserError("input.none", f"{option} {path}: does not exist", path=path)
        for file in [absolute] if absolute in named else _walk(absolute, option):
            if file in found:
                raise UserError(
                    "input.given_twice",
                    f"{option} {path}: {file} is already given by {found[file]}",
                    path=file,
                )
            found[file] = path
    return list(found), frozenset(named)


def _walk(root: Path, option: str) -> Iterator[Path]:
    seen = set()

    def raise_user_error(error: OSError) -> None:
        raise UserError(
            "input.unreadable",
            f"{error.filename}: cannot be listed: {error.strerror}",
            path=error.filename,
        )

    for folder, folders, names in os.walk(root, followlinks=True, onerror=raise_user_error):
        if (identity := os.path.realpath(folder)) in seen:
            raise UserError(
                "input.given_twice",
                f"{option} {root}: {folder} is reached twice, through links; remove the link, "
                "or give the folders separately",
                path=Path(folder),
            )
        seen.add(identity)
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def match_tails(files: Sequence[Path], tail: Sequence[str]) -> tuple[Path, dict[str, Path]]:
    """Return the root of the files whose paths end with `tail`, and {path below it: file}.

    Try shorter tails if no file matches. Raises UserError for several roots.
    """
    for first in range(len(tail)):
        shape = "/".join(tail[first:])
        matches: dict[Path, dict[str, Path]] = {}
        for file in files:
            if match := re.fullmatch(f"(.*/)({shape})", str(file)):
                matches.setdefault(Path(match[1]), {})[match[2]] = file
        if len(matches) > 1:
            roots = summarize_paths(matches)
            raise UserError(
                "input.wrong_files",
                f"--files: several folders have {shape}: {roots}; give one of them",
            )
        if matches:
            return matches.popitem()
    return Path(), {}


def to_inputs(files: Mapping[str, Path], hashes: Mapping[str, str]) -> tuple[Input, ...]:
    """Return inputs in natural order, with the sizes that the files have. Raises OSError."""
    paths = sorted(files, key=natural_order)
    return tuple(Input(p, files[p].stat().st_size, hashes.get(p, "")) for p in paths)


def summarize_paths(paths: Iterable[Path]) -> str:
    """Return the first few of the paths, and how many more there are."""
    names = sorted(map(str, paths), key=natural_order)
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

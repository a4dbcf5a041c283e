"""The suites' staged data sets, verified and read without network.

    DIR/KEY/SPLIT.parquet   the rows of one split
    DIR/KEY/manifest.json   written last: the rows' source and number, the files' SHA-256

CATALOGUE lists their repositories, columns and sizes. A task's YAML reads them by
`custom_dataset: !function eval.staged.load` and `dataset_kwargs: {dataset: KEY}`.
"""

import hashlib
import io
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from canon_pretrain.core import files
from canon_pretrain.core.errors import UserError, check_choice

if TYPE_CHECKING:
    import datasets

DISCRIMINATIVE = "discriminative"
JRT = "jrt"
BABILONG = "babilong"
SUITES = (DISCRIMINATIVE, JRT, BABILONG)  # birth-year uses the data set wikitext

BABILONG_TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
BABILONG_LENGTHS = ("0k", "1k", "2k", "4k")

REVISIONS: Mapping[str, str] = {
    # commits that public evaluation code pins for these repositories
    "baber/piqa": "142f6d7367fd9877f0fb3b5734ea6a545f54cdd1",
    "Rowan/hellaswag": "218ec52e09a7e7462a5400043bb9a69a41d06b76",
    "allenai/winogrande": "01e74176c63542e6b0bcb004dcdea22d94fb67b5",
    "allenai/ai2_arc": "210d026faf9955653af8916fad021475a3f00453",
    "lighteval/siqa": "54c6a1f8cb6daf4f5abf24a601852612fb35eb25",
    "aps/super_glue": "3de24cf8022e94f4ee4b9d55a6f539891524d646",
    "EleutherAI/lambada_openai": "900124bf3b8235c6daf21033af9948b3f07346c4",
    "EleutherAI/wikitext_document_level": "647234772b9554e208af6c826f23b99e3cac88c8",
}


@dataclass(frozen=True)
class DataSet:
    """One configuration of a hub repository: the split, columns and rows that a task reads."""

    key: str
    suite: str
    path: str
    config: str | None
    split: str
    columns: tuple[str, ...]
    documents: int

    @property
    def revision(self) -> str | None:
        return REVISIONS.get(self.path)  # if None, stage.py pins the newest commit


# key, repository, configuration (-: none), split, documents, columns; JRT's: of its public CSVs
_TABLE = """
piqa baber/piqa - validation 1838 goal sol1 sol2 label
hellaswag Rowan/hellaswag - validation 10042 activity_label ctx_a ctx_b endings label source_id
winogrande allenai/winogrande winogrande_xl validation 1267 sentence option1 option2 answer
arc_easy allenai/ai2_arc ARC-Easy test 2376 question choices answerKey
arc_challenge allenai/ai2_arc ARC-Challenge test 1172 question choices answerKey
social_iqa lighteval/siqa - validation 1954 context question answerA answerB answerC label
boolq aps/super_glue boolq validation 3270 passage question label
lambada_openai EleutherAI/lambada_openai default test 5153 text
wikitext EleutherAI/wikitext_document_level wikitext-2-raw-v1 test 62 page
jrt_swde hazyresearch/based-swde-v2 default validation 1111 text key value
jrt_fda hazyresearch/based-fda default validation 1102 text key value
jrt_squad hazyresearch/based-squad default validation 2984 text context question value
jrt_triviaqa hazyresearch/based_triviaqa - validation 1688 context question orig_question answers
jrt_nq hazyresearch/based_nq_1024 - validation 3157 context question orig_question answers
jrt_drop hazyresearch/based_drop - validation 2087 context question orig_question answers
"""
# rows of the public CSVs if they are not 999
_BABILONG_ROWS = {
    **dict.fromkeys((("qa1", length) for length in BABILONG_LENGTHS), 1000),
    ("qa3", "1k"): 862,
    ("qa3", "2k"): 998,
    ("qa5", "1k"): 997,
}


def _catalogue() -> Iterator[DataSet]:
    """Yield the data sets of the table, and one per task and length of BABILong."""
    for line in _TABLE.strip().splitlines():
        key, path, config, split, documents, *columns = line.split()
        yield DataSet(
            key=key,
            suite=JRT if key.startswith(JRT) else DISCRIMINATIVE,
            path=path,
            config=None if config == "-" else config,
            split=split,
            columns=tuple(columns),
            documents=int(documents),
        )

    for task, length in product(BABILONG_TASKS, BABILONG_LENGTHS):
        yield DataSet(
            key=f"babilong_{task}_{length}",
            suite=BABILONG,
            path="RMT-team/babilong-1k-samples",
            config=length,
            split=task,
            columns=("input", "question", "target"),
            documents=_BABILONG_ROWS.get((task, length), 999),
        )


CATALOGUE: Mapping[str, DataSet] = {data.key: data for data in _catalogue()}

FOLDER_VARIABLE = "CANON_EVAL_DATA"
DEFAULT_FOLDER = Path("outputs") / "eval_data"
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Split:
    """One file of a data set."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    version: int
    key: str
    path: str
    config: str | None
    revision: str
    splits: dict[str, Split]


class StagedFile(NamedTuple):
    """The manifest of a data set, and the content of its file."""

    manifest: Manifest
    content: bytes


def staged_folder(folder: str | Path | None = None) -> Path:
    """Return the folder of staged data: `folder`, else $CANON_EVAL_DATA, else outputs/eval_data."""
    return Path(folder or os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def check_staged(suites: Collection[str], folder: Path) -> None:
    """Raise UserError if a data set of these suites is not in `folder`; reads no rows."""
    for key, data in CATALOGUE.items():
        if data.suite in suites and not (folder / key / MANIFEST).is_file():
            raise UserError(
                "stage.missing",
                f"{folder / key}: not staged; {stage_command(key, folder)}",
                path=folder / key / MANIFEST,
            )


def data_set(key: str) -> DataSet:
    """Return the catalogue's entry; raises UserError for an unknown key."""
    check_choice("data set", key, CATALOGUE)
    return CATALOGUE[key]


def load(*, dataset: str, staged: str | None = None, **_: Any) -> dict[str, "datasets.Dataset"]:
    """Load a data set as lm_eval's `custom_dataset`, which passes metadata and dataset_kwargs."""
    return {data_set(dataset).split: load_staged(dataset, staged)}


def load_staged(key: str, folder: str | Path | None = None) -> "datasets.Dataset":
    """Return the rows of the data set `key` in memory; raises UserError if missing or damaged."""
    import datasets
    import pyarrow.parquet

    content = verify(key, staged_folder(folder)).content
    # not Dataset.from_parquet, which copies to a cache that may be read-only
    return datasets.Dataset(pyarrow.parquet.read_table(io.BytesIO(content)))


def verify(key: str, folder: Path) -> StagedFile:
    """Return the manifest and the file's content of `key`; raises UserError if damaged."""
    data = data_set(key)
    remedy = stage_command(key, folder)

    path = folder / key / MANIFEST
    try:
        manifest = files.read_record(path, Manifest)
    except files.UnreadableFile as error:
        if error.is_missing:
            raise UserError(
                "stage.missing",
                f"{path.parent}: not staged; {remedy}",
                path=path,
            ) from None
        raise UserError("stage.damaged", f"{error}; {remedy}", path=path) from None

    # it may be of another version, or copied from another data set's folder
    expected = {
        "version": MANIFEST_VERSION,
        "key": key,
        "path": data.path,
        "config": data.config,
    }
    recorded = {name: getattr(manifest, name) for name in expected}
    if recorded != expected or set(manifest.splits) != {data.split}:
        raise UserError(
            "stage.damaged",
            f"{path}: {recorded}, expected {expected}; {remedy}",
            path=path,
        )

    split = manifest.splits[data.split]
    path = folder / key / split.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            "stage.damaged",
            f"{path}: can't be read: {error.strerror}; {remedy}",
            path=path,
        ) from None
    if hashlib.sha256(content).hexdigest() != split.sha256:
        raise UserError(
            "stage.damaged",
            f"{path}: changed after it was staged; {remedy}",
            path=path,
        )
    return StagedFile(manifest, content)


def stage_command(key: str, folder: Path) -> str:
    """Return the instruction to stage the data set `key` into `folder`."""
    return (
        "on a machine with network: "
        f"canon eval stage --suite {CATALOGUE[key].suite} --only {key} --to {folder}"
    )


def write_staged(
    folder: str | Path,
    key: str,
    rows: "datasets.Dataset | Iterable[dict[str, Any]]",
    *,
    revision: str,
) -> Manifest:
    """Write the data set `key`; a concurrent reader sees the old one, an error, or the new one."""
    import datasets
    import pyarrow.parquet

    if not isinstance(rows, datasets.Dataset):
        rows = datasets.Dataset.from_list([*rows])

    # The file's content; the column types are stored in the schema, where Dataset reads them.
    table = rows.with_format("arrow")[:].cast(rows.features.arrow_schema)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    content = buffer.getvalue()

    data = data_set(key)
    split = Split(
        file=f"{data.split}.parquet",
        rows=len(rows),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    manifest = Manifest(
        version=MANIFEST_VERSION,
        key=key,
        path=data.path,
        config=data.config,
        revision=revision,
        splits={data.split: split},
    )

    # The manifest is removed before the file changes, and written last.
    target = Path(folder) / key
    temporary = target / f"{split.file}.next"
    target.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(target)
    files.write_atomic(temporary, content)  # a full disk keeps the old files
    (target / MANIFEST).unlink(missing_ok=True)
    files.fsync_folder(target)  # or a crash could leave the old manifest with a new file
    files.publish(temporary, target / split.file)
    files.write_json(target / MANIFEST, asdict(manifest))
    return manifest

"""The data sets of the suites: where the hub has them, at which commit, what must be in them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

DISCRIMINATIVE, JRT, BABILONG = "discriminative", "jrt", "babilong"
SUITES = (DISCRIMINATIVE, JRT, BABILONG)
"""The suites that need staged data. birth-year hides its statements in discriminative's wikitext;
validation reads a run's own data."""

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
    """One configuration of a hub repository: the split and columns that a task reads, its rows."""

    key: str
    suite: str
    path: str
    config: str | None
    split: str
    columns: tuple[str, ...]
    documents: int

    @property
    def revision(self) -> str | None:
        """The repository's commit; None if no public source names one (stage.py pins it)."""
        return REVISIONS.get(self.path)


# key, repository, configuration (-: none), split, documents, columns; JRT's numbers: spec/eval.md
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
# spec/eval.md: rows of the public CSVs where they are not 999
_BABILONG_ROWS = {
    **dict.fromkeys((("qa1", length) for length in BABILONG_LENGTHS), 1000),
    ("qa3", "1k"): 862,
    ("qa3", "2k"): 998,
    ("qa5", "1k"): 997,
}


def _catalogue() -> Iterator[DataSet]:
    for line in _TABLE.strip().splitlines():
        key, path, config, split, documents, *columns = line.split()
        suite = JRT if key.startswith(JRT) else DISCRIMINATIVE
        name = None if config == "-" else config
        yield DataSet(key, suite, path, name, split, tuple(columns), int(documents))
    path, fields = "RMT-team/babilong-1k-samples", ("input", "question", "target")
    for task, length in product(BABILONG_TASKS, BABILONG_LENGTHS):
        rows = _BABILONG_ROWS.get((task, length), 999)
        yield DataSet(f"babilong_{task}_{length}", BABILONG, path, length, task, fields, rows)


CATALOGUE: Mapping[str, DataSet] = {data.key: data for data in _catalogue()}

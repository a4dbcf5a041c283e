"""The JRT suite: prompts, what becomes of rows, options; and all of it, answered."""

import json
import logging
import string
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from canon_pretrain.core.errors import UserError
from eval.staged import write_staged
from eval.tasks.jrt.documents import LOG, load
from tests.data_folders import tokenizer
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.scripted_lm import ScriptedLM
from tests.support import ROOT

KEYS = ["jrt_swde", "jrt_fda", "jrt_squad", "jrt_triviaqa", "jrt_nq", "jrt_drop"]
TASKS = [f"{key}{more}" for key in KEYS for more in ("", "_twice")]


PAGE = {"key": "release date", "value": "1999", "text": "  A film. Of 1999.. Release Date:"}
ASKED = {
    "context": " [DOC] [TLE] Lamps[PAR] shine. Who shone? who shone?",
    "question": " Who shone? ",
    "orig_question": "Who was it:",
    "answers": ["Lamps", "lights"],
}
LAMPS = "Lamps shine"
MARKED = "[DOC] [TLE] Lamps[PAR] shine"
PROMPTS = {
    "jrt_fda": (PAGE, "A film. Of 1999. Release date:"),
    "jrt_fda_twice": (
        PAGE,
        "Information about Release date. A film. Of 1999.\nA film. Of 1999. Release date:",
    ),
    "jrt_triviaqa": (ASKED, f"{LAMPS}. Who shone?"),
    "jrt_triviaqa_twice": (ASKED, f"Who was it: {LAMPS}.\n{LAMPS}. Who shone?"),
    "jrt_nq": (ASKED, f"{MARKED}. Who shone?"),
    "jrt_nq_twice": (ASKED, f"Who was it {MARKED}.\n{MARKED}. Who shone?"),
}
PROMPTS["jrt_drop"], PROMPTS["jrt_drop_twice"] = PROMPTS["jrt_nq"], PROMPTS["jrt_nq_twice"]
TOLD = PAGE | {"text": f"{PAGE['text']}\nSummary of information above...\n1999. Release date:"}
PROMPTS["jrt_swde"] = (TOLD, PROMPTS["jrt_fda"][1])
PROMPTS["jrt_swde_twice"] = (TOLD, PROMPTS["jrt_fda_twice"][1])
SQUAD = {
    "text": " It is lit. The lamp is ",
    "context": "It is lit.\nQuestion: Is it?",
    "question": "Is it?",
    "value": "lit",
}
PROMPTS["jrt_squad"] = (SQUAD, "It is lit. The lamp is")
PROMPTS["jrt_squad_twice"] = (SQUAD, "Is it? It is lit.\n\nIt is lit. The lamp is")


def staged(folder: Path, key: str, rows: list[dict[str, Any]]) -> Path:
    write_staged(folder, key, rows, revision="f" * 40)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer, as metadata names it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    return str(folder)


@pytest.mark.parametrize("task", TASKS)
def test_prompts(task: str, tmp_path: Path, trained: str) -> None:
    row, prompt = PROMPTS[task]
    key = task.removesuffix("_twice")
    staged(tmp_path, key, [row])
    made = load(dataset=key, twice=task != key, staged=str(tmp_path), tokenizer=trained)
    (item,) = made["validation"]
    assert item["prompt"] == prompt
    assert item["labels"] == (row["answers"] if "answers" in row else [row["value"]])
    assert item["target"] == item["labels"][0]


# ---- what becomes of rows


def counts_of(found: Any) -> list[int]:
    counts = json.loads(found.info.description)
    return [counts[name] for name in ("rows", "dropped", "kept", "cut", "answer", "nothing")]


def test_counts_and_what_is_dropped(
    tmp_path: Path,
    trained: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    caplog.set_level(logging.INFO, LOG.name)
    rows = [
        PAGE,
        PAGE | {"value": "7"},
        PAGE | {"key": "x"},
        PAGE | {"value": ""},
        PAGE | {"value": None},
        PAGE | {"value": "nowhere", "key": "neither"},
        PAGE | {"value": "nowhere"},  # its key is there
    ]
    staged(tmp_path, "jrt_fda", rows)
    options = {"dataset": "jrt_fda", "staged": str(tmp_path), "tokenizer": trained}
    found = load(**options)["validation"]
    assert found["row"] == [0, 5, 6]
    assert found["centre"] == ["answer", "nothing", "answer"]
    assert counts_of(found) == [7, 4, 3, 0, 2, 1]
    (line,) = caplog.messages
    assert line.startswith("jrt_fda: rows 7, dropped 4, kept 3, cut 0, answer 2, ")
    # around the value alone, and to fewer tokens
    found = load(**options, jrt_fda_answers="value", jrt_tokens="4", jrt_swde_context="of others")
    found = found["validation"]
    assert found["row"] == [0, 2, 5, 6]
    assert counts_of(found) == [7, 3, 4, 4, 2, 2]
    with pytest.raises(UserError, match="none of 7 rows has an answer .* in empty"):
        staged(tmp_path, "jrt_fda", [row | {"empty": ""} for row in rows])
        load(**options, jrt_fda_answers=["empty"])


def test_lists_of_answers(tmp_path: Path, trained: str) -> None:
    letters = " ".join(string.ascii_lowercase)
    around = "aa " + letters + " Bb " + letters + " cc"
    row = {"question": "Which?", "orig_question": "Which?", "context": around}
    rows = [
        # not the first that occurs: the first
        row | {"answers": ["BB", "aa"], "alt_answers": ["cc"], "tok_pos": 0},
        row | {"answers": ["xx", "aa"], "alt_answers": ["yy", "cc", "aa"], "tok_pos": 0},
        row | {"answers": ["xx", "aa"], "alt_answers": ["yy"], "tok_pos": 0},
        row | {"answers": ["xx", "aa"], "alt_answers": [], "tok_pos": None},
        row | {"answers": [], "alt_answers": ["aa"], "tok_pos": 0},
        row | {"answers": ["b", "Bb"], "alt_answers": ["aa"], "tok_pos": 0},
    ]
    staged(tmp_path, "jrt_nq", rows)
    options = {"dataset": "jrt_nq", "staged": str(tmp_path), "tokenizer": trained}
    found = load(**options, jrt_tokens=8)["validation"]
    assert found["centre"] == ["answer", "alt_answers", "tok_pos", "nothing"]
    prompts = found["prompt"]
    assert "Bb" in prompts[0] and "cc" in prompts[1] and prompts[2].startswith("aa a")
    assert prompts[3] == "z cc. Which?"
    assert found["labels"][1] == ["xx", "aa"]


@pytest.mark.parametrize("key", ["jrt_drop", "jrt_triviaqa"])
def test_drop_and_triviaqa_keep_the_first_tokens(tmp_path: Path, trained: str, key: str) -> None:
    """Issue 17, item 3: the first 950 tokens, whatever the answers are; no row is dropped."""
    context = " ".join(f"word{i}" for i in range(900)) + " Oslo"
    lists: list[list[str]] = [["Oslo"], ["7"], [], ["nowhere to be seen", "word1"]]
    row = {"question": "Which?", "orig_question": "Which?", "context": context}
    more = {"alt_answers": ["Oslo"], "tok_pos": 2000}
    staged(tmp_path, key, [{**row, "answers": answers, **more} for answers in lists])
    options = {"dataset": key, "staged": str(tmp_path), "tokenizer": trained}
    found = load(**options)["validation"]
    kept = tokenizer().decode(tokenizer().encode(context)[:950]).strip()
    assert found["prompt"] == [f"{kept}. Which?"] * 4 and "Oslo" not in kept
    assert found["labels"] == lists
    counts = json.loads(found.info.description)
    assert (counts["dropped"], counts["kept"], counts["beginning"]) == (0, 4, 4)
    # around the answers, as an option
    found = load(**options, **{f"{key}_answers": "answers"})["validation"]
    assert found["row"] == [0, 3] and "Oslo. Which?" in found["prompt"][0]


def test_prompts_that_do_not_fit_are_counted(tmp_path: Path, trained: str) -> None:
    staged(tmp_path, "jrt_fda", [PAGE, PAGE | {"text": PAGE["text"] * 2}])
    options = {"dataset": "jrt_fda", "staged": str(tmp_path), "tokenizer": trained}
    first, second = (
        len(tokenizer().encode(item["prompt"])) + 48 for item in load(**options)["validation"]
    )
    assert first < second
    for max_length, count in ((second, 0), (second - 1, 1), (first - 1, 2)):
        found = load(**options, max_length=max_length)["validation"]
        assert json.loads(found.info.description)["too_long"] == count


def test_unknown_options_and_missing_fields(tmp_path: Path, trained: str) -> None:
    staged(tmp_path, "jrt_nq", [{key: ASKED[key] for key in ("context", "question", "answers")}])
    options: dict[str, Any] = {"dataset": "jrt_nq", "staged": str(tmp_path), "tokenizer": trained}
    assert len(load(**options)["validation"]) == 1
    with pytest.raises(UserError, match="no field 'orig_question', only context, question, answ"):
        load(**options, twice=True)
    with pytest.raises(UserError, match=r"no field 'text', .* jrt_nq_context and jrt_nq_answers"):
        load(**options, jrt_nq_context="text")
    with pytest.raises(UserError, match="no field 'value'"):
        load(**options, jrt_nq_answers=["answers", "value"])
    with pytest.raises(UserError, match='"jrt_nq_contxt" .* Did you mean'):
        load(**options, jrt_nq_contxt="text")
    for wrong in ("many", 1, -4, 3.5, None):
        with pytest.raises(UserError, match=r"jrt_tokens .*: expected a number of tokens"):
            load(**options, jrt_tokens=wrong)
    with pytest.raises(UserError, match=r"eval stage --suite jrt --only jrt_fda"):
        load(**options | {"dataset": "jrt_fda"})
    with pytest.raises(UserError, match="needs the evaluated model's tokenizer"):
        load(dataset="jrt_nq", staged=str(tmp_path))


def test_another_field_to_cut_leaves_the_prompts_context_whole(
    tmp_path: Path, trained: str
) -> None:
    # what the public launch scripts do: they cut `text`, the prompts are made of `context`
    long = "lamp " * 3000
    staged(tmp_path, "jrt_nq", [ASKED | {"context": long, "text": "Lamps"}])
    options = {"dataset": "jrt_nq", "staged": str(tmp_path), "tokenizer": trained}
    (item,) = load(**options, jrt_nq_context="text")["validation"]
    assert item["prompt"] == f"{long.strip()}. Who shone?"
    (item,) = load(**options)["validation"]
    assert 470 < len(tokenizer().encode(item["prompt"])) < 490  # no hit: the last 475


def test_rows_of_one_document_share_a_source(tmp_path: Path, trained: str) -> None:
    groups = {
        "jrt_swde": [("a", "T", 0), ("a", "U", 0), ("b", "T", 1)],
        "jrt_triviaqa": [("", "A b.", 0), ("", "A [PAR]c.", 1), ("", "A b.", 0)],
    }
    rows = [
        TOLD | {"text": TOLD["text"] + text, "file_name": name}
        for name, text, _ in groups["jrt_swde"]
    ]
    staged(tmp_path, "jrt_swde", rows)
    asked = [
        # the question at its end is no part of a passage
        ASKED | {"context": f"{text} {question}" if number else text, "question": question}
        for number, ((_, text, _), question) in enumerate(
            zip(groups["jrt_triviaqa"], ("Who?", "What?", "Where?"), strict=True)
        )
    ]
    staged(tmp_path, "jrt_triviaqa", asked)
    for key, expected in groups.items():
        found = load(dataset=key, staged=str(tmp_path), tokenizer=trained)["validation"]["source"]
        ours = [found.index(source) for source in found]
        theirs = [group for *_, group in expected]
        assert [a == b for a in ours for b in ours] == [a == b for a in theirs for b in theirs]


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(stage_fixtures(tmp_path_factory.mktemp("staged"), KEYS))


@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        (lambda gold: f" I think {gold.swapcase()}!\nWho knows?", 1.0),
        (lambda gold: f"\n{gold}", 0.0),
        (lambda gold: f"not {gold[:-1]}", 0.0),
    ],
    ids=["in a line", "after a line", "less"],
)
def test_the_suite_complete(fixtures: str, trained: str, tell: Any, expected: float) -> None:
    """Through its task files: what is asked, and the scores of a model that knows the answer."""
    metadata = {"staged": fixtures, "tokenizer": trained}
    tasks = {"include_path": str(ROOT / "eval" / "tasks"), "include_defaults": False}
    model = ScriptedLM(lambda request: tell(request.doc["labels"][0]))
    manager = TaskManager(**tasks, metadata=metadata)
    found = simple_evaluate(model, tasks=["jrt"], task_manager=manager, bootstrap_iters=0)
    assert found is not None and sorted(found["results"].keys() - {"jrt"}) == sorted(TASKS)
    asked = {(str(r.task_name), r.doc["row"]): r.arguments for r in model.asked}
    for task in TASKS:
        key, is_twice = task.removesuffix("_twice"), task.endswith("_twice")
        first = key in ("jrt_triviaqa", "jrt_drop")  # nothing is searched, nothing dropped
        assert found["results"][task]["contains,none"] == expected
        assert found["versions"][task] == (2.0 if first else 1.0)
        assert found["higher_is_better"][task] == {"contains": True}
        rows = {row for name, row in asked if name == task}
        golds = [row.get("value") or row["answers"][0] for row in rows_of(key)]
        assert rows == {n for n, gold in enumerate(golds) if first or len(gold) > 1} != set()
        lengths = []
        for row in rows:
            prompt, options = asked[task, row]
            assert options == {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
            lengths.append(len(tokenizer().encode(prompt)))
            if is_twice:
                assert prompt.endswith(f"\n{asked[key, row][0]}")
        # about 1k and 2k tokens; SQuAD's first copy is longer, as it is not cut
        most = 10_000 if task == "jrt_squad_twice" else 2000 if is_twice else 1000
        assert 0.93 * min(most, 2000) < max(lengths) < most

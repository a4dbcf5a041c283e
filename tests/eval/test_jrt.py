"""The JRT suite: prompts, what becomes of rows, options; and all of it, answered."""

import json
import logging
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from canon_pretrain.core.errors import UserError
from eval.staged import write_staged
from eval.tasks.jrt.documents import load
from tests.data_folders import tokenizer
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.scripted_lm import ScriptedLM
from tests.support import ROOT

PAGE = {"key": "release date", "value": "1999", "text": "  A film. Of 1999.. Release Date:"}
TOLD = PAGE | {"text": f"{PAGE['text']}\nSummary of information above...\n1999. Release date:"}
ASKED = {
    "context": " [DOC] [TLE] Lamps[PAR] shine. Who shone? who shone?",
    "question": " Who shone? ",
    "orig_question": "Who was it:",
    "answers": ["Lamps", "lights"],
}
SQUAD = {
    "text": " It is lit. The lamp is ",
    "context": "It is lit.\nQuestion: Is it?",
    "question": "Is it?",
    "value": "lit",
}
FILM, MARKED = "A film. Of 1999", "[DOC] [TLE] Lamps[PAR] shine"
KEYED = f"{FILM}. Release date:", f"Information about Release date. {FILM}.\n{FILM}. Release date:"
NQ = f"{MARKED}. Who shone?", f"Who was it {MARKED}.\n{MARKED}. Who shone?"
LAMPS = "Lamps shine. Who shone?", "Who was it: Lamps shine.\nLamps shine. Who shone?"
LIT = "It is lit. The lamp is", "Is it? It is lit.\n\nIt is lit. The lamp is"
PROMPTS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "jrt_swde": (TOLD, KEYED),
    "jrt_fda": (PAGE, KEYED),
    "jrt_squad": (SQUAD, LIT),
    "jrt_triviaqa": (ASKED, LAMPS),
    "jrt_nq": (ASKED, NQ),
    "jrt_drop": (ASKED, NQ),
}
KEYS = [*PROMPTS]
TASKS = [f"{key}{more}" for key in KEYS for more in ("", "_twice")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer, as metadata names it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    return str(folder)


def loader(folder: Path, trained: str, key: str, rows: list[dict[str, Any]]) -> Callable[..., Any]:
    """`load` of these rows, with options."""
    write_staged(folder, key, rows, revision="f" * 40)
    given = {"dataset": key, "staged": str(folder), "tokenizer": trained}
    return lambda **options: load(**given | options)["validation"]


@pytest.mark.parametrize("key", KEYS)
def test_prompts(key, tmp_path, trained):
    row, prompts = PROMPTS[key]
    made = loader(tmp_path, trained, key, [row])
    for twice, prompt in enumerate(prompts):
        (item,) = made(twice=bool(twice))
        assert item["prompt"] == prompt
        assert item["labels"] == (row["answers"] if "answers" in row else [row["value"]])
        assert item["target"] == item["labels"][0]


def counts_of(found: Any) -> list[int]:
    counts = json.loads(found.info.description)
    return [counts[name] for name in ("rows", "dropped", "kept", "cut", "answer", "nothing")]


def test_counts_and_what_is_dropped(tmp_path, trained):
    rows = [
        PAGE,
        PAGE | {"value": "7"},
        PAGE | {"key": "x"},
        PAGE | {"value": None},
        PAGE | {"value": "nowhere", "key": "neither"},
        PAGE | {"value": "nowhere"},  # its key is there
    ]
    made = loader(tmp_path, trained, "jrt_fda", rows)
    found = made()
    assert found["row"] == [0, 4, 5] and found["centre"] == ["answer", "nothing", "answer"]
    assert counts_of(found) == [6, 3, 3, 0, 2, 1]
    # around the value alone, and to fewer tokens
    found = made(jrt_fda_answers="value", jrt_tokens="4", jrt_swde_context="of others")
    assert found["row"] == [0, 2, 4, 5] and counts_of(found) == [6, 2, 4, 4, 2, 2]


def test_lists_of_answers(tmp_path, trained):
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
    ]
    found = loader(tmp_path, trained, "jrt_nq", rows)(jrt_tokens=8)
    assert found["centre"] == ["answer", "alt_answers", "tok_pos", "nothing"]
    prompts = found["prompt"]
    assert "Bb" in prompts[0] and "cc" in prompts[1] and prompts[2].startswith("aa a")
    assert prompts[3] == "z cc. Which?"


@pytest.mark.parametrize("key", ["jrt_drop", "jrt_triviaqa"])
def test_drop_and_triviaqa_keep_the_first_tokens(tmp_path, trained, key):
    """Issue 17, item 3: the first 950 tokens, whatever the answers are; no row is dropped."""
    context = " ".join(f"word{i}" for i in range(900)) + " Oslo"
    lists: list[list[str]] = [["Oslo"], ["7"], [], ["nowhere to be seen", "word1"]]
    row = {"question": "Which?", "orig_question": "Which?", "context": context}
    made = loader(tmp_path, trained, key, [{**row, "answers": answers} for answers in lists])
    found = made()
    kept = tokenizer().decode(tokenizer().encode(context)[:950]).strip()
    assert found["prompt"] == [f"{kept}. Which?"] * 4 and found["labels"] == lists
    counts = json.loads(found.info.description)
    assert (counts["dropped"], counts["kept"], counts["beginning"]) == (0, 4, 4)
    # around the answers, as an option
    found = made(**{f"{key}_answers": "answers"})
    assert found["row"] == [0, 3] and "Oslo. Which?" in found["prompt"][0]


def test_prompts_that_do_not_fit_are_counted(tmp_path, trained, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    made = loader(tmp_path, trained, "jrt_fda", [PAGE, PAGE | {"text": PAGE["text"] * 2}])
    first, second = (len(tokenizer().encode(item["prompt"])) + 48 for item in made())
    assert first < second
    for max_length, count in ((second, 0), (second - 1, 1), (first - 1, 2)):
        counts = json.loads(made(max_length=max_length).info.description)
        assert counts["too_long"] == count
    assert caplog.messages[1] == "jrt_fda: 2 prompts will lose their beginning"


def test_unknown_options_and_missing_fields(tmp_path, trained):
    row = {key: ASKED[key] for key in ("context", "question", "answers")}
    made = loader(tmp_path, trained, "jrt_nq", [row])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"twice": True}, "no field 'orig_question', only context, question, answ"),
        ({"jrt_nq_context": "text"}, "no field 'text', .* jrt_nq_context and jrt_nq_answers"),
        ({"jrt_nq_contxt": "text"}, '"jrt_nq_contxt" .* Did you mean'),
        ({"jrt_tokens": 1}, "jrt_tokens .*: expected a num"),
        ({"dataset": "jrt_fda"}, "eval stage --suite jrt --only jrt_fda"),
    ]
    for options, message in wrong:
        with pytest.raises(UserError, match=message):
            made(**options)


def test_rows_of_one_document_share_a_source(tmp_path, trained):
    """SWDE's name their file; of TriviaQA's passage the question at its end is no part."""
    named = (("a", "T"), ("a", "U"), ("b", "T"))
    pages = [TOLD | {"text": TOLD["text"] + text, "file_name": name} for name, text in named]
    asked = [
        ASKED | {"context": text, "question": question}
        for text, question in (("A b.", "Who?"), ("A [PAR]c. What?", "What?"), ("A b. W?", "W?"))
    ]
    for key, rows, groups in (("jrt_swde", pages, [0, 0, 1]), ("jrt_triviaqa", asked, [0, 1, 0])):
        found = loader(tmp_path, trained, key, rows)()["source"]
        assert [a == b for a in found for b in found] == [a == b for a in groups for b in groups]


@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        (lambda gold: f" I think {gold.swapcase()}!\nWho knows?", 1.0),
        (lambda gold: f"\n{gold}", 0.0),
    ],
)
def test_the_suite_complete(tmp_path, trained, tell, expected):
    """Through its task files: what is asked, and the scores of a model that knows the answer."""
    metadata = {"staged": str(stage_fixtures(tmp_path, KEYS)), "tokenizer": trained}
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
        rows = {row for name, row in asked if name == task}
        golds = [row.get("value") or row["answers"][0] for row in rows_of(key)]
        assert rows == {n for n, gold in enumerate(golds) if first or len(gold) > 1} != set()
        for row in rows:
            prompt, options = asked[task, row]
            assert options == {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
            assert not is_twice or prompt.endswith(f"\n{asked[key, row][0]}")
        # about 1k and 2k tokens; SQuAD's first copy is longer, as it is not cut
        longest = max(len(tokenizer().encode(asked[task, row][0])) for row in rows)
        most = 10_000 if task == "jrt_squad_twice" else 2000 if is_twice else 1000
        assert 0.93 * min(most, 2000) < longest < most

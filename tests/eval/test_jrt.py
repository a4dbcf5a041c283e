"""The JRT suite: prompts, dropped rows, options, complete tasks; cuts and scores by loops."""

import json
import logging
import re
import string
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from eval.staged import write_staged
from eval.tasks.jrt.documents import cut, load, score
from tests.data_folders import tokenizer
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.scripted_lm import Bytes, ScriptedLM
from tests.support import ROOT, refused

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
COUNTS = ("rows", "dropped", "kept", "cut", "answer", "nothing")


@pytest.fixture
def metadata(tmp_path):
    """A folder for staged data, and a tokenizer."""
    (tmp_path / "tokenizer.model").write_bytes(tokenizer().model)
    return {"staged": str(tmp_path), "tokenizer": str(tmp_path)}


@pytest.fixture
def loader(tmp_path, metadata):
    """Stage rows; return their `load`, which takes options."""

    def stage(key, rows):
        write_staged(tmp_path, key, rows, revision="f" * 40)
        return lambda **options: load(**{"dataset": key, **metadata, **options})["validation"]

    return stage


def counts_of(found, *names):
    counts = json.loads(found.info.description)
    return [counts[name] for name in names]


@pytest.mark.parametrize("key", KEYS)
def test_prompts(loader, key):
    row, prompts = PROMPTS[key]
    load_rows = loader(key, [row])
    items = [item for twice in (False, True) for item in load_rows(twice=twice)]
    assert [item["prompt"] for item in items] == [*prompts]
    labels = row["answers"] if "answers" in row else [row["value"]]
    assert all(item["labels"] == labels and item["target"] == labels[0] for item in items)


def test_dropped_rows_are_counted(loader):
    rows = [
        PAGE,
        PAGE | {"value": "7"},
        PAGE | {"key": "x"},
        PAGE | {"value": None},
        PAGE | {"value": "nowhere", "key": "neither"},
        PAGE | {"value": "nowhere"},  # the text has its key
    ]
    load_rows = loader("jrt_fda", rows)
    found = load_rows()
    assert found["row"] == [0, 4, 5] and found["centre"] == ["answer", "nothing", "answer"]
    assert counts_of(found, *COUNTS) == [6, 3, 3, 0, 2, 1]
    # around the value alone, and to fewer tokens
    found = load_rows(jrt_fda_answers="value", jrt_tokens="4", jrt_swde_context="of others")
    assert found["row"] == [0, 2, 4, 5] and counts_of(found, *COUNTS) == [6, 2, 4, 4, 2, 2]


def test_lists_of_answers(loader):
    letters = " ".join(string.ascii_lowercase)
    around = "aa " + letters + " Bb " + letters + " cc"
    row = {"question": "Which?", "orig_question": "Which?", "context": around}
    lists: list[tuple[list[str], list[str], int | None]] = [
        (["BB", "aa"], ["cc"], 0),  # the first answer counts, not the first that occurs
        (["xx", "aa"], ["yy", "cc", "aa"], 0),
        (["xx", "aa"], ["yy"], 0),
        (["xx", "aa"], [], None),
        ([], ["aa"], 0),
    ]
    names = ("answers", "alt_answers", "tok_pos")
    rows = [row | dict(zip(names, values, strict=True)) for values in lists]
    found = loader("jrt_nq", rows)(jrt_tokens=8)
    assert found["centre"] == ["answer", "alt_answers", "tok_pos", "nothing"]
    prompts = found["prompt"]
    assert "Bb" in prompts[0] and "cc" in prompts[1] and prompts[2].startswith("aa a")
    assert prompts[3] == "z cc. Which?"


@pytest.mark.parametrize("key", ["jrt_drop", "jrt_triviaqa"])
def test_drop_and_triviaqa_keep_the_first_tokens(loader, key):
    """Keep the first 950 tokens whatever the answers, and all rows (issue 17, item 3)."""
    context = " ".join(f"word{i}" for i in range(900)) + " Oslo"
    lists: list[list[str]] = [["Oslo"], ["7"], [], ["nowhere to be seen", "word1"]]
    row = {"question": "Which?", "orig_question": "Which?", "context": context}
    load_rows = loader(key, [{**row, "answers": answers} for answers in lists])
    found = load_rows()
    kept = tokenizer().decode(tokenizer().encode(context)[:950]).strip()
    assert found["prompt"] == [f"{kept}. Which?"] * 4 and found["labels"] == lists
    assert counts_of(found, "dropped", "kept", "beginning") == [0, 4, 4]
    # around the answers, as an option
    found = load_rows(**{f"{key}_answers": "answers"})
    assert found["row"] == [0, 3] and "Oslo. Which?" in found["prompt"][0]


def test_prompts_that_do_not_fit_are_counted(loader, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    load_rows = loader("jrt_fda", [PAGE, PAGE | {"text": PAGE["text"] * 2}])
    first, second = (len(tokenizer().encode(item["prompt"])) + 48 for item in load_rows())
    assert first < second
    for max_length, count in ((second, 0), (second - 1, 1), (first - 1, 2)):
        assert counts_of(load_rows(max_length=max_length), "too_long") == [count]
    assert [record.args for record in caplog.records] == [("jrt_fda", 1), ("jrt_fda", 2)]


def test_unknown_options_and_missing_fields(loader):
    row = {key: ASKED[key] for key in ("context", "question", "answers")}
    load_rows = loader("jrt_nq", [row])
    for options, code, fields in (
        ({"twice": True}, "jrt.field", {"field": "orig_question"}),
        ({"jrt_nq_context": "text"}, "jrt.field", {"field": "text"}),
        ({"jrt_nq_contxt": "text"}, "config.unknown_choice", {}),
        ({"jrt_tokens": 1}, "eval.option_range", {"option": "jrt_tokens"}),
        ({"dataset": "jrt_fda"}, "stage.missing", {}),
    ):
        with refused(code, **fields):
            load_rows(**options)


def test_rows_of_one_document_share_a_source(loader):
    """By file in SWDE; by the passage without its final question in TriviaQA."""
    named = (("a", "T"), ("a", "U"), ("b", "T"))
    pages = [TOLD | {"text": TOLD["text"] + text, "file_name": name} for name, text in named]
    asked = (("A b.", "Who?"), ("A b. W?", "W?"), ("A [PAR]c. What?", "What?"))
    questions = [ASKED | {"context": text, "question": question} for text, question in asked]
    for key, rows in (("jrt_swde", pages), ("jrt_triviaqa", questions)):
        first, second, third = loader(key, rows)()["source"]
        assert first == second != third


@pytest.mark.system
def test_the_suite_complete(tmp_path, metadata):
    """Requests and scores of the task files, for a model that knows the answers."""
    stage_fixtures(tmp_path, KEYS)
    tasks = {"include_path": str(ROOT / "eval" / "tasks"), "include_defaults": False}
    model = ScriptedLM(lambda request: f" I think {request.doc['labels'][0].swapcase()}!\nAnd?")
    manager = TaskManager(**tasks, metadata=metadata)
    found = simple_evaluate(model, tasks=["jrt"], task_manager=manager, bootstrap_iters=0)
    assert found is not None and sorted(found["results"].keys() - {"jrt"}) == sorted(TASKS)
    requests = {(str(r.task_name), r.doc["row"]): r.arguments for r in model.asked}
    for task in TASKS:
        key, is_twice = task.removesuffix("_twice"), task.endswith("_twice")
        first = key in ("jrt_triviaqa", "jrt_drop")  # no search, no dropped rows
        assert found["results"][task]["contains,none"] == 1.0
        assert found["versions"][task] == (2.0 if first else 1.0)
        rows = {row for name, row in requests if name == task}
        golds = [row["value"] for row in rows_of(key)]
        assert rows == {n for n, gold in enumerate(golds) if first or len(gold) > 1} != set()
        for row in rows:
            prompt, options = requests[task, row]
            assert options == {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
            assert not is_twice or prompt.endswith(f"\n{requests[key, row][0]}")
        # about 1k and 2k tokens; SQuAD's first copy is not cut
        longest = max(len(tokenizer().encode(requests[task, row][0])) for row in rows)
        most = 10_000 if task == "jrt_squad_twice" else 2000 if is_twice else 1000
        assert 0.93 * min(most, 2000) < longest < most


# ---- the cut rule and the score of spec/eval.md, letter by letter


class Words:
    """One token per word with the space before it; half a word is a token as well."""

    def __init__(self):
        self.known: list[str] = []

    def encode(self, text):
        found = re.findall(r" [^ ]*|[^ ]+", text)
        self.known += [word for word in dict.fromkeys(found) if word not in self.known]
        return [self.known.index(word) for word in found]

    def decode(self, ids):
        return "".join(self.known[i] for i in ids)


def alike(one, other):
    """Whether two letters are the same, case ignored."""
    forms = [
        {letter, letter.casefold(), letter.upper(), letter.lower()[0], letter.lower()[0].upper()}
        for letter in (one, other)
    ]
    return bool(forms[0] & forms[1])


def occurrence(text, answer):
    """Where `answer` begins in `text` first; -1 if nowhere."""
    for begin in range(len(text) - len(answer) + 1 if answer else 0):
        if all(alike(text[begin + k], letter) for k, letter in enumerate(answer)):
            return begin
    return -1


def spec_cut(text, answers, codec, limit, alternatives, at):
    """The kept tokens' indices, the number of all, and the centre."""
    count, centre = len(codec.encode(text)), "answer"
    places = [occurrence(text, answer) for answer in answers]
    earliest = min((place for place in places if place >= 0), default=-1)
    if earliest < 0:
        centre, places = "alt_answers", [occurrence(text, answer) for answer in alternatives]
        earliest = next((place for place in places if place >= 0), -1)
    if earliest >= 0:
        position = len(codec.encode(text[:earliest]))
    elif at is not None and at >= 0:
        centre, position = "tok_pos", min(at, count)
    else:
        centre, position = "nothing", count
    kept = [*range(position)][max(0, position - limit // 2) :]
    kept += [*range(position, count)][: limit - len(kept)]
    return kept, count, centre


TEXT = "aAbB .\nßẞſsKkİıiσςΣé🙂\ufffd"
texts = st.text(TEXT, max_size=40)
# few letters, so that several of the answers occur
answers = st.lists(st.text("aAbB.ßſsİé", max_size=2), max_size=3)
positions = st.one_of(st.none(), st.integers(-1, 60))


@given(texts, answers, st.integers(2, 30), answers, positions)
@example("aab", ["aab"], 2, [], None)  # the hit is the beginning
@example("bbbbaa", ["aa"], 2, [], None)  # it is the end
@example("aa", ["b"], 2, [], None)  # none: the last half only, of a short text too
@example("", ["b"], 2, [], 3)
@example("b" * 9 + "key" + "b" * 9 + "value" + "b" * 9, ["value", "key"], 4, [], None)
@example("b" * 9 + "value" + "b" * 9 + "key" + "b" * 9, ["value", "key"], 4, [], None)
@example("b" * 9 + "AA" + "b" * 9, ["aa"], 4, [], 0)
@settings(max_examples=200, deadline=None)
def test_the_cut_equals_the_rule(text, looked_for, limit, alternatives, at):
    bare, more = text.strip(), {"alternatives": alternatives, "token_position": at}
    for codec in (Bytes(), Words()):
        found = cut(text, looked_for, codec, limit=limit, **more)
        kept, count, centre = spec_cut(bare, looked_for, codec, limit, alternatives, at)
        assert found.centre == centre
        assert found.whole == (len(kept) == count)
        assert len(kept) <= limit
        tokens = codec.encode(bare)
        expected = codec.decode([tokens[i] for i in kept])
        if isinstance(codec, Bytes):  # only complete characters
            expected = bytes(tokens[i] for i in kept).decode(errors="ignore")
        if "\ufffd" not in bare:
            assert found.text == expected.strip()
        assert found.text in bare


@given(st.text(TEXT, max_size=12), st.lists(st.text(TEXT.replace("\n", ""), max_size=3)))
@example("a.b", ["a+b", "a.*"])  # a label is no pattern
@settings(max_examples=200, deadline=None)
def test_contains(prediction, labels):
    line = prediction.split("\n")[0]
    expected = any(label and occurrence(line, label) >= 0 for label in labels)
    assert score({"labels": labels}, [prediction]) == {"contains": expected}

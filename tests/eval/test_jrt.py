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
WITH_SUMMARY = PAGE | {
    "text": f"{PAGE['text']}\nSummary of information above...\n1999. Release date:"
}
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
FILM = "A film. Of 1999"


KEYED = (
    f"{FILM}. Release date:",
    f"Information about Release date. {FILM}.\n{FILM}. Release date:",
)


MARKED = "[DOC] [TLE] Lamps[PAR] shine"


NQ = (f"{MARKED}. Who shone?", f"Who was it {MARKED}.\n{MARKED}. Who shone?")


LAMPS = ("Lamps shine. Who shone?", "Who was it: Lamps shine.\nLamps shine. Who shone?")


LIT = ("It is lit. The lamp is", "Is it? It is lit.\n\nIt is lit. The lamp is")


# a row, and its prompts with one and with two copies
PROMPTS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "jrt_swde": (WITH_SUMMARY, KEYED),
    "jrt_fda": (PAGE, KEYED),
    "jrt_squad": (SQUAD, LIT),
    "jrt_triviaqa": (ASKED, LAMPS),
    "jrt_nq": (ASKED, NQ),
    "jrt_drop": (ASKED, NQ),
}
KEYS = [*PROMPTS]
TASKS = [f"{key}{copies}" for key in KEYS for copies in ("", "_twice")]


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


def counts_of(documents, *names):
    """Return the counts of that name in the description of loaded documents."""
    counts = json.loads(documents.info.description)
    return [counts[name] for name in names]


@pytest.mark.parametrize("key", KEYS)
def test_prompts(loader, key):
    row, (once, twice) = PROMPTS[key]
    load_rows = loader(key, [row])

    (first,) = load_rows(twice=False)
    (second,) = load_rows(twice=True)

    assert first["prompt"] == once
    assert second["prompt"] == twice
    labels = row["answers"] if "answers" in row else [row["value"]]
    for item in (first, second):
        assert item["labels"] == labels
        assert item["target"] == labels[0]


def test_dropped_rows_are_counted(loader):
    counts = ("rows", "dropped", "kept", "cut", "answer", "nothing")
    rows = [
        PAGE,
        PAGE | {"value": "7"},
        PAGE | {"key": "x"},
        PAGE | {"value": None},
        PAGE | {"value": "nowhere", "key": "neither"},
        PAGE | {"value": "nowhere"},  # the text has its key
    ]
    load_rows = loader("jrt_fda", rows)

    documents = load_rows()
    assert documents["row"] == [0, 4, 5]
    assert documents["centre"] == ["answer", "nothing", "answer"]
    assert counts_of(documents, *counts) == [6, 3, 3, 0, 2, 1]

    # around the value alone, and to fewer tokens
    documents = load_rows(jrt_fda_answers="value", jrt_tokens="4", jrt_swde_context="of others")
    assert documents["row"] == [0, 2, 4, 5]
    assert counts_of(documents, *counts) == [6, 2, 4, 4, 2, 2]


def test_lists_of_answers(loader):
    letters = " ".join(string.ascii_lowercase)
    row = {
        "question": "Which?",
        "orig_question": "Which?",
        "context": f"aa {letters} Bb {letters} cc",
    }
    rows = [
        # the first answer counts, not the first that occurs
        row | {"answers": ["BB", "aa"], "alt_answers": ["cc"], "tok_pos": 0},
        row | {"answers": ["xx", "aa"], "alt_answers": ["yy", "cc", "aa"], "tok_pos": 0},
        row | {"answers": ["xx", "aa"], "alt_answers": ["yy"], "tok_pos": 0},
        row | {"answers": ["xx", "aa"], "alt_answers": [], "tok_pos": None},
        row | {"answers": [], "alt_answers": ["aa"], "tok_pos": 0},
    ]

    documents = loader("jrt_nq", rows)(jrt_tokens=8)

    assert documents["centre"] == ["answer", "alt_answers", "tok_pos", "nothing"]
    of_answer, of_alternative, of_position, of_nothing = documents["prompt"]
    assert "Bb" in of_answer
    assert "cc" in of_alternative
    assert of_position.startswith("aa a")
    assert of_nothing == "z cc. Which?"


@pytest.mark.parametrize("key", ["jrt_drop", "jrt_triviaqa"])
def test_drop_and_triviaqa_keep_the_first_tokens(loader, key):
    """Keep the first 950 tokens whatever the answers, and all rows (issue 17, item 3)."""
    context = " ".join(f"word{i}" for i in range(900)) + " Oslo"
    row = {"question": "Which?", "orig_question": "Which?", "context": context}
    answers: list[list[str]] = [["Oslo"], ["7"], [], ["nowhere to be seen", "word1"]]
    load_rows = loader(key, [row | {"answers": row_answers} for row_answers in answers])

    documents = load_rows()
    first_tokens = tokenizer().decode(tokenizer().encode(context)[:950]).strip()
    assert documents["prompt"] == [f"{first_tokens}. Which?"] * 4
    assert documents["labels"] == answers
    assert counts_of(documents, "dropped", "kept", "beginning") == [0, 4, 4]

    # around the answers, as an option
    documents = load_rows(**{f"{key}_answers": "answers"})
    assert documents["row"] == [0, 3]
    assert "Oslo. Which?" in documents["prompt"][0]


def test_prompts_that_do_not_fit_are_counted(loader, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    load_rows = loader("jrt_fda", [PAGE, PAGE | {"text": PAGE["text"] * 2}])
    answer_tokens = 48
    short, long = (len(tokenizer().encode(item["prompt"])) + answer_tokens for item in load_rows())
    assert short < long

    for max_length, count in ((long, 0), (long - 1, 1), (short - 1, 2)):
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


def test_rows_of_one_page_share_a_source(loader):
    """By file in SWDE."""
    rows = [
        WITH_SUMMARY | {"text": WITH_SUMMARY["text"] + text, "file_name": name}
        for name, text in (("a", "T"), ("a", "U"), ("b", "T"))
    ]

    first, second, third = loader("jrt_swde", rows)()["source"]

    assert first == second != third


def test_rows_of_one_passage_share_a_source(loader):
    """By the passage without its final question in TriviaQA."""
    rows = [
        ASKED | {"context": "A b.", "question": "Who?"},
        ASKED | {"context": "A b. W?", "question": "W?"},
        ASKED | {"context": "A [PAR]c. What?", "question": "What?"},
    ]

    first, second, third = loader("jrt_triviaqa", rows)()["source"]

    assert first == second != third


def expected_rows(key, is_first_tokens):
    """Return the numbers of the fixture's rows that are kept."""
    golds = [row["value"] for row in rows_of(key)]
    return {at for at, gold in enumerate(golds) if is_first_tokens or len(gold) > 1}


@pytest.mark.system
def test_the_suite_complete(tmp_path, metadata):
    """Requests and scores of the task files, for a model that knows the answers."""
    stage_fixtures(tmp_path, KEYS)
    model = ScriptedLM(lambda request: f" I think {request.doc['labels'][0].swapcase()}!\nAnd?")
    manager = TaskManager(
        include_path=str(ROOT / "eval" / "tasks"), include_defaults=False, metadata=metadata
    )

    evaluated = simple_evaluate(model, tasks=["jrt"], task_manager=manager, bootstrap_iters=0)

    assert evaluated is not None
    assert sorted(evaluated["results"].keys() - {"jrt"}) == sorted(TASKS)
    requests = {
        (str(request.task_name), request.doc["row"]): request.arguments for request in model.asked
    }
    for task in TASKS:
        key = task.removesuffix("_twice")
        is_twice = task.endswith("_twice")
        is_first_tokens = key in ("jrt_triviaqa", "jrt_drop")  # no search, no dropped rows
        assert evaluated["results"][task]["contains,none"] == 1.0
        assert evaluated["versions"][task] == (2.0 if is_first_tokens else 1.0)

        rows = {row for name, row in requests if name == task}
        assert rows == expected_rows(key, is_first_tokens) != set()
        for row in rows:
            prompt, options = requests[task, row]
            assert options == {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
            if is_twice:
                assert prompt.endswith(f"\n{requests[key, row][0]}")

        # about 1k and 2k tokens; SQuAD's first copy is not cut
        longest = max(len(tokenizer().encode(requests[task, row][0])) for row in rows)
        nominal = 2000 if is_twice else 1000
        limit = 10_000 if task == "jrt_squad_twice" else nominal
        assert 0.93 * nominal < longest < limit


# ---- the cut rule and the score of spec/eval.md, letter by letter


class Words:
    """One token per word with the space before it; half a word is a token as well."""

    def __init__(self):
        self.vocabulary: list[str] = []

    def encode(self, text):
        tokens = re.findall(r" [^ ]*|[^ ]+", text)
        for token in tokens:
            if token not in self.vocabulary:
                self.vocabulary.append(token)
        return [self.vocabulary.index(token) for token in tokens]

    def decode(self, ids):
        return "".join(self.vocabulary[i] for i in ids)


def forms_of(letter):
    """The forms of a letter that are the same, case ignored."""
    lower = letter.lower()[0]
    return {letter, letter.casefold(), letter.upper(), lower, lower.upper()}


def alike(letter, other):
    """Whether two letters are the same, case ignored."""
    return bool(forms_of(letter) & forms_of(other))


def occurrence(text, answer):
    """Where `answer` begins in `text` first; -1 if nowhere."""
    if not answer:
        return -1
    for begin in range(len(text) - len(answer) + 1):
        if all(alike(text[begin + k], letter) for k, letter in enumerate(answer)):
            return begin
    return -1


def spec_centre(text, answers, codec, alternatives, token_position):
    """The token around which the rule cuts, and why."""
    places = [occurrence(text, answer) for answer in answers]
    if any(place >= 0 for place in places):
        earliest = min(place for place in places if place >= 0)
        return len(codec.encode(text[:earliest])), "answer"

    for alternative in alternatives:
        place = occurrence(text, alternative)
        if place >= 0:
            return len(codec.encode(text[:place])), "alt_answers"

    count = len(codec.encode(text))
    if token_position is not None and token_position >= 0:
        return min(token_position, count), "tok_pos"
    return count, "nothing"


def spec_cut(text, answers, codec, limit, alternatives, token_position):
    """The kept tokens' indices, the number of all, and the centre."""
    count = len(codec.encode(text))
    position, centre = spec_centre(text, answers, codec, alternatives, token_position)
    before = [*range(position)][max(0, position - limit // 2) :]
    after = [*range(position, count)][: limit - len(before)]
    return before + after, count, centre


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
def test_the_cut_equals_the_rule(text, looked_for, limit, alternatives, token_position):
    bare = text.strip()
    for codec in (Bytes(), Words()):
        kept, count, centre = spec_cut(bare, looked_for, codec, limit, alternatives, token_position)
        assert len(kept) <= limit

        result = cut(
            text,
            looked_for,
            codec,
            limit=limit,
            alternatives=alternatives,
            token_position=token_position,
        )

        assert result.centre == centre
        assert result.whole == (len(kept) == count)
        assert result.text in bare
        tokens = codec.encode(bare)
        expected = codec.decode([tokens[i] for i in kept])
        if isinstance(codec, Bytes):  # only complete characters
            expected = bytes(tokens[i] for i in kept).decode(errors="ignore")
        if "\ufffd" not in bare:
            assert result.text == expected.strip()


@given(st.text(TEXT, max_size=12), st.lists(st.text(TEXT.replace("\n", ""), max_size=3)))
@example("a.b", ["a+b", "a.*"])  # a label is no pattern
@settings(max_examples=200, deadline=None)
def test_contains(prediction, labels):
    line = prediction.split("\n")[0]
    expected = any(label and occurrence(line, label) >= 0 for label in labels)
    assert score({"labels": labels}, [prediction]) == {"contains": expected}

"""The documents of the JRT suite: prompts, what becomes of rows, options."""

import logging
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canon_pretrain.core.errors import UserError
from eval.staging.staged import write_staged
from eval.tasks.jrt.documents import LOG, load, read_counts
from eval.tasks.jrt.prompts import without_trailing
from tests.data_folders import tokenizer

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
    write_staged(folder, key, {"validation": rows}, revision="f" * 40)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer, as metadata names it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    return str(folder)


@pytest.fixture
def told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What is logged under the harness's name, which it keeps from the root once it has begun."""
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    caplog.set_level(logging.INFO, LOG.name)
    return caplog


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


def test_a_space_before_the_last_dot(tmp_path: Path, trained: str) -> None:
    # as NQ writes; only the twice variant closes it, in the public code too
    row = ASKED | {"context": "A lamp shone ."}
    staged(tmp_path, "jrt_nq", [row])
    options = {"dataset": "jrt_nq", "staged": str(tmp_path), "tokenizer": trained}
    once, twice = (load(**options, twice=twice)["validation"][0] for twice in (False, True))
    assert once["prompt"] == "A lamp shone . Who shone?"
    assert twice["prompt"] == "Who was it A lamp shone.\nA lamp shone. Who shone?"


# ---- what becomes of rows


def fields(count: dict[str, int]) -> list[int]:
    return [count[name] for name in ("rows", "dropped", "kept", "cut", "answer", "nothing")]


def test_counts_and_what_is_dropped(
    tmp_path: Path, trained: str, told: pytest.LogCaptureFixture
) -> None:
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
    assert fields(read_counts(found)) == [7, 4, 3, 0, 2, 1]
    (line,) = told.messages
    assert line.startswith("jrt_fda: rows 7, dropped 4, kept 3, cut 0, answer 2, ")
    # around the value alone, and to fewer tokens
    found = load(**options, jrt_fda_answers="value", jrt_tokens="4", jrt_swde_context="of others")
    found = found["validation"]
    assert found["row"] == [0, 2, 5, 6]
    assert fields(read_counts(found)) == [7, 3, 4, 4, 2, 2]
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
    counts = read_counts(found)
    assert (counts["dropped"], counts["kept"], counts["beginning"]) == (0, 4, 4)
    # around the answers, as an option
    found = load(**options, **{f"{key}_answers": "answers"})["validation"]
    assert found["row"] == [0, 3] and "Oslo. Which?" in found["prompt"][0]


def test_squad_twice_leaves_the_first_copy_whole(tmp_path: Path, trained: str) -> None:
    passage = "The sun is up. " * 400
    row = SQUAD | {"context": f"{passage}Question: x", "text": f"{passage}It is lit, is it"}
    staged(tmp_path, "jrt_squad", [row])
    options = {"dataset": "jrt_squad", "staged": str(tmp_path), "tokenizer": trained}
    once, twice = (load(**options, twice=twice)["validation"][0] for twice in (False, True))
    assert twice["prompt"] == f"Is it? {passage}\n{once['prompt']}"
    assert 475 < len(tokenizer().encode(once["prompt"])) < 500 < len(tokenizer().encode(passage))
    assert once["prompt"].endswith("It is lit, is it")


def test_another_field_to_cut_leaves_the_prompt_s_context_whole(
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


def test_prompts_that_do_not_fit_are_counted(
    tmp_path: Path, trained: str, told: pytest.LogCaptureFixture
) -> None:
    staged(tmp_path, "jrt_fda", [PAGE, PAGE | {"text": PAGE["text"] * 2}])
    options = {"dataset": "jrt_fda", "staged": str(tmp_path), "tokenizer": trained}
    needed = [
        len(tokenizer().encode(item["prompt"])) + 48 for item in load(**options)["validation"]
    ]
    assert needed[0] < needed[1]
    for max_length, count in ((needed[1], 0), (needed[1] - 1, 1), (needed[0] - 1, 2)):
        told.clear()
        found = load(**options, max_length=max_length)["validation"]
        assert read_counts(found)["too_long"] == count
        assert [record.levelname for record in told.records] == ["WARNING" if count else "INFO"]


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
    with pytest.raises(UserError, match="unknown option 'jrt_nq_contxt', did you mean"):
        load(**options, jrt_nq_contxt="text")
    for wrong in ("many", 1, -4, 3.5, None):
        with pytest.raises(UserError, match=r"jrt_tokens .*: expected a number of tokens"):
            load(**options, jrt_tokens=wrong)
    with pytest.raises(UserError, match=r"eval stage --suite jrt --only jrt_fda"):
        load(**options | {"dataset": "jrt_fda"})
    with pytest.raises(UserError, match="needs the evaluated model's tokenizer"):
        load(dataset="jrt_nq", staged=str(tmp_path))


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


@given(st.text("ab ?", max_size=8), st.text("aA?", min_size=1, max_size=3), st.integers(0, 3))
def test_trailing_copies_go(text: str, copy: str, times: int) -> None:
    found = without_trailing(text + f"  {copy.swapcase()}" * times, copy)
    assert found == without_trailing(text, copy)
    assert not found.lower().endswith(copy.lower()) and found == found.rstrip()
    assert text.startswith(found)
    assert without_trailing(text, " ") == text.rstrip()

"""The JRT suite: prompts, what becomes of rows, options; and all of it, answered."""

import json
import logging
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.export import export
from eval.staging.staged import write_staged
from eval.tasks.jrt.cut import contains
from eval.tasks.jrt.documents import LOG, STYLES, load, read_counts, score, without_trailing
from tests.data_folders import plant_data, sentence, tokenizer
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.hf_exports import hub_environment, plant_run
from tests.scripted_lm import ScriptedLM
from tests.support import ROOT
from tests.variants import VARIANTS, build

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
    with pytest.raises(UserError, match='"jrt_nq_contxt" .* Did you mean'):
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


# ---- the suite complete, through its task files: models that know the answer


FIRST_TOKENS = ("jrt_triviaqa", "jrt_drop")
"""Those that keep the beginning of a context: nothing is searched, nothing dropped."""


def row_of(request: Instance) -> dict[str, Any]:
    """The staged row that a prompt is from."""
    key = str(request.task_name).removesuffix("_twice")
    return rows_of(key)[request.doc["row"]]


def gold(row: dict[str, Any]) -> str:
    return row["value"] if "value" in row else row["answers"][0]


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(stage_fixtures(tmp_path_factory.mktemp("staged"), KEYS))


def evaluate(model: LM, metadata: dict[str, Any]) -> dict[str, Any]:
    manager = TaskManager(
        include_path=str(ROOT / "eval" / "tasks"), include_defaults=False, metadata=metadata
    )
    found = simple_evaluate(model, tasks=["jrt"], task_manager=manager, bootstrap_iters=0)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        (gold, 1.0),
        (lambda row: f" I think {gold(row).swapcase()}!\nWho knows?", 1.0),
        (lambda row: f"\n{gold(row)}", 0.0),
        (lambda row: f"not {gold(row)[:-1]}", 0.0),
        (lambda row: "", 0.0),
    ],
    ids=["gold", "gold in a line", "gold after a line", "less than gold", "nothing"],
)
def test_the_suite_scores_what_is_told(
    fixtures: str, trained: str, tell: Any, expected: float
) -> None:
    model = ScriptedLM(lambda request: tell(row_of(request)))
    found = evaluate(model, {"staged": fixtures, "tokenizer": trained})
    assert sorted(found["results"].keys() - {"jrt"}) == sorted(TASKS)
    counts = dict.fromkeys(TASKS, 0)
    for request in model.asked:
        counts[str(request.task_name)] += 1
    for task in TASKS:
        assert found["results"][task]["contains,none"] == expected
        rows = rows_of(task.removesuffix("_twice"))
        first = task.startswith(FIRST_TOKENS)
        kept = [row for row in rows if first or len(gold(row)) > 1]
        assert counts[task] == len(kept) > 0
        assert found["versions"][task] == (2.0 if first else 1.0)
        assert found["n-shot"][task] == 0
        assert found["higher_is_better"][task] == {"contains": True}
        assert found["configs"][task]["metadata"]["primary"] == "contains"


def test_what_the_suite_asks(fixtures: str, trained: str) -> None:
    model = ScriptedLM(lambda request: "")
    evaluate(model, {"staged": fixtures, "tokenizer": trained})
    lengths: dict[str, int] = {}
    asked: dict[tuple[str, int], str] = {}
    for request in model.asked:
        prompt, options = request.arguments
        assert options == {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
        assert prompt == request.doc["prompt"] and prompt == prompt.rstrip()
        name = str(request.task_name)
        asked[name, request.doc["row"]] = prompt
        lengths[name] = max(lengths.get(name, 0), len(tokenizer().encode(prompt)))
        row = row_of(request)
        if "squad" not in name:  # there a hit far from the end cuts that off
            assert prompt.endswith(last_words(name, request.doc["row"]))
    # about 1k and 2k tokens; SQuAD's first copy is longer, as it is not cut
    for key in KEYS:
        assert 940 < lengths[key] < 1000
        assert lengths[f"{key}_twice"] > 1890
        assert lengths[f"{key}_twice"] < 2000 or key == "jrt_squad"
    for (name, row), prompt in asked.items():
        if not name.endswith("_twice"):
            twice = asked[f"{name}_twice", row]
            assert twice.endswith(f"\n{prompt}")
            text = prompt.removesuffix(last_words(name, row))
            assert twice.count(text) == 2 or name == "jrt_squad"


def last_words(name: str, row: int) -> str:
    """What stands behind the text in a prompt."""
    fields = rows_of(name.removesuffix("_twice"))[row]
    return f" {fields['key'].capitalize()}:" if "key" in fields else f" {fields.get('question')}"


def test_the_tables_and_files_fit() -> None:
    assert list(STYLES) == KEYS
    manager = TaskManager(include_path=str(ROOT / "eval" / "tasks"), include_defaults=False)
    assert set(TASKS) <= set(manager.all_subtasks) and "jrt" in manager.all_groups
    assert score({"labels": ["Oslo"]}, ["In oslo."]) == {"contains": 1.0}


@pytest.mark.slow
def test_the_command_on_an_export(tmp_path: Path, fixtures: str, trained: str) -> None:
    plant_data(tmp_path / "data", [[sentence(seed, 40) for seed in range(3)]], [sentence(9, 40)])
    model = build(replace(VARIANTS["nope ABCD"], vocab_size=300, max_seq_len=512))
    export(plant_run(tmp_path / "run", model, data=tmp_path / "data"), tmp_path / "out")
    arguments = f"pretrained={tmp_path / 'out'},trust_remote_code=True"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments]
    command += ["--tasks", "jrt", "--include_path", str(ROOT / "eval" / "tasks")]
    command += ["--metadata", '{"jrt_tokens": 60}', "--device", "cpu", "--batch_size", "32"]
    command += ["--log_samples", "--output_path", str(tmp_path / "results")]
    environment = hub_environment(tmp_path) | {"CANON_EVAL_DATA": fixtures}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jrt_squad: rows 12, dropped 6, kept 6, " in done.stdout + done.stderr
    for task in TASKS:
        (path,) = (tmp_path / "results").rglob(f"samples_{task}_2*.jsonl")
        found = [json.loads(line) for line in path.read_text().splitlines()]
        key = task.removesuffix("_twice")
        options = {"staged": fixtures, "tokenizer": trained, "jrt_tokens": 60}
        items = load(dataset=key, twice=task != key, **options)["validation"]
        # the export's tokenizer cuts as that of training
        assert [row["doc"] for row in found] == list(items)
        for row in found:
            answer = row["filtered_resps"][0]
            assert "\n" not in answer
            assert row["contains"] == contains(answer, row["doc"]["labels"])

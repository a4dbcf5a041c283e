"""The JRT suite complete, through its task files: models that know the answer, and the command."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from canon_pretrain.hf.export import export
from eval.tasks.jrt.cut import contains
from eval.tasks.jrt.documents import load, score
from eval.tasks.jrt.prompts import STYLES
from tests.data_folders import plant_data, sentence, tokenizer
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.hf_exports import hub_environment, plant_run
from tests.scripted_lm import ScriptedLM
from tests.support import ROOT
from tests.variants import VARIANTS, build

KEYS = ["jrt_swde", "jrt_fda", "jrt_squad", "jrt_triviaqa", "jrt_nq", "jrt_drop"]
TASKS = [f"{key}{more}" for key in KEYS for more in ("", "_twice")]
FIRST_TOKENS = ("jrt_triviaqa", "jrt_drop")
"""Those that keep the beginning of a context: nothing is searched, nothing dropped."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer, as metadata names it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    return str(folder)


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

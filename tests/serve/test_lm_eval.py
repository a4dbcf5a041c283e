"""`lm_eval --model local-completions` on a served export has the scores of `canon eval run`."""

import json
import os
import subprocess
import sys

import pytest

from canon_pretrain.hf.export import export
from canon_pretrain.run.results import read_samples
from tests.eval_fixtures import stage_fixtures
from tests.hf_exports import hub_environment
from tests.served_runs import serve, write_text_run
from tests.support import ROOT

SUITES = ("discriminative", "jrt_squad")
LIMIT = ("--limit", "2")
TIMEOUT_S = 1500
MAX_LENGTH = 2048


@pytest.mark.system
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_served_scores_are_those_of_eval_run(tmp_path):
    """Log-likelihoods of choices and of whole pages, greedy or not, and generated answers."""
    run = write_text_run(tmp_path, "nope ABCD", MAX_LENGTH)
    out = tmp_path / "out"
    export(run, out)
    staged = stage_fixtures(tmp_path / "staged")
    environment = hub_environment(tmp_path) | {"CANON_EVAL_DATA": str(staged)}
    environment["PYTHONPATH"] = str(ROOT)

    def command(*words):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done

    command(
        *("eval", "run"),
        *("--checkpoint", out),
        *("--suite", ",".join(SUITES)),
        *("--out", tmp_path),
        *("--max_length", MAX_LENGTH),
        *LIMIT,
    )
    with serve(out) as server:
        command(
            *("lm_eval", "--model", "local-completions"),
            "--model_args",
            f"model=out,base_url={server.url}/v1/completions,tokenizer={out},num_concurrent=8,"
            f"max_length={MAX_LENGTH}",
            *("--include_path", ROOT / "eval" / "tasks"),
            *("--tasks", ",".join(SUITES)),
            *("--batch_size", "3"),
            *("--log_samples", "--output_path", tmp_path / "theirs"),
            *LIMIT,
        )

    num_items = 0
    for suite in SUITES:
        for task, rows in read_samples(tmp_path / suite).items():
            (path,) = (tmp_path / "theirs").glob(f"*{os.sep}samples_{task}_*.jsonl")
            samples = [json.loads(line) for line in path.read_text().splitlines()]
            theirs = {sample["doc_id"]: sample for sample in samples}
            assert len(rows) == len(theirs) > 0
            for row in rows:
                sample = theirs[row["doc_id"]]
                assert row["prompt_hash"] == sample["prompt_hash"]
                for metric in sample["metrics"]:
                    assert row[metric] == pytest.approx(sample[metric], rel=1e-4), (task, metric)
                num_items += 1
    assert num_items > 15

"""Babilong and the birth-year probes by `lm_eval --model hf`, as a user types it, with no network.

Beside the command's answers: what the exported model says when it is asked one prompt at a time.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from canon_pretrain.hf.export import export
from canon_pretrain.model.transformer import Transformer
from eval.tasks.babilong.task import is_right
from eval.tasks.birth_year.probes import KINDS
from eval.tasks.birth_year.task import FrozenSets
from tests.data_folders import plant_data, sentence, tokenizer
from tests.eval_fixtures import stage_fixtures
from tests.hf_exports import hub_environment, plant_run
from tests.support import ROOT
from tests.variants import VARIANTS, build

ASKED = "babilong_qa1_0k,1-hop-0,1-hop-0_rank"
ITEMS = 12


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    plant_data(tmp_path / "data", [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])
    model = build(replace(VARIANTS["nope ABCD"], vocab_size=300))
    export(plant_run(tmp_path / "run", model, data=tmp_path / "data"), tmp_path / "out")
    weights, args = model.state_dict(), replace(model.args, max_seq_len=2048)
    model = build(args)
    model.load_state_dict(weights)
    stage_fixtures(tmp_path / "staged", ["babilong_qa1_0k"])
    # as `eval run` freezes them: for the training tokenizer, which the export names
    probes = FrozenSets(
        tmp_path / "probes",
        tokenizer=tokenizer(),
        tokenizer_sha256=tokenizer().sha256,
        corpus=lambda: "none is needed",
    )
    probes.get(KINDS[0], 0)
    # of bytes that are no text, as a random model writes them, the package makes less than ours
    text_of = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).decode
    folders = {"staged": str(tmp_path / "staged"), "probes": str(tmp_path / "probes")}
    done = ask(tmp_path, folders, "max_position_embeddings=2048")
    assert done.returncode == 0, done.stdout + done.stderr
    found = samples(tmp_path / "results", "babilong_qa1_0k")
    assert len(found) == 6
    for row in found:
        document, answer = row["doc"], row["filtered_resps"][0]
        asked = (document["task"], document["question"], document["target"], answer)
        assert row["acc"] == is_right(*asked)
        assert answer == text_of(greedy(model, document["prompt"], 20)).partition(".")[0]
    found = samples(tmp_path / "results", "1-hop-0")
    assert len(found) == ITEMS
    for row in found:
        answer = text_of(greedy(model, row["doc"]["prompt"], 5))
        assert row["filtered_resps"][0].strip() == answer.strip()
        assert row["exact"] == (answer.strip()[:4] == row["doc"]["answer"])
    for row in samples(tmp_path / "results", "1-hop-0_rank"):
        document = row["doc"]
        prompt = tokenizer().encode(document["prompt"]).tolist()
        for year, answer in zip(document["choices"], row["filtered_resps"], strict=True):
            whole = tokenizer().encode(document["prompt"] + year).tolist()
            # the space is the continuation's, so its likelihood is counted in
            expected = log_likelihood(model, whole, len(prompt) - 1)
            assert float(answer[0]) == pytest.approx(expected, abs=1e-3)
    done = ask(tmp_path, folders)  # the export says that it reads 160 tokens
    assert done.returncode != 0
    assert "babilong_qa1_0k: prompts of up to " in done.stderr.splitlines()[-1]


def ask(base: Path, metadata: dict[str, str], *more: str) -> subprocess.CompletedProcess:
    arguments = ",".join([f"pretrained={base / 'out'}", "trust_remote_code=True", *more])
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments]
    command += ["--include_path", str(ROOT / "eval" / "tasks"), "--tasks", ASKED]
    command += ["--metadata", json.dumps(metadata), "--limit", str(ITEMS), "--device", "cpu"]
    command += ["--batch_size", "4", "--log_samples", "--output_path", str(base / "results")]
    return subprocess.run(
        command,
        cwd=base,
        env=hub_environment(base) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def greedy(model: Transformer, prompt: str, count: int) -> list[int]:
    """The answer of at most `count` tokens; it ends before EOS."""
    tokens = context = tokenizer().encode(prompt).tolist()
    for _ in range(count):
        with torch.no_grad():
            tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
    written = tokens[len(context) :]
    if tokenizer().eos_id in written:
        written = written[: written.index(tokenizer().eos_id)]
    return written


def log_likelihood(model: Transformer, tokens: list[int], start: int) -> float:
    """The sum of the log-probabilities of the tokens from `start` on."""
    with torch.no_grad():
        logs = model(torch.tensor([tokens]))[0].log_softmax(-1)
    return sum(float(logs[at - 1, tokens[at]]) for at in range(start, len(tokens)))


def samples(results: Path, task: str) -> list[dict[str, Any]]:
    """What lm_eval wrote of each question."""
    (path,) = results.glob(f"*/samples_{task}_2*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]

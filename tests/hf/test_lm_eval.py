"""`lm_eval --model hf` on an export, as a user types it; its numbers beside those of our model."""

import json
import os
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
from tests.data_folders import plant_data, sentence, tokenizer
from tests.hf_exports import hub_environment, plant_run
from tests.variants import VARIANTS, build

CHOICES = [" and", " was not", " the which by"]
QUESTIONS = [f"the {word} of" for word in ("to", "in", "is", "was", "for", "on")]
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: {kind}
{rest}
"""
TASKS = {
    "choose": (
        "multiple_choice",
        "doc_to_text: question\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        'target_delimiter: ""\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
    ),
    "roll": (
        "loglikelihood_rolling",
        'doc_to_text: ""\ndoc_to_target: question\n'
        "metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte}]",
    ),
    "write": (
        "generate_until",
        "doc_to_text: question\ndoc_to_target: question\n"
        'generation_kwargs: {until: ["."], max_gen_toks: 6}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
    ),
}


def log_likelihood(model: Transformer, context: list[int], text: list[int]) -> float:
    """The sum of the log-probabilities of `text` after `context`."""
    with torch.no_grad():
        logs = model(torch.tensor([context + text]))[0].log_softmax(-1)
    places = range(len(context) - 1, len(context) + len(text) - 1)
    return sum(float(logs[at, token]) for at, token in zip(places, text, strict=True))


@pytest.mark.slow
def test_the_command_on_tasks_from_disk(tmp_path: Path) -> None:
    plant_data(tmp_path / "data", [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])
    model = build(replace(VARIANTS["nope ABCD"], vocab_size=300))
    export(plant_run(tmp_path / "run", model, data=tmp_path / "data"), tmp_path / "out")
    rows = tmp_path / "rows.json"
    asked = [{"question": q, "choices": CHOICES, "gold": i % 3} for i, q in enumerate(QUESTIONS)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    for name, (kind, rest) in TASKS.items():
        text = TASK.format(name=name, rows=rows, kind=kind, rest=rest)
        (tmp_path / f"{name}.yaml").write_text(text)
    arguments = f"pretrained={tmp_path / 'out'},trust_remote_code=True"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(tmp_path), "--device", "cpu"]
    command += ["--batch_size", "4", "--log_samples", "--output_path", str(tmp_path / "results")]
    environment = hub_environment(tmp_path)
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    training = tokenizer()
    # of bytes that are no text, as a random model writes them, the package makes less than ours
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return training.encode(text).tolist()

    for row in samples(tmp_path / "results", "choose"):
        question = row["doc"]["question"]
        for choice, answer in zip(CHOICES, row["filtered_resps"], strict=True):
            context = ids(question)
            text = ids(question + choice)[len(context) :]
            expected = log_likelihood(model, context, text)
            assert float(answer[0]) == pytest.approx(expected, abs=1e-3)
    for row in samples(tmp_path / "results", "roll"):
        # a text without context begins after EOS, as documents do in training
        expected = log_likelihood(model, [training.eos_id], ids(row["doc"]["question"]))
        assert float(row["filtered_resps"][0]) == pytest.approx(expected, abs=1e-3)
    for row in samples(tmp_path / "results", "write"):
        tokens = context = ids(row["doc"]["question"])
        for _ in range(6):
            with torch.no_grad():
                tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
        written = tokens[len(context) :]
        if training.eos_id in written:
            written = written[: written.index(training.eos_id)]
        assert row["resps"][0][0] == exported.decode(written).split(".")[0]


def samples(results: Path, task: str) -> list[dict[str, Any]]:
    """What lm_eval wrote of each question."""
    (path,) = results.glob(f"*{os.sep}samples_{task}_*.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == len(QUESTIONS)
    return found

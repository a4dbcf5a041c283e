"""vLLM serves exports by the plugin: logits equal full passes, however requests are scheduled.

The tests marked `system` need vLLM: VLLM_PYTHON is the Python of an environment with vLLM
and transformers; see canon_pretrain/serve/README.md.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.hf_exports import quick as quick
from tests.support import HANGS_AFTER_S
from tests.variants import build, variant

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 64, "dim": 128, "ffn_dim": 96, "max_seq_len": 256}  # heads of 32 channels
LENGTHS = [1, 2, 3, 5, 17, 40, 64, 100]
NUM_NEW = 12
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 200,
    "max_num_seqs": 8,
    "max_logprobs": 64,
    "block_size": 32,
    "seed": 0,
}


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]


def model_of(name):
    return build(replace(variant(name), **SIZES)).eval()


def run_vllm(cases, folder):
    """Return vLLM's answers of each case, by the plugin of this folder."""
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("needs VLLM_PYTHON, the Python of an environment with vLLM")

    # the entry point, as an installation of this package has it
    metadata = folder / "site" / "canon_vllm-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: canon-vllm\nVersion: 0\n")
    entry = "[vllm.general_plugins]\ncanon = canon_pretrain.serve.vllm_plugin:register\n"
    (metadata / "entry_points.txt").write_text(entry)

    cases_path = folder / "cases.json"
    answers_path = folder / "answers.json"
    cases_path.write_text(json.dumps(cases))
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    script = Path(__file__).with_name("vllm_cases.py")
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], script, cases_path, answers_path],
        env=os.environ | settings,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=5 * HANGS_AFTER_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(answers_path.read_text())


def largest_error(model, prompt, answered):
    """Return the largest difference of log-probabilities; assert that the tokens are the argmax."""
    ids = prompt + answered["ids"]
    with torch.no_grad():
        scores_TV = model(torch.tensor([ids]))[0].log_softmax(dim=-1)
    assert answered["ids"] == scores_TV[len(prompt) - 1 : -1].argmax(dim=-1).tolist()

    # the scores of position i are those of token i + 1
    by_position = dict(enumerate(answered["prompt_logprobs"][1:]))
    by_position |= dict(enumerate(answered["logprobs"], start=len(prompt) - 1))
    errors = [
        abs(scores_TV[position, int(id_)].item() - score)
        for position, scores in by_position.items()
        for id_, score in scores.items()
    ]
    assert len(answered["ids"]) == NUM_NEW and len(errors) >= NUM_NEW * OPTIONS["max_logprobs"]
    return max(errors)

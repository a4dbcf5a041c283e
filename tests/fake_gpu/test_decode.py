"""Generation and scoring on a fake H100: the step is captured, and the host reads 16 tokens."""

import json
import math
import subprocess
import sys

import pytest

from tests.fake_gpu_decode import NEW_TOKENS
from tests.support import ROOT

MODELS = {
    "canon": {"canon_set": "ABCD"},
    "alibi": {"position": "alibi"},
    "relative": {"position": "relative", "relative_extent": 64},
    "dynamic": {"canon_set": "ABCD", "canon_filter": "dynamic"},
    "experts": {"ffn": "moe", "canon_set": "ABC", "num_experts": 4},
    "gla": {"mixer": "gla", "canon_set": "ABCD", "position": "nope"},
    "mamba2": {"mixer": "mamba2", "position": "nope"},
    "gated_deltanet": {"mixer": "gated_deltanet", "position": "nope"},
}
TOKENS_PER_READ = 16


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.system if name == "canon" else pytest.mark.long)
        for name in MODELS
    ],
)
def test_a_decode_step_is_one_launch(name):
    command = [sys.executable, "-m", "tests.fake_gpu_decode", json.dumps(MODELS[name])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])

    # the first token is read from the prompt, the second one runs before the capture
    assert report["replays"] == NEW_TOKENS - 2

    # waits: none for scores; for the first token, and for the others in groups
    assert report["waits"]["score"] == {}
    waits = report["waits"]["generate"]
    num_reads = sum(count for wait, count in waits.items() if wait.startswith("tolist"))
    assert num_reads == 1 + math.ceil((NEW_TOKENS - 1) / TOKENS_PER_READ)

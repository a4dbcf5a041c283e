"""The benches as a user starts them: they measure, say the ratio, and leave nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


def bench(*arguments: object, temporary: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary)}
    return subprocess.run(
        [sys.executable, "-m", "canon_pretrain.bench", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_step_compares_ours_with_a_bare_loop(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    small = ("--config", ROOT / "train_configs" / "debug.toml", "--repeats", 3, "--steps", 2)
    done = bench("step", *small, "--json", tmp_path / "step.json", temporary=scratch)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "step.json").read_text())
    assert result["tokens_per_step"] == 12 * 64
    assert 0.1 < result["ratio"] < 10
    assert result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    assert len(result["saves"]) == 3
    for save in result["saves"]:
        # weights and two moments in float32, and about 700 kB around small tensors
        assert 3 * 4 * 171_584 < save["bytes"] < 5 * 4 * 171_584
        assert 0 < save["stall_s"] < save["whole_s"]
    assert "bare PyTorch loop" in done.stdout
    assert "target at most" in " ".join(done.stdout.split())
    assert not [path for path in scratch.iterdir() if path.name.startswith("canon-bench-")]


def test_bad_input_is_one_message(tmp_path: Path) -> None:
    done = bench("step", "--repeats", 0, temporary=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: --repeats 0 --steps 3: expected at least 1 each\n"

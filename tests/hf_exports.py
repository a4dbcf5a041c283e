"""Exports of small models, and the process that has never heard of this package."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from canon_pretrain.checkpoint.manifest import Kind
from canon_pretrain.checkpoint.weights import TRAINING_STATE
from canon_pretrain.checkpoint.writer import save_alone
from canon_pretrain.hf.export import export
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from tests.ranks import launch, whole_state
from tests.support import ROOT, debug_run


def plant_run(
    folder: Path, model: Transformer, *, data: Path | None = None, kind: Kind = "full"
) -> Path:
    section = {"path": str(data) if data else "", "paths": []}
    RunFolder(folder).write_config({"data": section}, identity_of(model.args))
    checkpoint = folder / "checkpoint" / "step-3"
    save_alone(dict(model.named_parameters()), checkpoint, step=3, kind=kind)
    return checkpoint


def identity_of(args: ModelArgs) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in asdict(args).items()}


def export_model(folder: Path, model: Transformer, **options: Any) -> Path:
    checkpoint = plant_run(folder / "run", model)
    export(checkpoint, folder / "out", **{"with_tokenizer": False, **options})
    return folder / "out"


STEP, LAST = 10, 12


@functools.cache
def trained_run(data: Path, base: Path) -> Path:
    folder = base / "hf-trained"
    words = ("--checkpoint.interval", STEP, "--model.position", "partial_rope_c")
    launch(*debug_run(data, folder / "run"), *words, "--model.num_kv_heads", 2, output=folder)
    return folder / "run"


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = whole_state(checkpoint)
    return {name: t for name, t in state.items() if not name.startswith(TRAINING_STATE)}


def in_clean_process(request: Any, scratch: Path, *, timeout: int = 300) -> Any:
    """What hf_clean_process.py answers to `request`; both are JSON."""
    scratch.mkdir(parents=True, exist_ok=True)
    asked, answered = scratch / "request.json", scratch / "answer.json"
    asked.write_text(json.dumps(request))
    script = str(ROOT / "tests" / "hf_clean_process.py")
    command = [sys.executable, "-I", script, str(asked), str(answered)]
    options: Any = {"capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run(command, cwd=scratch, env=hub_environment(scratch), **options)
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}")
    return json.loads(answered.read_text())


def hub_environment(scratch: Path) -> dict[str, str]:
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    folders = {"HF_HOME": str(scratch / "hf"), "HF_MODULES_CACHE": str(scratch / "hf" / "modules")}
    return os.environ | offline | folders | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

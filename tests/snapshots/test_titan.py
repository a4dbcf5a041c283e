"""The wording of the trainer's console, startup warnings and dry run."""

import logging
import re
from typing import Any

import pytest
import rich.console
import torch

from canon_pretrain.data.mixture import Mixture
from canon_pretrain.machine import memory
from canon_pretrain.titan import dry_run
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.console import Console
from canon_pretrain.titan.dry_run import Device, startup_notes
from canon_pretrain.train import main
from tests.support import ROOT, write_split

CONFIG = str(ROOT / "train_configs" / "nope_canon.toml")
FIELDS: dict[str, Any] = {
    "step": 240,
    "loss": 3.25,
    "grad_norm": 0.837,
    "lr": 2.52e-3,
    "tokens_per_second": 5047.4,
    "seconds_per_step": 15.0,
    "data_wait": 0.0123,
    "memory_gib": 54.2,
    "tokens": 512_000,
    "skipped_steps": 2,
    "restarts": 1,
}


def show_events(console):
    """Pass one event of each kind, after a curve of 600 steps."""
    for k in range(600):
        console.event("step", FIELDS | {"loss": 10.0 - k / 100})
    console.event("count_models", {"unigram": 5.6636, "bigram": 3.5175})
    console.event("step", FIELDS | {"step": 250, "mfu": 0.451})
    console.event("checkpoint", {"step": 250, "bytes": 14_700_000, "seconds": 0.25})
    console.event("skip", {"step": 249, "reason": "not finite [x]\x1b[2J\n"})
    validation = {
        "step": 200,
        "seconds": 1.25,
        "loss": 3.5,
        "bits_per_byte": 1.75,
        "tokens_scored": 131072,
    }
    console.event("validation", validation)
    samples = [{"prompt": "The", "text": " a\n\x1b[2Jb"}, {"prompt": "", "text": "c"}]
    console.event("samples", {"step": 200, "seconds": 0.5, "samples": samples})


def test_plain_lines(caplog, snapshot, monkeypatch):
    monkeypatch.setattr("canon_pretrain.titan.console.LINE_INTERVAL_S", 0.0)
    console = Console(500, 255)
    with caplog.at_level(logging.INFO, logger="root"):
        console.begin(0)
        show_events(console)
        console.end()
    assert [record.getMessage() for record in caplog.records][-5:] == snapshot


def test_live_view(snapshot):
    view = Console(500, 500)
    show_events(view)

    console = rich.console.Console(width=100, color_system="standard", force_terminal=True)
    lines = ["".join(part.text for part in line).rstrip() for line in console.render_lines(view)]
    text = re.sub(r"\d\d:\d\d:\d\d", "HH:MM:SS", "\n".join(lines))
    assert re.sub(r"\d+ s ago", "N s ago", text) == snapshot


def test_startup_notes(tmp_path, snapshot, monkeypatch):
    write_split(tmp_path / "web" / "train", 1, 100)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(dry_run, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    job = parse_job(["--config", CONFIG])
    device = Device("H100", 79.6, 4e14, "40% MFU")
    with Mixture.open([tmp_path / "web"]) as data:
        assert [*startup_notes(job, data, device, 1)] == snapshot


@pytest.mark.parametrize(
    "config, world", [("nope_canon", 8), ("quickstart", 4)], ids=("nope_canon", "quickstart")
)
def test_dry_run(config, world, snapshot, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(dry_run, "has_accelerator", lambda: False)
    monkeypatch.setattr(dry_run, "available_cores", lambda: 2)
    monkeypatch.setattr(memory, "available_memory", lambda: 16 * 2**30)
    options = f"--data.path= --dry-run --gpu H200 --world {world} --mfu 0.5 --loss.z_loss 1e-4"

    main(["--config", str(ROOT / "train_configs" / f"{config}.toml"), *options.split()])

    assert capsys.readouterr().out == snapshot

"""One checkpoint on one suite: load, ask, print, record."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from canon_pretrain.checkpoint import METADATA, check_checkpoint, checkpoint_step
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.errors import UserError
from canon_pretrain.files import write_json
from canon_pretrain.run.folder import RunFolder
from eval.model import load_model
from eval.progress import progress
from eval.validation import HeldOutLoss, baseline_losses, model_loss, windows

SUITES = ("validation",)
RESULTS = "results.json"


def run_suite(arguments: argparse.Namespace) -> None:
    """Run `arguments.suite` on `arguments.checkpoint`; prints a table and writes results.json."""
    if arguments.suite not in SUITES:
        raise UserError(f"unknown suite '{arguments.suite}'; known are: {', '.join(SUITES)}")
    for name in ("limit", "batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: expected at least 1")
    checkpoint: Path = arguments.checkpoint
    check_checkpoint(checkpoint)
    folder = RunFolder.of_checkpoint(checkpoint)
    config = folder.read_config()
    data = arguments.data or Path(config["config"]["data"]["path"])
    train, held_out = TokenShards.open(data / "train"), TokenShards.open(data / "validation")
    if held_out.num_tokens < 2:
        raise UserError(
            f"{data / 'validation'} holds no text: build the data with --holdout above 0"
        )
    trained_on = config["identity"]["data_fingerprint"]
    if train.fingerprint != trained_on:
        raise UserError(
            f"{data} is not what {folder.path} was trained on: its fingerprint is "
            f"{train.fingerprint[:12]}, the run's {trained_on[:12]}. Name the run's shards with "
            "--data"
        )
    seq_len = config["config"]["training"]["seq_len"]
    step = checkpoint_step(checkpoint)
    out = arguments.out or folder.path / "evals" / f"step-{step}" / arguments.suite
    asked = {
        "checkpoint": str(checkpoint),
        "written_ns": (checkpoint / METADATA).stat().st_mtime_ns,
        "step": step,
        "suite": arguments.suite,
        "limit": arguments.limit,
        "seq_len": seq_len,
        "train_fingerprint": train.fingerprint,
        "held_out_fingerprint": held_out.fingerprint,
    }
    console = Console()
    if known := _known_results(out / RESULTS, asked):
        _print(console, checkpoint, known)
        console.print(f"as found in {out / RESULTS}", soft_wrap=True)
        _check_beaten(known, arguments.must_beat)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(checkpoint, device)
    total = sum(1 for _ in windows(held_out.num_tokens, seq_len, arguments.limit))
    with progress(console, "held-out windows", total) as advance:
        losses = {
            "model": model_loss(
                model,
                held_out,
                seq_len=seq_len,
                batch_size=arguments.batch_size,
                device=device,
                limit=arguments.limit,
                advance=advance,
            )
        }
    console.print("counting the training shards' unigrams and bigrams")
    losses |= baseline_losses(train, held_out, seq_len=seq_len, limit=arguments.limit)
    _print(console, checkpoint, losses)
    out.mkdir(parents=True, exist_ok=True)
    results = {name: asdict(loss) for name, loss in losses.items()}
    write_json(out / RESULTS, {"asked": asked, "results": results})
    console.print(f"written to {out / RESULTS}", soft_wrap=True)
    _check_beaten(losses, arguments.must_beat)


def _check_beaten(losses: dict[str, HeldOutLoss], name: str | None) -> None:
    """Raise UserError unless the model has fewer bits per byte than the count model `name`."""
    if name is None or losses["model"].bits_per_byte < losses[name].bits_per_byte:
        return
    raise UserError(
        f"the checkpoint's {losses['model'].bits_per_byte:.4f} bits per byte do not beat the "
        f"{name} model's {losses[name].bits_per_byte:.4f}, as --must_beat asks"
    )


def _known_results(path: Path, asked: dict[str, Any]) -> dict[str, HeldOutLoss] | None:
    """What an earlier call found for exactly the same question; None where there is none."""
    try:
        record = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if record["asked"] != asked:
        return None
    return {name: HeldOutLoss(**loss) for name, loss in record["results"].items()}


def _print(console: Console, checkpoint: Path, losses: dict[str, HeldOutLoss]) -> None:
    """The losses as a table, best first."""
    tokens = losses["model"].num_tokens
    table = Table(title=f"held-out loss over {tokens:,} tokens: {checkpoint}", title_justify="left")
    table.add_column("model")
    table.add_column("nats/token", justify="right")
    table.add_column("bits/byte", justify="right")
    for name, loss in sorted(losses.items(), key=lambda item: item[1].bits_per_byte):
        label = f"{name} of the training shards" if name != "model" else "this checkpoint"
        table.add_row(label, f"{loss.nats_per_token:.4f}", f"{loss.bits_per_byte:.4f}")
    console.print(table)

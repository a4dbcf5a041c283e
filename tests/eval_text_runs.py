"""Data and options of small runs on text, trained in seconds, for suites of text."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from data_prep.planning import train_tokenizer
from tests.support import ROOT
from tests.variants import prefer_ids_from

VOCAB_SIZE = 300
WORDS = "the a one no river stone light house year born was in of and said went saw".split()
MAX_LENGTH = 900  # three lengths of probes fit, with a vocabulary of 300
TRAIN = ROOT / "train_configs" / "debug.toml"


def write_texts(
    folder: Path,
    train: Sequence[str],
    held_out: Sequence[str],
    vocab_size: int = VOCAB_SIZE,
    more: Sequence[str] = (),
) -> None:
    """Write shards to `folder`, with a tokenizer trained on all texts and on `more`."""
    tokenizer = Tokenizer(train_tokenizer([*train, *held_out, *more], vocab_size), "test")
    for name, part in (("train", train), ("validation", held_out)):
        write_shards(
            folder / name,
            [np.append(tokenizer.encode(text), tokenizer.eos_id) for text in part],
            vocab_size=vocab_size,
            eos_id=tokenizer.eos_id,
            num_bytes=[len(text) for text in part],
            tokenizer_sha256=tokenizer.sha256,
        )
    (folder / "tokenizer.model").write_bytes(tokenizer.model)


def write_text_data(folder: Path) -> None:
    """Write shards of five texts and one held out: train/, validation/, tokenizer.model."""
    texts = [
        " ".join(WORDS[int(pick % np.uint64(len(WORDS)))] for pick in picks)
        for picks in np.random.Philox(key=5).random_raw((6, 1500))
    ]
    write_texts(folder, texts[:5], texts[5:])


def text_run(data: Path, run: Path) -> list[object]:
    """Options for the config TRAIN: 12 steps, a checkpoint every 3."""
    return [
        "--data.path", data, "--model.vocab_size", VOCAB_SIZE, "--job.dump_folder", run,
        "--training.steps", 12, "--checkpoint.interval", 3, "--run.heartbeat_s", 0.5,
    ]  # fmt: skip


def document(seed: int) -> str:
    picks = np.random.Philox(key=seed).random_raw(400) % np.uint64(len(WORDS))
    words = [WORDS[int(pick)] for pick in picks]
    return "\n".join(" ".join(words[i : i + 8]).capitalize() + "." for i in range(0, 400, 8))


def write_run(
    base: Path, vocab_size: int = VOCAB_SIZE, more: Sequence[str] = (), padding: int = 0
) -> Path:
    """Write shards of text to base/data, and untrained checkpoints 2 and 3 to base/run.

    The model has `padding` more ids than the tokenizer, one of which is always the likeliest.
    """
    texts = [document(seed) for seed in range(6)]
    write_texts(base / "data", texts[:3], texts[3:], vocab_size, more)
    args = ModelArgs(
        vocab_size=vocab_size + padding, num_layers=1, dim=32, num_heads=2, ffn_dim=48,
        max_seq_len=1000, canon_set="ABCD", position="nope",
    )  # fmt: skip
    model = Transformer(args)
    model.init_weights()
    if padding:
        prefer_ids_from(model, vocab_size)
    run = base / "run"
    for step in (2, 3):
        save_no_dist(dict(model.named_parameters()), run / "checkpoint" / f"step-{step}", step=step)
    identity = {f"model.{name}": value for name, value in asdict(args).items()}
    identity["data_fingerprint"] = TokenShards.open(base / "data" / "train").fingerprint
    config = {"data": {"path": str(base / "data")}, "training": {"seq_len": MAX_LENGTH}}
    RunFolder(run).write_config(config, identity)
    return run

"""Data and options of small runs on text, trained in seconds, for suites of text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.planning import train_tokenizer
from tests.support import ROOT

VOCAB_SIZE = 300
WORDS = "the a one no river stone light house year born was in of and said went saw".split()
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

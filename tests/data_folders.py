"""Small finished data folders with known documents."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.files import write_json
from canon_pretrain.data import shards
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.finish import write_manifests
from data_prep.folder import TRAIN, VALIDATION
from data_prep.input_groups import InputGroupJob
from data_prep.plan import NO_LIMITS, Input, Options, Plan, save_plan
from data_prep.planning import record_of, train_tokenizer

WORDS = "the of and to in is was for on as with by he at from his an were are which".split()
HEADER = ("vocab_size", "eos_id", "tokenizer_sha256", "plan_sha256", "version", "limits", "cut")


def sentence(seed: int, words: int) -> str:
    """Return a text of so many words; equal for equal arguments."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer([sentence(seed, 200) for seed in range(20)], 300), "test")


def write_forged_manifest(folder: Path, names: Sequence[str], **changes: Any) -> None:
    """Write the manifest of these shards with a changed header, consistent in itself."""
    stored = shards.read_manifest(folder)
    header = {name: getattr(stored, name) for name in HEADER} | changes
    records = [shards.read_commit(folder, name) for name in names]
    write_json(folder / "manifest.json", asdict(shards.make_manifest(records, **header)))


def make_data_folder(
    folder: Path,
    train: Sequence[Sequence[str]],
    validation: Sequence[str] = (),
    *,
    groups: Sequence[str] = ("",),
    max_part_tokens: int = shards.MAX_SHARD_TOKENS,
) -> Plan:
    """Make a finished folder with these texts per input group of training; groups alternate."""
    known, numbers = tokenizer(), range(len(train))
    plan = Plan(
        source="local",
        source_version="made",
        text_field="text",
        group_field=None,
        options=Options(holdout=0.1, max_part_tokens=max_part_tokens),
        tokenizer=record_of(known, "train:300"),
        units=tuple((number, number + 1) for number in numbers),
        inputs=tuple(Input(f"{number}.txt", 1, "0" * 64) for number in numbers),
        root=str(folder / "nowhere"),
    )
    folder.mkdir()
    save_plan(folder, plan)
    (folder / known.file_name).write_bytes(known.model)
    held_out = [validation, *[()] * (len(train) - 1)]
    for split, number in itertools.product((TRAIN, VALIDATION), numbers):
        (folder / split).mkdir(exist_ok=True)
        texts = (train if split == TRAIN else held_out)[number]
        with InputGroupJob.of(folder, folder, plan, number).writer(split) as writer:
            for row, text in enumerate(texts):
                ids, size = np.append(known.encode(text), known.eos_id), len(text.encode())
                writer.add(ids, num_bytes=size, row=row, group=groups[row % len(groups)])
            writer.finish({"empty": 3} if split == TRAIN and number == 0 else {})
    write_manifests(folder, plan, NO_LIMITS)
    return plan

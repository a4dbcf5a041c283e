"""Exports opened where this package can't be imported: every variant, a trained run, tokenizers.

All of it in one process, since it takes seconds to begin.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from canon_pretrain.checkpoint.architecture import model_args_of
from canon_pretrain.hf.config import plain_fields
from canon_pretrain.hf.export import export
from canon_pretrain.hf.names import to_hf
from canon_pretrain.hf.reading import import_folder
from canon_pretrain.hf.tokenizer_files import tokenizer_files
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from tests.data.test_tokenizer_exact import FRAGMENTS
from tests.hf.test_tokenizer import training_tokenizer
from tests.hf_exports import (
    STEP,
    export_model,
    in_clean_process,
    train_two_ranks,
    trained_run,
    weights_of,
)
from tests.ranks import events
from tests.variants import VARIANTS, build, random_tokens

# saved and loaded again: all that needs a field of ours
pytestmark = pytest.mark.slow  # a process of its own, that imports transformers anew
LAST = "alibi A no_res act cst standard gqa tied documents"
TRAINED = "10 steps on 2 ranks"
TOKENIZERS = ("as ours", "byte-level")


def texts() -> list[str]:
    """Texts that may trip a tokenizer; the first is one to find words in again."""
    generator = random.Random(0)
    odd = ["".join(generator.choices(FRAGMENTS, k=generator.randrange(25))) for _ in range(300)]
    return ["the cat sat on the mat, and it came", *odd]


def expect(folder: Path, model: Transformer, seed: int = 0) -> None:
    """Write down what `model` computes, for the process to compare with."""
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24, seed=seed)
    with torch.no_grad():
        expected = {"tokens": tokens_BT, "logits": model(tokens_BT)}
    save_file(expected, folder / "expected.safetensors")


@pytest.fixture(scope="module")
def run(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(data_folder, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def answers(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the clean process says of every export."""
    base = tmp_path_factory.mktemp("exports")
    models, tokenizers = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # 1,200 of them; no power cut here
        export(run / "checkpoint" / f"step-{STEP}", base / "run" / "out", with_tokenizer=False)
        trained = Transformer(model_args_of(RunFolder(run)))
        trained.load_state_dict(weights_of(run / "checkpoint" / f"step-{STEP}"))
        expect(base / "run", trained)
        models[TRAINED] = str(base / "run" / "out")
        for number, name in enumerate([*(n for n in VARIANTS if n != LAST), LAST]):
            model, folder = build(VARIANTS[name]), base / f"v{number}"
            models[name] = str(export_model(folder, model))
            expect(folder, model, seed=number)
    for name in TOKENIZERS:
        folder = base / name
        folder.mkdir()
        tokenizers[name] = str(folder)
        for file, content in tokenizer_files(training_tokenizer(name), 64).items():
            (folder / file).write_text(json.dumps(content))
    request = {"models": models, "tokenizers": tokenizers, "texts": texts()}
    return in_clean_process(request, base / "process")


@pytest.fixture(scope="module")
def opened(answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return answers["models"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_opened(name: str, opened: dict[str, Any]) -> None:
    """The logits of `Transformer`; a cache generates what full passes do; names; frozen taps."""
    found, args = opened[name], VARIANTS[name]
    assert found["difference"] < 1e-4 and found["scale"] > 0.5  # there is something to differ in
    assert found["greedy"]
    expected = {to_hf(ours) for ours, _ in build(args).named_parameters()}
    # transformers lists what is tied too
    assert set(found["names"]) == expected | ({"lm_head.weight"} if args.tie_embeddings else set())
    plain = plain_fields(args)
    architectures = plain["architectures"] if plain else ["LlamaCanonForCausalLM"]
    assert [found["type"]] == found["architectures"] == architectures
    frozen = {n for n in found["names"] if ".canon" in n} if "cst" in name else set()
    assert set(found["frozen"]) == frozen
    again = {"torch.float32": 0.0, "torch.bfloat16": 0.0} if name == LAST else {}
    assert found["saved again"] == again


@pytest.mark.parametrize("name", TOKENIZERS)
def test_auto_tokenizer(name: str, answers: dict[str, dict[str, Any]]) -> None:
    answer, training, asked = answers["tokenizers"][name], training_tokenizer(name), texts()
    ids = [training.encode(text).tolist() for text in asked]
    assert answer["ids"] == ids
    assert all(other == ids for other in answer["others"])
    assert answer["texts"] == [training.decode([*row, training.eos_id]) for row in ids]
    assert answer["offsets"][0] == answer["offsets"][1]
    eos, size = training.eos_id, training.vocab_size
    assert answer["special"] == {
        "eos": eos, "bos": eos, "pad": eos, "size": size, "fast": True, "longest": 64
    }  # fmt: skip
    assert answer["keys"] == ["attention_mask", "input_ids"]  # what `generate` takes


def test_there_and_back(
    run: Path, opened: dict[str, Any], data_folder: Path, tmp_path: Path
) -> None:
    """2 ranks train 10 steps -> export -> transformers in a clean process -> import -> train on."""
    assert opened[TRAINED]["difference"] < 1e-4 and opened[TRAINED]["greedy"]
    checkpoint = run / "checkpoint" / f"step-{STEP}"
    export(checkpoint, tmp_path / "out", with_tokenizer=False)
    found = import_folder(tmp_path / "out", tmp_path / "back", state_from=checkpoint)
    origin = ("--checkpoint.initial_load_path", found.checkpoint)
    words = (*origin, "--checkpoint.no_initial_load_model_only")
    train_two_ranks(data_folder, tmp_path / "run", tmp_path, *words)
    names = ("step", "loss", "grad_norm", "lr", "tokens", "data_digests")
    steps, others = (
        [[event[name] for name in names] for event in events(folder, "step")]
        for folder in (run, tmp_path / "run")
    )
    assert [fields[0] for fields in others] == [11, 12]
    assert others == steps[STEP:]

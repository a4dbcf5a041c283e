"""Exports loaded in a process without this package: every variant, tokenizers."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from canon_pretrain.hf.config import plain_fields, to_hf
from canon_pretrain.hf.tokenizer_files import tokenizer_files
from canon_pretrain.model.transformer import Transformer
from tests.data.test_tokenizer import FRAGMENTS
from tests.hf.test_tokenizer import training_tokenizer
from tests.hf_exports import export_model, in_clean_process
from tests.variants import VARIANTS, build, random_tokens

pytestmark = pytest.mark.system  # starts a process that imports transformers
# also saved and loaded again: with many fields that the released class lacks
LAST = "alibi A no_res act cst standard gqa tied documents"
TOKENIZERS = ("as ours", "byte-level")


def texts() -> list[str]:
    generator = random.Random(0)
    odd = ["".join(generator.choices(FRAGMENTS, k=generator.randrange(25))) for _ in range(300)]
    return ["the cat sat on the mat, and it came", *odd]


def expect(folder: Path, model: Transformer, seed: int = 0) -> None:
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24, seed=seed)
    with torch.no_grad():
        expected = {"tokens": tokens_BT, "logits": model(tokens_BT)}
    save_file(expected, folder / "expected.safetensors")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    base = tmp_path_factory.mktemp("exports")
    models, tokenizers = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
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


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_loaded(name, answers):
    found, args = answers["models"][name], VARIANTS[name]
    assert found["difference"] < 1e-4 and found["scale"] > 0.5
    assert found["greedy"]
    expected = {to_hf(ours) for ours, _ in build(args).named_parameters()}
    # transformers lists what is tied too
    assert set(found["names"]) == expected | ({"lm_head.weight"} if args.tie_embeddings else set())
    plain = plain_fields(args)
    architectures = plain["architectures"] if plain else ["LlamaCanonForCausalLM"]
    assert [found["type"]] == found["architectures"] == architectures
    # all folders and config classes have the same name: none is mistaken for another
    assert found["canon_set"] == args.canon_set and found["num_layers"] == args.num_layers
    frozen = {n for n in found["names"] if ".canon" in n} if "cst" in name else set()
    assert set(found["frozen"]) == frozen
    again = {"torch.float32": 0.0, "torch.bfloat16": 0.0} if name == LAST else {}
    assert found["saved again"] == again


@pytest.mark.parametrize("name", TOKENIZERS)
def test_auto_tokenizer(name, answers):
    answer, training, asked = answers["tokenizers"][name], training_tokenizer(name), texts()
    ids = [training.encode(text).tolist() for text in asked]
    assert answer["ids"] == ids
    assert all(other == ids for other in answer["others"])
    assert answer["texts"] == [training.decode([*row, training.eos_id]) for row in ids]
    assert answer["offsets"][0] == answer["offsets"][1]
    assert answer["special"] == [training.eos_id] * 3
    assert answer["facts"] == [training.vocab_size, True, 64]
    assert answer["keys"] == ["attention_mask", "input_ids"]  # what `generate` takes

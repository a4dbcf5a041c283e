"""Every variant, exported and opened where this package can't be imported."""

import os
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from canon_pretrain.hf.names import to_hf
from tests.hf_exports import export_model, in_clean_process
from tests.variants import VARIANTS, build, random_tokens

# saved and loaded again: all that needs a field of ours
LAST = "alibi A no_res act cst standard gqa tied documents"
every_name = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the clean process says of each variant's export."""
    base = tmp_path_factory.mktemp("exports")
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # 1,200 of them; no power cut here
        for number, name in enumerate([*(n for n in VARIANTS if n != LAST), LAST]):
            args = VARIANTS[name]
            model = build(args)
            tokens_BT = random_tokens(args, rows=2, num_tokens=24, seed=number)
            with torch.no_grad():
                expected = {"tokens": tokens_BT, "logits": model(tokens_BT)}
            folder = base / f"v{number}"
            folders[name] = str(export_model(folder, model))
            save_file(expected, folder / "expected.safetensors")
    return in_clean_process("check_models", folders, base / "process")


@every_name
def test_logits_are_those_of_the_trained_model(name: str, opened: dict[str, Any]) -> None:
    assert opened[name]["difference"] < 1e-4
    assert opened[name]["scale"] > 0.5  # there is something to differ in


@every_name
def test_generation_with_a_cache_is_that_of_full_passes(name: str, opened: dict[str, Any]) -> None:
    assert opened[name]["greedy"]


@every_name
def test_parameters_have_the_released_names(name: str, opened: dict[str, Any]) -> None:
    parameters = dict(build(VARIANTS[name]).named_parameters())
    expected = {to_hf(ours) for ours in parameters}
    if VARIANTS[name].tie_embeddings:
        expected.add("lm_head.weight")  # as transformers lists what is tied
    assert set(opened[name]["names"]) == expected
    assert opened[name]["type"] == "LlamaCanonForCausalLM"
    assert opened[name]["architectures"] == ["LlamaCanonForCausalLM"]


@every_name
def test_only_the_taps_of_cst_canon_are_frozen(name: str, opened: dict[str, Any]) -> None:
    frozen = {n for n in opened[name]["names"] if ".canon" in n} if "cst" in name else set()
    assert set(opened[name]["frozen"]) == frozen


def test_saved_again_by_transformers(opened: dict[str, Any]) -> None:
    (answer,) = (found["saved again"] for found in opened.values() if found["saved again"])
    assert answer == {"torch.float32": 0.0, "torch.bfloat16": 0.0}

"""Exports of every variant, loaded in a process that can't import this package."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from canon_pretrain.hf.config import plain_fields, to_hf
from tests.hf_exports import export_model, hub_environment
from tests.variants import VARIANTS, build, random_tokens

pytestmark = pytest.mark.system  # starts a process that imports transformers
# also saved and loaded again: with many fields that the released class lacks
LAST = "alibi A no_res act cst standard gqa tied documents"
PROCESS = """
import json, sys
from pathlib import Path

sys.modules["canon_pretrain"] = None  # it may be installed in this environment
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)

torch.set_grad_enabled(False)
options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
answers = {}
for name, folder in json.loads(Path("request.json").read_text()).items():
    expected = load_file(Path(folder).parent / "expected.safetensors")
    model, tokens_BT, prompts_BT = load(folder), expected["tokens"], expected["tokens"][:, :9]
    options["attention_mask"] = torch.ones_like(prompts_BT)  # otherwise 0 is taken for padding
    texts = [model.generate(prompts_BT, use_cache=cache, **options) for cache in (True, False)]
    answers[name] = {
        "type": type(model).__name__,
        "difference": float((model(tokens_BT).logits - expected["logits"]).abs().max()),
        "scale": float(expected["logits"].abs().max()),
        "greedy": torch.equal(*texts),
        "names": sorted(model.state_dict()),
        "frozen": sorted(n for n, p in model.named_parameters() if not p.requires_grad),
        "architectures": model.config.architectures,
        "canon_set": getattr(model.config, "canon_set", ""),
        "num_layers": model.config.num_hidden_layers,
    }
for dtype in (torch.float32, torch.bfloat16):
    model = model.to(dtype)
    model.save_pretrained(f"copy-{dtype}")
    again = load(f"copy-{dtype}", dtype="auto")
    assert again.dtype == dtype and torch.equal(model(tokens_BT).logits, again(tokens_BT).logits)
Path("answer.json").write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    base = tmp_path_factory.mktemp("exports")
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for number, name in enumerate([*(n for n in VARIANTS if n != LAST), LAST]):
            model, folder = build(VARIANTS[name]), base / f"v{number}"
            folders[name] = str(export_model(folder, model))
            tokens_BT = random_tokens(model.args, rows=2, num_tokens=24, seed=number)
            with torch.no_grad():
                expected = {"tokens": tokens_BT, "logits": model(tokens_BT)}
            save_file(expected, folder / "expected.safetensors")
    (base / "request.json").write_text(json.dumps(folders))
    command = [sys.executable, "-I", "-c", PROCESS]
    subprocess.run(command, cwd=base, env=hub_environment(base), timeout=300, check=True)
    return json.loads((base / "answer.json").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_loaded(name, answers):
    found, args = answers[name], VARIANTS[name]
    assert found["difference"] < 1e-4 and found["scale"] > 0.5 and found["greedy"]
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

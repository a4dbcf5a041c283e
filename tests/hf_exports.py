"""Exports of small models, folders of LlamaCanon models (llama_canon.py), and their imports."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import dynamic_module_utils

from canon_pretrain.checkpoint.manifest import Kind, Manifest, verify
from canon_pretrain.checkpoint.weights import TRAINING_STATE
from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.hf.export import export
from canon_pretrain.hf.reading import Imported, import_folder
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from tests import llama_canon
from tests.llama_canon import NO_POSITIONS, random_state, write_folder
from tests.ranks import whole_state
from tests.support import refused

BASE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 32,
    "rope_theta": 100.0,  # all frequencies matter within 20 tokens
}  # fmt: skip
POSITIONS: list[dict[str, Any]] = [
    {},
    {"rope_dim": 8, "partial_rotary_factor": 0.25},
    {"rope_dim": 16, "partial_rotary_factor": 0.5},
    {"rope_scaling": NO_POSITIONS},
]
TOKENS = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))


def plant_run(
    folder: Path, model: Transformer, *, data: Path | None = None, kind: Kind = "full"
) -> Path:
    section = {"path": str(data) if data else "", "paths": []}
    identity = {f"model.{name}": value for name, value in asdict(model.args).items()}
    RunFolder(folder).write_config({"data": section}, identity)
    checkpoint = folder / "checkpoint" / "step-3"
    save_no_dist(dict(model.state_dict()), checkpoint, step=3, kind=kind)
    return checkpoint


def export_model(folder: Path, model: Transformer, **options: Any) -> Path:
    checkpoint = plant_run(folder / "run", model)
    export(checkpoint, folder / "out", **{"with_tokenizer": False, **options})
    return folder / "out"


def check_equal_weights(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys() and len(expected) > 10
    assert [
        name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])
    ] == []


def check_greedy(opened: Any, model: Transformer, prompts_BT: Tensor) -> None:
    """Check that 8 tokens of `generate`, with transformers' cache, are the model's argmax."""
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(prompts_BT)
    texts = opened.generate(prompts_BT, **options)
    first = prompts_BT.shape[1]
    for length in range(first, first + 8):
        assert torch.equal(model(texts[:, :length])[:, -1].argmax(dim=-1), texts[:, length])


def logits_in_parts(model: Transformer, tokens_BT: Tensor, sizes: list[int]) -> Tensor:
    """Return the logits of parts of `sizes` tokens, from our cache."""
    cache = Cache.of(model.args)
    parts = [model(part, cache=cache) for part in tokens_BT.split(sizes, dim=1)]
    return torch.cat(parts, dim=1)


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    state = whole_state(checkpoint)
    return {name: t for name, t in state.items() if not name.startswith(TRAINING_STATE)}


def hub_environment(scratch: Path) -> dict[str, str]:
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    folders = {"HF_HOME": str(scratch / "hf"), "HF_MODULES_CACHE": str(scratch / "hf" / "modules")}
    return os.environ | offline | folders | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def isolate_remote_code(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """An export's code is copied there, by default to the home folder; the import is forgotten."""
    patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    patch.setenv("HF_MODULES_CACHE", str(folder))
    patch.syspath_prepend(str(folder))
    for name in [n for n in sys.modules if n.split(".")[0] == "transformers_modules"]:
        patch.delitem(sys.modules, name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def our_logits(found: Imported, tokens_BT: Tensor = TOKENS) -> Tensor:
    verify(found.checkpoint)
    with torch.device("meta"):
        model = Transformer(found.args)
    model.load_state_dict(whole_state(found.checkpoint), assign=True)
    model.reset_ropes(torch.device("cpu"))
    with torch.no_grad():
        return model(tokens_BT)


def check(folder: Path, config: dict[str, Any], state: dict[str, Tensor], **options: Any) -> None:
    found = import_folder(write_folder(folder / "hf", config, state, **options), folder / "out")
    assert (our_logits(found) - llama_canon.logits(config, state, TOKENS)).abs().max() < 1e-4
    assert all(t.dtype == torch.float32 for t in whole_state(found.checkpoint).values())
    assert Manifest.read(found.checkpoint).kind == "weights"


def small_folder(tmp_path: Path, **fields: Any) -> Path:
    config = BASE | {"num_hidden_layers": 1}
    return write_folder(tmp_path / "hf", config | fields, random_state(config))


def check_refused(
    folder: Path, code: str, *, options: dict[str, Any] | None = None, **fields: object
) -> None:
    """Import `folder`, expecting an error with `code` and `fields`, and nothing written."""
    out = folder.with_name(f"{folder.name}-out")
    with refused(code, **fields):
        import_folder(folder, out, **options or {})
    assert not out.exists() and not list(folder.parent.glob(".*.importing*"))

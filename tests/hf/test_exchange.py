"""Exchange with transformers' own classes whose layers differ or have a window, both ways."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from canon_pretrain.hf.config import plain_fields
from canon_pretrain.hf.reading import import_folder
from canon_pretrain.model.args import ModelArgs, Table
from tests.hf_exports import export_model, our_logits, weights_of
from tests.hf_exports import quick as quick
from tests.variants import BASE, build, random_tokens

NUM_TOKENS = 24
TOKENS = torch.randint(40, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}

# -- theirs: sizes of every class, and what each class adds

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "initializer_range": 0.3,
}
FULL, SLIDING = "full_attention", "sliding_attention"
THEIRS: dict[str, tuple[str, dict[str, Any], list[tuple[str, int]]]] = {
    # class, fields, position and window of each layer
    "mistral": ("Mistral", {"sliding_window": 5}, [("rope", 5)] * 4),
    "mistral without a window": ("Mistral", {"sliding_window": None}, [("rope", 0)] * 4),
    "qwen3 by layer": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
        },
        [("rope", 3), ("rope", 0)] * 2,
    ),
    "qwen3 from a layer on": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 3},
        [("rope", 0)] * 3 + [("rope", 3)],
    ),
    "smollm3 of every fourth": (
        "SmolLM3",
        {"no_rope_layer_interval": 4},
        [("rope", 0)] * 3 + [("nope", 0)],
    ),
    "smollm3 of windows": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 4, "no_rope_layers": [1, 1, 0, 1]},
        [("rope", 0), ("rope", 0), ("nope", 4), ("rope", 0)],
    ),
    "smollm3 of all kinds": (
        "SmolLM3",
        {
            "use_sliding_window": True,
            "sliding_window": 2,
            "no_rope_layers": [1, 1, 0, 0],
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "tie_word_embeddings": False,
        },
        [("rope", 2), ("rope", 0), ("nope", 2), ("nope", 0)],
    ),
}


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_their_model_is_imported(name, tmp_path):
    """The logits are equal, and the file says what each layer is, also where it is a default."""
    class_name, options, layers = THEIRS[name]
    config = getattr(transformers, f"{class_name}Config")(**SIZES, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path / "hf")

    # as transformers writes it, and with the fields that were passed only
    record = json.loads((tmp_path / "hf" / "config.json").read_text())
    short = {"model_type": record["model_type"], "tie_word_embeddings": config.tie_word_embeddings}
    for number, fields in enumerate((record, SIZES | short | options)):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(fields))
        found = import_folder(tmp_path / "hf", tmp_path / f"out-{number}")
        kinds = [(layer.position, layer.window) for layer in found.args.layer_args]
        assert kinds == layers
        torch.testing.assert_close(our_logits(found, TOKENS), model(TOKENS).logits, **CLOSE)


# -- ours: the class that computes a model, or none


def _pattern(*layers: Mapping[str, Any], **changes: Any) -> ModelArgs:
    names = tuple(f"layer{number}" for number in range(len(layers)))
    sections = Table(zip(names, layers, strict=True))
    args = replace(BASE, num_layers=5, num_kv_heads=2, rope_theta=100.0, **changes)
    return replace(args, pattern=names, layers=sections)


NOPE = {"position": "nope"}
OURS: dict[str, tuple[str, ModelArgs]] = {
    "a window": ("mistral", replace(BASE, window=5, num_kv_heads=2, rope_theta=100.0)),
    "equal layers": ("mistral", _pattern({"window": 3}, {"window": 3})),
    "a window in two of three": ("smollm3", _pattern({"window": 3}, {"window": 3}, {})),
    "without rotation in one of three": ("smollm3", _pattern({}, {}, NOPE)),
    "all kinds": (
        "smollm3",
        _pattern({"window": 4}, NOPE, NOPE | {"window": 4}, {}, tie_embeddings=True),
    ),
    "Qwen3's norm": ("qwen3", _pattern({"window": 3}, {}, qk_norm="per_head")),
    "Qwen3's norm, windows only": ("qwen3", replace(BASE, window=3, qk_norm="per_head")),
}


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_our_model_is_loaded_by_their_class(name, tmp_path):
    model_type, args = OURS[name]
    model = build(args).eval()
    out = export_model(tmp_path, model)
    assert not list(out.glob("*.py"))
    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(opened).__module__ == f"transformers.models.{model_type}.modeling_{model_type}"
    torch.testing.assert_close(opened(TOKENS).logits, model(TOKENS), **CLOSE)

    # past the window, with their cache
    prompts = TOKENS[:, :9]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(prompts)
    texts = opened.generate(prompts, **options)
    for length in range(9, 17):
        assert torch.equal(model(texts[:, :length])[:, -1].argmax(dim=-1), texts[:, length])

    # and back
    found = import_folder(out, tmp_path / "back")
    assert found.args.layer_args == args.layer_args
    _check_equal(weights_of(found.checkpoint), dict(model.state_dict()))


def _check_equal(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys() and len(expected) > 10
    assert [
        name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])
    ] == []


WITHOUT_CLASS: dict[str, ModelArgs] = {
    "two windows": _pattern({"window": 3}, {"window": 4}),
    "two bases": _pattern({"window": 3}, {"rope_theta": 50.0}),
    "two widths": _pattern({"ffn_dim": 40}, {}),
    "Canon in one": _pattern({"canon_set": "A"}, {}),
    "a recurrence": _pattern({"mixer": "gla"}, {}),
    "Qwen3's norm in one": _pattern({"qk_norm": "per_head"}, {}),
    "Qwen3's norm without rotation": _pattern(NOPE, {}, qk_norm="per_head"),
    "a window of documents": replace(BASE, window=5, document_mask=True),
    "a window of ALiBi": replace(BASE, window=5, position="alibi"),
    "a window with Canon": replace(BASE, window=5, canon_set="ABCD"),
}


@pytest.mark.parametrize("name", WITHOUT_CLASS)
@torch.no_grad()
def test_a_model_that_no_class_computes(name, tmp_path):
    args = WITHOUT_CLASS[name]
    assert plain_fields(args) is None
    model = build(args).eval()
    out = export_model(tmp_path, model)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "LlamaCanon" and (out / "modeling_canon.py").is_file()
    assert load_file(out / "model.safetensors").keys() >= {"model.norm.weight"}
    tokens_BT = random_tokens(args, rows=2, num_tokens=20)
    found = import_folder(out, tmp_path / "back")
    assert found.args.layer_args == args.layer_args
    torch.testing.assert_close(our_logits(found, tokens_BT), model(tokens_BT), **CLOSE)

"""Dense models of transformers' InklingForCausalLM, both ways."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, InklingForCausalLM, InklingTextConfig

from canon_pretrain.hf.classes import plain_fields
from canon_pretrain.hf.export import export
from canon_pretrain.hf.loading import load_model
from canon_pretrain.hf.reading import folder_args, import_folder
from canon_pretrain.model.args import ModelArgs, Table
from tests.hf_exports import (
    check_greedy,
    check_refused,
    export_model,
    logits_in_parts,
    our_logits,
    weights_of,
)
from tests.hf_exports import quick as quick
from tests.llama_canon import write_folder
from tests.variants import BASE, build, random_tokens

CPU = torch.device("cpu")
NUM_TOKENS = 24
TOKENS = torch.randint(40, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}

FULL, SLIDING = "hybrid", "hybrid_sliding"
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    # K = 16, and 4 in layers with a window: gains are divided by exactly 4 and 2
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 4,
    "sliding_window_size": 5,
    "d_rel": 3,
    "rel_extent": 7,
    "layer_types": [SLIDING, FULL, SLIDING],
    "mlp_layer_types": ["dense"] * 3,
    "max_position_embeddings": 64,
    "logits_mup_width_multiplier": 8.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "both kinds": {},
    "full": {"layer_types": [FULL] * 3, "rel_extent": 30, "hidden_act": "relu2"},
    "sliding": {"layer_types": [SLIDING] * 3, "sliding_window_size": 1, "conv_kernel_size": 2},
    "not a power of 2": {
        "num_attention_heads": 4,
        "head_dim": 8,
        "logits_mup_width_multiplier": 24.0,
    },
}


def their_model(**changes: Any) -> InklingForCausalLM:
    """Return a model in which no gain or scale is 1."""
    model = InklingForCausalLM(InklingTextConfig(**SIZES | changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "global_scale")):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=0.3, generator=generator)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_their_model_is_imported_and_exported(name, tmp_path):
    theirs = their_model(**CONFIGS[name])
    theirs.save_pretrained(tmp_path / "hf")
    expected = theirs(TOKENS).logits
    found = import_folder(tmp_path / "hf", tmp_path / "imported")
    torch.testing.assert_close(our_logits(found, TOKENS), expected, **CLOSE)
    torch.testing.assert_close(load_model(tmp_path / "hf", CPU)(TOKENS), expected, **CLOSE)

    # in parts, from our cache
    ours = load_model(found.checkpoint, CPU)
    logits = logits_in_parts(ours, TOKENS, [9, 1, 1, 2, 8, 3])
    torch.testing.assert_close(logits, expected, **CLOSE)

    # and out, without code
    out = tmp_path / "out"
    export(found.checkpoint, out, with_tokenizer=False)
    assert not list(out.glob("*.py"))
    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(opened) is InklingForCausalLM
    torch.testing.assert_close(opened(TOKENS).logits, expected, **CLOSE)

    # and in again
    again = import_folder(out, tmp_path / "again")
    assert again.args == found.args
    weights = weights_of(found.checkpoint)
    for tensor_name, tensor in weights_of(again.checkpoint).items():
        if name == "not a power of 2" and tensor_name.endswith("q_norm.weight"):
            torch.testing.assert_close(tensor, weights[tensor_name], rtol=1.2e-7, atol=0)
        else:
            assert torch.equal(tensor, weights[tensor_name]), tensor_name


def test_fields_by_other_names_and_defaults(tmp_path):
    """The class derives layers from local_layer_ids; every sixth is full by default."""
    theirs = their_model()
    theirs.save_pretrained(tmp_path / "hf")
    record = json.loads((tmp_path / "hf" / "config.json").read_text())
    aliases = {
        "sconv_kernel_size": record.pop("conv_kernel_size"),
        "sliding_window": record.pop("sliding_window_size"),
        "embedding_multiplier": record.pop("logits_mup_width_multiplier"),
        "model_max_length": record.pop("max_position_embeddings"),
        "local_layer_ids": [0, 2],
    }
    del record["layer_types"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(record | aliases))
    found = import_folder(tmp_path / "hf", tmp_path / "imported")
    assert [layer.window for layer in found.args.layer_args] == [5, 0, 5]
    assert found.args.max_seq_len == 64
    with torch.no_grad():
        torch.testing.assert_close(our_logits(found, TOKENS), theirs(TOKENS).logits, **CLOSE)

    del aliases["local_layer_ids"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(record | aliases))
    sliding = folder_args(tmp_path / "hf")
    assert [layer.window for layer in sliding.layer_args] == [5, 5, 5]


@torch.no_grad()
def test_rows_with_padding_on_the_left(tmp_path):
    theirs = their_model()
    theirs.save_pretrained(tmp_path / "hf")
    is_real = torch.arange(NUM_TOKENS) >= torch.tensor([[0], [7]])
    expected = theirs(TOKENS, attention_mask=is_real.long()).logits
    ours = load_model(tmp_path / "hf", CPU)
    torch.testing.assert_close(
        ours(TOKENS, is_real_BT=is_real)[is_real], expected[is_real], **CLOSE
    )


# -- ours: Inkling's class, or none


def _pattern(*layers: dict[str, Any], **changes: Any) -> ModelArgs:
    names = tuple(f"layer{number}" for number in range(len(layers)))
    return replace(
        OURS,
        num_layers=4,
        relative_extent=0,
        pattern=names,
        layers=Table(zip(names, layers, strict=True)),
        **changes,
    )


OURS = replace(
    BASE,
    position="relative",
    relative_dim=3,
    relative_extent=6,
    canon_set="FKOV",
    qk_norm="per_head",
    embed_norm=True,
    num_heads=2,  # K = 16
)
NEAR = {"window": 4, "num_heads": 8, "num_kv_heads": 4}
FAR = {"relative_extent": 9}
EXPORTED = {
    "one kind": OURS,
    "a window": replace(OURS, window=5, relative_extent=0, canon_kernel=3),
    "two kinds": _pattern(NEAR, FAR, FAR),
    "frozen": replace(OURS, canon_trainable=False),
}


@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_our_model_is_loaded_by_their_class(name, tmp_path):
    args = EXPORTED[name]
    model = build(args).eval()
    out = export_model(tmp_path, model)
    assert not list(out.glob("*.py"))
    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(opened) is InklingForCausalLM
    torch.testing.assert_close(opened(TOKENS).logits, model(TOKENS), **CLOSE)

    # past window and distances, with their cache
    check_greedy(opened, model, TOKENS[:, :9])

    # and back
    found = import_folder(out, tmp_path / "back")
    assert found.args.layer_args == args.layer_args
    weights = weights_of(found.checkpoint)
    assert weights.keys() == model.state_dict().keys()
    for tensor_name, tensor in model.state_dict().items():
        assert torch.equal(weights[tensor_name], tensor), tensor_name


WITHOUT_CLASS: dict[str, ModelArgs] = {
    "another norm": replace(OURS, qk_norm="full"),
    "embeddings as they are": replace(OURS, embed_norm=False),
    "embeddings that are the head": replace(OURS, tie_embeddings=True),
    "other places": replace(OURS, canon_set="KOV"),
    "no convolutions": replace(OURS, canon_set=""),
    "scaled convolutions": replace(OURS, canon_scale="sqrt"),
    "documents": replace(OURS, document_mask=True),
    "a standard feed-forward": replace(OURS, ffn="standard", ffn_activation="gelu"),
    "experts": replace(OURS, ffn="moe", num_experts=4),
    "fewer distances than the window": replace(OURS, window=8),
    "two windows": _pattern({"window": 4}, {"window": 5}),
    "two extents": _pattern({"relative_extent": 4}, {"relative_extent": 5}),
    "heads that differ": _pattern({"num_heads": 4}, {}),
    "channels that differ": _pattern({"relative_dim": 4}, {}),
    "a layer without biases": _pattern({"position": "nope"}, {}),
}


@pytest.mark.parametrize("name", WITHOUT_CLASS)
@torch.no_grad()
def test_a_model_that_the_class_does_not_compute(name, tmp_path):
    args = WITHOUT_CLASS[name]
    assert plain_fields(args) is None
    model = build(args).eval()
    out = export_model(tmp_path, model)
    assert json.loads((out / "config.json").read_text())["model_type"] == "LlamaCanon"
    tokens_BT = random_tokens(args, rows=2, num_tokens=20)
    found = import_folder(out, tmp_path / "back")
    assert found.args.layer_args == args.layer_args
    torch.testing.assert_close(our_logits(found, tokens_BT), model(tokens_BT), **CLOSE)


# -- what is refused

REFUSED: list[tuple[str, Any]] = [
    ("log_scaling_n_floor", 16),
    ("unpadded_vocab_size", 30),
    ("num_mtp_layers", 1),
    ("mlp_layer_types", ["dense", "sparse", "dense"]),
    ("mlp_layer_types", None),
    ("layer_types", [FULL, SLIDING]),
    ("layer_types", [FULL, FULL, "full_attention"]),
    ("local_layer_ids", 3),
    ("head_dim", 8),
    ("swa_head_dim", 8),
    ("hidden_act", "gelu"),
    ("attention_dropout", 0.1),
    ("tie_word_embeddings", True),
    ("logits_mup_width_multiplier", 0.0),
    ("logits_mup_width_multiplier", "24"),
    ("d_rel", 0),
    ("rel_extent", -1),
    ("canon_pretrain", {"canon_set": "A"}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_field_that_is_refused(name, value, tmp_path):
    config = {"model_type": "inkling_text", **SIZES, name: value}
    if name == "local_layer_ids":
        config["layer_types"] = None
    field = "canon_pretrain.canon_set" if name == "canon_pretrain" else name
    folder = write_folder(tmp_path / "hf", config, {"lm_head.weight": torch.ones(40, 32)})
    check_refused(folder, "hf.unsupported_field", name=field)


def test_tensors_that_do_not_fit(tmp_path):
    folder = tmp_path / "hf"
    their_model().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    scale, profiles = (
        f"model.layers.1.{name}" for name in ("mlp.global_scale", "self_attn.rel_logits_proj.proj")
    )

    save_file(
        {name: x for name, x in tensors.items() if name != scale}, folder / "model.safetensors"
    )
    check_refused(folder, "hf.missing_tensors", names=[scale])

    turned = tensors | {profiles: tensors[profiles].T.contiguous()}
    save_file(turned, folder / "model.safetensors")
    check_refused(folder, "hf.tensor_shape", name=profiles, expected=(3, 7))

"""Exchange with transformers' Qwen3NextForCausalLM without experts, both ways."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from canon_pretrain.hf.classes import plain_fields
from canon_pretrain.hf.export import export
from canon_pretrain.hf.loading import load_model
from canon_pretrain.hf.reading import import_folder
from canon_pretrain.model.args import ModelArgs, Table
from canon_pretrain.model.counts import flops_per_token, num_parameters
from tests.hf_exports import (
    check_equal_weights,
    check_greedy,
    check_refused,
    export_model,
    logits_in_parts,
    our_logits,
    weights_of,
)
from tests.hf_exports import quick as quick
from tests.llama_canon import write_folder
from tests.support import ROOT
from tests.variants import BASE, build

CPU = torch.device("cpu")
# more than a chunk of the recurrence
TOKENS = torch.randint(40, (2, 70), generator=torch.Generator().manual_seed(1))
CLOSE: dict[str, float] = {"rtol": 1e-9, "atol": 1e-9}
"""In float64."""
FULL, LINEAR = "full_attention", "linear_attention"
# widths all differ; values of a head are wider than its keys
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 80,
    "rope_theta": 100.0,
    "num_experts": 0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}


def their_model(**fields: Any) -> Qwen3NextForCausalLM:
    """Return a model with gains and decays other than the initial ones.

    A gain of 1 + weight is the same in float32 and in float64.
    """
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("A_log", "dt_bias")):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.7, 0.7))
                parameter.mul_(2**10).round_().div_(2**10)
    return model


@torch.no_grad()
def their_logits(model: Qwen3NextForCausalLM, tokens_BT: Tensor = TOKENS) -> Tensor:
    """Return the logits in float64: the class computes in it where it names float32.

    Rounding to float32 grows from layer to layer in such a small recurrence, to 1e-4 and more. Only
    the rotary tables stay float32, as ours do.
    """
    positions_1T = torch.arange(tokens_BT.shape[1])[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions_1T)
    model = copy.deepcopy(model).double()
    with (
        mock.patch.object(model.model.rotary_emb, "forward", lambda *_: (cos, sin)),
        mock.patch.object(Tensor, "float", Tensor.double),
        mock.patch.object(torch, "float32", torch.float64),
    ):
        logits: Tensor = model(tokens_BT).logits
    return logits


@torch.no_grad()
def _logits_of(path: Path) -> Tensor:
    return load_model(path, CPU).double()(TOKENS)


DENSE_BY_LAYER = {"num_experts": 4, "mlp_only_layers": [3, 1, 0, 2]}
# fields, and the mixer and the rotated dims of each layer
THEIRS: dict[str, tuple[dict[str, Any], list[tuple[str, int]]]] = {
    "defaults": ({}, [("gated_deltanet", 0)] * 3 + [("attention", 4)]),
    "every second layer": (
        {"full_attention_interval": 2, "linear_conv_kernel_dim": 2, "num_key_value_heads": 2},
        [("gated_deltanet", 0), ("attention", 4)] * 2,
    ),
    "layers by name": (
        {
            "layer_types": [FULL, LINEAR, LINEAR, FULL],
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": True,
            **DENSE_BY_LAYER,
        },
        [("attention", 16), ("gated_deltanet", 0), ("gated_deltanet", 0), ("attention", 16)],
    ),
    "attention only": (
        {"layer_types": [FULL] * 4, "partial_rotary_factor": 0.65, "linear_num_value_heads": 6},
        [("attention", 10)] * 4,
    ),
    "experts past the last layer": (
        {"num_experts": 4, "decoder_sparse_step": 5},
        [("gated_deltanet", 0)] * 3 + [("attention", 4)],
    ),
}


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_their_model_is_imported_and_exported(name, tmp_path):
    fields, layers = THEIRS[name]
    theirs = their_model(**fields)
    theirs.save_pretrained(tmp_path / "hf")
    expected = their_logits(theirs)

    # the logits are equal, in one pass and in parts from our cache
    found = import_folder(tmp_path / "hf", tmp_path / "in")
    assert [(layer.mixer, layer.rope_dim) for layer in found.args.layer_args] == layers
    torch.testing.assert_close(_logits_of(found.checkpoint), expected, **CLOSE)
    ours = load_model(tmp_path / "hf", CPU).double()
    logits = logits_in_parts(ours, TOKENS, [40, 1, 1, 2, 26])
    torch.testing.assert_close(logits, expected, **CLOSE)

    # gains are 1 + weight in float32, as the class computes them
    weights = weights_of(found.checkpoint)
    attention = next(i for i, (mixer, _) in enumerate(layers) if mixer == "attention")
    stored = theirs.get_submodule(f"model.layers.{attention}.self_attn.k_norm").weight
    gains = weights[f"layers.{attention}.attention.k_norm.weight"]
    assert torch.equal(gains.sort().values, (1 + stored).sort().values)

    # out, without code
    export(found.checkpoint, tmp_path / "out", with_tokenizer=False)
    assert not list((tmp_path / "out").glob("*.py"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(opened) is Qwen3NextForCausalLM
    torch.testing.assert_close(their_logits(opened), expected, **CLOSE)
    check_equal_weights(opened.state_dict(), theirs.state_dict())

    # and in again: the same model, to the bit
    again = import_folder(tmp_path / "out", tmp_path / "again")
    assert again.args == found.args
    check_equal_weights(weights_of(again.checkpoint), weights)


OF_TRANSFORMERS_4: dict[str, Any] = {
    "model_type": "qwen3_next",
    **SIZES,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "mlp_only_layers": [],
    "full_attention_interval": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
"""The fields of a released file (Qwen3-Next-80B-A3B), with small sizes."""
# the rotation's place, and theta and dims by it
ROTATIONS: list[tuple[dict[str, Any], float, int]] = [
    ({}, 100.0, 8),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, 50.0, 8),
    ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.25}}, 100.0, 4),
    ({"rope_parameters": {"rope_theta": 9, "partial_rotary_factor": 1}}, 9.0, 16),
]


@pytest.mark.parametrize(("changes", "theta", "rotated"), ROTATIONS)
@torch.no_grad()
def test_a_file_of_transformers_4(changes, theta, rotated, tmp_path):
    """As transformers reads it, wherever the rotation is."""
    model = their_model(full_attention_interval=2)
    fields = OF_TRANSFORMERS_4 | changes
    folder = write_folder(tmp_path / "hf", fields, dict(model.state_dict()))
    found = import_folder(folder, tmp_path / "in")
    layer = found.args.kinds["attention"]
    assert (layer.rope_theta, layer.rope_dim) == (theta, rotated)
    opened = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(_logits_of(found.checkpoint), their_logits(opened), **CLOSE)


NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    # the field, its value, and other fields
    ("num_experts", 4, {}),
    ("num_experts", 4, {"mlp_only_layers": [0, 1, 2]}),
    ("num_experts", 4, {"decoder_sparse_step": 4}),
    ("num_experts", None, {}),
    ("attention_bias", True, {}),
    ("attention_dropout", 0.1, {}),
    ("hidden_act", "gelu", {}),
    ("head_dim", 8, {}),
    ("head_dim", None, {}),
    ("linear_num_value_heads", 6, {}),
    ("linear_conv_kernel_dim", 1, {}),
    ("layer_types", [FULL, LINEAR], {}),
    ("layer_types", [FULL, "sliding_attention", LINEAR, FULL], {}),
    ("full_attention_interval", 0, {}),
    ("partial_rotary_factor", 0.0, {}),
    ("partial_rotary_factor", 0.2, {}),  # 3 dims
    ("partial_rotary_factor", 1.5, {}),
    ("rope_parameters", {"rope_type": "linear", "factor": 2.0}, {}),
    ("rope_parameters", NESTED, {}),
    ("rope_scaling", {"rope_theta": 9.0}, {"rope_parameters": {"rope_theta": 9.0}}),
    ("rope_scaling", {"type": "yarn", "factor": 4.0}, {}),
    ("num_hidden_layers", 1001, {}),
    ("rms_norm_eps", "1e-6", {}),
    ("tie_word_embeddings", None, {}),
]


@pytest.mark.parametrize(("name", "value", "others"), REFUSED)
def test_a_model_that_is_refused(name, value, others, tmp_path):
    fields = OF_TRANSFORMERS_4 | others | {name: value}
    folder = write_folder(tmp_path / "hf", fields, {"lm_head.weight": torch.ones(40, 32)})
    check_refused(folder, "hf.unsupported_field", name=name)


def test_the_released_model_is_refused_for_its_experts(tmp_path):
    Qwen3NextConfig().save_pretrained(tmp_path / "hf")
    check_refused(tmp_path / "hf", "hf.unsupported_field", name="num_experts")


def _changed_folder(tmp_path: Path, change: str) -> Path:
    """Save a model with one tensor removed, cut or added."""
    folder = tmp_path / "hf"
    their_model(full_attention_interval=2).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    packed = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    match change:
        case "missing":
            del tensors[packed]
        case "cut":
            tensors[packed] = tensors[packed][:-1].clone()
        case "added":
            tensors["model.layers.0.linear_attn.wq.weight"] = tensors[packed].clone()
        case "multi-token prediction":
            tensors["mtp.layers.0.mlp.gate_proj.weight"] = tensors[packed].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_packed_tensors_are_checked(tmp_path):
    packed = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    folder = _changed_folder(tmp_path / "missing", "missing")
    check_refused(folder, "hf.missing_tensors", names=[packed])
    folder = _changed_folder(tmp_path / "cut", "cut")
    check_refused(folder, "hf.tensor_shape", name=packed, expected=(3 * (8 + 8 + 12 + 12), 32))
    folder = _changed_folder(tmp_path / "added", "added")
    names = ["model.layers.0.linear_attn.wq.weight"]
    check_refused(folder, "hf.unknown_tensors", names=names)

    # what transformers does not read either
    import_folder(_changed_folder(tmp_path / "mtp", "multi-token prediction"), tmp_path / "in")


# -- ours


def _args(*layers: Mapping[str, Any], **changes: Any) -> ModelArgs:
    """Return a model of attention that the class has, with `layers` that differ."""
    args = replace(
        BASE,
        num_layers=3,
        num_kv_heads=2,
        rope_theta=100.0,
        qk_norm="per_head",
        attention_gate="per_channel",
        **changes,
    )
    names = tuple(f"layer{number}" for number in range(len(layers)))
    return replace(args, pattern=names, layers=Table(zip(names, layers, strict=True)))


DELTA: dict[str, Any] = {
    "mixer": "gated_deltanet",
    "num_heads": 2,
    "expand_k": 0.75,
    "expand_v": 1.5,
    "mixer_conv": True,
    "canon_kernel": 3,
}
HALF = {"position": "partial_rope_c", "partial_rope_dim": 4}
OURS: dict[str, ModelArgs] = {
    "attention": _args(),
    "attention of half rotations": _args(**HALF, tie_embeddings=True),
    "hybrid": _args(DELTA, DELTA, {}),
    "hybrid of other widths": _args(HALF, DELTA | {"num_heads": 4, "expand_v": 0.5}),
}


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_our_model_is_loaded_by_their_class(name, tmp_path):
    args = OURS[name]
    model = build(args).eval()
    out = export_model(tmp_path, model)
    assert not list(out.glob("*.py"))
    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(opened) is Qwen3NextForCausalLM
    ours = copy.deepcopy(model).double()
    torch.testing.assert_close(their_logits(opened), ours(TOKENS), **CLOSE)
    assert num_parameters(args) == sum(weight.numel() for weight in opened.parameters())

    # with their cache
    check_greedy(opened, model, TOKENS[:, :9])

    # and back: gains of at least 0.5 have the same bits
    found = import_folder(out, tmp_path / "back")
    assert found.args.layer_args == args.layer_args
    check_equal_weights(weights_of(found.checkpoint), dict(model.state_dict()))


@torch.no_grad()
def test_gains_are_rounded_after_1_is_subtracted(tmp_path):
    model = build(_args()).eval()
    gains = 1 + torch.linspace(-0.01, 0.01, BASE.dim)
    model.norm.weight.copy_(gains)
    out = export_model(tmp_path, model, dtype="bfloat16")
    stored = load_file(out / "model.safetensors")["model.norm.weight"]
    assert torch.equal(stored, (gains - 1).bfloat16())
    assert not torch.equal(1 + stored.float(), gains.bfloat16().float())


LFM2_FILE = ROOT / "canon_pretrain" / "hf" / "lfm2_conv.py:GatedConv"
WITHOUT_CLASS: dict[str, ModelArgs] = {
    "no QK-norm": replace(_args(), qk_norm="none"),
    "QK-norm of all heads": replace(_args(), qk_norm="full"),
    "no rotation": _args(position="nope"),
    "rotation of some heads": _args(position="partial_rope_a"),
    "a window": _args(window=5),
    "biases": _args(bias=True),
    "another activation": _args(ffn_activation="relu2"),
    "a standard feed-forward": _args(ffn="standard"),
    "Canon": _args(canon_set="A"),
    "Canon in the recurrence": _args(DELTA | {"mixer_conv": False, "canon_set": "B"}, {}),
    "no convolution": _args({**DELTA, "mixer_conv": False, "canon_kernel": 4}, {}),
    "a gate of low rank": _args(DELTA | {"output_gate_rank": 4}, {}),
    "another recurrence": _args({"mixer": "gla"}, {}),
    "gate in some": _args({"attention_gate": "none"}, {}),
    "two bases": _args({"rope_theta": 50.0}, {}),
    "two recurrences": _args(DELTA, DELTA | {"expand_v": 1.0}, {}),
    "two widths": _args(DELTA | {"ffn_dim": 40}, {}),
    "documents": _args(document_mask=True),
    "LFM2's convolution": _args({"mixer": str(LFM2_FILE)}, {}),
    "the recurrence only": replace(BASE, position="nope", **DELTA),
}


@pytest.mark.parametrize("name", WITHOUT_CLASS)
def test_a_model_that_the_class_does_not_compute(name):
    assert plain_fields(WITHOUT_CLASS[name]) is None


@pytest.mark.parametrize("name", ["no QK-norm", "gate in some", "biases"])
@torch.no_grad()
def test_our_class_has_the_gate(name, tmp_path):
    args = WITHOUT_CLASS[name]
    model = build(args).eval()
    out = export_model(tmp_path, model)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "LlamaCanon"
    assert "model.layers.1.self_attn.g_proj.weight" in load_file(out / "model.safetensors")
    found = import_folder(out, tmp_path / "back")
    assert found.args.layer_args == args.layer_args
    torch.testing.assert_close(our_logits(found, TOKENS), model(TOKENS))


def test_the_gate_costs_a_matrix():
    """As large as that of the queries; 6 FLOPs per parameter and token."""
    plain = replace(BASE, num_kv_heads=2)
    gated = replace(plain, attention_gate="per_channel")
    num_values = plain.num_layers * plain.dim * plain.num_heads * plain.head_dim
    assert num_parameters(gated) - num_parameters(plain) == num_values
    assert flops_per_token(gated, 9) - flops_per_token(plain, 9) == 6 * num_values
    with_bias = num_parameters(replace(gated, bias=True)) - num_parameters(gated)
    without = num_parameters(replace(plain, bias=True)) - num_parameters(plain)
    assert with_bias - without == plain.num_layers * plain.dim

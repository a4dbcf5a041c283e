"""Exports loaded by torchao and bitsandbytes, if these are installed, on a CPU."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from canon_pretrain.hf.classes import to_hf
from canon_pretrain.hf.config import to_fields
from canon_pretrain.hf.modeling_canon import LlamaCanonConfig, LlamaCanonForCausalLM
from tests.variants import build, random_tokens, variant

pytestmark = pytest.mark.filterwarnings("ignore")  # of these packages

# attention with Canon; routers; gates of states, a convolution; a smear gate, a tied head
NAMES = ["nope ABCD", "nope ABC moe capacity", "gdn AC conv", "rope smear gqa tied"]
SMALL = {"gate", "a_proj", "b_proj", "lm_head"}
"""Linear layers that stay as they are."""


def saved(name, folder):
    """Write the export's weights, of a width that the packages' kernels take; return our model."""
    args = replace(variant(name), dim=128, ffn_dim=256, num_heads=4)
    ours = build(args).eval()
    model = LlamaCanonForCausalLM(LlamaCanonConfig(**to_fields(args)))
    state = {to_hf(our_name): tensor for our_name, tensor in ours.state_dict().items()}
    model.load_state_dict(state, strict=False)
    model.save_pretrained(folder)
    return ours


def torchao_config(**fields):
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig(), **fields)


def bitsandbytes_config(**fields):
    pytest.importorskip("bitsandbytes")
    if fields.get("load_in_4bit"):
        fields |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return transformers.BitsAndBytesConfig(**fields)


def quantized_names(model):
    return {
        name.removesuffix(".weight")
        for name, weight in model.named_parameters()
        if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor
    }


def expected_names(model):
    """Return the names of all linear layers but the small ones."""
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.split(".")[-1] not in SMALL
    }


@torch.no_grad()
def logits_and_continuation(model, ids):
    """Return the logits of a full pass, and of its second half behind a cache."""
    whole = model(ids, use_cache=False).logits
    past = model(ids[:, :8], use_cache=True).past_key_values
    return whole, model(ids[:, 8:], past_key_values=past).logits


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_int8_weights_of_torchao(name, tmp_path):
    config = torchao_config()
    ours = saved(name, tmp_path)
    ids = random_tokens(ours.args, rows=2, num_tokens=16)

    model = LlamaCanonForCausalLM.from_pretrained(tmp_path, quantization_config=config)

    assert quantized_names(model) == expected_names(model) != set()
    # the arithmetic is that of the dequantized weights
    reference = LlamaCanonForCausalLM.from_pretrained(tmp_path).eval()
    for layer_name in quantized_names(model):
        weight = model.get_submodule(layer_name).weight.dequantize()
        reference.get_submodule(layer_name).weight.copy_(weight)
    whole, part = logits_and_continuation(model, ids)
    torch.testing.assert_close(whole, reference(ids).logits, atol=2e-4, rtol=0)
    torch.testing.assert_close(part, whole[:, 8:], atol=2e-4, rtol=0)
    assert mean_error(whole, ours(ids)) < 0.05


def mean_error(logits, expected):
    return ((logits - expected).abs().mean() / expected.std()).item()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_8_bits_of_bitsandbytes(name, tmp_path):
    config = bitsandbytes_config(load_in_8bit=True)
    ours = saved(name, tmp_path)
    ids = random_tokens(ours.args, rows=2, num_tokens=16)

    model = LlamaCanonForCausalLM.from_pretrained(tmp_path, quantization_config=config)

    assert quantized_names(model) == expected_names(model) != set()
    for logits in logits_and_continuation(model, ids):
        assert mean_error(logits, ours(ids)[:, -logits.shape[1] :]) < 0.1


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_4_bits_of_bitsandbytes(name, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    config = bitsandbytes_config(load_in_4bit=True)
    ours = saved(name, tmp_path)
    ids = random_tokens(ours.args, rows=2, num_tokens=16)

    model = LlamaCanonForCausalLM.from_pretrained(tmp_path, quantization_config=config)

    assert quantized_names(model) == expected_names(model) != set()
    reference = LlamaCanonForCausalLM.from_pretrained(tmp_path).eval()
    for layer_name in quantized_names(model):
        weight = copy.deepcopy(model.get_submodule(layer_name).weight)
        dequantized = functional.dequantize_4bit(weight.data, weight.quant_state)
        reference.get_submodule(layer_name).weight.copy_(dequantized)
    whole, part = logits_and_continuation(model, ids)
    # its kernels for CPUs compute in bfloat16, which may change the choice of an expert
    expected = reference(ids).logits
    assert mean_error(whole, expected) < 0.1
    assert mean_error(part, expected[:, 8:]) < 0.1


def test_layers_that_4_bits_cannot_run_are_named(tmp_path):
    """Mamba2's first layer has an output more for each head."""
    cpu_layers = pytest.importorskip("bitsandbytes.nn").Linear4bit
    if not getattr(cpu_layers(64, 64), "support_avx512bf16_for_cpu", False):
        pytest.skip("bitsandbytes has no such kernels on this CPU")
    saved("mamba2 AB", tmp_path)
    load = LlamaCanonForCausalLM.from_pretrained

    with pytest.raises(ValueError, match="llm_int8_skip_modules.*layers.0.self_attn.in_proj"):
        load(tmp_path, quantization_config=bitsandbytes_config(load_in_4bit=True))

    config = bitsandbytes_config(
        load_in_4bit=True, llm_int8_skip_modules=["lm_head", "self_attn.in_proj"]
    )
    model = load(tmp_path, quantization_config=config)
    assert {name.split(".")[-1] for name in quantized_names(model)} == {"out_proj"}


def test_a_users_list_of_modules_is_kept(tmp_path):
    config = torchao_config(modules_to_not_convert=[".*self_attn"])
    saved("gdn AC conv", tmp_path)

    model = LlamaCanonForCausalLM.from_pretrained(tmp_path, quantization_config=config)

    names = quantized_names(model)
    assert "lm_head" in names and not any("self_attn" in name for name in names)
    assert config.modules_to_not_convert == [".*self_attn"]


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
def test_a_config_may_be_a_dict(package, tmp_path):
    pytest.importorskip(package)
    # with and without a list of modules
    fields = torchao_config().to_dict() if package == "torchao" else {"load_in_8bit": True}
    saved("gdn AC conv", tmp_path)

    model = LlamaCanonForCausalLM.from_pretrained(tmp_path, quantization_config=fields)

    assert quantized_names(model) == expected_names(model) != set()

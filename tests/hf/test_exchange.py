"""Exchange with transformers' own classes whose layers differ or have a window, both ways."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from canon_pretrain.checkpoint.architecture import model_args_of
from canon_pretrain.hf.classes import plain_fields, to_args, unknown
from canon_pretrain.hf.export import export
from canon_pretrain.hf.loading import load_model
from canon_pretrain.hf.reading import import_folder
from canon_pretrain.model.args import ModelArgs, Table
from canon_pretrain.model.counts import flops_per_token, num_parameters
from canon_pretrain.run.folder import RunFolder
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
from tests.variants import BASE, build, random_tokens

CPU = torch.device("cpu")
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
LINEAR = "linear_attention"
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
    "olmo2": ("Olmo2", {"rms_norm_eps": 1e-5}, [("rope", 0)] * 4),
}


def _randomize_gains(model: torch.nn.Module) -> None:
    """Set the gains of norms, which are 1, to other values, so that none is like another."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_their_model_is_imported(name, tmp_path):
    """The logits are equal, and the file says what each layer is, also where it is a default."""
    class_name, options, layers = THEIRS[name]
    config = getattr(transformers, f"{class_name}Config")(**SIZES, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).eval()
    _randomize_gains(model)
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
OLMO2 = {"norm_place": "output", "qk_norm": "full"}
DELTA = NOPE | {
    "mixer": "gated_deltanet",
    "num_heads": 2,
    "expand_k": 0.375,
    "expand_v": 0.625,
    "mixer_conv": True,
    "canon_kernel": 3,
    "o_norm_eps": 1e-5,
    "allow_neg_eigval": True,
}
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
    "OLMo 2's norms": ("olmo2", replace(BASE, num_kv_heads=2, rope_theta=100.0, **OLMO2)),
    "OLMo Hybrid": ("olmo_hybrid", _pattern(DELTA, OLMO2, DELTA, norm_eps=1e-3)),
    "OLMo Hybrid without rotation": (
        "olmo_hybrid",
        replace(
            _pattern(OLMO2 | NOPE, DELTA | {"allow_neg_eigval": False}, tie_embeddings=True),
            rope_theta=ModelArgs.rope_theta,  # of which its file says nothing
        ),
    ),
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
    check_greedy(opened, model, TOKENS[:, :9])

    # and back
    found = import_folder(out, tmp_path / "back")
    assert found.args.layer_args == args.layer_args
    check_equal_weights(weights_of(found.checkpoint), dict(model.state_dict()))


# -- LFM2, whose convolutions are a mixer in one file

LFM2 = {
    "conv_L_cache": 3,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.5,
    "layer_types": ["conv", "conv", FULL, "conv"],
    "tie_word_embeddings": False,
}


@torch.no_grad()
def test_lfm2(tmp_path):
    """Both ways; its cache and ours make the same texts."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = transformers.Lfm2Config(**sizes, **LFM2)
    torch.manual_seed(0)
    theirs = transformers.Lfm2ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    assert theirs.model.layers[0].feed_forward.w1.weight.shape[0] == 24  # 8 ceil(1.5 * 16 / 8)
    expected = theirs(TOKENS).logits
    found = import_folder(tmp_path / "hf", tmp_path / "imported")
    torch.testing.assert_close(our_logits(found, TOKENS), expected, **CLOSE)
    assert (tmp_path / "imported" / "mixers" / "lfm2_conv.py").is_file()
    torch.testing.assert_close(load_model(tmp_path / "hf", CPU)(TOKENS), expected, **CLOSE)

    # in parts, from our cache
    ours = load_model(found.checkpoint, CPU)
    logits = logits_in_parts(ours, TOKENS, [9, 1, 1, 2, 8, 3])
    torch.testing.assert_close(logits, expected, **CLOSE)

    # older names of the same fields
    record = json.loads((tmp_path / "hf" / "config.json").read_text())
    del record["layer_types"], record["intermediate_size"], record["tie_word_embeddings"]
    record |= {"full_attn_idxs": [2], "block_ff_dim": 24, "tie_embedding": False}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(record))
    again = import_folder(tmp_path / "hf", tmp_path / "again")
    assert again.args.layer_names == found.args.layer_names == ["conv", "conv", "attention", "conv"]
    torch.testing.assert_close(our_logits(again, TOKENS), expected, **CLOSE)

    # and out, without code
    out = tmp_path / "out"
    export(found.checkpoint, out, with_tokenizer=False)
    assert not list(out.glob("*.py"))
    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(opened) is transformers.Lfm2ForCausalLM
    check_equal_weights(opened.state_dict(), theirs.state_dict())
    torch.testing.assert_close(opened(TOKENS).logits, expected, **CLOSE)

    # it has no norms of outputs
    args = model_args_of(RunFolder(tmp_path / "imported"))
    assert plain_fields(args) is not None
    assert plain_fields(replace(args, norm_place="output")) is None

    # another file of that name is the user's own
    mixer = tmp_path / "imported" / "mixers" / "lfm2_conv.py"
    mixer.write_text(mixer.read_text() + "\n")
    assert plain_fields(model_args_of(RunFolder(tmp_path / "imported"))) is None


NOT_LFM2 = [
    ("conv_bias", True),
    ("layer_types", ["conv", FULL]),
    ("layer_types", ["conv", SLIDING, FULL, "conv"]),
    ("rope_parameters", {"rope_type": "linear", "factor": 2.0}),
    ("conv_L_cache", 0),
]


@pytest.mark.parametrize(("name", "value"), NOT_LFM2)
def test_an_lfm2_that_is_refused(name, value, tmp_path):
    fields = {"model_type": "lfm2", **SIZES, **LFM2} | {name: value}
    del fields["head_dim"]
    folder = write_folder(tmp_path / "hf", fields, {"lm_head.weight": torch.ones(40, 32)})
    check_refused(folder, "hf.unsupported_field", name=name)


# -- OLMo Hybrid, whose two kinds of layers have their norms in other places

OLMO_SIZES = {name: value for name, value in SIZES.items() if name != "head_dim"}
# larger weights amplify the rounding of float32, in both classes, to more than 1e-5
OLMO_SIZES["initializer_range"] = 0.1
OLMO_HYBRID: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "all sizes": {
        "num_hidden_layers": 5,
        "rope_parameters": {"rope_theta": None},
        "layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 3,
        "linear_allow_neg_eigval": False,
        "rms_norm_eps": 1e-2,
        "tie_word_embeddings": True,
    },
}


def _olmo_hybrid(folder: Path, **changes: Any) -> Any:
    """Return a model of transformers with random weights, which is saved in the folder."""
    config = transformers.OlmoHybridConfig(**OLMO_SIZES | changes)
    torch.manual_seed(0)
    model = transformers.OlmoHybridForCausalLM(config).eval()
    _randomize_gains(model)
    model.save_pretrained(folder)
    return model


def _olmo_hybrid_flops(model: Any, num_tokens: int) -> int:
    """Count FLOPs of a token forward and backward, from the model's products and its config."""
    products = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    others = [p for p in model.model.layers.parameters() if p.ndim != 2]
    num_weights = sum(product.weight.numel() for product in products)
    num_weights += sum(p.numel() for p in (*others, model.model.norm.weight))
    total = 6 * num_weights

    config = model.config
    for layer_type in config.layer_types:
        if layer_type == FULL:  # scores, and the sum of values: all heads are as wide as the model
            total += 2 * 6 * config.hidden_size * num_tokens
        else:  # the state of each head is read twice, and written
            state = config.linear_key_head_dim * config.linear_value_head_dim
            total += 3 * 6 * config.linear_num_key_heads * state
    return total


@pytest.mark.parametrize("name", OLMO_HYBRID)
@torch.no_grad()
def test_olmo_hybrid(name, tmp_path):
    """Both ways, from each form of its files; our cache and theirs make the same logits."""
    theirs = _olmo_hybrid(tmp_path / "hf", **OLMO_HYBRID[name])
    expected = theirs(TOKENS).logits
    found = import_folder(tmp_path / "hf", tmp_path / "imported")
    assert num_parameters(found.args) == sum(p.numel() for p in theirs.parameters())
    assert flops_per_token(found.args, NUM_TOKENS) == _olmo_hybrid_flops(theirs, NUM_TOKENS)
    torch.testing.assert_close(our_logits(found, TOKENS), expected, **CLOSE)
    torch.testing.assert_close(load_model(tmp_path / "hf", CPU)(TOKENS), expected, **CLOSE)

    # in parts, from our cache
    ours = load_model(found.checkpoint, CPU)
    logits = logits_in_parts(ours, TOKENS, [9, 1, 1, 2, 8, 3])
    torch.testing.assert_close(logits, expected, **CLOSE)

    # out, without code
    out = tmp_path / "out"
    export(found.checkpoint, out, with_tokenizer=False)
    assert not list(out.glob("*.py"))
    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(opened) is transformers.OlmoHybridForCausalLM
    check_equal_weights(opened.state_dict(), theirs.state_dict())
    torch.testing.assert_close(opened(TOKENS).logits, expected, **CLOSE)

    # the same model from other forms: the released names, with the parts of convolutions as wide as
    # q, k and v, as we write them; and those of the class itself
    whole = {key: tensor.clone() for key, tensor in theirs.state_dict().items()}
    save_file(whole, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    for number, folder in enumerate((out, tmp_path / "hf")):
        again = import_folder(folder, tmp_path / f"again-{number}")
        assert again.args == found.args
        check_equal_weights(weights_of(again.checkpoint), weights_of(found.checkpoint))


def test_each_field_of_olmo_hybrid_is_known():
    assert unknown(transformers.OlmoHybridConfig().to_dict()) == []
    assert unknown({"model_type": "olmo_hybrid", "linear_other": 1}) == ["linear_other"]


@torch.no_grad()
def test_convolutions_that_are_not_whole(tmp_path):
    _olmo_hybrid(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.linear_attn.k_conv1d.weight"

    save_file({key: x for key, x in weights.items() if key != name}, file)
    missing = ["model.layers.1.linear_attn.conv1d.weight"]
    check_refused(tmp_path / "hf", "hf.missing_tensors", names=missing)

    save_file(weights | {name: torch.ones(32, 1, 3)}, file)
    check_refused(tmp_path / "hf", "hf.tensor_shape", expected=(32, 1, 3))

    save_file(weights | {name: torch.ones(33, 1, 4)}, file)
    check_refused(tmp_path / "hf", "hf.tensor_shape", expected=(96, 1, 4))

    save_file(weights | {name: torch.ones(32, 1, 4).int()}, file)
    check_refused(tmp_path / "hf", "hf.tensor_dtype", name=name)


NOT_OLMO_HYBRID = [
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("attention_dropout", 0.1),
    ("head_dim", 16),
    ("num_key_value_heads", 0),
    ("linear_num_value_heads", 8),
    ("linear_key_head_dim", 0.5),
    ("linear_conv_kernel_dim", 0),
    ("linear_allow_neg_eigval", None),
    ("layer_types", [LINEAR, FULL]),
    ("layer_types", [LINEAR] * 4),
    ("layer_types", [FULL] * 4),
    ("layer_types", [LINEAR, LINEAR, SLIDING, FULL]),
    ("layer_types", FULL),
    ("rope_parameters", None),
    ("rope_parameters", {"rope_type": None}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0}),
    ("rope_parameters", {"rope_theta": 100.0, "partial_rotary_factor": 0.5}),
    ("rope_parameters", {FULL: {"rope_theta": 100.0}}),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ("num_hidden_layers", 10**6),
]


@pytest.mark.parametrize(("name", "value"), NOT_OLMO_HYBRID)
def test_an_olmo_hybrid_that_is_refused(name, value, tmp_path):
    fields = {"model_type": "olmo_hybrid", **OLMO_SIZES} | {name: value}
    folder = write_folder(tmp_path / "hf", fields, {"lm_head.weight": torch.ones(40, 32)})
    check_refused(folder, "hf.unsupported_field", name=name)


def test_heads_of_olmo_hybrid_that_no_factor_of_the_width_gives(tmp_path):
    """1 / 49 times 49 is not 1 in floating point."""
    sizes = {"hidden_size": 49, "num_attention_heads": 1, "num_key_value_heads": 1}
    fields = {"model_type": "olmo_hybrid", **OLMO_SIZES, **sizes, "linear_key_head_dim": 1}
    folder = write_folder(tmp_path / "hf", fields, {"lm_head.weight": torch.ones(40, 49)})
    check_refused(folder, "hf.unsupported_field", name="linear_key_head_dim", given=1)


@pytest.mark.parametrize(
    ("fields", "position"),
    [
        ({"rope_parameters": None, "rope_theta": 50.0}, ("rope", 50.0)),
        ({"rope_parameters": None, "rope_theta": None}, ("nope", 1e4)),
        ({"rope_parameters": {"rope_theta": None, "rope_type": None}}, ("nope", 1e4)),
        ({"rope_parameters": {"rope_theta": 7}, "rope_theta": None}, ("rope", 7.0)),
    ],
)
def test_the_rotation_of_olmo_hybrid(fields, position):
    """As the class reads it."""
    args = to_args({"model_type": "olmo_hybrid", **OLMO_SIZES, **fields})
    layer = args.kinds["attention"]
    assert (layer.position, layer.rope_theta) == position

    theirs = transformers.OlmoHybridConfig(**OLMO_SIZES | fields).rope_parameters["rope_theta"]
    assert theirs == (position[1] if position[0] == "rope" else None)


REFUSED = {
    "inkling_text": ("InklingText", "mlp_layer_types"),  # experts
    "inkling_mm_model": ("Inkling", "text_config"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_class_that_our_models_cannot_express(model_type, tmp_path):
    class_name, name = REFUSED[model_type]
    config = getattr(transformers, f"{class_name}Config")()
    assert config.model_type == model_type
    config.save_pretrained(tmp_path / "hf")
    check_refused(tmp_path / "hf", "hf.unsupported_field", name=name)


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
    "OLMo 2's norms in one": _pattern(OLMO2, {}),
    "OLMo 2's places only": replace(BASE, norm_place="output"),
    "OLMo 2's places, Qwen3's norm": replace(BASE, norm_place="output", qk_norm="per_head"),
    "OLMo 2 without rotation": replace(BASE, position="nope", **OLMO2),
    "OLMo 2 with a window": replace(BASE, window=5, **OLMO2),
    "OLMo 2 with Canon": replace(BASE, canon_set="A", **OLMO2),
    "Mamba2 with norms of outputs": replace(
        BASE, mixer="mamba2", mixer_conv=True, ffn="none", norm_place="output", **NOPE
    ),
    "OLMo Hybrid with one epsilon": _pattern(OLMO2, {**DELTA, "o_norm_eps": 0.0}, norm_eps=1e-3),
    "OLMo Hybrid without convolutions": _pattern(
        OLMO2, {**DELTA, "mixer_conv": False, "canon_kernel": 4}
    ),
    "OLMo Hybrid with a thin gate": _pattern(OLMO2, {**DELTA, "output_gate_rank": 4}),
    "OLMo Hybrid with a window": _pattern({**OLMO2, "window": 5}, DELTA),
    "OLMo Hybrid with norms of outputs": _pattern(OLMO2, DELTA, norm_place="output"),
    "OLMo Hybrid with norms of inputs": _pattern({"qk_norm": "full"}, DELTA),
    "OLMo Hybrid of two widths": _pattern(OLMO2, {**DELTA, "ffn_dim": 40}),
    "OLMo Hybrid of three kinds": _pattern(OLMO2, {**OLMO2, "rope_theta": 50.0}, DELTA),
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

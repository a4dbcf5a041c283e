"""The released linear models: imports of their folders, and exports in their layout.

The tables of names and the logits were written by the released classes (released_linear.py). With
a clone (`make test-release CLONE=PATH`) the classes themselves are compared.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from canon_pretrain.core.files import read_json
from canon_pretrain.hf import export as exporting
from canon_pretrain.hf import lingua, lingua_linear
from canon_pretrain.hf.classes import CLASSES
from canon_pretrain.hf.commands import add_export_arguments, run_export
from canon_pretrain.hf.export import export
from canon_pretrain.hf.push import Upload
from canon_pretrain.hf.reading import import_folder, meta_weights
from canon_pretrain.model.args import ModelArgs
from tests.hf.release_classes import released_classes
from tests.hf.released_linear import (
    NUM_LOGITS,
    OPTIONS,
    SMALL,
    TOKENS,
    read_recipes,
    recipes,
    small_models,
    write_folder,
)
from tests.hf_exports import check_refused, our_logits, plant_run
from tests.hf_exports import quick as quick
from tests.ranks import whole_state
from tests.support import refused
from tests.synthetic.release_clone import CLONE
from tests.variants import build

MIXERS = {"GLA5": "gla", "GDN2": "gated_deltanet", "Mamba2": "mamba2"}
# layers, D, heads, F, vocabulary, context
SIZES = {
    "1B": (24, 2048, 16, 4096, 32000, 16384),
    "3B": (26, 3072, 24, 6144, 32000, 12288),
    "8B": (32, 4096, 32, 9472, 128256, 4096),
}
NOT_RECORDED = {"zeyuan_linearT", "zeyuan_alternate", "zeyuan_double", "zeyuan_layernorm"}
"""Fields that an export writes with their defaults, and that the recipes mostly lack."""
GATED_NORM = ("attn.g_norm.", "attn.g_norm_swish_gate.")
"""Names of one norm of GLA5, with `zeyuan_layernorm` and without."""
LINGUA_FILES = ("consolidated.pth", "params.json")
every_small_model = pytest.mark.parametrize("name", OPTIONS)


def recipe_args(name: str) -> ModelArgs:
    """Return the model of a recipe such as GLA5Canon-1B-Nemo-1T-lr0.002, from the paper's table."""
    family, size = name.split("-")[:2]
    num_layers, dim, num_heads, ffn_dim, vocab_size, max_seq_len = SIZES[size]
    args = ModelArgs(
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        position="nope",
        mixer=MIXERS[family.removesuffix("Canon").removesuffix("conv")],
        mixer_conv=True,
        canon_set="ACD" if family.endswith("Canon") else "",
    )
    if args.mixer == "mamba2":
        return replace(args, state_dim=128)
    return replace(args, expand_k=1.0, expand_v=2.0, output_gate_rank=16)


def exported_shapes(args: ModelArgs) -> dict[str, torch.Size]:
    """Return the names and shapes that an export has, without its values."""
    named = lingua.weights_of(lingua.to_params(args)).to_class(meta_weights(args).items(), args)
    return {name: tensor.shape for name, tensor in named}


def with_default_norm(name: str) -> str:
    return name.replace(*GATED_NORM)


def test_all_recipes_are_our_models():
    """48 of them, both ways: `model`, and the name and shape of every tensor."""
    found = recipes()
    assert len(found) == 48

    for name, recorded in found.items():
        assert lingua.unknown(recorded.params) == [], name
        args = lingua.to_args(recorded.params)
        assert args == recipe_args(name), name

        section = lingua.to_params(args)["model"]
        same = recorded.model.keys() - NOT_RECORDED
        assert {key: section[key] for key in same} == {key: recorded.model[key] for key in same}
        assert section.keys() - recorded.model.keys() <= NOT_RECORDED

        expected = {with_default_norm(key): shape for key, shape in recorded.shapes.items()}
        assert exported_shapes(args) == expected, name


@every_small_model
def test_an_import_has_the_classes_logits(name, tmp_path):
    recorded = small_models()[name]
    folder = write_folder(tmp_path / "hub", recorded.params, recorded.weights)

    imported = import_folder(folder, tmp_path / "out")

    logits = our_logits(imported, TOKENS)[..., :NUM_LOGITS]
    assert recorded.logits is not None
    assert (logits - recorded.logits).abs().max() < 5e-5


# bfloat16 is exact in the checkpoint's float32
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in OPTIONS), ("GLA5 8B", torch.bfloat16)],
    ids=str,
)
def test_an_export_of_an_import_is_the_folder(name, dtype, tmp_path):
    """Bitwise; of GLA5 with `zeyuan_layernorm`, a norm has its other name."""
    recorded = small_models()[name]
    weights = {key: tensor.to(dtype) for key, tensor in recorded.weights.items()}
    folder = write_folder(tmp_path / "hub", recorded.params, weights)
    imported = import_folder(folder, tmp_path / "imported")

    dtype_name = str(dtype).removeprefix("torch.")
    out = tmp_path / "out"
    record = export(imported.checkpoint, out, dtype=dtype_name, released=True, with_tokenizer=False)

    content = torch.load(out / "default" / "consolidated.pth", weights_only=True)
    tensors: dict[str, Tensor] = content["model"]
    expected = {with_default_norm(key): tensor for key, tensor in weights.items()}
    assert tensors.keys() == expected.keys()
    assert [key for key, tensor in tensors.items() if not same_bits(tensor, expected[key])] == []

    # But for letters in another order, or of Canon layers that are not there; and a null is 256.
    section = read_json(out / "default" / "params.json")["model"]
    same = recorded.model.keys() - NOT_RECORDED - {"canon_set"}
    if name == "Mamba2 no conv":
        recorded.model["mamba_ssm"] = 256
    assert {key: section[key] for key in same} == {key: recorded.model[key] for key in same}

    assert record["layout"] == "released"
    assert record["files"] == path_names(out)
    again = import_folder(out, tmp_path / "again")
    assert again.args == imported.args
    first_state, state = whole_state(imported.checkpoint), whole_state(again.checkpoint)
    assert all(same_bits(tensor, state[key]) for key, tensor in first_state.items())


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor, other)


def path_names(folder: Path) -> list[str]:
    """Return the paths of all files in a folder, sorted."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def test_the_rows_of_fused_tensors():
    """The gate first, then up; q, k and v of conv1d. No reader or writer of ours is used."""
    recorded = small_models()["GLA5 Canon"]
    layer = "trans.model.layers.1"
    weights = recorded.weights
    args = lingua.to_args(recorded.params)
    model = build(args)
    state = dict(model.state_dict())
    fused = weights[f"{layer}.mlp.gate_proj.weight"]
    state["layers.1.feed_forward.w1.weight"] = fused[: args.ffn_dim]
    state["layers.1.feed_forward.w3.weight"] = fused[args.ffn_dim :]
    conv = torch.cat([weights[f"{layer}.attn.{part}_conv1d.weight"] for part in "qkv"])
    state["layers.1.attention.conv1d.weight"] = conv

    named = dict(lingua.weights_of(recorded.params).to_class(state.items(), args))

    for key in ("mlp.gate_proj", "attn.q_conv1d", "attn.k_conv1d", "attn.v_conv1d"):
        assert torch.equal(named[f"{layer}.{key}.weight"], weights[f"{layer}.{key}.weight"])


# -- refusals -----------------------------------------------------------------------------------


def test_only_conversions_of_values_need_unrounded_weights():
    """What a class stores besides ours, such as a tied head, rounds no value."""
    assert not any(linear.weights.changes_values for linear in lingua_linear.CLASSES)
    changing = {name for name, standard in CLASSES.items() if standard.changes_values}
    assert changing == {"inkling_text", "qwen3_next"}


def small_folder(path: Path, name: str = "GLA5 conv", **fields: Any) -> Path:
    recorded = small_models()[name]
    params = recorded.params | {"model": recorded.model | fields}
    return write_folder(path, params, recorded.weights)


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("GLA5 conv", {"model_name": "GLA6"}),
    ("GLA5 conv", {"model_name": ["GLA5"]}),
    ("GLA5 conv", {"canon_bias": True}),
    ("GLA5 conv", {"zeyuan_linearT": True}),
    ("GLA5 conv", {"zeyuan_alternate": True}),
    ("GLA5 conv", {"zeyuan_double": 2}),
    ("GLA5 conv", {"canon_set": ""}),
    ("GLA5 conv", {"canon_set": None}),
    ("GLA5 conv", {"canon_set": "ACD"}),
    ("GLA5 conv", {"canon_set": "bE"}),
    ("GLA5 conv", {"canon_set": 3}),
    ("GLA5 Canon", {"canon_kernel": 3}),
    ("GLA5 conv", {"hidden_dim": 0}),
    ("GLA5 conv", {"hidden_dim": "24"}),
    ("GLA5 conv", {"norm_eps": "1e-5"}),
    ("GLA5 conv", {"n_heads": 2.0}),
    ("GDN2 conv", {"canon_set": "B"}),
    ("GDN2 conv", {"canon_set": "bB"}),
    ("Mamba2 conv", {"canon_set": "bB"}),
    ("Mamba2 conv", {"mamba_ssm": 32}),
    ("Mamba2 conv", {"mamba_ssm": 64.0}),
    ("Mamba2 conv", {"mlp_type": "mlp11"}),
    ("Mamba2 conv", {"norm_eps": 1e-6}),
]


def test_unsupported_fields_are_refused_by_name(tmp_path):
    for k, (name, fields) in enumerate(UNSUPPORTED):
        folder = small_folder(tmp_path / str(k), name, **fields)
        (key,) = fields
        check_refused(folder, "hf.unsupported_field", name=f"model.{key}")


def test_unknown_and_missing_fields(tmp_path):
    """`mlp_type` is no field of attention's params.json, nor `n_heads` optional."""
    folder = small_folder(tmp_path / "new", new_option=1)
    check_refused(folder, "hf.unknown_fields", names=["new_option"])
    attention = small_folder(tmp_path / "attention", model_name=None)
    check_refused(attention, "hf.unknown_fields")
    without_heads = small_folder(tmp_path / "heads", n_heads=None)
    check_refused(without_heads, "hf.unsupported_field", name="model.n_heads")

    # the class reads none of these
    unread = {"rope_dim": 8, "qk_norm": True, "n_kv_heads": 1, "multiple_of": 3, "head_dim": 2}
    imported = import_folder(small_folder(tmp_path / "unread", **unread), tmp_path / "out")
    assert imported.args == lingua.to_args(small_models()["GLA5 conv"].params)


def test_tensors_of_another_model(tmp_path):
    """Their names are those of the file."""
    recorded = small_models()["GDN2 Canon"]
    layer = "trans.model.layers.0"
    fused = f"{layer}.mlp.both_proj.weight"
    conv = f"{layer}.attn.k_conv1d.weight"
    decay = f"{layer}.attn.A_log"
    weights = recorded.weights

    def folder(name: str, changed: dict[str, Tensor | None]) -> Path:
        content = {key: tensor for key, tensor in (weights | changed).items() if tensor is not None}
        return write_folder(tmp_path / name, recorded.params, content)

    cases: list[tuple[dict[str, Tensor | None], str, dict[str, Any]]] = [
        ({fused: None}, "hf.missing_tensors", {"names": [fused]}),
        ({decay: None}, "hf.missing_tensors", {"names": [decay]}),
        ({conv: None}, "hf.missing_tensors", {}),
        ({fused: weights[fused][1:]}, "hf.tensor_shape", {"name": fused}),
        ({decay: torch.ones(3)}, "hf.tensor_shape", {"name": decay}),
        ({decay: torch.ones(2, dtype=torch.int32)}, "hf.tensor_dtype", {"name": decay}),
        ({"trans.extra": torch.ones(3)}, "hf.unknown_tensors", {"names": ["trans.extra"]}),
        ({"model.extra": torch.ones(3)}, "hf.unknown_tensors", {"names": ["model.extra"]}),
    ]
    for k, (changed, code, fields) in enumerate(cases):
        check_refused(folder(str(k), changed), code, **fields)


def test_a_tied_head_that_differs(tmp_path):
    recorded = small_models()["GDN2 tied"]
    weights = recorded.weights
    weights["trans.lm_head.weight"] = weights["trans.lm_head.weight"] + 1
    folder = write_folder(tmp_path / "hub", recorded.params, weights)

    check_refused(folder, "hf.tied_weights_differ")


GLA5_ARGS = ModelArgs(
    vocab_size=40,
    num_layers=2,
    dim=16,
    num_heads=2,
    ffn_dim=24,
    max_seq_len=32,
    mixer="gla",
    mixer_conv=True,
    position="nope",
    expand_k=1.0,
    expand_v=2.0,
    output_gate_rank=16,
)
MAMBA2_ARGS = replace(
    GLA5_ARGS, mixer="mamba2", expand_k=0.5, expand_v=1.0, output_gate_rank=0, state_dim=64
)
LLAMA_ARGS = ModelArgs(
    vocab_size=40, num_layers=2, dim=16, num_heads=2, ffn_dim=24, max_seq_len=32, canon_set="ABCD"
)
INEXPRESSIBLE: list[tuple[ModelArgs, dict[str, Any], list[str]]] = [
    (GLA5_ARGS, {"expand_k": 0.5}, ["expand_k"]),
    (GLA5_ARGS, {"expand_v": 1.0, "output_gate_rank": 8}, ["expand_v", "output_gate_rank"]),
    (GLA5_ARGS, {"o_norm_eps": 1e-6}, ["o_norm_eps"]),
    (GLA5_ARGS, {"gla_feature_map": "elu"}, ["gla_feature_map"]),
    (GLA5_ARGS, {"mixer_conv": False}, ["model.canon_set"]),
    (GLA5_ARGS, {"canon_kernel": 3}, ["canon_kernel"]),
    (GLA5_ARGS, {"canon_set": "A", "canon_kernel": 3}, ["model.canon_kernel"]),
    (GLA5_ARGS, {"canon_set": "AO"}, ["model.canon_set"]),
    (GLA5_ARGS, {"canon_set": "A", "canon_filter": "scalar"}, ["canon_filter"]),
    (GLA5_ARGS, {"ffn": "standard"}, ["ffn"]),
    (GLA5_ARGS, {"ffn_activation": "relu2"}, ["ffn_activation"]),
    (GLA5_ARGS, {"norm": "layernorm"}, ["norm"]),
    (GLA5_ARGS, {"norm_place": "output"}, ["norm_place"]),
    (GLA5_ARGS, {"document_mask": True}, ["document_mask"]),
    (GLA5_ARGS, {"smear": True, "embed_norm": True}, ["embed_norm", "smear"]),
    (MAMBA2_ARGS, {"state_dim": 32}, ["model.mamba_ssm"]),
    (MAMBA2_ARGS, {"norm_eps": 1e-6}, ["norm_eps"]),
    (LLAMA_ARGS, {"position": "nope"}, ["position"]),
    (LLAMA_ARGS, {"qk_norm": "per_head"}, ["qk_norm"]),
    (LLAMA_ARGS, {"window": 8}, ["window"]),
    (LLAMA_ARGS, {"canon_set": "AKO"}, ["canon_set"]),
    (LLAMA_ARGS, {"canon_kernel": 3}, ["canon_kernel"]),
    (LLAMA_ARGS, {"canon_residual": False}, ["canon_residual"]),
    (LLAMA_ARGS, {"tie_embeddings": True}, ["tie_embeddings"]),
    (LLAMA_ARGS, {"pattern": ["attention", "gla"]}, ["pattern"]),
    (LLAMA_ARGS, {"mixer": "mixers/x.py:X", "position": "nope", "canon_set": ""}, ["mixer"]),
]


def test_models_that_the_released_classes_lack():
    """The error names the fields; each model without its change is exported."""
    for args in (GLA5_ARGS, MAMBA2_ARGS, LLAMA_ARGS):
        assert lingua.to_args(lingua.to_params(args)) == args

    for args, changes, names in INEXPRESSIBLE:
        with refused("hf.released_layout", names=names):
            lingua.to_params(replace(args, **changes))


def test_a_refused_export_writes_nothing(tmp_path):
    checkpoint = plant_run(tmp_path / "run", build(replace(GLA5_ARGS, expand_v=1.0)))

    with refused("hf.released_layout", names=["expand_v"]):
        export(checkpoint, tmp_path / "out", released=True, with_tokenizer=False)

    assert not (tmp_path / "out").exists()


# -- exports ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"canon_set": "AC", "num_kv_heads": 1, "qk_norm": "full", "norm_eps": 1e-4},
        {"canon_set": "", "position": "partial_rope_c", "partial_rope_dim": 4, "rope_theta": 1e5},
    ],
    ids=str,
)
def test_attention_in_lingua_names(changes, tmp_path):
    """Also with the fields of the released LlamaCanon models."""
    model = build(replace(LLAMA_ARGS, **changes))
    checkpoint = plant_run(tmp_path / "run", model)
    out = tmp_path / "out"

    export(checkpoint, out, released=True, with_tokenizer=False)

    imported = import_folder(out, tmp_path / "again")
    assert imported.args == model.args
    tokens = TOKENS % 40
    with torch.no_grad():
        assert torch.equal(our_logits(imported, tokens), model(tokens))


def test_the_command_writes_a_readme_and_no_code(tmp_path, capsys):
    """The model card of the run, with the class that loads the folder."""
    plant_run(tmp_path / "run", build(GLA5_ARGS))
    out = tmp_path / "out"
    words = [tmp_path / "run", out, "--layout", "released", "--no-tokenizer"]
    parser = argparse.ArgumentParser()
    add_export_arguments(parser)

    run_export(parser.parse_args([*map(str, words)]))

    files = ["README.md", "canon_pretrain.json", *(f"default/{name}" for name in LINGUA_FILES)]
    assert path_names(out) == files
    card = (out / "README.md").read_text()
    assert "GLACanonForCausalLM" in card
    assert "library_name" not in card
    assert str(out) in capsys.readouterr().out
    assert sorted(Upload.of(out, "user/model", None).files) == files


def test_training_options_are_left_out():
    """They do not change what the model computes."""
    options: dict[str, Any] = {"init": "lingua", "init_seed": 3, "eos_id": 5}
    params = lingua.to_params(replace(GLA5_ARGS, **options))

    assert params == lingua.to_params(GLA5_ARGS)


def test_one_layout_replaces_the_other(tmp_path):
    """With --force; files of the user are kept, and stop it if they are in the way."""
    checkpoint = plant_run(tmp_path / "run", build(GLA5_ARGS))
    out = tmp_path / "out"
    options: dict[str, Any] = {"with_tokenizer": False, "force": True}
    first = export(checkpoint, out, with_tokenizer=False)
    (out / "notes.txt").write_text("mine")

    released = export(checkpoint, out, released=True, **options)
    assert path_names(out) == sorted([*released["files"], "notes.txt"])
    import_folder(out, tmp_path / "again")

    # the user's config.json is not that of an export
    (out / "config.json").write_text("mine")
    export(checkpoint, out, released=True, **options)
    assert (out / "config.json").read_text() == "mine"
    with refused("hf.not_an_export", path=out / "config.json"):
        export(checkpoint, out, **options)
    (out / "config.json").unlink()

    again = export(checkpoint, out, **options)
    assert again["files"] == first["files"]
    assert path_names(out) == sorted([*first["files"], "notes.txt"])
    assert not (out / "default").exists()

    # a folder or link of the user's in the way
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (out / "default").symlink_to(elsewhere)
    with refused("hf.not_an_export", path=out / "default"):
        export(checkpoint, out, released=True, **options)
    assert [*elsewhere.iterdir()] == []
    assert (out / "config.json").is_file()


def test_a_replacement_that_is_killed_does_not_load(tmp_path, monkeypatch):
    """It has no params.json until all files are there, and --force repairs it."""
    checkpoint = plant_run(tmp_path / "run", build(GLA5_ARGS))
    out = tmp_path / "out"
    options: dict[str, Any] = {"with_tokenizer": False, "released": True}
    export(checkpoint, out, **options)
    rename = exporting.disk.rename

    def fail_at_weights(source: Path, target: Path) -> None:
        if target.name == "consolidated.pth":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(exporting.disk, "rename", fail_at_weights)
        with pytest.raises(KeyboardInterrupt):
            export(checkpoint, out, **options, force=True)
    assert not (out / "default" / "params.json").exists()

    record = export(checkpoint, out, **options, force=True)
    assert path_names(out) == record["files"]
    assert import_folder(out, tmp_path / "again").args == GLA5_ARGS


# -- the released classes -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def released() -> Iterator[ModuleType]:
    with released_classes(Path(CLONE)) as module:
        yield module


def released_model(released: ModuleType, model: dict[str, Any]) -> Any:
    """Return the released model with initial values of its own, and other gains and biases."""
    torch.manual_seed(1)
    built = released.LMTransformer(released.LMTransformerArgs(**model)).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if not name.endswith("mixer.conv1d.weight") or "b" in model["canon_set"]:
                parameter.add_(torch.randn(parameter.shape) / 8)
    return built


needs_clone = [
    pytest.mark.release,
    pytest.mark.skipif(not CLONE, reason="no clone: make test-release CLONE=PATH"),
]


def small_recipes() -> dict[str, dict[str, Any]]:
    """Return `model` of each recipe, made small, by the name of the first that is so."""
    small: dict[str, dict[str, Any]] = {}
    for name, recorded in recipes().items():
        model = recorded.model | SMALL
        if model["hidden_dim"]:
            model["hidden_dim"] = 24
        if model not in small.values():
            small[name] = model
    return small


SMALL_RECIPES = small_recipes()


class TestReleasedClasses:
    pytestmark = needs_clone

    def test_recipes_are_recorded(self):
        assert read_recipes(Path(CLONE)) == {
            name: {key: recorded.model[key] for key in read_recipes(Path(CLONE))[name]}
            for name, recorded in recipes().items()
        }

    @pytest.mark.parametrize("name", sorted(recipes()))
    def test_tables_are_recorded(self, released, name):
        """Of each recipe in its size."""
        recorded = recipes()[name]
        model = read_recipes(Path(CLONE))[name]
        with torch.device("meta"):
            built = released.LMTransformer(released.LMTransformerArgs(**model))
        shapes = {key: tensor.shape for key, tensor in built.state_dict().items()}
        assert shapes == recorded.shapes

    @pytest.mark.parametrize("name", [*OPTIONS, *SMALL_RECIPES])
    def test_imports_have_equal_logits(self, released, name, tmp_path):
        """Of the options and of every recipe, made small; longer than our recurrences' chunk."""
        recorded = small_models().get(name)
        model = SMALL_RECIPES[name] if recorded is None else recorded.model
        model = model | {"max_seqlen": 128}
        built = released_model(released, model)
        params = {"name": "x", "model": model, "data": {"seq_len": 128}}
        folder = write_folder(tmp_path / "hub", params, built.state_dict())

        imported = import_folder(folder, tmp_path / "out")

        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(40, (2, 100), generator=generator)
        with torch.no_grad():
            expected = built(tokens)
        torch.testing.assert_close(our_logits(imported, tokens), expected, rtol=1e-4, atol=1e-4)

    @every_small_model
    def test_exports_load_in_the_class(self, released, name, tmp_path):
        """By its `from_pretrained`, which is strict, and the names in the README."""
        args = lingua.to_args(small_models()[name].params)
        model = build(args)
        checkpoint = plant_run(tmp_path / "run", model)
        export(checkpoint, tmp_path / "out", released=True, with_tokenizer=False)

        _, module, class_name = lingua.code_of(lingua.to_params(args))
        released_class = getattr(sys.modules[module], class_name)
        opened = released_class.from_pretrained(str(tmp_path / "out")).eval()

        with torch.no_grad():
            logits = opened(TOKENS, use_cache=False).logits
            torch.testing.assert_close(logits, model(TOKENS), rtol=1e-4, atol=1e-5)

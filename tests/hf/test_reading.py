"""Import of Hugging Face folders: equal logits, a [model] section, continued training, refusals."""

import json
import os
import pickle
import shutil
import signal
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM

from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.hf import reading
from canon_pretrain.hf.classes import to_hf, to_ours
from canon_pretrain.hf.config import to_fields
from canon_pretrain.hf.export import export
from canon_pretrain.hf.reading import import_folder, model_toml
from canon_pretrain.run import config as experiment
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import build_dataloader, open_shards
from canon_pretrain.titan.job_config import CanonJobConfig
from tests import hf_exports, llama_canon
from tests.checkpoint_folders import Plant, flip_byte, run_forked
from tests.hf_exports import BASE, TOKENS, check, check_refused, our_logits, small_folder
from tests.hf_exports import quick as quick
from tests.llama_canon import NO_POSITIONS, random_state, write_folder, write_lingua_folder
from tests.ranks import differences, events, launch, whole_state
from tests.support import debug_run, refused
from tests.variants import VARIANTS, build, every_variant, random_tokens


@dataclass
class Recipe:
    """A kind of released model: params.json's model section, and the same fields of config.json."""

    params: dict[str, Any]
    fields: dict[str, Any]


# of lingua_recipes/
RECIPES = {
    "1B and 3B": Recipe(
        {"qk_norm": True, "rope_dim": 8, "norm_eps": 1e-4},
        {"rms_norm_eps": 1e-4},
    ),
    "8B": Recipe(
        {"n_kv_heads": 2, "rope_theta": 100000, "rope_dim": 8, "hidden_dim": 40},
        {"num_key_value_heads": 2, "rope_theta": 1e5},
    ),
    "Llama": Recipe({"canon_set": ""}, {}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_released_models_of_the_hub(name, tmp_path):
    """params.json and consolidated.pth, by the folder or its subfolder."""
    params = RECIPES[name].params
    config = BASE | {
        "canon_set": "ABCD",
        "rope_version": "lingua",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    config |= params | RECIPES[name].fields
    if "hidden_dim" not in params:  # null: 8D/3, rounded up to a multiple of 256
        config["intermediate_size"] = 512
    state = random_state(config, dtype=torch.bfloat16)
    folder = write_lingua_folder(tmp_path / "hub", params, config, state)
    expected = llama_canon.logits(config, state, TOKENS)

    for k, source in enumerate((folder, folder / "default")):
        imported = import_folder(source, tmp_path / f"out-{k}")
        assert (our_logits(imported) - expected).abs().max() < 1e-4
        assert imported.args.max_seq_len == 32

    newer = write_lingua_folder(tmp_path / "new", params | {"new_option": 1}, config, state)
    check_refused(newer, "hf.unknown_fields", names=["new_option"])


def test_a_damaged_released_folder(tmp_path):
    """Also a pickle with other objects than tensors, which are not created."""
    config = BASE | {"canon_set": "AC", "rope_version": "lingua", "intermediate_size": 512}
    state = random_state(config)
    folder = write_lingua_folder(tmp_path / "hub", {}, config, state)
    weights = folder / "default" / "consolidated.pth"
    params = folder / "default" / "params.json"
    model = torch.load(weights, weights_only=True)["model"]
    original = weights.read_bytes()

    # other tensors
    without_canon_c = {name: tensor for name, tensor in model.items() if "canonC" not in name}
    expanded = {name: torch.ones(1).expand(tensor.shape) for name, tensor in model.items()}
    for code, content in (
        ("hf.unknown_tensors", model | {"layers.0.canonA.bias": torch.ones(128)}),
        ("hf.missing_tensors", without_canon_c),
        ("hf.unreadable_weights", expanded),
        ("hf.unreadable_weights", {"x": Path}),
    ):
        torch.save({"model": content}, weights)
        check_refused(folder, code)

    # half of the weights
    weights.write_bytes(original[: len(original) // 2])
    check_refused(folder, "hf.unreadable_weights", path=weights)
    weights.write_bytes(original)

    # params.json with other types, or outside of the folder
    params.write_text('{"model": 3, "data": {}}')
    check_refused(folder, "hf.unsupported_field")
    params.unlink()
    params.symlink_to(tmp_path / "elsewhere")
    check_refused(folder, "hf.outside_link", path=params)


@pytest.mark.parametrize("position", hf_exports.POSITIONS, ids=str)
@pytest.mark.parametrize("version", ["lingua", "huggingface"])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_model_in_both_rotary_layouts(version, position, data, tmp_path_factory):
    """With fields of config.json in any combination; those with a default may be left out."""
    draw = data.draw
    choices = {
        "num_key_value_heads": [None, 1, 2],
        "num_hidden_layers": [1, 11],  # "10" sorts before "2"
        "rms_norm_eps": [1e-6, 1e-2],
        "tie_word_embeddings": [False, True],
        "qk_norm": [True, False],
        "canon_set": ["ABCD", "", "A", "B", "CD", "AC", "BD"],
        "canon_kernel": [2, 3, 4, 5],
        "rope_theta": [100.0, 10000.0],
        "canon_activation": [False, True],
        "canon_residual": [True, False],
    }

    config = BASE | position | {"rope_version": version}
    config |= {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    for name in draw(st.sets(st.sampled_from(sorted(llama_canon.DEFAULTS)))):
        if name in config and config[name] == llama_canon.DEFAULTS[name]:
            del config[name]

    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    state = random_state(config, seed=draw(st.integers(0, 99)), dtype=draw(dtypes))
    folder = tmp_path_factory.mktemp("any")
    check(folder, config, state, num_files=draw(st.sampled_from([1, 3])))
    shutil.rmtree(folder)


@every_variant
def test_an_import_of_any_variant(args, tmp_path):
    model = build(args)
    weights = dict(model.state_dict())
    state = {to_hf(name): weight for name, weight in weights.items()}
    folder = write_folder(tmp_path / "hf", to_fields(args), state)

    imported = import_folder(folder, tmp_path / "out")

    assert imported.args == args
    assert differences(whole_state(imported.checkpoint), weights) == []
    tokens = random_tokens(args, 2, 20)
    with torch.no_grad():
        assert torch.equal(our_logits(imported, tokens), model(tokens))


# fields of Mamba-2 with a value that changes the model
NOT_OURS = {
    "n_groups": 2,
    "use_bias": True,
    "use_conv_bias": False,
    "hidden_act": "gelu",
    "expand": 3,
    "rms_norm": False,
    "norm_before_gate": True,
    "head_dim": 4,
    "state_size": 0,
    "conv_kernel": 1.5,
    "time_step_limit": [0.0, 0.1],
    "layer_norm_epsilon": "1e-5",
    "canon_pretrain": {"mixer": "gla"},
}


def save_mamba2(folder, tied):
    """Write a Mamba-2 of transformers, with fields that change nothing; return the model."""
    config = Mamba2Config(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=8,
        state_size=6,
        conv_kernel=3,
        n_groups=1,
        chunk_size=8,
        tie_word_embeddings=tied,
    )
    model = Mamba2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_mamba2_of_transformers(tied, tmp_path):
    model = save_mamba2(tmp_path / "hf", tied)

    imported = import_folder(tmp_path / "hf", tmp_path / "out")

    weights = whole_state(imported.checkpoint)
    theirs = {to_ours(name): tensor for name, tensor in model.state_dict().items()}
    assert differences(weights, {name: theirs[name] for name in weights}) == []
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(our_logits(imported), expected, rtol=1e-4, atol=1e-6)


def test_other_fields_of_mamba2_are_refused_by_name(tmp_path):
    folder = tmp_path / "hf"
    save_mamba2(folder, tied=False)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())

    for name, value in NOT_OURS.items():
        config_path.write_text(json.dumps(config | {name: value}))
        field = "canon_pretrain.mixer" if name == "canon_pretrain" else name
        check_refused(folder, "hf.unsupported_field", name=field)

    config_path.write_text(json.dumps(config | {"new_option": 1}))
    check_refused(folder, "hf.unknown_fields", names=["new_option"])


def test_tied_embeddings_with_a_stored_head(tmp_path):
    """In either order: names are read sorted per file, and files in the order of the index."""
    config = BASE | {"tie_word_embeddings": True, "rope_version": "lingua"}
    state = random_state(config)
    head = {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    for num_files in (1, 3):
        check(tmp_path / f"both{num_files}", config, state | head, num_files=num_files)

    # the head alone
    without_embedding = {name: tensor for name, tensor in state.items() if "embed" not in name}
    folder = write_folder(tmp_path / "head", config, without_embedding | head)
    imported = import_folder(folder, tmp_path / "out")
    expected = llama_canon.logits(config, state, TOKENS)
    assert (our_logits(imported) - expected).abs().max() < 1e-4

    # a head with other weights
    head["lm_head.weight"][3, 5] += 1
    for num_files in (1, 3):
        folder = write_folder(
            tmp_path / f"other{num_files}", config, state | head, num_files=num_files
        )
        check_refused(folder, "hf.tied_weights_differ")


OTHER_VARIANT = """
[data]
path = "{data}"

[model]
position = "nope"
canon_set = "BD"
canon_kernel = 2
qk_norm = "full"
dim = 8
tie_embeddings = true
ffn_dim = 7

[training]
global_batch_size = 8
"""


@every_variant
def test_the_toml_selects_the_model(args, tmp_path):
    """Even if it extends a file with another variant."""
    (tmp_path / "model.toml").write_text(model_toml(args, 'a "name"\n\x01 [model]\n\u2028'))
    (tmp_path / "base.toml").write_text(OTHER_VARIANT.format(data=tmp_path))
    path = tmp_path / "run.toml"
    path.write_text('extends = ["base.toml", "model.toml"]\n')

    values = experiment.read_experiment(path)

    selected = experiment.build(CanonJobConfig, values, source=str(path)).model_args

    # a section of a layer may say what is so without it
    assert selected.layer_args == args.layer_args
    assert args.pattern or selected == args
    if list(VARIANTS.values()).index(args) % 8 == 0:  # the rest of the way is slow
        assert parse_job(["--config", str(path)], quiet=True).model_args == selected


MODEL = (
    *("--model.position", "rope", "--model.qk_norm", "full", "--model.num_kv_heads", 2),
    *("--training.steps", 6, "--checkpoint.interval", 3, "--checkpoint.async_mode", "disabled"),
    *("--validation.enable", False),
)
FIELDS = ("step", "loss", "max_loss", "grad_norm", "lr", "tokens", "data_digests")


@pytest.fixture(scope="module")
def straight(data_folder, tmp_path_factory):
    """A run of six steps with checkpoints at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("straight")
    launch(*debug_run(data_folder, folder / "run"), *MODEL, output=folder, ranks=1)
    return folder / "run"


def steps_of(run):
    """Return the logged numbers of each step."""
    return [[event[name] for name in FIELDS] for event in events(run, "step")]


@pytest.mark.system
def test_an_import_continues_the_run_bitwise(straight, data_folder, tmp_path):
    """With the weights of the folder and all other state of the checkpoint."""
    step_3 = straight / "checkpoint" / "step-3"
    export(step_3, tmp_path / "hf", with_tokenizer=False)

    imported = import_folder(tmp_path / "hf", tmp_path / "imported", state_from=step_3)
    assert imported.checkpoint.name == "step-3"
    assert Manifest.read(imported.checkpoint).kind == "full"
    assert differences(whole_state(step_3), whole_state(imported.checkpoint)) == []

    run = tmp_path / "run"
    launch(
        *debug_run(data_folder, run),
        *MODEL,
        *("--checkpoint.initial_load_path", imported.checkpoint),
        "--checkpoint.no_initial_load_model_only",
        output=tmp_path,
        ranks=1,
    )
    assert steps_of(run) == steps_of(straight)[3:]
    straight_end = whole_state(straight / "checkpoint" / "step-6")
    assert any(name.startswith("optimizer.") for name in straight_end)
    assert differences(straight_end, whole_state(run / "checkpoint" / "step-6")) == []

    (load,) = events(run, "initial_load")
    assert load["checkpoint"] == str(imported.checkpoint)
    assert load["model_only"] is False
    assert load["checkpoint_step"] == 3
    assert events(run, "resume")[0]["from_step"] == 3


@pytest.mark.system
def test_imported_weights_train_from_step_1(straight, data_folder, tmp_path):
    export(straight / "checkpoint" / "step-6", tmp_path / "hf", with_tokenizer=False)
    imported = import_folder(tmp_path / "hf", tmp_path / "imported")
    run = tmp_path / "run"
    command = [
        *debug_run(data_folder, run),
        *MODEL,
        *("--checkpoint.initial_load_path", imported.checkpoint),
        *("--run.stop_at", 1),
    ]

    launch(*command, output=tmp_path, ranks=1)

    # the loss of the first batch
    job = parse_job(list(map(str, command)), quiet=True)
    job.training.local_batch_size = job.training.global_batch_size
    inputs, labels = next(iter(build_dataloader(1, 0, None, job, data=open_shards(job))))
    logits = our_logits(imported, inputs["input"])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (first,) = events(run, "step")
    assert first["loss"] == pytest.approx(expected.item(), rel=1e-6)

    # the same data and learning rate as from scratch, but not the initial weights
    from_scratch = events(straight, "step")[0]
    assert first["step"] == 1
    assert first["lr"] == from_scratch["lr"]
    assert first["data_digests"] == from_scratch["data_digests"]
    assert first["loss"] < from_scratch["loss"] - 0.1
    (load,) = events(run, "initial_load")
    assert load["model_only"] is True
    assert load["checkpoint_step"] == 0


@pytest.mark.system
def test_a_state_of_another_model_is_refused(straight, tmp_path):
    folder = tmp_path / "hf"
    step_3 = straight / "checkpoint" / "step-3"
    export(step_3, folder, with_tokenizer=False)
    weights = import_folder(folder, tmp_path / "weights", step=3)
    torn = tmp_path / "torn" / "step-3"
    shutil.copytree(step_3, torn)
    flip_byte(next(torn.glob("*.distcp")))
    other_model = small_folder(tmp_path / "other")

    for source, state_from, code in (
        (folder, weights.checkpoint, "checkpoint.weights_only"),
        (other_model, step_3, "checkpoint.other_model"),
        (folder, straight / "checkpoint" / "step-2", "checkpoint.missing"),
        (folder, torn, "checkpoint.damaged"),
    ):
        check_refused(source, code, options={"state_from": state_from})


SMOLLM3: dict[str, Any] = {"model_type": "smollm3", "tie_word_embeddings": False}
UNSUPPORTED: list[dict[str, Any]] = [
    {"attention_bias": True},
    {"mlp_bias": True},
    {"attention_dropout": 0.1},
    {"sliding_window": 8},
    {"hidden_act": "gelu"},
    {"head_dim": 64},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_dim": 7},
    {"rope_dim": 48},
    {"rope_dim": 0},
    {"partial_rotary_factor": 0.25},
    {"rope_version": "other"},
    {"qk_norm": "per_head"},
    {"canon_set": "AE"},
    {"canon_kernel": 17, "canon_set": "A"},
    {"layer_types": ["sliding_attention"]}, {"rms_norm_eps": 10**400},
    {"canon_pretrain": {"position": 3}}, {"canon_pretrain": {"dropout": 0.1}},
    {"no_rope_layers": [0, 2], **SMOLLM3}, {"no_rope_layers": 3, **SMOLLM3},
    {"no_rope_layers": [0, 0], **SMOLLM3}, {"layer_types": 3},
    {"layer_types": ["full_attention"] * 3, "model_type": "mistral"},
    {"layer_types": ["full_attention"], "model_type": "mistral"},
    {"sliding_window": 1.5, "model_type": "mistral"},
    {"max_window_layers": "1", "sliding_window": 4, "model_type": "qwen3", "head_dim": 32},
    {"canon_pretrain": {"pattern": [3]}}, {"canon_pretrain": {"pattern": "gla"}},
    {"canon_pretrain": {"layers": {"a": 3}}}, {"canon_pretrain": {"layers": {"a": {"dim": 3}}}},
    {"canon_pretrain": {"layers": {"a": {"window": "3"}}}},
]  # fmt: skip
UNKNOWN = [{"quantization_config": {"quant_method": "gptq"}}, {"embedding_multiplier": 12.0}]


def test_unsupported_fields(tmp_path):
    for k, fields in enumerate(UNSUPPORTED):
        check_refused(small_folder(tmp_path / str(k), **fields), "hf.unsupported_field")


def test_unknown_fields(tmp_path):
    for k, fields in enumerate(UNKNOWN):
        folder = small_folder(tmp_path / f"unknown-{k}", **fields)
        check_refused(folder, "hf.unknown_fields", names=[*fields])


def test_fields_that_are_ignored(tmp_path):
    folder = small_folder(tmp_path, embedding_multiplier=1.0, model_type="granite")
    check_refused(folder, "hf.model_type", given="granite")
    for model_type in (["llama"], {}, 1):
        wrong = small_folder(tmp_path / str(model_type), model_type=model_type)
        check_refused(wrong, "hf.model_type", given=repr(model_type))
    check_refused(folder, "hf.unknown_fields", options={"ignore": ["model_type"]})

    names = ["model_type", "embedding_multiplier"]
    imported = import_folder(folder, tmp_path / "out", ignore=names)

    assert imported.checkpoint.is_dir()


def test_two_names_of_the_rotation(tmp_path):
    """Transformers 5 writes rope_parameters, 4 rope_scaling: they may contradict each other."""
    rope = {"rope_type": "default", "rope_theta": 100.0}
    nope = NO_POSITIONS
    contradicting = small_folder(tmp_path / "two", rope_scaling=nope, rope_parameters=rope)
    check_refused(contradicting, "hf.unsupported_field", name="rope_parameters")

    with_theta = nope | {"rope_theta": 100.0}
    folder = small_folder(tmp_path / "both", rope_scaling=nope, rope_parameters=with_theta)
    assert import_folder(folder, tmp_path / "nope").args.position == "nope"


def test_a_claim_of_ten_million_layers(tmp_path):
    """Refused before a model or a table of positions is created."""
    import_folder(small_folder(tmp_path / "good"), tmp_path / "good" / "out")  # lazy imports
    tracemalloc.start()

    for claim, size in (("num_hidden_layers", 10**7), ("vocab_size", 10**12)):
        check_refused(small_folder(tmp_path / claim, **{claim: size}), "hf.missing_tensors")
    # contradicted by no weight, and nothing of that size is created
    import_folder(small_folder(tmp_path, max_position_embeddings=10**12), tmp_path / "out")

    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20e6


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_links_out_of_the_folder_are_refused(tmp_path, name):
    secret = tmp_path / "id_rsa"
    secret.write_text("{}")
    folder = small_folder(tmp_path / "hub")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)

    check_refused(folder, "hf.outside_link", path=folder / name)


def test_a_shard_that_is_a_link_is_refused(tmp_path):
    folder = write_folder(tmp_path / "several", BASE, random_state(BASE), num_files=2)
    (shard,) = folder.glob("*00001-of*")
    shutil.move(shard, tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")

    check_refused(folder, "hf.outside_link", path=shard)


def test_pipes_are_no_weights(tmp_path):
    folder = small_folder(tmp_path)
    os.mkfifo(folder / "tokenizer.model")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")

    check_refused(folder, "hf.no_weights")


def test_links_of_the_hubs_cache_are_read(tmp_path):
    """A snapshot consists of links to blobs."""
    cache = tmp_path / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    snapshot = small_folder(tmp_path).rename(cache / "snapshots" / "0123abcd")
    for path in list(snapshot.iterdir()):
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(Path("..", "..", "blobs", path.name))

    assert import_folder(snapshot, tmp_path / "out").checkpoint.is_dir()


def test_tensors_of_another_model(tmp_path):
    config = BASE | {"num_hidden_layers": 1}
    good = random_state(config)
    q = "model.layers.0.self_attn.q_proj.weight"
    canon_a = "model.layers.0.canonA.weight"
    without_q = {name: tensor for name, tensor in good.items() if name != q}
    with_score = good | {"score.weight": torch.ones(2, 128)}
    narrow_q = good | {q: torch.ones(128, 9)}
    int_q = good | {q: torch.ones(128, 128, dtype=torch.int8)}

    cases: list[tuple[dict[str, Tensor], dict[str, Any], str, dict[str, Any]]] = [
        (without_q, {}, "hf.missing_tensors", {"names": [q]}),
        (with_score, {}, "hf.unknown_tensors", {"names": ["score.weight"]}),
        (good, {"canon_set": "A"}, "hf.missing_tensors", {"names": [canon_a]}),
        (good, {"num_hidden_layers": 2}, "hf.missing_tensors", {}),
        (narrow_q, {}, "hf.tensor_shape", {"name": q, "given": (128, 9)}),
        (int_q, {}, "hf.tensor_dtype", {"name": q}),
    ]
    for k, (state, fields, code, error_fields) in enumerate(cases):
        folder = write_folder(tmp_path / str(k), config | fields, state)
        check_refused(folder, code, **error_fields)


def test_a_table_of_old_llama_checkpoints_is_ignored(tmp_path):
    """It follows from the config."""
    config = BASE | {"num_hidden_layers": 1}
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}

    check(tmp_path / "table", config, random_state(config) | table)


def test_damaged_weights(tmp_path):
    check_refused(tmp_path / "absent", "file.unreadable")

    folder = small_folder(tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        check_refused(folder, "hf.unreadable_weights", path=weights)

    weights.unlink()
    check_refused(folder, "hf.no_weights", path=folder)


def test_a_damaged_index(tmp_path):
    config = BASE | {"num_hidden_layers": 1}
    state = random_state(config)
    folder = write_folder(tmp_path / "several", config, state, num_files=3)
    index = folder / "model.safetensors.index.json"
    record = index.read_text()
    places = json.loads(record)["weight_map"]
    name = next(iter(places))
    other_file = next(file for file in places.values() if file != places[name])
    outside = tmp_path / "outside.safetensors"
    save_file({name: state[name]}, outside)

    wrong_places = [f"../{outside.name}", str(outside), 3, other_file]
    weight_maps = [places | {name: wrong} for wrong in wrong_places]
    for weight_map in (*weight_maps, {}, 3):
        index.write_text(json.dumps({"weight_map": weight_map}))
        check_refused(folder, "hf.damaged_index")

    index.write_text("{")
    check_refused(folder, "file.unreadable", path=index)

    index.write_text(record)
    (folder / other_file).unlink()
    check_refused(folder, "hf.unreadable_weights", path=folder / other_file)


def test_nothing_of_the_folder_is_run(tmp_path):
    marker = tmp_path / "it-ran"
    auto_map = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    folder = small_folder(tmp_path, auto_map=auto_map)
    for name in ("modeling_x.py", "__init__.py", "torch.py"):
        (folder / name).write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    for name in ("pytorch_model.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Plant(os.mkdir, str(marker))))

    import_folder(folder, tmp_path / "out")
    (folder / "model.safetensors").unlink()
    check_refused(folder, "hf.pickled_weights")
    shutil.copy(folder / "pytorch_model.bin", folder / "model.safetensors")
    check_refused(folder, "hf.unreadable_weights")
    assert not marker.exists()

    # it would have been run
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    folder = small_folder(tmp_path)
    monkeypatch.setattr(reading, "write_atomic", mock.Mock(side_effect=OSError(28, "full")))

    with pytest.raises(OSError, match="full"):
        import_folder(folder, tmp_path / "out")

    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_import_after_a_kill_removes_its_files(tmp_path, monkeypatch):
    folder = small_folder(tmp_path)
    out = tmp_path / "out"
    left = tmp_path / ".out.importing"
    with monkeypatch.context() as patch:
        patch.setattr(reading, "write_atomic", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert run_forked(lambda: import_folder(folder, out)) == -signal.SIGKILL
    assert not out.exists()
    assert (left / "step-0").is_dir()

    imported = import_folder(folder, out, step=7)

    assert imported.checkpoint == out / "step-7"
    assert Manifest.read(imported.checkpoint).step == 7
    assert not left.exists()


def test_one_tokenizer_is_copied(tmp_path):
    """Llama-2's folder has both; data/tokenizer.py rejects both."""
    folder = small_folder(tmp_path)
    out = tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer.model"):
        (folder / name).write_text("{}")

    import_folder(folder, out)
    assert (out / "tokenizer.model").read_text() == "{}"
    assert not (out / "tokenizer.json").exists()

    (folder / "tokenizer.model").unlink()
    import_folder(folder, tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep" / "tokenizer.json").is_file()


def test_a_taken_folder_and_a_negative_step_are_refused(tmp_path):
    folder = small_folder(tmp_path)
    taken = tmp_path / "taken"
    taken.symlink_to(tmp_path / "nowhere")

    with refused("hf.out_exists", path=taken):
        import_folder(folder, taken)
    with refused("hf.negative_step", given=-1):
        import_folder(folder, tmp_path / "new", step=-1)

"""Import of Hugging Face folders: equal logits, a [model] section, continued training, refusals."""

import json
import os
import pickle
import shutil
import signal
import tracemalloc
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
from canon_pretrain.hf.config import to_fields, to_hf, to_ours
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

# of lingua_recipes/: params.json's model section, and the same fields of config.json
SMALL = {"qk_norm": True, "rope_dim": 8, "norm_eps": 1e-4}, {"rms_norm_eps": 1e-4}
LARGE = {"n_kv_heads": 2, "rope_theta": 100000, "rope_dim": 8, "hidden_dim": 40}
OF_LARGE = {"num_key_value_heads": 2, "rope_theta": 1e5}
RECIPES = {"1B and 3B": SMALL, "8B": (LARGE, OF_LARGE), "Llama": ({"canon_set": ""}, {})}


@pytest.mark.parametrize(("params", "fields"), RECIPES.values(), ids=RECIPES)
def test_released_models_of_the_hub(params, fields, tmp_path):
    """params.json and consolidated.pth, by the folder or its subfolder."""
    config = BASE | {"canon_set": "ABCD", "rope_version": "lingua", "rms_norm_eps": 1e-5}
    config |= {"rope_theta": 10000.0} | params | fields
    if "hidden_dim" not in params:  # null: 8D/3, rounded up to a multiple of 256
        config["intermediate_size"] = 512
    state = random_state(config, dtype=torch.bfloat16)
    folder = write_lingua_folder(tmp_path / "hub", params, config, state)
    expected = llama_canon.logits(config, state, TOKENS)
    for k, source in enumerate((folder, folder / "default")):
        found = import_folder(source, tmp_path / f"out-{k}")
        assert (our_logits(found) - expected).abs().max() < 1e-4
        assert found.args.max_seq_len == 32
    new = write_lingua_folder(tmp_path / "new", params | {"new_option": 1}, config, state)
    check_refused(new, "hf.unknown_fields", names=["new_option"])


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
    draw = data.draw
    sampled = {
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
    config |= {name: draw(st.sampled_from(values)) for name, values in sampled.items()}
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
    state = {to_hf(name): tensor for name, tensor in model.state_dict().items()}
    found = import_folder(write_folder(tmp_path / "hf", to_fields(args), state), tmp_path / "out")
    assert found.args == args
    assert differences(whole_state(found.checkpoint), dict(model.state_dict())) == []
    tokens = random_tokens(args, 2, 20)
    with torch.no_grad():
        assert torch.equal(our_logits(found, tokens), model(tokens))


NOT_OURS = {
    "n_groups": 2, "use_bias": True, "use_conv_bias": False, "hidden_act": "gelu", "expand": 3,
    "rms_norm": False, "norm_before_gate": True, "head_dim": 4, "state_size": 0, "conv_kernel": 1.5,
    "time_step_limit": [0.0, 0.1], "layer_norm_epsilon": "1e-5", "canon_pretrain": {"mixer": "gla"},
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_mamba2_of_transformers(tied, tmp_path):
    """Also with the fields that change nothing; the others are refused by name."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4}
    sizes |= {"head_dim": 8, "state_size": 6, "conv_kernel": 3, "n_groups": 1, "chunk_size": 8}
    model = Mamba2ForCausalLM(Mamba2Config(**sizes, tie_word_embeddings=tied)).eval()
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    found = import_folder(folder, tmp_path / "out")
    weights = whole_state(found.checkpoint)
    theirs = {to_ours(name): tensor for name, tensor in model.state_dict().items()}
    assert differences(weights, {name: theirs[name] for name in weights}) == []
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(our_logits(found), expected, rtol=1e-4, atol=1e-6)
    record = (folder / "config.json").read_text()
    for name, value in ({} if tied else NOT_OURS).items():
        (folder / "config.json").write_text(json.dumps(json.loads(record) | {name: value}))
        field = "canon_pretrain.mixer" if name == "canon_pretrain" else name
        check_refused(folder, "hf.unsupported_field", name=field)
    (folder / "config.json").write_text(json.dumps(json.loads(record) | {"new_option": 1}))
    check_refused(folder, "hf.unknown_fields", names=["new_option"])


def test_tied_embeddings_with_a_stored_head(tmp_path):
    """In either order: names are read sorted per file, and files in the order of the index."""
    config = BASE | {"tie_word_embeddings": True, "rope_version": "lingua"}
    state = random_state(config)
    head = {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    for num_files in (1, 3):
        check(tmp_path / f"both{num_files}", config, state | head, num_files=num_files)
    alone = {name: t for name, t in state.items() if "embed" not in name} | head
    found = import_folder(write_folder(tmp_path / "head", config, alone), tmp_path / "out")
    expected = llama_canon.logits(config, state, TOKENS)
    assert (our_logits(found) - expected).abs().max() < 1e-4
    head["lm_head.weight"][3, 5] += 1
    for k in (1, 3):
        folder = write_folder(tmp_path / f"other{k}", config, state | head, num_files=k)
        check_refused(folder, "hf.tied_weights_differ")


@every_variant
def test_the_toml_selects_the_model(args, tmp_path):
    """Even if it extends a file with another variant."""
    (tmp_path / "model.toml").write_text(model_toml(args, 'a "name"\n\x01 [model]\n\u2028'))
    other = 'position = "nope"\ncanon_set = "BD"\ncanon_kernel = 2\nqk_norm = "full"\ndim = 8\n'
    base = f'[data]\npath = "{tmp_path}"\n[model]\n{other}tie_embeddings = true\nffn_dim = 7\n'
    (tmp_path / "base.toml").write_text(f"{base}[training]\nglobal_batch_size = 8\n")
    path = tmp_path / "run.toml"
    path.write_text('extends = ["base.toml", "model.toml"]\n')
    values = experiment.read_experiment(path)
    selected = experiment.build(CanonJobConfig, values, source=str(path)).model_args
    # a section of a layer may say what is so without it
    assert selected.layer_args == args.layer_args and (args.pattern or selected == args)
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
    folder = tmp_path_factory.mktemp("straight")
    launch(*debug_run(data_folder, folder / "run"), *MODEL, output=folder, ranks=1)
    return folder / "run"


def steps_of(run):
    return [[event[name] for name in FIELDS] for event in events(run, "step")]


@pytest.mark.system
def test_an_import_continues_the_run_bitwise(straight, data_folder, tmp_path):
    """With the weights of the folder and all other state of the checkpoint."""
    step_3 = straight / "checkpoint" / "step-3"
    export(step_3, tmp_path / "hf", with_tokenizer=False)
    found = import_folder(tmp_path / "hf", tmp_path / "imported", state_from=step_3)
    assert found.checkpoint.name == "step-3" and Manifest.read(found.checkpoint).kind == "full"
    assert differences(whole_state(step_3), whole_state(found.checkpoint)) == []

    run = tmp_path / "run"
    origin = ("--checkpoint.initial_load_path", found.checkpoint)
    words = (*MODEL, *origin, "--checkpoint.no_initial_load_model_only")
    launch(*debug_run(data_folder, run), *words, output=tmp_path, ranks=1)
    assert steps_of(run) == steps_of(straight)[3:]
    ends = [whole_state(folder / "checkpoint" / "step-6") for folder in (straight, run)]
    assert any(name.startswith("optimizer.") for name in ends[0])
    assert differences(*ends) == []
    (load,) = events(run, "initial_load")
    assert load["checkpoint"] == str(found.checkpoint) and load["model_only"] is False
    assert (load["checkpoint_step"], events(run, "resume")[0]["from_step"]) == (3, 3)


@pytest.mark.system
def test_imported_weights_train_from_step_1(straight, data_folder, tmp_path):
    export(straight / "checkpoint" / "step-6", tmp_path / "hf", with_tokenizer=False)
    found = import_folder(tmp_path / "hf", tmp_path / "imported")
    run = tmp_path / "run"
    words = (*MODEL, "--checkpoint.initial_load_path", found.checkpoint, "--run.stop_at", 1)
    command = (*debug_run(data_folder, run), *words)
    launch(*command, output=tmp_path, ranks=1)
    job = parse_job(list(map(str, command)), quiet=True)
    job.training.local_batch_size = job.training.global_batch_size
    inputs, labels = next(iter(build_dataloader(1, 0, None, job, data=open_shards(job))))
    logits = our_logits(found, inputs["input"])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (first,) = events(run, "step")
    assert first["step"] == 1 and first["lr"] == steps_of(straight)[0][FIELDS.index("lr")]
    assert first["data_digests"] == events(straight, "step")[0]["data_digests"]
    assert first["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert first["loss"] < events(straight, "step")[0]["loss"] - 0.1  # not the initial weights
    (load,) = events(run, "initial_load")
    assert load["model_only"] is True and load["checkpoint_step"] == 0


@pytest.mark.system
def test_a_state_of_another_model_is_refused(straight, tmp_path):
    step_3 = straight / "checkpoint" / "step-3"
    export(step_3, tmp_path / "hf", with_tokenizer=False)
    weights = import_folder(tmp_path / "hf", tmp_path / "weights", step=3)
    torn = tmp_path / "torn" / "step-3"
    shutil.copytree(step_3, torn)
    flip_byte(next(torn.glob("*.distcp")))
    for folder, state_from, code in (
        (tmp_path / "hf", weights.checkpoint, "checkpoint.weights_only"),
        (hf_exports.small_folder(tmp_path / "other"), step_3, "checkpoint.other_model"),
        (tmp_path / "hf", straight / "checkpoint" / "step-2", "checkpoint.missing"),
        (tmp_path / "hf", torn, "checkpoint.damaged"),
    ):
        check_refused(folder, code, options={"state_from": state_from})


SMOLLM3: dict[str, Any] = {"model_type": "smollm3", "tie_word_embeddings": False}
UNSUPPORTED: list[dict[str, Any]] = [
    {"attention_bias": True}, {"mlp_bias": True}, {"attention_dropout": 0.1},
    {"sliding_window": 8}, {"hidden_act": "gelu"}, {"head_dim": 64},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_dim": 7}, {"rope_dim": 48}, {"rope_dim": 0}, {"partial_rotary_factor": 0.25},
    {"rope_version": "other"}, {"qk_norm": "per_head"}, {"canon_set": "AE"},
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


def test_unsupported_and_unknown_fields(tmp_path):
    for k, fields in enumerate(UNSUPPORTED):
        check_refused(small_folder(tmp_path / str(k), **fields), "hf.unsupported_field")
    for k, fields in enumerate(UNKNOWN):
        folder = small_folder(tmp_path / f"unknown-{k}", **fields)
        check_refused(folder, "hf.unknown_fields", names=[*fields])
    folder = small_folder(tmp_path, embedding_multiplier=1.0, model_type="granite")
    check_refused(folder, "hf.model_type", given="granite")
    check_refused(folder, "hf.unknown_fields", options={"ignore": ["model_type"]})
    names = ["model_type", "embedding_multiplier"]
    assert import_folder(folder, tmp_path / "out", ignore=names).checkpoint.is_dir()
    # transformers 5 writes rope_parameters, 4 rope_scaling: they may contradict each other
    rope, nope = {"rope_type": "default", "rope_theta": 100.0}, NO_POSITIONS
    both = small_folder(tmp_path / "two", rope_scaling=nope, rope_parameters=rope)
    check_refused(both, "hf.unsupported_field", name="rope_parameters")
    own = {"rope_scaling": nope, "rope_parameters": nope | {"rope_theta": 100.0}}
    found = import_folder(small_folder(tmp_path / "both", **own), tmp_path / "nope")
    assert found.args.position == "nope"


def test_a_claim_of_ten_million_layers(tmp_path):
    """Refused before a model or a table of positions is created."""
    import_folder(small_folder(tmp_path / "good"), tmp_path / "good" / "out")  # lazy imports
    tracemalloc.start()
    for claim, size in (("num_hidden_layers", 10**7), ("vocab_size", 10**12)):
        check_refused(small_folder(tmp_path / claim, **{claim: size}), "hf.missing_tensors")
    # contradicted by no weight, and nothing of that size is created
    import_folder(small_folder(tmp_path, max_position_embeddings=10**12), tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_links_out_of_the_folder_and_of_the_hubs_cache(tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("{}")
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        folder = small_folder(tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        check_refused(folder, "hf.outside_link", path=folder / name)
    folder = small_folder(tmp_path / "pipes")
    os.mkfifo(folder / "tokenizer.model")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    check_refused(folder, "hf.no_weights")
    several = write_folder(tmp_path / "several", BASE, random_state(BASE), num_files=2)
    (shard,) = several.glob("*00001-of*")
    shutil.move(shard, tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")
    check_refused(several, "hf.outside_link", path=shard)
    cache = tmp_path / "models--a--b"  # a snapshot consists of links to blobs
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
    missing, extra = "hf.missing_tensors", torch.ones(2, 128)
    cases: list[tuple[dict[str, Tensor], dict[str, Any], str, dict[str, Any]]] = [
        ({n: t for n, t in good.items() if n != q}, {}, missing, {"names": [q]}),
        (good | {"score.weight": extra}, {}, "hf.unknown_tensors", {"names": ["score.weight"]}),
        (good, {"canon_set": "A"}, missing, {"names": ["model.layers.0.canonA.weight"]}),
        (good, {"num_hidden_layers": 2}, missing, {}),
        (good | {q: torch.ones(128, 9)}, {}, "hf.tensor_shape", {"name": q, "given": (128, 9)}),
        (good | {q: torch.ones(128, 128, dtype=torch.int8)}, {}, "hf.tensor_dtype", {"name": q}),
    ]
    for k, (state, fields, code, named) in enumerate(cases):
        check_refused(write_folder(tmp_path / str(k), config | fields, state), code, **named)
    # old Llama checkpoints contain a table that follows from the config
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    check(tmp_path / "table", config, good | table)


def test_damaged_files(tmp_path):
    check_refused(tmp_path / "absent", "file.unreadable")
    config = BASE | {"num_hidden_layers": 1}
    state = random_state(config)
    one = write_folder(tmp_path / "one", config, state)
    weights = one / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        check_refused(one, "hf.unreadable_weights", path=weights)
    weights.unlink()
    check_refused(one, "hf.no_weights", path=one)

    several = write_folder(tmp_path / "several", config, state, num_files=3)
    index = several / "model.safetensors.index.json"
    record = index.read_text()
    places = json.loads(record)["weight_map"]
    name, outside = next(iter(places)), tmp_path / "outside.safetensors"
    other = next(file for file in places.values() if file != places[name])
    save_file({name: state[name]}, outside)
    wrong = [places | {name: file} for file in (f"../{outside.name}", str(outside), 3, other)]
    for weight_map in (*wrong, {}, 3):
        index.write_text(json.dumps({"weight_map": weight_map}))
        check_refused(several, "hf.damaged_index")
    index.write_text("{")
    check_refused(several, "file.unreadable", path=index)
    index.write_text(record)
    (several / other).unlink()
    check_refused(several, "hf.unreadable_weights", path=several / other)


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
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists()  # it would have been run


def test_an_import_is_atomic(tmp_path, monkeypatch):
    """On a full disk, and killed: the next one removes its files."""
    folder, out = small_folder(tmp_path), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(reading, "write_atomic", mock.Mock(side_effect=OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            import_folder(folder, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    left = tmp_path / ".out.importing"
    with monkeypatch.context() as patch:
        patch.setattr(reading, "write_atomic", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert run_forked(lambda: import_folder(folder, out)) == -signal.SIGKILL
    assert not out.exists() and (left / "step-0").is_dir()
    # Llama-2's folder has both; data/tokenizer.py rejects both
    for name in ("tokenizer.json", "tokenizer.model"):
        (folder / name).write_text("{}")
    found = import_folder(folder, out, step=7)
    assert found.checkpoint == out / "step-7" and Manifest.read(found.checkpoint).step == 7
    assert not left.exists() and (out / "tokenizer.model").read_text() == "{}"
    assert not (out / "tokenizer.json").exists()
    taken = tmp_path / "taken"
    taken.symlink_to(tmp_path / "nowhere")
    with refused("hf.out_exists", path=taken):
        import_folder(folder, taken)
    with refused("hf.negative_step", given=-1):
        import_folder(folder, tmp_path / "new", step=-1)
    (folder / "tokenizer.model").unlink()
    import_folder(folder, tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep" / "tokenizer.json").is_file()

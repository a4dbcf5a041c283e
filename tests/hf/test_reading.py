"""Import of Hugging Face folders: equal logits, a [model] section, continued training."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.hf.config import to_fields, to_hf
from canon_pretrain.hf.export import export
from canon_pretrain.hf.reading import import_folder, model_toml
from canon_pretrain.run import config as experiment
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import build_dataloader, open_shards
from canon_pretrain.titan.job_config import CanonJobConfig
from tests import hf_exports, llama_canon
from tests.checkpoint_folders import flip_byte
from tests.hf_exports import BASE, TOKENS, check, check_refused, our_logits
from tests.hf_exports import quick as quick
from tests.llama_canon import random_state, write_folder, write_lingua_folder
from tests.ranks import differences, events, launch, whole_state
from tests.support import debug_run
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
    weights, params = (folder / "default" / name for name in ("consolidated.pth", "params.json"))
    model = torch.load(weights, weights_only=True)["model"]
    whole = weights.read_bytes()

    for code, content in (
        ("hf.unknown_tensors", model | {"layers.0.canonA.bias": torch.ones(128)}),
        ("hf.missing_tensors", {n: t for n, t in model.items() if "canonC" not in n}),
        ("hf.unreadable_weights", {n: torch.ones(1).expand(t.shape) for n, t in model.items()}),
        ("hf.unreadable_weights", {"x": Path}),
    ):
        torch.save({"model": content}, weights)
        check_refused(folder, code)
    weights.write_bytes(whole[: len(whole) // 2])
    check_refused(folder, "hf.unreadable_weights", path=weights)
    weights.write_bytes(whole)
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
        "canon_activation": [False, True],
        "canon_residual": [True, False],
    }
    config = BASE | position | {"rope_version": version}
    config |= {name: draw(st.sampled_from(values)) for name, values in sampled.items()}
    for name in draw(st.sets(st.sampled_from(["rope_version", "canon_kernel", "rms_norm_eps"]))):
        if config[name] == llama_canon.DEFAULTS[name]:
            del config[name]
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    state = random_state(config, seed=draw(st.integers(0, 99)), dtype=draw(dtypes))
    folder = tmp_path_factory.mktemp("any")
    check(folder, config, state, num_files=draw(st.sampled_from([1, 3])))
    shutil.rmtree(folder)


@every_variant
def test_an_import_of_any_variant(args, tmp_path):
    model = build(args)
    state = {to_hf(name): tensor.detach() for name, tensor in model.named_parameters()}
    found = import_folder(write_folder(tmp_path / "hf", to_fields(args), state), tmp_path / "out")
    assert found.args == args
    assert differences(whole_state(found.checkpoint), dict(model.named_parameters())) == []
    tokens = random_tokens(args, 2, 20)
    with torch.no_grad():
        assert torch.equal(our_logits(found, tokens), model(tokens))


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
    assert experiment.build(CanonJobConfig, values, source=str(path)).model_args == args
    if list(VARIANTS.values()).index(args) % 8 == 0:  # the rest of the way is slow
        assert parse_job(["--config", str(path)], quiet=True).model_args == args


MODEL = (
    *("--model.position", "rope", "--model.qk_norm", "full", "--model.num_kv_heads", 2),
    *("--training.steps", 6, "--checkpoint.interval", 3, "--checkpoint.async_mode", "disabled"),
    *("--validation.enable", False),
)
FIELDS = ("step", "loss", "max_loss", "grad_norm", "lr", "tokens", "data_digests")


@pytest.fixture(scope="module")
def straight(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    launch(*debug_run(data_folder, folder / "run"), *MODEL, output=folder, ranks=1)
    return folder / "run"


def steps_of(run: Path) -> list[list[Any]]:
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

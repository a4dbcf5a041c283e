"""Exports: weights, tokenizer, other files, --force, kills."""

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from canon_pretrain.checkpoint.architecture import model_args_of, run_of_checkpoint
from canon_pretrain.core.errors import UserError
from canon_pretrain.data.tokenizer import load_tokenizer
from canon_pretrain.hf import export as export_module
from canon_pretrain.hf import writing
from canon_pretrain.hf.classes import to_ours
from canon_pretrain.hf.export import DTYPES, RECORD, export
from canon_pretrain.hf.reading import import_folder
from canon_pretrain.hf.writing import INDEX
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.run.folder import RunFolder
from data_prep.planning import train_tokenizer
from tests import llama_canon
from tests.checkpoint_folders import contents, flip_byte, killed_everywhere
from tests.data_folders import make_data_folder, sentence, tokenizer
from tests.hf_exports import export_model, plant_run, weights_of
from tests.hf_exports import quick as quick
from tests.ranks import events, launch
from tests.support import ROOT, canon_stage, command_error, debug_run, refused
from tests.variants import VARIANTS, build, random_tokens, variant

main = canon_stage("hf")

STEP = 10


@pytest.fixture(scope="module")
def run(data_folder, tmp_path_factory):
    """A run on two ranks with a checkpoint at STEP."""
    folder = tmp_path_factory.mktemp("trained")
    launch(
        *debug_run(data_folder, folder / "run"),
        *("--checkpoint.interval", STEP),
        *("--model.position", "partial_rope_c"),
        output=folder,
    )
    return folder / "run"


def exported(folder):
    """Return the tensors of an export by our names."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {to_ours(name): tensor for name, tensor in load_file(file).items()}
    return tensors


def read(path):
    """Return the content of a JSON file."""
    return json.loads(path.read_text())


def check_equal(tensors, expected):
    """Assert that all tensors are bitwise equal."""
    assert tensors.keys() == expected.keys()
    assert len(tensors) > 10
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []


@pytest.mark.system
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_two_ranks(dtype, run, tmp_path):
    checkpoint = run / "checkpoint" / f"step-{STEP}"
    assert len(list(checkpoint.glob("*.distcp"))) == 2  # each rank has a part of every tensor
    out = tmp_path / "out"

    export(checkpoint, out, dtype=dtype, with_tokenizer=False)

    expected = {name: t.to(DTYPES[dtype]) for name, t in weights_of(checkpoint).items()}
    check_equal(exported(out), expected)
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    assert read(out / "config.json")["torch_dtype"] == dtype
    assert not list(tmp_path.glob(".*"))
    assert not list(out.glob("tokenizer*"))


@pytest.mark.system
def test_weights_of_several_files(run, tmp_path):
    checkpoint = run / "checkpoint" / f"step-{STEP}"
    limit = 100_000
    out = tmp_path / "out"

    export(checkpoint, out, dtype="float32", with_tokenizer=False, max_file_bytes=limit)

    check_equal(exported(out), weights_of(checkpoint))
    files = {path.name: load_file(path) for path in sorted(out.glob("*.safetensors"))}
    assert len(files) > 2
    assert next(iter(files)) == f"model-00001-of-{len(files):05}.safetensors"

    index = read(out / INDEX)
    assert index["weight_map"] == {name: f for f, tensors in files.items() for name in tensors}
    total_size = 0
    for tensors in files.values():
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= limit or len(tensors) == 1
        total_size += size
    assert index["metadata"]["total_size"] == total_size


@pytest.mark.system
def test_config_and_record(run, tmp_path):
    out = tmp_path / "out"
    export(run / "checkpoint" / f"step-{STEP}", out, with_tokenizer=False)

    record = read(out / RECORD)
    tokens = events(run, "step")[STEP - 1]["tokens"]
    position = {
        "train_state.step": STEP,
        "train_state.tokens": tokens,
        "dataloader.next_sample": STEP * 12,
    }
    assert record["run_id"] == read(run / "run.json")["run_id"]
    assert (record["step"], record["world_size"]) == (STEP, 2)
    assert record["identity"] == RunFolder(run).read_config()["identity"]
    assert position.items() <= record["position"].items()

    # the shards' EOS; there is no BOS in training
    config = read(out / "config.json")
    assert read(out / "generation_config.json") == {
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert config["eos_token_id"] == config["bos_token_id"] == 2
    assert config["max_position_embeddings"] == record["identity"]["training.seq_len"]
    assert config["model_type"] == "LlamaCanon"
    assert "canon_pretrain" not in config


PEAK_OF_LARGE_EXPORT = """
import resource, sys
from pathlib import Path
import canon_pretrain.hf.export as e

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small, large, out = map(Path, sys.argv[1:])
e.export(small, out / "hf-small", with_tokenizer=False)
before = peak()
e.export(large, out / "hf-large", with_tokenizer=False)
print(peak() - before)
"""


@pytest.mark.system
def test_memory_is_less_than_the_weights_once(tmp_path):
    args = VARIANTS["nope ABCD"]
    large_args = replace(args, vocab_size=32000, dim=576, num_heads=8, ffn_dim=1536, num_layers=12)
    large = plant_run(tmp_path / "run", build(large_args))
    small = plant_run(tmp_path / "small", build(args))

    command = [sys.executable, "-c", PEAK_OF_LARGE_EXPORT, str(small), str(large), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    weights_bytes = (tmp_path / "hf-large" / "model.safetensors").stat().st_size
    assert weights_bytes > 330e6
    assert int(done.stdout) < 0.8 * weights_bytes


def test_bad_weights_are_refused(tmp_path):
    out = tmp_path / "out"
    model = build(VARIANTS["nope ABCD"])
    with torch.no_grad():
        model.norm.weight[3] = 1e6
    checkpoint = plant_run(tmp_path / "run", model)

    # too large for float16
    with refused("hf.not_finite", name="norm.weight"):
        export(checkpoint, out, dtype="float16", with_tokenizer=False)
    export(checkpoint, tmp_path / "other", dtype="bfloat16", with_tokenizer=False)

    flip_byte(checkpoint / "__0_0.distcp")
    with refused("checkpoint.damaged"):
        export(checkpoint, out, with_tokenizer=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory):
    """A checkpoint of a run on text, with its data."""
    folder = tmp_path_factory.mktemp("of_texts")
    train = [[sentence(seed, 60) for seed in range(9)]]
    make_data_folder(folder / "data", train, [sentence(9, 60)])
    args = replace(VARIANTS["nope ABCD"], vocab_size=300)
    return plant_run(folder / "run", build(args), data=folder / "data")


def test_data_that_moved(of_texts, tmp_path):
    """The tokenizer is named, as a file or a folder."""
    data = of_texts.parents[2] / "data"
    export(of_texts, tmp_path / "stayed")
    model = build(model_args_of(run_of_checkpoint(of_texts)))
    moved = plant_run(tmp_path / "run", model, data=tmp_path / "gone")

    with refused("hf.no_tokenizer"):
        export(moved, tmp_path / "out")
    for name, path in (("file", data / "tokenizer.model"), ("folder", data)):
        export(moved, tmp_path / name, tokenizer=path)
        content = (tmp_path / name / "tokenizer.json").read_bytes()
        assert content == (tmp_path / "stayed" / "tokenizer.json").read_bytes()


def test_an_export_has_the_training_tokenizer(of_texts, tmp_path):
    out = tmp_path / "out"
    training = tokenizer()

    export(of_texts, out)

    assert read(out / RECORD)["tokenizer"] == {
        "sha256": training.sha256,
        "bos_id": training.bos_id,
        "eos_id": training.eos_id,
        "vocab_size": 300,
    }
    # of both files, the training tokenizer's own; a data folder has only one
    assert (out / "tokenizer.model").read_bytes() == training.model
    assert load_tokenizer(out).sha256 == training.sha256
    (out / "tokenizer_config.json").unlink()
    with refused("tokenizer.not_one", found=2):
        load_tokenizer(out)


def test_wrong_tokenizers_are_refused(of_texts, tmp_path, monkeypatch):
    out = tmp_path / "out"
    other = tmp_path / "tokenizer.model"
    other.write_bytes(train_tokenizer([sentence(seed, 90) for seed in range(40, 60)], 300))
    with refused("hf.other_tokenizer", expected=tokenizer().sha256):
        export(of_texts, out, tokenizer=other)

    # more ids than the model
    smaller = plant_run(tmp_path / "smaller", build(VARIANTS["nope ABCD"]))
    with refused("hf.vocab_size", given=300, expected=40):
        export(smaller, out, tokenizer=other)

    # one that cannot be converted
    error = UserError("hf.inexact_tokenizer", "injected")
    monkeypatch.setattr(export_module, "tokenizer_files", mock.Mock(side_effect=error))
    with refused("hf.inexact_tokenizer"):
        export(of_texts, out)
    assert not out.exists()

    main(["export", str(of_texts), str(out), "--no-tokenizer"])
    assert not list(out.glob("tokenizer*"))


RELEASED = [
    "rope gqa",
    "rope relu2 qk_full gqa",
    "rope ABCD qk_full gqa tied",
    "nope AC no_res",
    "nope ABCD act",
    "nope BD k3 no_res act qk_full gqa",
    "nope ABCD k5 relu2 tied",
    "nope ABCD cst",
    "partial_rope_c",
    "partial_rope_c ABCD qk_full gqa",
    "partial_rope_c half AC k3 relu2 tied",
]


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_class_loads_an_export(name, tmp_path):
    """config.json is read as that class reads it, nulls included."""
    model = build(variant(name))
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24)

    out = export_model(tmp_path, model)

    assert None not in read(out / "config.json").values()
    config = llama_canon.read_config(out)
    weights = load_file(out / "model.safetensors")
    logits = llama_canon.logits(config, weights, tokens_BT)
    assert (logits - model(tokens_BT)).abs().max() < 1e-4


PLAIN = {
    "rope": "LlamaForCausalLM",
    "rope gqa tied": "LlamaForCausalLM",
    "nope": "SmolLM3ForCausalLM",
    "nope gqa tied": "SmolLM3ForCausalLM",
    "rope qk_per_head gqa": "Qwen3ForCausalLM",
    "mamba2 conv": "Mamba2ForCausalLM",
    "mamba2 k3 conv tied mimetic": "Mamba2ForCausalLM",
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_class_of_transformers_loads_an_export(name, tmp_path):
    """A model without Canon needs no code; the logits are equal, and it can be imported again."""
    args = variant(name)
    change = {"rope_theta": 500.0} if args.rope_dim else {"norm_eps": 1e-4}
    if args.ffn == "none":  # a width of no part
        change["ffn_dim"] = ModelArgs.ffn_dim
    model = build(replace(args, **change))
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24)

    out = export_model(tmp_path, model)
    assert not list(out.glob("*.py"))

    opened = AutoModelForCausalLM.from_pretrained(out)
    assert type(opened).__name__ == PLAIN[name]
    assert type(opened).__module__.startswith("transformers.")
    assert (opened(tokens_BT).logits - model(tokens_BT)).abs().max() < 1e-4
    assert opened.config.max_position_embeddings == model.args.max_seq_len

    opened.save_pretrained(tmp_path / "again")  # as transformers writes the fields
    for folder in (out, tmp_path / "again"):
        imported = import_folder(folder, tmp_path / f"back-{folder.name}")
        assert imported.args == model.args
        check_equal(weights_of(imported.checkpoint), dict(model.named_parameters()))


def test_an_import_can_be_exported(tmp_path, of_texts):
    first = tmp_path / "first"
    second = tmp_path / "second"
    third = tmp_path / "third"
    imported = tmp_path / "imported"
    main(["export", str(of_texts.parents[1]), str(first)])  # RUN: its newest step

    main(["import", str(first), str(imported)])
    main(["export", str(imported / "step-0"), str(second), "--eos", "</s>"])
    main(["export", str(imported), str(third), "--no-tokenizer"])

    for folder in (second, third):
        check_equal(exported(folder), exported(first))
        assert read(folder / RECORD)["position"] == {}  # of weights only
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (second / name).read_bytes() == (first / name).read_bytes(), name


@pytest.fixture
def export_with_user_files(of_texts, tmp_path):
    """An export in several files, and files of a user in its folder."""
    out = tmp_path / "out"
    export(of_texts, out, max_file_bytes=20_000)
    for name in USER_FILES:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    return out


USER_FILES = [".git/HEAD", "notes.md", "finetune/model.safetensors", "run/checkpoint/step-1/x"]


OTHER_OPTIONS = ["--dtype", "bfloat16", "--no-tokenizer"]


def test_force_replaces_only_the_files_of_an_export(of_texts, export_with_user_files, tmp_path):
    out = export_with_user_files
    fresh = tmp_path / "fresh"
    inode = out.stat().st_ino
    with refused("hf.out_exists", path=out):
        export(of_texts, out)

    main(["export", str(of_texts), str(out), "--force", *OTHER_OPTIONS])
    main(["export", str(of_texts), str(fresh), *OTHER_OPTIONS])

    assert [(out / name).read_text() for name in USER_FILES] == USER_FILES
    assert out.stat().st_ino == inode
    files = {path.name for path in fresh.iterdir()}
    of_user = {name.split("/")[0] for name in USER_FILES}
    assert {path.name for path in out.iterdir()} == files | of_user
    for name in files - {RECORD}:
        assert (out / name).read_bytes() == (fresh / name).read_bytes()
    assert set(read(out / RECORD)["files"]) == files


def test_force_keeps_a_users_file_that_the_export_needs(of_texts, tmp_path):
    out = tmp_path / "out"
    main(["export", str(of_texts), str(out), *OTHER_OPTIONS])
    (out / "tokenizer.json").write_text("mine")

    with refused("hf.not_an_export", path=out / "tokenizer.json"):
        export(of_texts, out, force=True)

    assert (out / "tokenizer.json").read_text() == "mine"


@pytest.mark.parametrize(
    "files",
    [None, ["../thesis/chapter-1.tex"], [3], "no record"],
    ids=["earlier", "tampered", "number", "none"],
)
def test_force_deletes_nothing_without_a_good_record(of_texts, export_with_user_files, files):
    out = export_with_user_files
    if files == "no record":
        (out / RECORD).unlink()
    else:
        (out / RECORD).write_text(json.dumps(read(out / RECORD) | {"files": files}))
    before = contents(out)

    with refused("hf.not_an_export", path=out):
        export(of_texts, out, force=True)

    assert contents(out) == before


@pytest.mark.system
def test_a_kill_leaves_a_complete_export_or_none_that_loads(of_texts, tmp_path):
    base = tmp_path / "base"
    export(of_texts, base / "out", max_file_bytes=20_000)
    (base / "out" / "notes.md").write_text("mine")
    old = exported(base / "out")
    new = {name: tensor.to(torch.bfloat16) for name, tensor in old.items()}
    numbers = itertools.count()

    def copy_base():
        return Path(shutil.copytree(base, tmp_path / f"copy-{next(numbers)}"))

    def replace_it(folder):
        export(of_texts, folder / "out", dtype="bfloat16", force=True)

    outcomes = []
    for folder in killed_everywhere(replace_it, copy_base):
        out = folder / "out"
        if (out / "config.json").exists():
            weights = exported(out)
            is_old = next(iter(weights.values())).dtype == torch.float32
            check_equal(weights, old if is_old else new)
            outcomes.append("old" if is_old else "new")
        else:
            outcomes.append("none")

        # export again after each change; always would take too long
        if outcomes[-1:] != outcomes[-2:-1]:
            replace_it(folder)
            check_equal(exported(out), new)
            assert [path.name for path in folder.iterdir()] == ["out"]
        assert (out / "notes.md").read_text() == "mine"

    assert set(outcomes) == {"old", "none", "new"}


def test_a_full_disk_leaves_nothing(of_texts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "full" / "out"
    error = OSError(28, "No space left on device", str(out))
    monkeypatch.setattr(writing, "write_files", mock.Mock(side_effect=error))

    words = ["export", str(of_texts), str(out)]
    assert command_error(capsys, main, words) == "file.os_error"
    assert list((tmp_path / "full").iterdir()) == []

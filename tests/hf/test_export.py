"""Exports: weights, tokenizer, other files, --force, kills."""

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
from canon_pretrain.hf.config import to_ours
from canon_pretrain.hf.export import DTYPES, RECORD, export
from canon_pretrain.hf.reading import import_folder
from canon_pretrain.hf.writing import INDEX, MAX_FILE_BYTES
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.run.folder import RunFolder
from data_prep.planning import train_tokenizer
from tests import llama_canon
from tests.checkpoint_folders import contents, flip_byte, killed_everywhere
from tests.data_folders import make_data_folder, sentence, tokenizer
from tests.hf_exports import export_model, plant_run, weights_of
from tests.hf_exports import quick as quick
from tests.ranks import events, launch
from tests.support import ROOT, canon_stage, debug_run, error_codes, refused
from tests.variants import VARIANTS, build, random_tokens, variant

main = canon_stage("hf")

STEP = 10


@pytest.fixture(scope="module")
def run(data_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    options = ("--checkpoint.interval", STEP, "--model.position", "partial_rope_c")
    launch(*debug_run(data_folder, folder / "run"), *options, output=folder)
    return folder / "run"


def exported(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {to_ours(name): t for file in files for name, t in load_file(file).items()}


def read(path):
    return json.loads(path.read_text())


def check_equal(one, other):
    assert one.keys() == other.keys() and len(one) > 10
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.system
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_config_and_record_of_two_ranks(dtype, run, tmp_path):
    checkpoint = run / "checkpoint" / f"step-{STEP}"
    assert len(list(checkpoint.glob("*.distcp"))) == 2  # each rank has a part of every tensor
    expected = {name: t.to(DTYPES[dtype]) for name, t in weights_of(checkpoint).items()}
    limit = 100_000 if dtype == "float32" else MAX_FILE_BYTES
    out = tmp_path / "out"
    export(checkpoint, out, dtype=dtype, with_tokenizer=False, max_file_bytes=limit)
    check_equal(exported(out), expected)
    names = (RECORD, "config.json", "generation_config.json")
    record, config, generation = (read(out / name) for name in names)
    assert record["run_id"] == read(run / "run.json")["run_id"]
    assert (record["step"], record["world_size"]) == (STEP, 2)
    assert record["identity"] == RunFolder(run).read_config()["identity"]
    tokens = events(run, "step")[STEP - 1]["tokens"]
    position = {"train_state.step": STEP, "train_state.tokens": tokens}
    assert (position | {"dataloader.next_sample": STEP * 12}).items() <= record["position"].items()
    # the shards' EOS; there is no BOS in training
    assert generation == {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 2}
    assert config["eos_token_id"] == config["bos_token_id"] == 2
    assert config["max_position_embeddings"] == record["identity"]["training.seq_len"]
    assert config["model_type"] == "LlamaCanon" and "canon_pretrain" not in config
    assert config["torch_dtype"] == dtype
    assert not list(tmp_path.glob(".*")) and not list(out.glob("tokenizer*"))
    files = {path.name: load_file(path) for path in sorted(out.glob("*.safetensors"))}
    if dtype != "float32":
        assert [*files] == ["model.safetensors"]
        return
    assert next(iter(files)) == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 2
    index = read(out / INDEX)
    assert index["weight_map"] == {name: f for f, tensors in files.items() for name in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    each = zip(sizes, files.values(), strict=True)
    assert all(size <= limit or len(tensors) == 1 for size, tensors in each)
    assert sum(sizes) == index["metadata"]["total_size"]


@pytest.mark.system
def test_memory_is_less_than_the_weights_once(tmp_path):
    args = replace(VARIANTS["nope ABCD"], vocab_size=32000, dim=576, num_heads=8, ffn_dim=1536)
    large = plant_run(tmp_path / "run", build(replace(args, num_layers=12)))
    small = plant_run(tmp_path / "small", build(VARIANTS["nope ABCD"]))
    script = (
        "import resource, sys; from pathlib import Path; import canon_pretrain.hf.export as e\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "small, large, out = map(Path, sys.argv[1:])\n"
        "e.export(small, out / 'hf-small', with_tokenizer=False); before = peak()\n"
        "e.export(large, out / 'hf-large', with_tokenizer=False); print(peak() - before)\n"
    )
    command = [sys.executable, "-c", script, str(small), str(large), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    weights = (tmp_path / "hf-large" / "model.safetensors").stat().st_size
    assert weights > 330e6 and int(done.stdout) < 0.8 * weights


def test_bad_weights_are_refused(tmp_path):
    model, out = build(VARIANTS["nope ABCD"]), tmp_path / "out"
    with torch.no_grad():
        model.norm.weight[3] = 1e6
    checkpoint = plant_run(tmp_path / "run", model)
    with refused("hf.not_finite", name="norm.weight"):
        export(checkpoint, out, dtype="float16", with_tokenizer=False)
    export(checkpoint, tmp_path / "other", dtype="bfloat16", with_tokenizer=False)
    flip_byte(checkpoint / "__0_0.distcp")
    with refused("checkpoint.damaged"):
        export(checkpoint, out, with_tokenizer=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of_texts")
    train = [[sentence(seed, 60) for seed in range(9)]]
    make_data_folder(folder / "data", train, [sentence(9, 60)])
    args = replace(VARIANTS["nope ABCD"], vocab_size=300)
    return plant_run(folder / "run", build(args), data=folder / "data")


def test_a_moved_or_wrong_tokenizer(of_texts, tmp_path, monkeypatch):
    data = of_texts.parents[2] / "data"
    out = tmp_path / "out"
    stayed = tmp_path / "stayed"
    training = tokenizer()
    export(of_texts, stayed)

    # data that moved: the tokenizer is named, as a file or a folder
    model = build(model_args_of(run_of_checkpoint(of_texts)))
    moved = plant_run(tmp_path / "run", model, data=tmp_path / "gone")
    with refused("hf.no_tokenizer"):
        export(moved, out)
    for name, path in (("file", data / "tokenizer.model"), ("folder", data)):
        export(moved, tmp_path / name, tokenizer=path)
        content = (tmp_path / name / "tokenizer.json").read_bytes()
        assert content == (stayed / "tokenizer.json").read_bytes()
    assert read(stayed / RECORD)["tokenizer"] == {
        "sha256": training.sha256,
        "bos_id": training.bos_id,
        "eos_id": training.eos_id,
        "vocab_size": 300,
    }

    # of both files, the training tokenizer's own; a data folder has only one
    assert (stayed / "tokenizer.model").read_bytes() == training.model
    assert load_tokenizer(stayed).sha256 == training.sha256
    (stayed / "tokenizer_config.json").unlink()
    with refused("tokenizer.not_one", found=2):
        load_tokenizer(stayed)

    # another tokenizer, one with more ids than the model, one that cannot be converted
    other = tmp_path / "tokenizer.model"
    other.write_bytes(train_tokenizer([sentence(seed, 90) for seed in range(40, 60)], 300))
    with refused("hf.other_tokenizer", expected=training.sha256):
        export(of_texts, out, tokenizer=other)
    smaller = plant_run(tmp_path / "smaller", build(VARIANTS["nope ABCD"]))
    with refused("hf.vocab_size", given=300, expected=40):
        export(smaller, out, tokenizer=other)
    error = UserError("hf.inexact_tokenizer", "injected")
    monkeypatch.setattr(export_module, "tokenizer_files", mock.Mock(side_effect=error))
    with refused("hf.inexact_tokenizer"):
        export(of_texts, out)
    assert not out.exists()

    main(["export", str(of_texts), str(out), "--no-tokenizer"])
    assert not list(out.glob("tokenizer*"))


RELEASED = [
    *("rope gqa", "rope relu2 qk_full gqa", "rope ABCD qk_full gqa tied", "nope AC no_res"),
    *("nope ABCD act", "nope BD k3 no_res act qk_full gqa", "nope ABCD k5 relu2 tied"),
    *("nope ABCD cst", "partial_rope_c", "partial_rope_c ABCD qk_full gqa"),
    "partial_rope_c half AC k3 relu2 tied",
]


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_class_loads_an_export(name, tmp_path):
    """config.json is read as that class reads it, nulls included."""
    model = build(variant(name))
    out = export_model(tmp_path, model)
    assert None not in read(out / "config.json").values()
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24)
    config, weights = llama_canon.read_config(out), load_file(out / "model.safetensors")
    difference = llama_canon.logits(config, weights, tokens_BT) - model(tokens_BT)
    assert difference.abs().max() < 1e-4


PLAIN = {
    **dict.fromkeys(("rope", "rope gqa tied"), "LlamaForCausalLM"),
    **dict.fromkeys(("nope", "nope gqa tied"), "SmolLM3ForCausalLM"),
    "rope qk_per_head gqa": "Qwen3ForCausalLM",
    **dict.fromkeys(("mamba2 conv", "mamba2 k3 conv tied mimetic"), "Mamba2ForCausalLM"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_class_of_transformers_loads_an_export(name, tmp_path):
    """A model without Canon needs no code; the logits are equal, and it can be imported again."""
    args = variant(name)
    change = {"rope_theta": 500.0} if args.rope_dim else {"norm_eps": 1e-4}
    if args.ffn == "none":  # a width of no part
        change["ffn_dim"] = ModelArgs.ffn_dim
    model = build(replace(args, **change))
    out = export_model(tmp_path, model)
    assert not list(out.glob("*.py"))
    opened = AutoModelForCausalLM.from_pretrained(out)
    assert type(opened).__name__ == PLAIN[name]
    assert type(opened).__module__.startswith("transformers.")
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24)
    assert (opened(tokens_BT).logits - model(tokens_BT)).abs().max() < 1e-4
    assert opened.config.max_position_embeddings == model.args.max_seq_len
    opened.save_pretrained(tmp_path / "again")  # as transformers writes the fields
    for folder in (out, tmp_path / "again"):
        found = import_folder(folder, tmp_path / f"back-{folder.name}")
        assert found.args == model.args
        check_equal(weights_of(found.checkpoint), dict(model.named_parameters()))


def test_an_import_can_be_exported(tmp_path, of_texts):
    main(["export", str(of_texts.parents[1]), str(tmp_path / "first")])  # RUN: its newest step
    main(["import", str(tmp_path / "first"), str(tmp_path / "imported")])
    step_0 = tmp_path / "imported" / "step-0"
    main(["export", str(step_0), str(tmp_path / "second"), "--eos", "</s>"])
    main(["export", str(step_0.parent), str(tmp_path / "third"), "--no-tokenizer"])
    for name in ("second", "third"):
        check_equal(exported(tmp_path / name), exported(tmp_path / "first"))
        assert read(tmp_path / name / RECORD)["position"] == {}  # of weights only
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        files = [(tmp_path / folder / name).read_bytes() for folder in ("first", "second")]
        assert files[0] == files[1], name


def test_force_replaces_only_the_files_of_an_export(of_texts, tmp_path):
    out = tmp_path / "out"
    export(of_texts, out, max_file_bytes=20_000)
    with refused("hf.out_exists", path=out):
        export(of_texts, out)
    kept = [".git/HEAD", "notes.md", "finetune/model.safetensors", "run/checkpoint/step-1/x"]
    for name in kept:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    inode = out.stat().st_ino
    main(["export", str(of_texts), str(out), "--force", "--dtype", "bfloat16", "--no-tokenizer"])
    assert [(out / name).read_text() for name in kept] == kept and out.stat().st_ino == inode
    fresh = tmp_path / "fresh"
    main(["export", str(of_texts), str(fresh), "--dtype", "bfloat16", "--no-tokenizer"])
    files = {path.name for path in fresh.iterdir()}
    assert {path.name for path in out.iterdir()} == files | {name.split("/")[0] for name in kept}
    for name in files - {RECORD}:
        assert (out / name).read_bytes() == (fresh / name).read_bytes()
    assert set(read(out / RECORD)["files"]) == files
    # a user's file whose name the export needs
    (out / "tokenizer.json").write_text("mine")
    with refused("hf.not_an_export", path=out / "tokenizer.json"):
        export(of_texts, out, force=True)
    assert (out / "tokenizer.json").read_text() == "mine"
    # a record of an earlier version, a tampered one, or none: nothing is deleted
    for files in (None, ["../thesis/chapter-1.tex"], [3], "no record"):
        (out / RECORD).write_text(json.dumps(read(fresh / RECORD) | {"files": files}))
        if files == "no record":
            (out / RECORD).unlink()
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
    copies = iter(range(1000))

    def replace_it(folder):
        export(of_texts, folder / "out", dtype="bfloat16", force=True)

    found = []
    for folder in killed_everywhere(
        replace_it, lambda: Path(shutil.copytree(base, tmp_path / f"copy-{next(copies)}"))
    ):
        out = folder / "out"
        if (out / "config.json").exists():
            weights = exported(out)
            is_old = next(iter(weights.values())).dtype == torch.float32
            check_equal(weights, old if is_old else new)
            found.append("old" if is_old else "new")
        else:
            found.append("none")
        if found[-1:] != found[-2:-1]:  # after each change; always would take too long
            replace_it(folder)
            check_equal(exported(out), new)
            assert [path.name for path in folder.iterdir()] == ["out"]
        assert (out / "notes.md").read_text() == "mine"
    assert set(found) == {"old", "none", "new"}


def test_a_full_disk_leaves_nothing(of_texts, tmp_path, capsys, monkeypatch):
    error = OSError(28, "No space left on device", str(tmp_path / "full" / "out"))
    monkeypatch.setattr(writing, "write_files", mock.Mock(side_effect=error))
    with pytest.raises(SystemExit) as ended:
        main(["export", str(of_texts), str(tmp_path / "full" / "out")])
    assert ended.value.code == 2 and error_codes(capsys.readouterr().err) == ["file.os_error"]
    assert list((tmp_path / "full").iterdir()) == []

"""A checkpoint of several ranks to a folder: what is in it, what it refuses, what a kill leaves."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from canon_pretrain.checkpoint.architecture import model_args_of, run_of_checkpoint
from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.weights import strip_to_weights
from canon_pretrain.core.errors import UserError
from canon_pretrain.hf import export as export_module
from canon_pretrain.hf import writing
from canon_pretrain.hf.__main__ import main
from canon_pretrain.hf.config import to_ours
from canon_pretrain.hf.export import DTYPES, RECORD, export
from canon_pretrain.hf.reading import import_folder
from canon_pretrain.hf.writing import INDEX, MAX_FILE_BYTES
from canon_pretrain.run.folder import RunFolder
from data_prep.planning import train_tokenizer
from tests import llama_canon
from tests.checkpoint_folders import flip_byte, killed_everywhere
from tests.data_folders import make_data_folder, sentence, tokenizer
from tests.hf_exports import LAST, STEP, export_model, plant_run, trained_run, weights_of
from tests.ranks import events
from tests.support import ROOT
from tests.variants import VARIANTS, build, random_tokens, variant


@pytest.fixture(scope="module")
def run(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(data_folder, tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing outlives a power cut


@pytest.fixture
def checkpoint(run: Path) -> Path:
    return run / "checkpoint" / f"step-{STEP}"


def exported(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {to_ours(name): t for file in files for name, t in load_file(file).items()}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def check_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and len(one) > 10
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# ---- the weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_two_ranks(dtype, checkpoint, tmp_path):
    assert len(list(checkpoint.glob("*.distcp"))) == 2  # each rank has a part of every tensor
    expected = {name: t.to(DTYPES[dtype]) for name, t in weights_of(checkpoint).items()}
    limit = 100_000 if dtype == "float32" else MAX_FILE_BYTES
    out = tmp_path / "out"
    export(checkpoint, out, dtype=dtype, with_tokenizer=False, max_file_bytes=limit)
    check_equal(exported(out), expected)
    assert read(out / "config.json")["torch_dtype"] == dtype
    assert not list(tmp_path.glob(".*"))
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
    checkpoint = plant_run(tmp_path / "run", build(replace(args, num_layers=12)))
    script = (
        "import resource, sys; from pathlib import Path; import canon_pretrain.hf.export as e\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "small, large, out = map(Path, sys.argv[1:])\n"
        "e.export(small, out / 'hf-small', with_tokenizer=False); before = peak()\n"
        "e.export(large, out / 'hf-large', with_tokenizer=False); print(peak() - before)\n"
    )
    small = plant_run(tmp_path / "small", build(VARIANTS["nope ABCD"]))
    command = [sys.executable, "-c", script, str(small), str(checkpoint), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    weights = (tmp_path / "hf-large" / "model.safetensors").stat().st_size
    assert weights > 330e6
    assert int(done.stdout) < 0.8 * weights


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path):
    model = build(VARIANTS["nope ABCD"])
    with torch.no_grad():
        model.norm.weight[3] = 1e6
    checkpoint = plant_run(tmp_path / "run", model)
    with pytest.raises(UserError, match="norm.weight has values that are not finite in float16"):
        export(checkpoint, tmp_path / "out", dtype="float16", with_tokenizer=False)
    export(checkpoint, tmp_path / "out", dtype="bfloat16", with_tokenizer=False)


# ---- the other files


def test_what_an_export_says_of_itself(checkpoint, run, tmp_path):
    out = tmp_path / "out"
    export(checkpoint, out, with_tokenizer=False)
    names = (RECORD, "config.json", "generation_config.json")
    record, config, generation = (read(out / name) for name in names)
    assert record["run_id"] == read(run / "run.json")["run_id"]
    assert (record["step"], record["world_size"]) == (STEP, 2)
    assert record["identity"] == RunFolder(run).read_config()["identity"]
    position = record["position"]
    assert position["train_state.step"] == STEP
    assert position["train_state.tokens"] == events(run, "step")[STEP - 1]["tokens"]
    assert position["dataloader.next_sample"] == STEP * 12
    # the shards' EOS; no BOS was ever seen
    assert config["eos_token_id"] == config["bos_token_id"] == 2
    assert generation == {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 2}
    assert config["max_position_embeddings"] == record["identity"]["training.seq_len"]
    assert config["model_type"] == "LlamaCanon" and "canon_pretrain" not in config
    readme = (out / "README.md").read_text()
    assert "trust_remote_code=True" in readme and "okenizer" not in readme
    assert not list(out.glob("tokenizer*"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "data"
    make_data_folder(folder, [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])
    return folder


@pytest.fixture(scope="module")
def of_texts(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    args = replace(VARIANTS["nope ABCD"], vocab_size=300)
    return plant_run(tmp_path_factory.mktemp("of_texts") / "run", build(args), data=data)


def test_a_tokenizer_that_moved_or_cannot_travel(of_texts, data, tmp_path, monkeypatch):
    export(of_texts, tmp_path / "stayed")
    model, out = build(model_args_of(run_of_checkpoint(of_texts))), tmp_path / "out"
    moved = plant_run(tmp_path / "run", model, data=tmp_path / "gone")
    with pytest.raises(UserError, match="--tokenizer PATH.*--no-tokenizer"):
        export(moved, out)
    for name, path in (("file", data / "tokenizer.model"), ("folder", data)):
        export(moved, tmp_path / name, tokenizer=path)
        files = [(tmp_path / each / "tokenizer.json").read_bytes() for each in (name, "stayed")]
        assert files[0] == files[1]
    known, found = tokenizer(), read(tmp_path / "stayed" / RECORD)["tokenizer"]
    ids = {"bos_id": known.bos_id, "eos_id": known.eos_id, "vocab_size": 300}
    assert found == {"sha256": known.sha256} | ids
    other = tmp_path / "tokenizer.model"
    other.write_bytes(train_tokenizer([sentence(seed, 90) for seed in range(40, 60)], 300))
    with pytest.raises(UserError, match="is not the one that the run's data was written with"):
        export(of_texts, out, tokenizer=other)
    larger = plant_run(tmp_path / "larger", build(VARIANTS["nope ABCD"]))
    with pytest.raises(UserError, match="300 pieces, the model 40"):
        export(larger, out, tokenizer=other)

    def refuse(*_: object) -> None:
        raise UserError("todo.test_export", "it normalises characters")

    monkeypatch.setattr(export_module, "tokenizer_files", refuse)
    with pytest.raises(UserError, match="normalises characters.*--no-tokenizer"):
        export(of_texts, out)
    assert not out.exists()
    main(["export", str(of_texts), str(out), "--no-tokenizer"])
    assert not list(out.glob("tokenizer*"))


# ---- where it comes from


def test_weights_alone_and_archives_will_do(checkpoint, run, tmp_path):
    export(checkpoint, tmp_path / "full", with_tokenizer=False)
    expected = exported(tmp_path / "full")
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    folder = CheckpointFolder(copy / "checkpoint")
    strip_to_weights(folder.step_path(LAST), folder.path / "step-12-only")
    shutil.rmtree(folder.step_path(LAST))
    (folder.path / "step-12-only").rename(folder.step_path(LAST))
    export(folder.step_path(LAST), tmp_path / "stripped", with_tokenizer=False)
    assert read(tmp_path / "stripped" / RECORD)["position"] == {}
    branch = folder.archive_after(6, copy, "a test")  # has no config.json of its own
    assert branch is not None
    export(branch / "checkpoint" / f"step-{STEP}", tmp_path / "branch", with_tokenizer=False)
    check_equal(exported(tmp_path / "branch"), expected)
    shutil.move(branch / "checkpoint" / f"step-{STEP}", folder.step_path(STEP))
    whole = folder.archive_all(copy, "a test")  # takes config.json along
    assert whole is not None and not (copy / "config.json").exists()
    export(whole / "checkpoint" / f"step-{STEP}", tmp_path / "whole", with_tokenizer=False)
    check_equal(exported(tmp_path / "whole"), expected)


@pytest.mark.parametrize("fault", ["damaged", "absent", "no step", "other model"])
def test_a_damaged_checkpoint_is_refused(fault, checkpoint, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    asked = tmp_path / "run" / "checkpoint" / f"step-{STEP}"
    if fault == "damaged":
        flip_byte(asked / "__1_0.distcp")
    if fault == "other model":
        config = read(tmp_path / "run" / "config.json")
        config["identity"]["model.ffn_dim"] = 180
        (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    path, match = {
        "damaged": (asked, "__1_0.distcp has SHA-256"),
        "absent": (asked.with_name("step-11"), "no checkpoint at .*10, 12"),
        "no step": (asked.parent, "is not a checkpoint: expected RUN"),
        "other model": (asked, "is of another model: .*w1.weight is of shape"),
    }[fault]
    with pytest.raises(UserError, match=match):
        export(path, tmp_path / "out", with_tokenizer=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# ---- what opens it

# all that the released class has fields for; a Canon-free NoPE model is written as SmolLM3's
RELEASED = [
    *("rope gqa", "rope relu2 qk_full gqa", "rope ABCD qk_full gqa tied", "nope AC no_res"),
    *("nope ABCD act", "nope BD k3 no_res act qk_full gqa", "nope ABCD k5 relu2 tied"),
    *("nope ABCD cst", "partial_rope_c", "partial_rope_c ABCD qk_full gqa"),
    "partial_rope_c half AC k3 relu2 tied",
]


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_class_opens_it(name, tmp_path):
    """Issue 17, item 7: config.json as that class reads it, null included, and the same logits."""
    model = build(variant(name))
    out = export_model(tmp_path, model)
    assert None not in read(out / "config.json").values()
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24)
    config, weights = llama_canon.read_config(out), load_file(out / "model.safetensors")
    difference = llama_canon.logits(config, weights, tokens_BT) - model(tokens_BT)
    assert difference.abs().max() < 1e-4


PLAIN = {
    "rope": "LlamaForCausalLM",
    "rope gqa tied": "LlamaForCausalLM",
    "nope": "SmolLM3ForCausalLM",
    "nope gqa tied": "SmolLM3ForCausalLM",
    "rope qk_per_head gqa": "Qwen3ForCausalLM",
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_class_opens_it_without_code(name, tmp_path):
    """Issue 17, item 9: transformers' own class, the same logits, and an import gives it back."""
    model = build(variant(name))
    out = export_model(tmp_path, model)
    assert not list(out.glob("*.py"))
    opened = AutoModelForCausalLM.from_pretrained(out)
    assert type(opened).__name__ == PLAIN[name]
    assert type(opened).__module__.startswith("transformers.")
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24)
    assert (opened(tokens_BT).logits - model(tokens_BT)).abs().max() < 1e-4
    readme = (out / "README.md").read_text()
    assert PLAIN[name] in readme and "trust_remote_code" not in readme
    opened.save_pretrained(tmp_path / "again")  # its own fields, by transformers
    for folder in (out, tmp_path / "again"):
        found = import_folder(folder, tmp_path / f"back-{folder.name}")
        assert found.args == model.args
        check_equal(weights_of(found.checkpoint), dict(model.named_parameters()))


def test_what_an_import_wrote_is_exported(tmp_path, of_texts):
    """Issue 17, item 9: OUT/step-N of `hf import`, with its tokenizer."""
    export(of_texts, tmp_path / "first")
    main(["import", str(tmp_path / "first"), str(tmp_path / "imported")])
    step_0 = tmp_path / "imported" / "step-0"
    main(["export", str(step_0), str(tmp_path / "second"), "--eos", "</s>"])
    main(["export", str(step_0.parent), str(tmp_path / "third"), "--no-tokenizer"])
    check_equal(exported(tmp_path / "third"), exported(tmp_path / "first"))
    check_equal(exported(tmp_path / "second"), exported(tmp_path / "first"))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        files = [(tmp_path / folder / name).read_bytes() for folder in ("first", "second")]
        assert files[0] == files[1], name


# ---- where it goes


def test_force_replaces_what_an_export_wrote(of_texts, tmp_path):
    """Issue 17, item 15: `--force` deleted all that was in OUT."""
    out = tmp_path / "out"
    export(of_texts, out, max_file_bytes=20_000)
    with pytest.raises(UserError, match="out exists.*--force"):
        export(of_texts, out)
    kept = [".git/HEAD", "notes.md", "finetune/model.safetensors", "run/checkpoint/step-1/x"]
    for name in kept:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    inode = out.stat().st_ino
    main(["export", str(of_texts), str(out), "--force", "--dtype", "bfloat16", "--no-tokenizer"])
    assert [(out / name).read_text() for name in kept] == kept and out.stat().st_ino == inode
    fresh = tmp_path / "fresh"
    export(of_texts, fresh, dtype="bfloat16", with_tokenizer=False)
    files = {path.name for path in fresh.iterdir()}
    assert {path.name for path in out.iterdir()} == files | {name.split("/")[0] for name in kept}
    for name in files - {RECORD}:
        assert (out / name).read_bytes() == (fresh / name).read_bytes()
    assert set(read(out / RECORD)["files"]) == files
    # a file of the user's under a name that the export needs
    (out / "tokenizer.json").write_text("mine")
    with pytest.raises(UserError, match="tokenizer.json is not a file of the earlier export"):
        export(of_texts, out, force=True)
    assert (out / "tokenizer.json").read_text() == "mine"
    assert exported(out).keys() == exported(fresh).keys()


def test_only_exports_whose_files_are_known_are_replaced(of_texts, tmp_path):
    """Issue 17, item 15: of an earlier version's record, or a tampered one, nothing is deleted."""
    out = tmp_path / "out"
    export(of_texts, out)
    record = read(out / RECORD)
    for files in (None, ["../thesis/chapter-1.tex"], [3], "no record"):
        (out / RECORD).write_text(json.dumps(record | {"files": files}))
        if files == "no record":
            (out / RECORD).unlink()
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(UserError, match="out exists, and no .* lists the files of an export"):
            export(of_texts, out, force=True)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_kill_leaves_a_whole_export_or_none_that_opens(of_texts, tmp_path):
    """And the next one takes the killed one's files away (issue 17, item 15)."""
    base = tmp_path / "base"
    export(of_texts, base / "out", max_file_bytes=20_000)
    (base / "out" / "notes.md").write_text("mine")
    old = exported(base / "out")
    new = {name: tensor.to(torch.bfloat16) for name, tensor in old.items()}
    copies = iter(range(1000))

    def build_folder() -> Path:
        folder = tmp_path / f"copy-{next(copies)}"
        shutil.copytree(base, folder)
        return folder

    def replace_it(folder: Path) -> None:
        export(of_texts, folder / "out", dtype="bfloat16", force=True)

    found = []
    for folder in killed_everywhere(replace_it, build_folder):
        out = folder / "out"
        if (out / "config.json").exists():
            weights = exported(out)
            is_old = next(iter(weights.values())).dtype == torch.float32
            check_equal(weights, old if is_old else new)
            found.append("old" if is_old else "new")
        else:
            found.append("none")
        if found[-1:] != found[-2:-1]:  # at each turn, or it takes long
            replace_it(folder)
            check_equal(exported(out), new)
            assert [path.name for path in folder.iterdir()] == ["out"]
        assert (out / "notes.md").read_text() == "mine"
    assert set(found) == {"old", "none", "new"}


# ---- the command


def test_the_command_and_what_it_says(of_texts, tmp_path, capsys, monkeypatch):
    """RUN stands for its newest step (issue 17, item 10); an error leaves nothing."""
    out, back = tmp_path / "new" / "out", tmp_path / "back"
    main(["export", str(of_texts.parents[1]), str(out), "--dtype", "float16"])
    assert f"step 3 to {out}" in capsys.readouterr().out
    assert all(t.dtype == torch.float16 for t in exported(out).values())
    main(["import", str(out), str(back), "--step", "3"])
    assert f"initial_load_path {back / 'step-3'}" in capsys.readouterr().out

    def full_disk(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "full" / "out"))

    monkeypatch.setattr(writing, "write_files", full_disk)
    for target in (out, tmp_path / "full" / "out"):
        with pytest.raises(SystemExit) as ended:
            main(["export", str(of_texts), str(target)])
        assert ended.value.code == 2 and str(target) in capsys.readouterr().err
    assert list((tmp_path / "full").iterdir()) == []

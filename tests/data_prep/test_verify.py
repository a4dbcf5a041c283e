"""verify: undamaged folders pass; a flipped byte in any file is found, and repaired."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from canon_pretrain.core.lock import locked
from canon_pretrain.data import shard_writer
from canon_pretrain.data.shards import Cut
from data_prep import verify as verify_module
from data_prep.__main__ import main
from data_prep.finish import finish
from data_prep.folder import SPLITS
from data_prep.plan import Limits
from data_prep.verify import LEVELS, verify
from tests import corpora
from tests.corpora import flip
from tests.data_folders import make_data_folder, sentence, write_forged_manifest
from tests.support import error_codes, refused


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return corpora.corpus_folder(tmp_path_factory.mktemp("verify"), files=9)


@pytest.fixture
def data(base, tmp_path):
    return Path(shutil.copytree(base / "data", tmp_path / "data"))


def snapshot(folder):
    """Return the files of a folder without its locks."""
    return {name: data for name, data in corpora.snapshot(folder).items() if ".lock" not in name}


def names_of(split):
    """Return the names of a split's shards."""
    return [entry["name"] for entry in json.loads((split / "manifest.json").read_bytes())["parts"]]


def faults_of(folder, *level, **options):
    """Return the faults that verify finds in a damaged folder."""
    with refused("data.damaged") as caught:
        verify(folder, *level, **options)
    return caught.value.fields["faults"]


def files_of(faults):
    """Return the damaged files, as SPLIT/NAME."""
    paths = [Path(fault.partition(": ")[0]) for fault in faults]
    return [f"{path.parent.name}/{path.name}" for path in paths]


def patch_writer(patch, change):
    """Let shards be written with changed ids."""
    add_unchanged = shard_writer.ShardWriter.add

    def add(self, ids, **fields):
        add_unchanged(self, change(ids), **fields)

    patch.setattr(shard_writer.ShardWriter, "add", add)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.system)])
def test_a_flipped_byte_in_any_file_is_found(data, every):
    for level in LEVELS:
        verify(data, level, workers=2)
    files = [path for path in data.rglob("*") if path.is_file() and path.suffix != ".lock"]
    kinds = {(path.parent.name, path.suffix, path.stem[:4]): path for path in files}
    assert len(files) > 50
    assert len(kinds) == 12

    for path in files if every else kinds.values():
        good = path.read_bytes()
        flip(path)
        # these files are small: a sample is all of them
        for level in ("sample", "full") if good else ("size",):
            if path.name == "plan.json":
                with refused("plan.damaged"):
                    verify(data, level)
            else:
                assert any(path.name in fault for fault in faults_of(data, level))
        path.write_bytes(good)
    verify(data)


def test_the_command_reports_all_faults(data, capsys):
    main(["verify", str(data), "--level", "sample"])
    manifest = data / "validation/manifest.json"
    manifest_bytes = manifest.read_bytes()

    # five files of four shards
    (data / "train/part-00000-0.bin").unlink()
    manifest.unlink()
    flip(data / "train/part-00002-0.docs")
    flip(data / "validation/part-00003-0.bin")
    (data / "train/part-00001-0.json").unlink()
    with refused("data.damaged", shards=4) as caught:
        verify(data)
    assert sorted(files_of(caught.value.fields["faults"])) == [
        "train/part-00000-0.bin",
        "train/part-00001-0.json",
        "train/part-00002-0.docs",
        "validation/manifest.json",
        "validation/part-00003-0.bin",
    ]

    # a repair without the inputs
    with pytest.raises(SystemExit, match="2"):
        main(["verify", str(data), "--repair", "--workers", "2", "--root", str(data)])
    printed = capsys.readouterr()
    assert error_codes(printed.err) == ["data.damaged"]
    assert "[input.unreadable]" in printed.out

    # and with them
    root = json.loads((data / "plan.json").read_bytes())["root"]
    manifest.write_bytes(manifest_bytes)
    main(["verify", str(data), "--repair", "--root", root])


def test_shards_with_wrong_ids_and_hashes_are_found(data, base, monkeypatch):
    """The hashes of the files are those of what was written, which is wrong."""
    for path in data.glob("*/part-*"):
        path.unlink()
    with monkeypatch.context() as patch:
        # EOS and another id are exchanged
        patch_writer(patch, lambda ids: np.where(ids == 2, 7, np.where(ids == 7, 2, ids)))
        patch.setattr(shard_writer, "block_crcs", lambda content: np.zeros(1, dtype="<u4"))
        corpora.build_corpus(data, base / "corpus")

    faults = " ".join(faults_of(data))

    assert "EOS: 0, expected" in faults
    assert "64-KiB blocks: [0]" in faults


def test_shards_with_eos_inside_documents_are_found(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch_writer(patch, lambda ids: np.concatenate([ids[:4], [2], ids[4:]]))
        make_data_folder(tmp_path / "wrong", [[sentence(1, 40), sentence(2, 40)]])

    assert "inside documents: 2, expected 0" in " ".join(faults_of(tmp_path / "wrong"))


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({}, -1),
        ({}, 2),
        ({"vocab_size": 301}, None),
        ({"tokenizer_sha256": "0" * 64}, None),
        ({"limits": {"max_tokens": 9}}, None),
    ],
    ids=["last shard", "a shard", "vocabulary", "tokenizer", "limits"],
)
def test_a_manifest_that_does_not_match_the_plan(data, changes, dropped):
    """The manifest is consistent in itself."""
    names = names_of(data / "train")
    if dropped is not None:
        names.pop(dropped)
    write_forged_manifest(data / "train", names, **changes)

    fault = faults_of(data, "size")[0]

    assert files_of([fault]) == ["train/manifest.json"]
    assert all(f"{name} is" in fault for name in changes if name != "limits")


def test_a_manifest_that_does_not_match_its_records(data):
    path = data / "train/manifest.json"
    manifest = json.loads(path.read_bytes())

    path.write_text(json.dumps(manifest | {"num_tokens": manifest["num_tokens"] + 1}))
    assert files_of(faults_of(data, "size")) == ["train/manifest.json"]

    manifest["parts"][0]["name"] = "../x"
    path.write_text(json.dumps(manifest))
    assert files_of(faults_of(data)) == ["train/manifest.json"]


def test_limits(data):
    manifest_path = data / "train/manifest.json"
    whole = json.loads(manifest_path.read_bytes())
    max_documents = whole["num_documents"] - whole["parts"][-1]["documents"] - 2

    finish(data, Limits(max_documents=max_documents))

    manifest = json.loads(manifest_path.read_bytes())
    assert manifest["cut"]
    assert manifest["num_documents"] == max_documents
    for level in LEVELS:
        verify(data, level)

    # a cut at another place
    names = names_of(data / "train")
    cut = Cut(**manifest["cut"] | {"tokens": manifest["cut"]["tokens"] - 1})
    write_forged_manifest(data / "train", names, cut=cut)
    assert files_of(faults_of(data, "size")) == ["train/manifest.json"]

    # the splits end after different input groups
    write_forged_manifest(data / "train", names[:1], cut=None)
    assert any(fault.startswith(f"{data}: ") for fault in faults_of(data, "size"))


def test_a_commit_record_of_other_data_is_found(data):
    path = data / "train/part-00000-0.json"
    good = json.loads(path.read_bytes())

    for change in ({"max_id": -1}, {"inputs": {"part1.jsonl": "0" * 64}}, {"unit": 1}):
        path.write_text(json.dumps(good | change))
        if "max_id" not in change:  # the manifest matches the record, but not the plan
            write_forged_manifest(data / "train", names_of(data / "train"))
        assert "train/part-00000-0.json" in files_of(faults_of(data, "size"))


def test_repair_restores_the_bytes_of_every_damaged_file(data, capsys):
    good = snapshot(data)
    for split in SPLITS:
        flip(data / f"{split}/part-00000-0.bin")
        (data / f"{split}/part-00001-0.docs").unlink()
        (data / f"{split}/part-00002-0.crc").write_bytes(b"")
        flip(data / f"{split}/part-00003-0.json")
    undamaged = data / "train/part-00004-0.bin"
    inode = undamaged.stat().st_ino
    (data / verify_module.SCRATCH).mkdir()
    (data / verify_module.SCRATCH / "left by a kill").touch()

    verify(data, repair=True)

    assert snapshot(data) == good
    assert "rebuilt 8 shard(s)" in capsys.readouterr().out
    assert undamaged.stat().st_ino == inode
    assert not (data / verify_module.SCRATCH).exists()
    assert not (data / "locks").exists()
    verify(data, repair=True)


def test_repair_refuses_changed_inputs(data, base, tmp_path, capsys):
    texts = Path(shutil.copytree(base / "corpus", tmp_path / "texts"))
    source = texts / "part1.jsonl"
    source.write_text(source.read_text().replace("the", "The"))
    flip(data / "train/part-00000-0.bin")
    flip(data / "train/part-00002-0.bin")
    before = snapshot(data)

    assert files_of(faults_of(data, repair=True, root=texts)) == ["train/part-00000-0.bin"]

    assert f"[input.changed] {source}" in capsys.readouterr().out
    after = snapshot(data)
    assert {name for name in after if after[name] != before[name]} == {"train/part-00002-0.bin"}


def full_disk(ids):
    raise OSError(errno.ENOSPC, "No space left on device")


def other_ids(ids):
    """Return other ids, as of another version of a library."""
    return np.append(ids[1:], ids[-1])


@pytest.mark.parametrize(
    ("code", "change"), [("shard.not_reproduced", other_ids), ("disk.full", full_disk)]
)
def test_a_failed_repair_changes_nothing(data, monkeypatch, capsys, code, change):
    flip(data / "train/part-00000-0.bin")
    before = snapshot(data)

    with monkeypatch.context() as patch:
        patch_writer(patch, change)
        assert faults_of(data, repair=True)

    assert f"[{code}]" in capsys.readouterr().out
    assert snapshot(data) == before
    verify(data, repair=True)


def test_a_repair_needs_its_lock_and_the_tokenizer(data):
    flip(data / "train/part-00000-0.bin")
    before = snapshot(data)

    with locked(data / verify_module.LOCK, "x"), refused("lock.held"):
        verify(data, repair=True)

    flip(data / "tokenizer.model", 0)
    assert len(faults_of(data, repair=True)) == 2
    flip(data / "tokenizer.model", 0)
    assert snapshot(data) == before

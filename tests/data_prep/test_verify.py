"""verify: whole folders pass, a flipped byte in any file is found and named, and repaired."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import locked
from canon_pretrain.data import shard_writer
from canon_pretrain.data.shards import Cut
from data_prep import verify as verify_module
from data_prep.__main__ import main
from data_prep.build import build
from data_prep.finish import finish
from data_prep.folder import SPLITS
from data_prep.plan import Limits, Options
from data_prep.verify import LEVELS, verify
from tests import corpora
from tests.corpora import flip
from tests.data_folders import make_data_folder, sentence, write_forged_manifest

OPTIONS = Options(holdout=0.3, unit_bytes=1500, max_part_tokens=300)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the inputs' folder, the data folder): five units, several parts in each."""
    texts = tmp_path_factory.mktemp("texts")
    for i in range(24):
        rows = [{"text": f"{sentence(100 * i + k, 20 + k)} {i}"} for k in range(4)]
        (texts / f"m{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path_factory.mktemp("built") / "data"
    build(out, "local", "train:300", OPTIONS, workers=1, files=[texts])
    return texts, out


@pytest.fixture
def data(built: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the data folder, to be damaged."""
    return Path(shutil.copytree(built[1], tmp_path / "data"))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in corpora.snapshot(folder).items() if ".lock" not in name}


def names_of(split: Path) -> list[str]:
    return [part["name"] for part in json.loads((split / "manifest.json").read_bytes())["parts"]]


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """What verify says of a folder that is, or stays, damaged."""

    def said(folder: Path, *level: str, **more: Any) -> str:
        capsys.readouterr()
        with pytest.raises(UserError) as caught:
            verify(folder, *level, **more)
        return capsys.readouterr().out + str(caught.value)

    return said


def patch_writer(patch: pytest.MonkeyPatch, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Let the writer store other ids than it is given."""
    real = shard_writer.ShardWriter.add

    def add(self: shard_writer.ShardWriter, ids: np.ndarray, **known: Any) -> None:
        real(self, change(ids), **known)

    patch.setattr(shard_writer.ShardWriter, "add", add)


def test_a_flipped_byte_in_any_file_is_found(data, refused):
    for level in LEVELS:
        verify(data, level, workers=2)
    files = [path for path in data.rglob("*") if path.is_file() and path.suffix != ".lock"]
    kinds = {path.suffix for path in files}
    assert kinds == {".json", ".model", ".bin", ".docs", ".crc"} and len(files) > 60
    for path in files:
        good = path.read_bytes()
        flip(path)
        # these files are small: a sample is all of them
        for level in ("sample", "full") if good else ("size",):
            assert path.name in refused(data, level)
        path.write_bytes(good)
    verify(data)


def test_missing_files_are_all_reported(data, capsys):
    (data / "train/part-00000-0.bin").unlink()
    (data / "validation/manifest.json").unlink()
    flip(data / "train/part-00002-0.docs")
    flip(data / "validation/part-00003-0.bin")
    (data / "train/part-00001-0.json").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(["verify", str(data)])
    printed = capsys.readouterr()
    for name in ("00000-0.bin: is missing", "validation/manifest.json", "00002-0.docs",
                 "validation/part-00003-0.bin", "train/part-00001-0"):  # fmt: skip
        assert name in printed.out
    assert "5 fault(s) found; --repair rebuilds 4 part(s)" in printed.err


def test_a_part_that_was_written_wrong_is_found(data, built, monkeypatch, refused):
    """Hashes agree with what was written, and what was written is wrong."""
    for path in data.glob("*/part-*"):
        path.unlink()
    with monkeypatch.context() as patch:
        patch_writer(patch, lambda ids: np.where(ids == 2, 7, np.where(ids == 7, 2, ids)))
        patch.setattr(shard_writer, "block_crcs", lambda content: np.zeros(1, dtype="<u4"))
        build(data, "local", "train:300", OPTIONS, workers=1, files=[built[0]])
    said = refused(data)
    assert "documents ending with EOS: 0, expected" in said
    assert "blocks by their CRC32: [0]" in said
    with monkeypatch.context() as patch:
        patch_writer(patch, lambda ids: np.concatenate([ids[:4], [2], ids[4:]]))
        make_data_folder(data.with_name("planted"), [[sentence(1, 40), sentence(2, 40)]])
    assert "EOS ids inside documents: 2, expected 0" in refused(data.with_name("planted"))


def test_a_manifest_that_fits_itself_and_not_the_plan(data, refused):
    path = data / "train/manifest.json"
    good, names = path.read_bytes(), names_of(data / "train")
    forged: list[tuple[dict[str, Any], list[str], str]] = [
        ({}, names[:-1], "ends before unit"),
        ({}, [*names[:2], *names[3:]], "lists part-"),
        ({"vocab_size": 301}, names, "vocab_size is 301, the plan's is 300"),
        ({"tokenizer_sha256": "0" * 64}, names, "tokenizer_sha256 is"),
        ({"limits": {"max_tokens": 9}}, names, "more than the limit 9"),
    ]
    for changes, listed, fault in forged:
        path.write_bytes(good)
        write_forged_manifest(data / "train", listed, **changes)
        said = refused(data, "size")
        assert "train/manifest.json: " in said and fault in said
    stored = json.loads(good)
    path.write_text(json.dumps(stored | {"num_tokens": stored["num_tokens"] + 1}))
    assert "does not fit the commit marks" in refused(data, "size")
    stored["parts"][0]["name"] = "../x"
    path.write_text(json.dumps(stored))
    assert "train/manifest.json: cannot be read" in refused(data)


def test_limits(data, refused):
    whole = json.loads((data / "train/manifest.json").read_bytes())
    limit = whole["num_documents"] - whole["parts"][-1]["documents"] - 2
    finish(data, Limits(max_documents=limit))
    manifest = json.loads((data / "train/manifest.json").read_bytes())
    assert manifest["cut"] and manifest["num_documents"] == limit
    for level in LEVELS:
        verify(data, level)
    names = names_of(data / "train")
    cut = Cut(**manifest["cut"] | {"tokens": manifest["cut"]["tokens"] - 1})
    write_forged_manifest(data / "train", names, cut=cut)
    assert "where no document ends" in refused(data, "size")
    write_forged_manifest(data / "train", names[:1], cut=None)
    assert "the splits do not end together" in refused(data, "size")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"inputs": {"m0.jsonl": "0" * 64}}, "was made from m0.jsonl with sha256 0000"),
        ({"unit": 1}, "is the mark of part-00001-0"),
        ({"max_id": -1}, "no commit mark of this format"),
    ],
)
def test_a_mark_of_something_else_is_found(data, change, fault, refused):
    """Marks and manifest agree with each other; the plan says something else."""
    path = data / "train/part-00000-0.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    if "max_id" not in change:
        write_forged_manifest(data / "train", names_of(data / "train"))
    said = refused(data, "size")
    assert "train/part-00000-0.json: " in said and fault in said


def test_repair_gives_every_damaged_file_its_bytes_again(data, capsys):
    good = snapshot(data)
    for split in SPLITS:
        flip(data / f"{split}/part-00000-0.bin")
        (data / f"{split}/part-00001-0.docs").unlink()
        (data / f"{split}/part-00002-0.crc").write_bytes(b"")
        flip(data / f"{split}/part-00003-0.json")
    kept = (data / "train/part-00004-0.bin").stat().st_ino
    (data / verify_module.SCRATCH).mkdir()
    (data / verify_module.SCRATCH / "left by a kill").touch()
    verify(data, repair=True)
    assert snapshot(data) == good
    assert "ok again, 8 part(s) rebuilt" in capsys.readouterr().out
    # what is whole was not touched
    assert (data / "train/part-00004-0.bin").stat().st_ino == kept
    assert not (data / verify_module.SCRATCH).exists() and not (data / "locks").exists()
    verify(data, repair=True)


def test_repair_refuses_changed_inputs(data, built, tmp_path, refused):
    texts = Path(shutil.copytree(built[0], tmp_path / "texts"))
    flip(data / "train/part-00000-0.bin")
    flip(data / "train/part-00002-0.bin")
    before = snapshot(data)
    source = texts / "m0.jsonl"
    source.write_text(source.read_text().replace("the", "The"))
    said = refused(data, repair=True, root=texts)
    assert "unit 0 cannot be repaired" in said and "m0.jsonl" in said
    after = snapshot(data)
    assert {name for name in after if after[name] != before[name]} == {"train/part-00002-0.bin"}
    verify(data, repair=True)


def test_repair_puts_nothing_in_place_that_is_not_the_marks(data, monkeypatch, refused):
    """As with another version of a library: the inputs are right, the ids are not."""
    flip(data / "train/part-00000-0.bin")
    before = snapshot(data)
    patch_writer(monkeypatch, lambda ids: np.append(ids[1:], ids[-1]))
    assert "the inputs make other bytes now" in refused(data, repair=True)
    assert snapshot(data) == before


def test_repair_needs_room_its_tokenizer_and_no_other_repair(data, monkeypatch, refused):
    flip(data / "train/part-00000-0.bin")
    before = snapshot(data)
    with locked(data / verify_module.LOCK, "x"):
        assert "another process" in refused(data, repair=True)

    def full(ids: np.ndarray) -> np.ndarray:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch_writer(patch, full)
        assert "the disk is full" in refused(data, repair=True)

    assert snapshot(data) == before
    flip(data / "tokenizer.model", 0)
    assert "2 fault(s) left" in refused(data, repair=True)
    flip(data / "tokenizer.model", 0)
    assert snapshot(data) == before
    verify(data, repair=True)


def test_the_command(data, capsys):
    main(["verify", str(data), "--level", "sample"])
    flip(data / "train/part-00001-0.bin")
    root = json.loads((data / "plan.json").read_bytes())["root"]
    command = ["verify", str(data), "--repair", "--workers", "2", "--root"]
    with pytest.raises(SystemExit, match="2"):
        main([*command, str(data)])
    assert "unit 1 cannot be repaired" in capsys.readouterr().out
    main([*command, root])
    assert "ok again, 1 part(s) rebuilt" in capsys.readouterr().out

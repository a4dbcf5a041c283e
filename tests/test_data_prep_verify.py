"""verify: whole folders pass, a flipped byte in any file is found and named."""

from pathlib import Path

import numpy as np
import pytest

from canon_pretrain.data import shard_writer
from canon_pretrain.errors import UserError
from data_prep import sources
from data_prep.__main__ import main
from data_prep.build import build
from data_prep.plan import Options
from data_prep.verify import verify


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = tmp_path / "library"
    library.mkdir()
    for i in range(12):
        (library / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * (i + 3))
    monkeypatch.setattr(sources, "source_root", lambda source: library)
    options = Options(holdout=0.3, unit_bytes=800)
    build(tmp_path / "data", "stdlib", "train:300", options, workers=1)
    return tmp_path / "data"


def test_a_flipped_byte_in_any_file_is_found(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(data)
    files = [path for path in data.rglob("*") if path.is_file() and path.name != "build.lock"]
    kinds = {path.suffix for path in files}
    assert kinds == {".json", ".model", ".bin", ".docs", ".crc"} and len(files) > 25
    for path in files:
        good = path.read_bytes()
        bad = bytearray(good or b"\x00")
        bad[len(bad) // 2] ^= 1
        path.write_bytes(bad)
        capsys.readouterr()
        with pytest.raises(UserError) as caught:
            verify(data)
        assert path.name in capsys.readouterr().out + str(caught.value)
        path.write_bytes(good)
    verify(data)


def test_missing_files_are_all_reported(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "train/part-00000-0.bin").unlink()
    (data / "validation/manifest.json").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(["verify", str(data)])
    printed = capsys.readouterr()
    assert "part-00000-0" in printed.out and "validation/manifest.json" in printed.out
    assert printed.err == f"error: {data}: 2 fault(s) found\n"


def test_a_part_that_was_written_wrong_is_found(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hashes agree with what was written, and what was written is wrong."""
    for path in data.glob("*/part-*"):
        path.unlink()
    real = shard_writer.UnitWriter.add

    def without_eos(self, ids, *, num_bytes, row):  # type: ignore[no-untyped-def]
        real(self, np.where(ids == 2, 7, ids), num_bytes=num_bytes, row=row)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer.UnitWriter, "add", without_eos)
        patch.setattr(shard_writer, "block_crcs", lambda content: np.zeros(1, dtype="<u4"))
        build(data, "stdlib", "train:300", Options(holdout=0.3, unit_bytes=800), workers=1)
    with pytest.raises(UserError, match="fault"):
        verify(data)
    printed = capsys.readouterr().out
    assert "documents ending with EOS: 0, expected" in printed
    assert "CRC32 of blocks 0 to 0" in printed


def test_not_a_data_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        verify(tmp_path / "none")
    with pytest.raises(UserError, match="no plan.json"):
        verify(tmp_path)

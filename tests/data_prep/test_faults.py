"""What goes wrong in a long build, done to real ones: kills, two at once, full disks, changes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import sha256_file
from canon_pretrain.data.shards import TokenShards
from data_prep import build as build_module
from data_prep.__main__ import main
from data_prep.plan import Options, load_plan
from tests.checkpoint_folders import fill, small_disk
from tests.corpora import (
    build_corpus,
    corpus_folder,
    snapshot,
    stored_texts,
    write_corpus,
    write_tokenizer,
)
from tests.data_folders import tokenizer
from tests.support import ROOT


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 17 units, its tokenizer, and `data`."""
    return corpus_folder(tmp_path_factory.mktemp("faults"), files=34)


# argv: base, out, workers, shard
BUILD = """
import sys
from pathlib import Path
from canon_pretrain.core.errors import UserError, exit_with
from data_prep.build import JobSlice
from tests.corpora import build_corpus

if __name__ == "__main__":
    base, out, workers, *shard = sys.argv[1:]
    try:
        build_corpus(Path(out), Path(base) / "corpus", workers=int(workers),
                     shard=JobSlice.parse(shard[0]) if shard else None)
    except UserError as error:
        exit_with(error)
"""


def start(base: Path, out: Path, workers: int = 1, *shard: str) -> subprocess.Popen[str]:
    """A build in a process of its own, from a file: its workers import it again."""
    script, pipe = base / "build.py", subprocess.PIPE
    script.write_text(BUILD)
    arguments = [sys.executable, str(script), str(base), str(out), str(workers), *shard]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(arguments, env=environment, stdout=pipe, stderr=pipe, text=True)


def wait_for_parts(run: subprocess.Popen[str], out: Path, count: int) -> None:
    """Return once so many parts are committed, or the run has ended."""
    deadline = time.monotonic() + 60
    while committed(out) < count and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def committed(out: Path) -> int:
    return len(list(out.glob("*/part-*.json")))


# ---- kills, two at once, shards


def test_a_killed_worker_ends_the_build_with_a_message(base, tmp_path):
    out = tmp_path / "data"
    run = start(base, out, 2)
    wait_for_parts(run, out, 3)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    workers = [
        pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(int(workers[0]), signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 2 and errors.startswith("error: a worker process was killed"), errors
    assert not (out / "train/manifest.json").exists()
    build_corpus(out, base / "corpus")
    assert snapshot(out) == snapshot(base / "data")


def test_workers_end_with_a_killed_parent(base, tmp_path):
    out = tmp_path / "data"
    run = start(base, out, 2)
    wait_for_parts(run, out, 1)
    run.kill()
    run.communicate(timeout=60)  # its workers hold the pipe as long as they live
    assert run.returncode == -signal.SIGKILL
    assert committed(out) and not (out / "train/manifest.json").exists()
    build_corpus(out, base / "corpus", workers=2)
    assert snapshot(out) == snapshot(base / "data")


def test_two_builds_at_once_harm_nothing(base, tmp_path):
    """They take turns unit by unit, or one is refused: never do both write one."""
    out = tmp_path / "data"
    runs = [start(base, out), start(base, out, 2)]
    printed = [run.communicate(timeout=60) for run in runs]
    for run, (_, errors) in zip(runs, printed, strict=True):
        assert run.returncode == 0 or "being built by another process" in errors, errors
    assert 0 in [run.returncode for run in runs], printed
    assert snapshot(out) == snapshot(base / "data")


def test_three_shards_one_killed(base, tmp_path):
    out = tmp_path / "data"
    runs = [start(base, out, 1, f"{index}/3") for index in (1, 2, 3)]
    wait_for_parts(runs[1], out, 4)
    runs[1].kill()
    printed = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, -signal.SIGKILL, 0], printed
    units = {int(path.name.split("-")[1]) for path in out.glob("*/part-*.json")}
    assert {unit for unit in range(17) if unit % 3 != 1} <= units and len(units) < 17
    with pytest.raises(SystemExit, match="2"):
        main(["finish", str(out)])
    again = start(base, out, 2, "2/3")
    _, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert not (out / "train/manifest.json").exists()
    main(["finish", str(out)])
    assert snapshot(out) == snapshot(base / "data")


# ---- full disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=4m") as folder:
        yield folder


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up(tmp_path, disk, workers):
    corpus, out = tmp_path / "corpus", disk / "data"
    write_corpus(corpus, files=20, rows=60, words=500)
    write_tokenizer(tmp_path / "tokenizer.model")
    options = Options(holdout=0.1, unit_files=2, max_part_tokens=60_000)
    build_corpus(tmp_path / "data", corpus, options=options)
    whole = snapshot(tmp_path / "data")
    size = sum(map(len, whole.values()))
    assert 1.5e6 < size < 3e6
    ballast = fill(disk)
    counts = []
    for share in (0.0, 0.1, 0.4, 0.8):
        os.truncate(ballast, min(ballast.stat().st_size, (4 << 20) - int(share * size)))
        with pytest.raises(UserError, match="the disk is full.*are free; make room"):
            build_corpus(out, corpus, workers=workers, options=options)
        # whole units, each split's, and nothing half written beside them
        marks = [path.stem for path in out.glob("*/part-*.json")]
        parts = [path.stem for path in out.glob("*/part-*") if path.suffix != ".json"]
        assert sorted(parts) == sorted(3 * marks)
        there = {name: content for name, content in snapshot(out).items() if "part-" in name}
        assert there.items() <= whole.items() and not list(out.glob("*/manifest.json"))
        counts.append(len(marks))
    assert counts == sorted(counts) and counts[0] < counts[-1]
    ballast.unlink()
    build_corpus(out, corpus, workers=workers, options=options)
    assert snapshot(out) == whole


# ---- changed inputs


@pytest.fixture
def corpus(base: Path, tmp_path: Path) -> Path:
    """A copy of the corpus, to be changed."""
    (tmp_path / "corpus").mkdir()
    for path in (base / "corpus").iterdir():
        (tmp_path / "corpus" / path.name).write_bytes(path.read_bytes())
    write_tokenizer(tmp_path / "tokenizer.model")
    return tmp_path / "corpus"


def test_an_input_changed_between_runs(base, corpus, tmp_path):
    out, changed = tmp_path / "data", corpus / "part20.jsonl"
    build_corpus(out, corpus)
    for path in out.glob("*/part-0000[3-9]-*"):
        path.unlink()
    before, good = snapshot(out), changed.read_bytes()
    changed.write_bytes(good.replace(b"the", b"thx", 1))
    with pytest.raises(UserError, match=r"input part20\.jsonl: \d+ bytes, sha256 .* -> "):
        build_corpus(out, corpus)
    changed.unlink()
    with pytest.raises(UserError, match=r"input part20\.jsonl: .* -> None"):
        build_corpus(out, corpus)
    assert snapshot(out) == before
    changed.write_bytes(good)
    corpus.rename(tmp_path / "moved")
    build_corpus(out, tmp_path / "moved")
    assert snapshot(out) == {**snapshot(base / "data"), "plan.json": before["plan.json"]}


def test_an_input_that_changes_while_it_is_built(corpus, tmp_path, monkeypatch):
    """Between the hashing of the small inputs and the reading: its unit is not committed."""
    out, changed, run_jobs = tmp_path / "data", corpus / "part7.jsonl", build_module.run_jobs

    def change_first(*arguments: Any) -> Any:
        changed.write_bytes(changed.read_bytes().replace(b"the", b"thx", 1))
        return run_jobs(*arguments)

    monkeypatch.setattr(build_module, "run_jobs", change_first)
    with pytest.raises(UserError, match=r"part7\.jsonl"):
        build_corpus(out, corpus)
    assert not list(out.glob("*/part-00003-*")) and committed(out)


def test_large_inputs_are_hashed_while_they_are_read(base, corpus, tmp_path, monkeypatch):
    """Too large to read twice: the size is compared before, the marks know the content."""
    monkeypatch.setattr("data_prep.plan.HASH_AHEAD_BYTES", 1000)
    out = tmp_path / "data"
    build_corpus(out, corpus)
    assert {known.sha256 for known in load_plan(out).inputs} == {""}
    last = max(out.glob("train/part-00002-*.json"))
    found = {name: sha256_file(corpus / name) for name in ("part5.jsonl", "part6.jsonl")}
    for path in (last, base / "data/train" / last.name):
        assert list(json.loads(path.read_text())["inputs"].items()) == list(found.items())
    content = {name: data for name, data in snapshot(out).items() if name.endswith("bin")}
    assert content.items() <= snapshot(base / "data").items()
    with open(corpus / "part20.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(UserError, match=r"input part20\.jsonl"):
        build_corpus(out, corpus)


def test_a_bad_input_ends_the_build_once_the_other_worker_is_done(corpus, tmp_path):
    out = tmp_path / "data"
    with open(corpus / "part9.jsonl", "a") as file:
        file.write('{"text": "cut sho')
    with pytest.raises(UserError, match=r"part9\.jsonl.*row 25"):
        build_corpus(out, corpus, workers=2)
    assert not list(out.glob("*/part-00004-*")) and not list(out.glob("*/manifest.json"))
    marks = {path.stem for path in out.glob("*/part-*.json")}
    assert {path.stem for path in out.glob("*/part-*.bin")} == marks


# ---- text and vocabularies


def test_odd_texts_end_to_end(tmp_path, capsys):
    odd = "a <s> b </s> c <unk> d"
    files = {
        "a.jsonl": json.dumps({"text": odd}).encode()
        + b'\n{"text": ""}\n{"text": null}\n{"text": "one \\ud800 half"}\n'
        + b'{"text": "bad \xff byte"}\n{"text": "good"}\n',
        "b.txt": b"",
        "c.jsonl": b"",
    }
    (tmp_path / "corpus").mkdir()
    for name, content in files.items():
        (tmp_path / "corpus" / name).write_bytes(content)
    write_tokenizer(tmp_path / "tokenizer.model")
    build_corpus(tmp_path / "data", tmp_path / "corpus", options=Options(holdout=0.0))
    printed = capsys.readouterr().out
    assert "repaired: 1 invalid UTF-8, 1 lone surrogate\n" in printed
    assert "skipped: 3 empty\n" in printed
    texts = [odd, "one \ufffd half", "bad \ufffd byte", "good"]
    assert stored_texts(tmp_path / "data") == texts


def test_bos_before_every_document(base, tmp_path):
    data = tmp_path / "data"
    options = Options(holdout=0.1, bos=True, unit_files=2, max_part_tokens=2500)
    build_corpus(data, base / "corpus", options=options)
    for split in ("train", "validation"):
        with TokenShards.open(data / split) as shards:
            ids, starts = shards.read(0, shards.num_tokens), [0, *shards.document_ends()[:-1]]
        with TokenShards.open(base / "data" / split) as plain:
            assert np.array_equal(np.delete(ids, starts), plain.read(0, plain.num_tokens))
        assert tokenizer().bos_id >= 0 and (ids[starts] == tokenizer().bos_id).all()
    main(["verify", str(data)])
    with pytest.raises(UserError, match="bos: True -> False"):
        build_corpus(data, base / "corpus")


def test_a_tokenizer_json_of_70_000_words(tmp_path):
    vocabulary = {"<unk>": 0} | {f"w{i}": i for i in range(1, 69_999)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    # the last of them, and EOS itself, would be 4462 and 4463 in 16 bits
    (tmp_path / "a.txt").write_text("w69998 w3 w65535 w4462")
    arguments = ["--files", str(tmp_path / "a.txt"), "--out", str(tmp_path / "data")]
    arguments += ["--tokenizer", str(tmp_path / "tokenizer.json"), "--holdout", "0"]
    main(["build", "--source", "local", *arguments])
    with TokenShards.open(tmp_path / "data/train") as shards:
        assert shards.read(0, 5).tolist() == [69_998, 3, 65_535, 4462, 69_999]
    main(["verify", str(tmp_path / "data")])

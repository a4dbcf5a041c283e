"""Faults of long builds: kills, two builds at once, full disks, changed inputs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from canon_pretrain.core.files import sha256_file
from canon_pretrain.data.shards import TokenShards
from data_prep import build as build_module
from data_prep.__main__ import main
from data_prep.plan import Options, load_plan
from tests.checkpoint_folders import fill, small_disk
from tests.corpora import build_corpus, corpus_folder, snapshot, write_corpus, write_tokenizer
from tests.data_folders import tokenizer
from tests.support import ROOT, error_codes, refused


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a corpus of 11 input groups, its tokenizer, and `data`."""
    return corpus_folder(tmp_path_factory.mktemp("faults"), files=22)


# argv: base, out, workers
BUILD = """
import sys
from pathlib import Path
from canon_pretrain.core.cli import command
from tests.corpora import build_corpus

base, out, workers = sys.argv[1:]
with command():
    build_corpus(Path(out), Path(base) / "corpus", workers=int(workers))
"""


def start(base, out, workers=1):
    words, pipe = [sys.executable, "-c", BUILD, str(base), str(out), str(workers)], subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def wait_for_shards(run, out, count):
    deadline = time.monotonic() + 60
    while committed(out) < count and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def committed(out):
    return len(list(out.glob("*/part-*.json")))


@pytest.mark.system
@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_a_killed_process_ends_the_build(base, tmp_path, victim):
    out = tmp_path / "data"
    run = start(base, out, 2)
    wait_for_shards(run, out, 3)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    workers = [int(pid) for pid, command in commands.items() if b"spawn_main" in command]
    os.kill(workers[0] if victim == "worker" else run.pid, signal.SIGKILL)
    _, errors = run.communicate(timeout=60)  # returns when the workers have ended, too
    codes = ["data.worker_killed"] if victim == "worker" else []
    assert error_codes(errors) == codes, errors
    assert run.returncode == (2 if victim == "worker" else -signal.SIGKILL)
    assert committed(out) and not (out / "train/manifest.json").exists()
    build_corpus(out, base / "corpus")
    assert snapshot(out) == snapshot(base / "data")


@pytest.mark.system
def test_two_builds_at_once(base, tmp_path):
    out = tmp_path / "data"
    runs = [start(base, out), start(base, out, 2)]
    printed = [run.communicate(timeout=60) for run in runs]
    for run, (_, errors) in zip(runs, printed, strict=True):
        assert run.returncode == 0 or error_codes(errors) == ["lock.held"], errors
    assert 0 in [run.returncode for run in runs], printed
    assert snapshot(out) == snapshot(base / "data")


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "size=4m") as folder:
        yield folder


@pytest.mark.system
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
        with refused("disk.full"):
            build_corpus(out, corpus, workers=workers, options=options)
        # whole input groups, and no partial files
        records = [path.stem for path in out.glob("*/part-*.json")]
        others = [path.stem for path in out.glob("*/part-*") if path.suffix != ".json"]
        assert sorted(others) == sorted(3 * records)
        there = {name: content for name, content in snapshot(out).items() if "part-" in name}
        assert there.items() <= whole.items() and not list(out.glob("*/manifest.json"))
        counts.append(len(records))
    assert counts == sorted(counts) and counts[0] < counts[-1]
    ballast.unlink()
    build_corpus(out, corpus, workers=workers, options=options)
    assert snapshot(out) == whole


# ---- changed inputs


@pytest.fixture
def corpus(base, tmp_path):
    write_tokenizer(tmp_path / "tokenizer.model")
    return Path(shutil.copytree(base / "corpus", tmp_path / "corpus"))


def test_an_input_changed_between_runs(base, corpus, tmp_path):
    out, changed = tmp_path / "data", corpus / "part20.jsonl"
    build_corpus(out, corpus)
    for path in out.glob("*/part-0000[3-9]-*"):
        path.unlink()
    before, good = snapshot(out), changed.read_bytes()
    changed.write_bytes(good.replace(b"the", b"thx", 1))
    with refused("plan.changed") as caught:
        build_corpus(out, corpus)
    (difference,) = caught.value.fields["differences"]
    assert difference.startswith("input part20.jsonl: ")
    changed.unlink()
    with refused("plan.changed"):
        build_corpus(out, corpus)
    assert snapshot(out) == before
    changed.write_bytes(good)
    corpus.rename(tmp_path / "moved")
    build_corpus(out, tmp_path / "moved")
    assert snapshot(out) == {**snapshot(base / "data"), "plan.json": before["plan.json"]}


def test_an_input_that_changes_while_it_is_built(corpus, tmp_path, monkeypatch):
    out, changed, run_jobs = tmp_path / "data", corpus / "part7.jsonl", build_module.run_jobs

    def change_first(*arguments):
        changed.write_bytes(changed.read_bytes().replace(b"the", b"thx", 1))
        return run_jobs(*arguments)

    monkeypatch.setattr(build_module, "run_jobs", change_first)
    with refused("input.changed", path=changed):
        build_corpus(out, corpus)
    assert not list(out.glob("*/part-00003-*")) and committed(out)


def test_large_inputs_are_hashed_while_they_are_read(base, corpus, tmp_path, monkeypatch):
    """They are too large to read twice; the commit records have their hashes."""
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
    with refused("plan.changed"):
        build_corpus(out, corpus)


@pytest.mark.system
def test_a_bad_input_ends_the_build_after_the_other_worker(corpus, tmp_path):
    out = tmp_path / "data"
    with open(corpus / "part9.jsonl", "a") as file:
        file.write('{"text": "cut sho')
    with refused("input.bad_row", path=corpus / "part9.jsonl", row=25):
        build_corpus(out, corpus, workers=2)
    assert not list(out.glob("*/part-00004-*")) and not list(out.glob("*/manifest.json"))
    records = {path.stem for path in out.glob("*/part-*.json")}
    assert {path.stem for path in out.glob("*/part-*.bin")} == records


def test_bos_before_each_document(base, tmp_path):
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

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
from tests.support import HANGS_AFTER_S, ROOT, error_codes, refused


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
    """Start a build in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(base), str(out), str(workers)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_shards(run, out, count):
    """Wait until a build has committed this many shards, has ended, or takes a minute."""
    deadline = time.monotonic() + HANGS_AFTER_S
    while committed(out) < count and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def committed(out):
    """Return the number of committed shards."""
    return len(list(out.glob("*/part-*.json")))


def workers_of(pid):
    """Return the ids of the workers of a build."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, command in commands.items() if b"spawn_main" in command]


@pytest.mark.system
@pytest.mark.parametrize(
    ("victim", "code", "codes"),
    [("worker", 2, ["data.worker_killed"]), ("parent", -signal.SIGKILL, [])],
    ids=["worker", "parent"],
)
def test_a_killed_process_ends_the_build(base, tmp_path, victim, code, codes):
    out = tmp_path / "data"
    run = start(base, out, 2)
    wait_for_shards(run, out, 3)

    os.kill(workers_of(run.pid)[0] if victim == "worker" else run.pid, signal.SIGKILL)
    _, errors = run.communicate(timeout=HANGS_AFTER_S)  # returns when the workers have ended, too

    assert error_codes(errors) == codes, errors
    assert run.returncode == code
    assert committed(out)
    assert not (out / "train/manifest.json").exists()
    build_corpus(out, base / "corpus")
    assert snapshot(out) == snapshot(base / "data")


@pytest.mark.system
def test_two_builds_at_once(base, tmp_path):
    out = tmp_path / "data"
    runs = [start(base, out), start(base, out, 2)]
    printed = [run.communicate(timeout=HANGS_AFTER_S) for run in runs]
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
    corpus = tmp_path / "corpus"
    out = disk / "data"
    write_corpus(corpus, files=20, rows=60, words=500)
    write_tokenizer(tmp_path / "tokenizer.model")
    options = Options(holdout=0.1, unit_files=2, max_part_tokens=60_000)
    build_corpus(tmp_path / "data", corpus, options=options)
    whole = snapshot(tmp_path / "data")
    size = sum(map(len, whole.values()))
    assert 1.5e6 < size < 3e6

    # ever more free space, but never enough
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
        parts = {name: content for name, content in snapshot(out).items() if "part-" in name}
        assert parts.items() <= whole.items()
        assert not list(out.glob("*/manifest.json"))
        counts.append(len(records))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]

    ballast.unlink()
    build_corpus(out, corpus, workers=workers, options=options)
    assert snapshot(out) == whole


# ---- changed inputs


@pytest.fixture
def corpus(base, tmp_path):
    """Return a copy of the corpus, next to its tokenizer."""
    write_tokenizer(tmp_path / "tokenizer.model")
    return Path(shutil.copytree(base / "corpus", tmp_path / "corpus"))


def test_an_input_changed_between_runs(base, corpus, tmp_path):
    out = tmp_path / "data"
    build_corpus(out, corpus)
    for path in out.glob("*/part-0000[3-9]-*"):
        path.unlink()
    before = snapshot(out)
    changed = corpus / "part20.jsonl"
    good = changed.read_bytes()

    changed.write_bytes(good.replace(b"the", b"thx", 1))
    with refused("plan.changed") as caught:
        build_corpus(out, corpus)
    (difference,) = caught.value.fields["differences"]
    assert difference.startswith("input part20.jsonl: ")

    changed.unlink()
    with refused("plan.changed"):
        build_corpus(out, corpus)
    assert snapshot(out) == before

    # with its content again, from another place
    changed.write_bytes(good)
    corpus.rename(tmp_path / "moved")
    build_corpus(out, tmp_path / "moved")
    assert snapshot(out) == {**snapshot(base / "data"), "plan.json": before["plan.json"]}


def test_an_input_that_changes_while_it_is_built(corpus, tmp_path, monkeypatch):
    out = tmp_path / "data"
    changed = corpus / "part7.jsonl"
    run_jobs = build_module.run_jobs

    def change_first(*arguments):
        changed.write_bytes(changed.read_bytes().replace(b"the", b"thx", 1))
        return run_jobs(*arguments)

    monkeypatch.setattr(build_module, "run_jobs", change_first)
    with refused("input.changed", path=changed):
        build_corpus(out, corpus)

    assert not list(out.glob("*/part-00003-*"))
    assert committed(out)


def test_large_inputs_are_hashed_while_they_are_read(base, corpus, tmp_path, monkeypatch):
    """They are too large to read twice; the commit records have their hashes."""
    monkeypatch.setattr("data_prep.plan.HASH_AHEAD_BYTES", 1000)
    out = tmp_path / "data"

    build_corpus(out, corpus)

    assert {source_input.sha256 for source_input in load_plan(out).inputs} == {""}
    hashes = [(name, sha256_file(corpus / name)) for name in ("part5.jsonl", "part6.jsonl")]
    last = max(out.glob("train/part-00002-*.json"))
    for path in (last, base / "data/train" / last.name):
        assert list(json.loads(path.read_text())["inputs"].items()) == hashes
    shards = {name: content for name, content in snapshot(out).items() if name.endswith("bin")}
    assert shards.items() <= snapshot(base / "data").items()

    # another size is noticed without a hash
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

    assert not list(out.glob("*/part-00004-*"))
    assert not list(out.glob("*/manifest.json"))
    records = {path.stem for path in out.glob("*/part-*.json")}
    assert {path.stem for path in out.glob("*/part-*.bin")} == records


def test_bos_before_each_document(base, tmp_path):
    data = tmp_path / "data"
    options = Options(holdout=0.1, bos=True, unit_files=2, max_part_tokens=2500)

    build_corpus(data, base / "corpus", options=options)

    assert tokenizer().bos_id >= 0
    for split in ("train", "validation"):
        with TokenShards.open(data / split) as shards:
            ids = shards.read(0, shards.num_tokens)
            starts = [0, *shards.document_ends()[:-1]]
        with TokenShards.open(base / "data" / split) as plain:
            ids_without_bos = plain.read(0, plain.num_tokens)
        assert (ids[starts] == tokenizer().bos_id).all()
        assert np.array_equal(np.delete(ids, starts), ids_without_bos)
    main(["verify", str(data)])

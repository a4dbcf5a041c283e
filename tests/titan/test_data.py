"""A job's data: opened once per node, in either order, prefetched, refused if they do not fit."""

import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.loader import BatchLoader
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.run.sections import Data
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import (
    LOADER_CLOSE_TIMEOUT_S,
    CanonDataLoader,
    open_data,
    open_shards,
)
from canon_pretrain.titan.dry_run import Plan, this_machine
from tests.ranks import assert_refused, events, launch
from tests.support import EOS_ID, ROOT, debug_run, refused, token_documents, write_data, write_split

BATCH, SEQ_LEN = 12, 64
WEIGHTS = [0.75, 0.25]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("sources")
    for k, name in enumerate(("web", "books")):
        write_split(base / name / "train", 7 + k, 40)
    return [base / "web", base / "books"]


def experiment(tmp_path, **data):
    """Return the command line of debug.toml with these [data] keys, into tmp_path/run."""
    words = ["--config", str(ROOT / "train_configs/debug.toml")]
    words += ["--job.dump_folder", str(tmp_path / "run")]
    for key, value in data.items():
        words += [f"--data.{key}", *map(str, value if isinstance(value, list) else [value])]
    return words


def test_a_source_too_short_or_of_another_vocabulary_is_named(folders, tmp_path):
    write_shards(tmp_path / "short" / "train", [np.arange(30)], vocab_size=512, eos_id=EOS_ID)
    write_shards(tmp_path / "other" / "train", [np.arange(300)], vocab_size=600, eos_id=EOS_ID)
    short, other = ([str(folders[0]), str(tmp_path / name)] for name in ("short", "other"))
    with refused("data.too_short", folder=short[1], num_tokens=30):
        open_shards(parse_job(experiment(tmp_path, paths=short, weights=[1, 1])))
    with pytest.raises(UserError, match="vocab_size"):
        open_shards(parse_job(experiment(tmp_path, paths=other, weights=[1, 1])))
    # unset, vocab_size is that of the data
    words = experiment(tmp_path, path=str(tmp_path / "other"))
    job = parse_job(words)
    assert job.model_args.vocab_size == 512  # the flavor's, before the data are read
    open_shards(job).close()
    assert job.model_args.vocab_size == 600
    with refused("data.vocab_size", given=512, expected=600):
        open_shards(parse_job([*words, "--model.vocab_size", "512"]))


def test_the_model_may_have_more_ids_than_the_data(folders, tmp_path):
    """As imported models do, whose vocabulary is padded to a multiple of 128."""
    shutil.copytree(folders[0], tmp_path / "data")
    write_split(tmp_path / "data" / "validation", 9, 8)
    words = experiment(tmp_path, path=str(tmp_path / "data"))
    known = open_data(exact := parse_job(words))
    opened = open_data(padded := parse_job([*words, "--model.vocab_size", "640"]))
    assert (exact.model_args.vocab_size, padded.model_args.vocab_size) == (512, 640)
    assert opened.training.vocab_size == 512 and padded.validation.enable is True
    assert opened.identity == known.identity and known.notices == []
    assert len(opened.notices) == 1
    plan, other = (Plan(job, this_machine(1), 1) for job in (padded, exact))
    assert plan.data_fingerprint == other.data_fingerprint
    assert (plan.data_bytes, plan.data_vocab_size) == (other.data_bytes, 512)
    dim = padded.model_args.dim
    assert plan.parameters - other.parameters == 2 * dim * 128


@pytest.mark.system
def test_a_mixture_resumes_at_another_world_size(folders, tmp_path):
    """Each logged step has the tokens per source, by the specification's random numbers."""
    argv = experiment(tmp_path, paths=[str(folder) for folder in folders], weights=WEIGHTS)
    for ranks, stop_at in ((2, 2), (1, 4)):
        launch(*argv, "--run.stop_at", stop_at, ranks=ranks, output=tmp_path / "out")
    lines = events(tmp_path / "run", "step")
    assert [event["step"] for event in lines] == [1, 2, 3, 4]
    blocks = [np.random.Philox(key=0, counter=(i - 1) % 2**256) for i in range(4 * BATCH)]
    is_books = [int(block.random_raw(2)[1]) >= 3 * 2**62 for block in blocks]
    for event in lines:
        seen, books = event["step"] * BATCH, sum(is_books[: event["step"] * BATCH])
        assert event["source_tokens"] == {"web": (seen - books) * SEQ_LEN, "books": books * SEQ_LEN}
        assert sum(event["source_tokens"].values()) == event["tokens"]
    other = experiment(tmp_path, paths=[str(folder) for folder in folders], weights=[0.5, 0.5])
    assert_refused(launch(*other, ranks=1, output=tmp_path / "out", check=False), "run.changed")


@pytest.fixture
def data(tmp_path):
    """Shards of more than one 64-KiB block."""
    folder = tmp_path / "data" / "train"
    write_split(folder, 3, 200, length=400)
    return folder


def loader(folder, read_ahead):
    sizes = {"seq_len": SEQ_LEN, "global_batch_size": 6, "local_batch_size": 2}
    return CanonDataLoader(BatchLoader(TokenShards.open(folder), data_seed=1, **sizes), read_ahead)


def take(iterator):
    inputs, labels = next(iterator)
    return torch.cat([inputs["input"], labels], dim=1)


def test_a_state_is_resumed_exactly(data):
    ahead, plain = loader(data, 4), loader(data, 0)
    batches = iter(ahead)
    first, _, _ = (take(batches) for _ in range(3))  # a step
    copied, state = first.clone(), ahead.state_dict()
    after = [take(batches) for _ in range(5)]
    assert torch.equal(first, copied)  # later reads use other memory
    ahead.load_state_dict(state)  # back, in the middle of iterating, with more in the queue
    plain.load_state_dict(state)
    for each in (batches, rest := iter(plain)):
        assert all(torch.equal(take(each), expected) for expected in after)
    ahead.close()  # returns to the last batch taken
    assert ahead.loader.state_dict() == ahead.state_dict() == plain.state_dict()
    assert torch.equal(take(batches), take(rest))
    ahead.close()


def test_a_hanging_read_delays_neither_steps_nor_the_end(data, monkeypatch, caplog):
    batches = loader(data, 3)
    free, read = threading.Event(), batches.loader.next_batch
    calls = iter(range(100))

    def hang_at_the_third():
        if next(calls) == 2:
            free.wait()
        return read()

    monkeypatch.setattr(batches.loader, "next_batch", hang_at_the_third)
    steps = iter(batches)
    for _ in range(2):
        take(steps)
    state = batches.state_dict()
    begin = time.monotonic()
    steps.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begin < LOADER_CLOSE_TIMEOUT_S / 2
    assert not caplog.records
    batches.close(timeout_s=0.01)
    assert len(caplog.records) == 1
    assert batches.state_dict() == state
    free.set()
    batches.close()
    assert batches.loader.state_dict() == state


def on_own_node(rank, folder):
    """Make rank K the only one of its node, in `folder`/K."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(folder / str(rank))


def test_documents_must_end_with_the_models_eos_id(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        documents = [np.where(ids == EOS_ID, 5, ids) for ids in token_documents(seed, 3, 200)]
        write_shards(folder / "train", documents, vocab_size=512, eos_id=5)
    job = parse_job(experiment(tmp_path))
    for data in (Data(path=str(folders[0])), Data(paths=list(map(str, folders)), weights=[1, 1])):
        job.data = data
        job.model.document_mask, job.model.eos_id = True, None
        with refused("data.eos_id", folder=str(folders[0]), expected=5):
            open_shards(job)
        for mask, eos_id in ((True, 5), (False, None)):
            job.model.document_mask, job.model.eos_id = mask, eos_id
            open_shards(job).close()


@pytest.mark.system
def test_a_node_with_other_data_is_named(tmp_path):
    write_data(tmp_path / "0" / "data")
    shutil.copytree(tmp_path / "0" / "data", tmp_path / "1" / "data")
    shutil.rmtree(tmp_path / "1" / "data" / "validation")
    write_split(tmp_path / "1" / "data" / "validation", 3, 8)
    words = debug_run(Path("data"), tmp_path / "run")
    before = (on_own_node, tmp_path)
    ended = launch(*words, output=tmp_path / "out", check=False, before=before)
    assert_refused(ended, "data.differs_between_nodes")
    assert not (tmp_path / "run" / "checkpoint").exists()

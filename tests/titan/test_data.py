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

BATCH = 12
SEQ_LEN = 64
WEIGHTS = [0.75, 0.25]


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "web"
    write_split(folder / "train", 7, 40)
    return folder


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "books"
    write_split(folder / "train", 8, 40)
    return folder


def experiment(tmp_path, *data):
    """Return the command line of debug.toml with these [data] options, into tmp_path/run."""
    return [
        *("--config", str(ROOT / "train_configs/debug.toml")),
        *("--job.dump_folder", str(tmp_path / "run")),
        *map(str, data),
    ]


def mixture(tmp_path, folders, weights):
    """Return the command line of debug.toml on several sources, into tmp_path/run."""
    return experiment(tmp_path, "--data.paths", *folders, "--data.weights", *weights)


def test_a_source_that_is_too_short_is_named(web, tmp_path):
    short = tmp_path / "short"
    write_shards(short / "train", [np.arange(30)], vocab_size=512, eos_id=EOS_ID)
    with refused("data.too_short", folder=str(short), num_tokens=30):
        open_shards(parse_job(mixture(tmp_path, [web, short], [1, 1])))

    # a window of one document is padded
    job = parse_job(experiment(tmp_path, "--data.path", short, "--data.order", "documents"))
    assert open_shards(job).num_tokens == 30


def test_a_source_of_another_vocabulary_is_refused(web, tmp_path):
    other = tmp_path / "other"
    write_shards(other / "train", [np.arange(300)], vocab_size=600, eos_id=EOS_ID)
    with pytest.raises(UserError, match="vocab_size"):
        open_shards(parse_job(mixture(tmp_path, [web, other], [1, 1])))


def test_an_unset_vocab_size_is_that_of_the_data(tmp_path):
    data = tmp_path / "data"
    write_shards(data / "train", [np.arange(300)], vocab_size=600, eos_id=EOS_ID)
    command = experiment(tmp_path, "--data.path", data)

    job = parse_job(command)
    assert job.model_args.vocab_size == 512  # the flavor's, before the data are read
    open_shards(job).close()
    assert job.model_args.vocab_size == 600

    with refused("data.vocab_size", given=512, expected=600):
        open_shards(parse_job([*command, "--model.vocab_size", "512"]))


def test_the_model_may_have_more_ids_than_the_data(web, tmp_path):
    """As imported models do, whose vocabulary is padded to a multiple of 128."""
    data = tmp_path / "data"
    shutil.copytree(web, data)
    write_split(data / "validation", 9, 8)
    command = experiment(tmp_path, "--data.path", data)
    exact = parse_job(command)
    padded = parse_job([*command, "--model.vocab_size", "640"])

    exact_data = open_data(exact)
    padded_data = open_data(padded)

    # the data are the same, and one notice says that ids are left over
    assert exact.model_args.vocab_size == 512
    assert padded.model_args.vocab_size == 640
    assert padded.validation.enable is True
    assert padded_data.training.vocab_size == 512
    assert padded_data.identity == exact_data.identity
    assert exact_data.notices == []
    assert len(padded_data.notices) == 1

    # so are the plans, but for the rows of two matrices
    exact_plan = Plan(exact, this_machine(1), 1)
    padded_plan = Plan(padded, this_machine(1), 1)
    assert padded_plan.data_fingerprint == exact_plan.data_fingerprint
    assert padded_plan.data_bytes == exact_plan.data_bytes
    assert padded_plan.data_vocab_size == 512
    dim = padded.model_args.dim
    assert padded_plan.parameters - exact_plan.parameters == 2 * dim * 128


@pytest.mark.system
def test_a_mixture_resumes_at_another_world_size(web, books, tmp_path):
    """Each logged step has the tokens per source, by the specification's random numbers."""
    command = mixture(tmp_path, [web, books], WEIGHTS)
    launch(*command, "--run.stop_at", 2, ranks=2, output=tmp_path / "out")
    launch(*command, "--run.stop_at", 4, ranks=1, output=tmp_path / "out")

    # sample i is of books if its second random number is in the last quarter
    blocks = [np.random.Philox(key=0, counter=(i - 1) % 2**256) for i in range(4 * BATCH)]
    is_books = [int(block.random_raw(2)[1]) >= 3 * 2**62 for block in blocks]
    steps = events(tmp_path / "run", "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    for event in steps:
        num_samples = event["step"] * BATCH
        num_books = sum(is_books[:num_samples])
        assert event["source_tokens"] == {
            "web": (num_samples - num_books) * SEQ_LEN,
            "books": num_books * SEQ_LEN,
        }
        assert event["tokens"] == num_samples * SEQ_LEN

    # other weights are another run
    changed = mixture(tmp_path, [web, books], [0.5, 0.5])
    ended = launch(*changed, ranks=1, output=tmp_path / "out", check=False)
    assert_refused(ended, "run.changed")


@pytest.fixture
def data(tmp_path):
    """Shards of more than one 64-KiB block."""
    folder = tmp_path / "data" / "train"
    write_split(folder, 3, 200, length=400)
    return folder


def dataloader(folder, read_ahead):
    """Return a dataloader of 2 rows a batch that reads this many batches ahead."""
    loader = BatchLoader(
        TokenShards.open(folder),
        data_seed=1,
        seq_len=SEQ_LEN,
        global_batch_size=6,
        local_batch_size=2,
    )
    return CanonDataLoader(loader, read_ahead)


def take(iterator):
    """Return inputs and labels of the next batch, side by side."""
    inputs, labels = next(iterator)
    return torch.cat([inputs["input"], labels], dim=1)


def test_a_state_is_resumed_exactly(data):
    ahead = dataloader(data, read_ahead=4)
    plain = dataloader(data, read_ahead=0)
    batches = iter(ahead)
    plain_batches = iter(plain)

    # the state after a step of three batches; later reads use other memory
    first = take(batches)
    copy_of_first = first.clone()
    for _ in range(2):
        take(batches)
    state = ahead.state_dict()
    next_batches = [take(batches) for _ in range(5)]
    assert torch.equal(first, copy_of_first)

    # back to it, in the middle of iterating, with more in the queue
    ahead.load_state_dict(state)
    plain.load_state_dict(state)
    for expected in next_batches:
        assert torch.equal(take(batches), expected)
        assert torch.equal(take(plain_batches), expected)

    # closed, it returns to the last batch taken
    ahead.close()
    assert ahead.loader.state_dict() == ahead.state_dict() == plain.state_dict()
    assert torch.equal(take(batches), take(plain_batches))
    ahead.close()


def test_a_hanging_read_delays_neither_steps_nor_the_end(data, monkeypatch, caplog):
    batches = dataloader(data, read_ahead=3)
    read = batches.loader.next_batch
    disk_is_back = threading.Event()
    calls = iter(range(100))

    def hang_at_the_third():
        if next(calls) == 2:
            disk_is_back.wait()
        return read()

    monkeypatch.setattr(batches.loader, "next_batch", hang_at_the_third)
    steps = iter(batches)
    for _ in range(2):
        take(steps)
    state = batches.state_dict()

    # the end of the steps
    begin = time.monotonic()
    steps.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begin < LOADER_CLOSE_TIMEOUT_S / 2
    assert not caplog.records

    # the end of the launch, with a warning
    batches.close(timeout_s=0.01)
    assert len(caplog.records) == 1
    assert batches.state_dict() == state

    # what was read too late is not taken
    disk_is_back.set()
    batches.close()
    assert batches.loader.state_dict() == state


def on_own_node(rank, folder):
    """Make rank K the only one of its node, in `folder`/K."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(folder / str(rank))


def test_documents_must_end_with_the_models_eos_id(tmp_path):
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    for seed, folder in enumerate(folders):
        documents = [np.where(ids == EOS_ID, 5, ids) for ids in token_documents(seed, 3, 200)]
        write_shards(Path(folder, "train"), documents, vocab_size=512, eos_id=5)
    job = parse_job(experiment(tmp_path))

    for data in (Data(path=folders[0]), Data(paths=folders, weights=[1, 1])):
        job.data = data

        # with the mask, the model's id is that of the data
        job.model.document_mask = True
        job.model.eos_id = None
        with refused("data.eos_id", folder=folders[0], expected=5):
            open_shards(job)
        job.model.eos_id = 5
        open_shards(job).close()

        # without one, any is right
        job.model.document_mask = False
        job.model.eos_id = None
        open_shards(job).close()


@pytest.mark.system
def test_a_node_with_other_data_is_named(tmp_path):
    data_0 = tmp_path / "0" / "data"
    data_1 = tmp_path / "1" / "data"
    write_data(data_0)
    shutil.copytree(data_0, data_1)
    shutil.rmtree(data_1 / "validation")
    write_split(data_1 / "validation", 3, 8)

    ended = launch(
        *debug_run(Path("data"), tmp_path / "run"),
        output=tmp_path / "out",
        check=False,
        before=(on_own_node, tmp_path),
    )

    assert_refused(ended, "data.differs_between_nodes")
    assert not (tmp_path / "run" / "checkpoint").exists()

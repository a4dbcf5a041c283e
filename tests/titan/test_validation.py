"""Held-out loss while training: correct, equal at any world size, without effect on training."""

import dataclasses
import math
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.held_out import divide_windows, windows
from canon_pretrain.data.mixture import exact_weight
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.hf.loading import load_model
from canon_pretrain.machine.device import to_device
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import RunLog
from canon_pretrain.run.sections import Data
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import open_data
from canon_pretrain.titan.validation import CanonValidator, logged_at, num_windows
from eval.model.lm import CanonLM
from eval.validation import model_loss
from tests.fault_runs import flip
from tests.ranks import assert_refused, assert_same_run, events, launch
from tests.support import (
    EOS_ID,
    ROOT,
    VOCAB_SIZE,
    debug_run,
    refused,
    token_documents,
    write_split,
)

CPU = torch.device("cpu")


def debug_job(**data):
    """Return the debug run's job with this [data] section."""
    job = parse_job(["--config", str(ROOT / "train_configs" / "debug.toml")])
    job.data = Data(**data)
    return job


def validator_of(job, rank=0, world_size=1):
    return CanonValidator(job, open_data(job).held_out, rank, world_size)


def forget_validation(run):
    """Remove the validations from a run's log."""
    log = RunFolder(run).log_file
    lines = [line for line in log.read_text().splitlines() if '"validation"' not in line]
    log.write_text("\n".join(lines) + "\n")


def test_the_default_follows_freq_and_the_batch_alone():
    job = debug_job()
    job.training.global_batch_size = 48
    job.training.seq_len = 4096

    for steps, freq, expected in (
        (510_000, 1000, 480),  # 2**21 tokens at most
        (510_000, 100_000, 480),
        (510_000, 199, 48),
        (50, 199, 24),  # one validation, of half a batch
    ):
        job.training.steps = steps
        job.validation.freq = freq
        assert num_windows(job) == expected

    job.validation.windows = -1
    assert num_windows(job) is None


def test_windows_are_at_even_distances_and_given_out_by_share():
    assert [offset for offset, _ in windows(101, 10, 3)] == [0, 30, 60]
    assert list(windows(95, 10))[-1] == (90, 5)
    shares = [exact_weight(weight) for weight in (0.7, 0.25, 0.05)]
    assert divide_windows(10, shares, [99, 99, 99]) == [7, 3, 1]  # 7, 2.5, 0.5, and one at least
    assert divide_windows(20, shares, [99, 3, 99]) == [14, 3, 1]


@torch.no_grad()
def test_every_batch_goes_to_the_device_as_those_of_training_do(data_folder, monkeypatch):
    """By one helper, which pins them for a GPU: token ids, and each row's source."""
    job = debug_job(path=str(data_folder))
    job.validation.windows = 5
    validator = validator_of(job)
    model = Transformer(job.model_args)
    model.init_weights()
    moves = []

    def move(tensor, device):
        moves.append((tensor.dtype, device))
        return to_device(tensor, device)

    monkeypatch.setattr("canon_pretrain.titan.validation.to_device", move)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)

    validator.measure(model)

    assert validator.num_passes == 2
    assert moves == [(torch.int32, "cpu"), (torch.bool, "cpu")] * 2


@pytest.mark.system
@pytest.mark.parametrize(("limit", "world_sizes"), [(None, (1, 2, 3)), (7, (3,))])
def test_equal_at_any_world_size_and_to_eval(data_folder, runs, tmp_path, limit, world_sizes):
    """Scored by launches of a finished run: 26 windows, or 7, which leaves a last pass not full."""
    losses = []
    for world_size in world_sizes:
        run = tmp_path / f"run-{world_size}"
        shutil.copytree(runs.straight, run)
        forget_validation(run)
        launch(
            *debug_run(data_folder, run),
            *("--validation.windows", -1 if limit is None else limit),
            ranks=world_size,
            output=tmp_path / "out",
        )

        (event,) = events(run, "validation")
        assert event["step"] == 12
        assert event["tokens"] == 12 * 12 * 64
        (source,) = event["sources"].values()
        assert event["loss"] == source["loss"]
        assert event["bits_per_byte"] == source["bits_per_byte"]
        assert event["tokens_scored"] == source["tokens"]
        losses.append((event["loss"], event["bits_per_byte"], event["tokens_scored"]))

    # what `python -m eval run --suite validation` computes for the checkpoint
    lm = CanonLM(load_model(runs.straight / "checkpoint/step-12", CPU), None, max_length=64)
    with TokenShards.open(data_folder / "validation") as shards:
        loss, _ = model_loss(lm, shards, seq_len=64, limit=limit)
    expected = (loss.nats_per_token, loss.bits_per_byte, loss.num_tokens)
    for values in losses:
        assert values == pytest.approx(expected, rel=1e-6)
        assert values == pytest.approx(losses[0], rel=1e-9)


def test_a_mixture_by_source_against_float64(data_folder, tmp_path, monkeypatch):
    """Two ranks' sums added here; the loss per source, and the total by tokens and bytes."""
    other = tmp_path / "other"
    for name, seed in (("train", 5), ("validation", 6)):
        write_split(other / name, seed, 4, length=90, bytes_per_token=5)
    job = debug_job(paths=[str(data_folder), str(other)], weights=[3.0, 1.0])
    job.validation.windows = 8
    job.training.local_batch_size = 3

    # the mixture's held-out text
    opened = open_data(job)
    assert opened.notices == []
    assert job.validation.enable is True
    fingerprints = []
    for folder in (data_folder, other):
        with TokenShards.open(folder / "validation") as shards:
            fingerprints.append(shards.fingerprint)
    assert opened.identity == {"held_out_fingerprint": "+".join(fingerprints)}

    # sums of two ranks, per source: nats and tokens
    model = Transformer(job.model_args)
    model.init_weights()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    first, second = (validator_of(job, rank, 2) for rank in (0, 1))
    assert first.num_passes == second.num_passes == 2  # 8 windows in passes of 2 x 3
    first_sums = first.measure(model)
    sums = [
        (nats_0 + nats_1, count_0 + count_1)
        for (nats_0, count_0), (nats_1, count_1) in zip(
            first_sums, second.measure(model), strict=True
        )
    ]

    # the same in float64: 8 windows by weights 3 and 1
    nats_a, count_a = float64_loss(model, data_folder, limit=6)
    nats_b, count_b = float64_loss(model, other, limit=2)
    (sum_a, tokens_a), (sum_b, tokens_b) = sums
    assert (tokens_a, tokens_b) == (count_a, count_b)
    assert sum_a == pytest.approx(nats_a, rel=1e-6)
    assert sum_b == pytest.approx(nats_b, rel=1e-6)

    # the total: by tokens, and by bytes
    whole = first.loss(sums)
    assert whole.nats_per_token == pytest.approx((nats_a + nats_b) / (count_a + count_b), rel=1e-6)
    num_bytes = 3 * count_a + 5 * count_b
    assert whole.bits_per_byte == pytest.approx((nats_a + nats_b) / math.log(2) / num_bytes)
    assert first.names == [data_folder.name, "other"]

    # a loss of the second source that is not finite does not spread to the first
    sources_of_passes = iter(first._sources)

    def break_second_source(module, inputs, h_BTD):
        is_second_B = next(sources_of_passes) == 1
        return h_BTD.masked_fill(is_second_B[:, None, None], math.nan)

    model.norm.register_forward_hook(break_second_source)
    finite, (nats, _) = first.measure(model)
    assert finite == first_sums[0]
    assert math.isnan(nats)


def test_documents_are_scored_in_windows_of_their_own(tmp_path, monkeypatch):
    """As eval does, and as an explicit loop in float64; each document alone, cut to the window."""
    folder = tmp_path / "stories"
    for name, seed in (("train", 5), ("validation", 6)):
        documents = [token_documents(seed + n, 1, n)[0] for n in (2, 30, 65, 66, 200, 7)]
        documents.insert(2, np.array([EOS_ID]))
        num_bytes = [3 * len(document) for document in documents]
        write_shards(
            folder / name, documents, vocab_size=VOCAB_SIZE, eos_id=EOS_ID, num_bytes=num_bytes
        )
    job = debug_job(path=str(folder), order="documents")
    job.validation.windows = -1
    model = Transformer(job.model_args).eval()
    model.init_weights()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)

    validator = validator_of(job)
    ((nats, count),) = validator.measure(model)

    expected = 0.0
    num_predicted = 0
    with TokenShards.open(folder / "validation") as shards:
        starts = [0, *shards.document_ends().tolist()]
        for start, end in pairwise(starts):
            ids = torch.from_numpy(shards.read(start, min(65, end - start)))
            if len(ids) < 2:
                continue
            with torch.no_grad():
                logits = model(ids[None, :-1])[0].double()
            expected -= logits.log_softmax(-1).gather(1, ids[1:, None]).sum().item()
            num_predicted += len(ids) - 1
        loss, records = model_loss(
            CanonLM(model, None, max_length=64), shards, seq_len=64, order="documents"
        )
        _, packed_records = model_loss(CanonLM(model, None, max_length=64), shards, seq_len=64)
    assert validator.num_windows == 6  # one document has a single token
    assert count == num_predicted == 1 + 29 + 64 + 64 + 64 + 6
    assert nats == pytest.approx(expected, rel=1e-6)
    assert loss.num_tokens == count
    assert loss.nats_per_token == pytest.approx(expected / count, rel=1e-6)

    # a record per document; they are not the question that packed windows ask
    assert [record["nats_per_token"][1] for record in records] == [1, 29, 64, 64, 64, 6]
    questions = {record["prompt_hash"] for record in (*records, *packed_records)}
    assert len(questions) == 2


@torch.no_grad()
def float64_loss(model, folder, limit):
    """Return nats and number of tokens of `limit` windows of a folder's held-out text."""
    nats = 0.0
    count = 0
    with TokenShards.open(folder / "validation") as shards:
        for offset, size in windows(shards.num_tokens, 64, limit):
            ids = torch.from_numpy(shards.read(offset, size))
            logits = model(ids[None, :-1])[0].double()
            nats -= logits.log_softmax(-1).gather(1, ids[1:, None]).sum().item()
            count += size - 1
    return nats, count


@pytest.mark.system
def test_validation_does_not_change_training(data_folder, runs, tmp_path):
    """Stopped where a validation is due, its line lost, resumed, and launched once more."""
    run = tmp_path / "run"

    def launch_run(*options):
        launch(
            *debug_run(data_folder, run),
            *("--validation.freq", 2),
            *("--validation.windows", 9),
            *options,
            ranks=2,
            output=tmp_path / "out",
        )

    launch_run("--run.stop_at", 6)
    before = events(run, "validation")
    assert [event["step"] for event in before] == [2, 4, 6]

    # the last one is lost, and made again; the last launch has none to make
    forget_validation(run)
    launch_run()
    launch_run()
    after = events(run, "validation")
    assert [event["step"] for event in after] == [6, 8, 10, 12]
    for event in (before[-1], after[0]):
        for name in ("time", "segment", "seconds"):
            event.pop(name, None)
    assert before[-1] == after[0]
    assert before[0]["loss"] > after[-1]["loss"]

    # the run is that without these validations
    assert_same_run(run, runs.straight, step=12)
    (at_the_end,) = events(runs.straight, "validation")
    assert at_the_end["step"] == 12


@pytest.fixture
def bare(tmp_path):
    """A data folder without a held-out split."""
    folder = tmp_path / "bare"
    write_split(folder / "train", 1, 20)
    return folder


def test_data_without_a_held_out_split(bare):
    job = debug_job(path=str(bare))
    opened = open_data(job)
    assert len(opened.notices) == 1
    assert opened.identity == {"held_out_fingerprint": None}

    # refused if validation is requested
    job = debug_job(path=str(bare))
    job.validation.enable = True
    with refused("data.no_validation", folders=[str(bare)]):
        open_data(job)


def test_a_mixture_of_which_one_source_has_a_held_out_split(bare, data_folder):
    job = debug_job(paths=[str(bare), str(data_folder)], weights=[1.0, 1.0])

    opened = open_data(job)

    (notice,) = opened.notices
    assert str(bare) in notice
    assert str(data_folder) not in notice
    assert opened.identity["held_out_fingerprint"].startswith("none+")
    assert job.validation.enable
    assert CanonValidator(job, opened.held_out, 0, 1).names == [data_folder.name]


def test_a_damaged_held_out_split_is_refused(data_folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    (shard,) = (data / "validation").glob("*.bin")

    # a byte
    flip(shard)
    job = debug_job(path=str(data))
    job.validation.windows = -1
    with pytest.raises(UserError, match=shard.stem):
        validator_of(job)

    # a file
    shard.unlink()
    with refused("data.held_out"):
        open_data(debug_job(path=str(data)))

    # with validation off it is not read
    job.validation.enable = False
    opened = open_data(job)
    assert opened.held_out == []
    assert opened.identity == {}


def job_validated_on(data, folder):
    job = debug_job(path=str(data))
    job.validation = dataclasses.replace(job.validation, path=str(folder))
    return job


def test_validation_path_scores_another_folders_text(bare, data_folder, tmp_path):
    """Data built with --holdout 0, validated on another build's held-out split, or on all of it."""
    apart = tmp_path / "apart"
    write_split(apart / "train", 9, 8)
    for folder, split in ((data_folder, "validation"), (apart, "train")):
        job = job_validated_on(bare, folder)
        opened = open_data(job)
        assert opened.notices == []
        assert job.validation.enable is True
        with TokenShards.open(folder / split) as text:
            assert opened.identity == {"held_out_fingerprint": text.fingerprint}
        assert validator_of(job).names == [folder.name]


def test_a_validation_path_of_trained_or_foreign_text_is_refused(bare, tmp_path):
    foreign = tmp_path / "foreign"
    write_split(foreign / "train", 9, 8, tokenizer_sha256="f" * 64)

    with refused("data.overlap"):
        open_data(job_validated_on(bare, bare))
    with refused("data.tokenizers_differ"):
        open_data(job_validated_on(bare, foreign))


@pytest.mark.system
def test_another_held_out_text_is_another_run(data_folder, tmp_path):
    """The held-out split is replaced by another build's, with the same tokenizer."""
    data = tmp_path / "data"
    run = tmp_path / "run"
    shutil.copytree(data_folder, data)

    def launch_run(*options, check=True):
        return launch(
            *debug_run(data, run),
            *("--validation.freq", 4),
            *options,
            ranks=1,
            output=tmp_path / "out",
            check=check,
        )

    def recorded():
        return RunFolder(run).read_config()["identity"]["held_out_fingerprint"]

    launch_run("--run.stop_at", 4)
    before = recorded()
    (start,) = events(run, "start")
    assert start["held_out_fingerprint"] == before

    # another text is refused
    shutil.rmtree(data / "validation")
    write_split(data / "validation", 9, 8)
    assert_refused(launch_run(check=False), "run.changed")

    # with validation off, the recorded fingerprint is kept
    launch_run("--validation.enable", False, "--run.stop_at", 5)
    assert recorded() == before

    # allowed, it is the run's
    launch_run("--run.allow_changes", "held_out_fingerprint")
    with TokenShards.open(data / "validation") as shards:
        after = shards.fingerprint
    assert recorded() == after != before
    fingerprints = {e["step"]: e["held_out_fingerprint"] for e in events(run, "validation")}
    assert fingerprints == {4: before, 8: after, 12: after}


def test_an_undone_validation_is_repeated(tmp_path):
    """A launch killed between save and validation leaves the validation of an older branch."""
    log = RunLog(tmp_path / "log.jsonl")
    log.write("start")
    for step in (50, 100):
        log.write("validation", step=step, loss=1.0)
        log.write("samples", step=step, samples=[])
    log.flush()
    assert logged_at(log.path, 100) == {"validation", "samples"}

    # back to step 80, killed after the step that is validated
    log.write("resume", from_step=80)
    log.write("step", step=100, loss=1.0)
    log.write("resume", from_step=100)
    log.flush()
    assert logged_at(log.path, 100) == {"step"}
    assert "validation" in logged_at(log.path, 50)
    log.close()

    assert logged_at(tmp_path / "nothing", 100) == set()

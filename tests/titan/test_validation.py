"""Held-out loss while training: correct, equal at any world size, without effect on training."""

import dataclasses
import math
import shutil
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.held_out import divide_windows, windows
from canon_pretrain.data.mixture import exact_weight
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
from tests.support import ROOT, debug_run, refused, write_split

CPU = torch.device("cpu")


def debug_job(**data):
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
    job.training.global_batch_size, job.training.seq_len = 48, 4096
    for steps, freq, expected in (
        *((510_000, 1000, 480), (510_000, 100_000, 480)),  # 2**21 tokens at most
        *((510_000, 199, 48), (50, 199, 24)),  # the last is one validation, of half a batch
    ):
        job.training.steps, job.validation.freq = steps, freq
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
    model, moved = Transformer(job.model_args), []
    model.init_weights()

    def move(tensor, device):
        moved.append((tensor.dtype, device))
        return to_device(tensor, device)

    monkeypatch.setattr("canon_pretrain.titan.validation.to_device", move)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    validator.measure(model)
    assert validator.num_passes == 2
    assert moved == [(torch.int32, "cpu"), (torch.bool, "cpu")] * 2


@pytest.mark.system
@pytest.mark.parametrize("limit", [None, 7])
def test_equal_at_any_world_size_and_to_eval(data_folder, runs, tmp_path, limit):
    """Scored by launches of a finished run: 26 windows, or 7, which leaves a last pass not full."""
    found = []
    for ranks in (1, 2, 3) if limit is None else (3,):
        run = tmp_path / f"run-{ranks}"
        shutil.copytree(runs.straight, run)
        forget_validation(run)
        more = ("--validation.windows", -1 if limit is None else limit)
        launch(*debug_run(data_folder, run), *more, ranks=ranks, output=tmp_path / "out")
        (event,) = events(run, "validation")
        assert event["step"] == 12 and event["tokens"] == 12 * 12 * 64
        found.append((event["loss"], event["bits_per_byte"], event["tokens_scored"]))
        (source,) = event["sources"].values()
        assert (source["loss"], source["bits_per_byte"], source["tokens"]) == found[-1]
    # what `python -m eval run --suite validation` computes for the checkpoint
    lm = CanonLM(load_model(runs.straight / "checkpoint/step-12", CPU), None, max_length=64)
    with TokenShards.open(data_folder / "validation") as shards:
        loss, _ = model_loss(lm, shards, seq_len=64, limit=limit)
    expected = (loss.nats_per_token, loss.bits_per_byte, loss.num_tokens)
    for values in found:
        assert values == pytest.approx(expected, rel=1e-6)
    assert all(values == pytest.approx(found[0], rel=1e-9) for values in found)


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
    assert opened.notices == [] and job.validation.enable is True
    with TokenShards.open(data_folder / "validation") as own:
        with TokenShards.open(other / "validation") as others:
            both = f"{own.fingerprint}+{others.fingerprint}"
    assert opened.identity == {"held_out_fingerprint": both}

    # sums of two ranks
    model = Transformer(job.model_args)
    model.init_weights()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    validators = [validator_of(job, rank, 2) for rank in (0, 1)]
    assert {v.num_passes for v in validators} == {2}  # 8 windows in passes of 2 x 3
    shares = [validator.measure(model) for validator in validators]
    sums = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(*shares, strict=True)]

    # the same in float64: 8 windows by weights 3 and 1
    expected = []
    for folder, limit in ((data_folder, 6), (other, 2)):
        nats, count = 0.0, 0
        with TokenShards.open(folder / "validation") as shards, torch.no_grad():
            for offset, size in windows(shards.num_tokens, 64, limit):
                ids = torch.from_numpy(shards.read(offset, size))
                logits = model(ids[None, :-1])[0].double()
                nats -= logits.log_softmax(-1).gather(1, ids[1:, None]).sum().item()
                count += size - 1
        expected.append((nats, count))
    assert [count for _, count in sums] == [count for _, count in expected]
    for (nats, _), (wanted, _) in zip(sums, expected, strict=True):
        assert nats == pytest.approx(wanted, rel=1e-6)

    # the total: by tokens, and by bytes
    whole = validators[0].loss(sums)
    (nats_a, count_a), (nats_b, count_b) = expected
    assert whole.nats_per_token == pytest.approx((nats_a + nats_b) / (count_a + count_b), rel=1e-6)
    num_bytes = 3 * count_a + 5 * count_b
    assert whole.bits_per_byte == pytest.approx((nats_a + nats_b) / math.log(2) / num_bytes)
    assert validators[0].names == [data_folder.name, "other"]

    # NaN of one source
    turns = iter(validators[0]._sources)
    model.norm.register_forward_hook(  # not finite for the second source alone
        lambda _, given, h_BTD: h_BTD.masked_fill((next(turns) == 1)[:, None, None], math.nan)
    )
    good, bad = validators[0].measure(model)
    assert good == shares[0][0] and math.isnan(bad[0])  # NaN does not spread to other sources


@pytest.mark.system
def test_validation_does_not_change_training(data_folder, runs, tmp_path):
    """Stopped where a validation is due, its line lost, resumed, and launched once more."""
    run = tmp_path / "run"
    words = [*debug_run(data_folder, run), "--validation.freq", 2, "--validation.windows", 9]
    launch(*words, "--run.stop_at", 6, ranks=2, output=tmp_path / "out")
    first = events(run, "validation")
    assert [event["step"] for event in first] == [2, 4, 6]
    forget_validation(run)
    launch(*words, ranks=2, output=tmp_path / "out")
    launch(*words, ranks=2, output=tmp_path / "out")
    found = events(run, "validation")
    assert [event["step"] for event in found] == [6, 8, 10, 12]
    again = {"time", "segment", "seconds"}
    assert {k: v for k, v in found[0].items() if k not in again} == {
        k: v for k, v in first[-1].items() if k not in again
    }
    assert first[0]["loss"] > found[-1]["loss"]
    assert_same_run(run, runs.straight, step=12)
    (at_the_end,) = events(runs.straight, "validation")
    assert at_the_end["step"] == 12


def test_data_without_a_held_out_split(data_folder, tmp_path):
    bare = tmp_path / "bare"
    write_split(bare / "train", 1, 20)
    opened = open_data(debug_job(path=str(bare)))
    assert len(opened.notices) == 1 and opened.identity == {"held_out_fingerprint": None}
    job = debug_job(path=str(bare))
    job.validation.enable = True
    with refused("data.no_validation", folders=[str(bare)]):
        open_data(job)
    job = debug_job(paths=[str(bare), str(data_folder)], weights=[1.0, 1.0])
    opened = open_data(job)
    (notice,) = opened.notices
    assert opened.identity["held_out_fingerprint"].startswith("none+")
    assert job.validation.enable and str(bare) in notice and str(data_folder) not in notice
    assert CanonValidator(job, opened.held_out, 0, 1).names == [data_folder.name]


def test_a_damaged_held_out_split_is_refused(data_folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    (shard,) = (data / "validation").glob("*.bin")
    flip(shard)
    job = debug_job(path=str(data))
    job.validation.windows = -1
    with pytest.raises(UserError, match=shard.stem):
        validator_of(job)
    shard.unlink()
    with refused("data.held_out"):
        open_data(debug_job(path=str(data)))
    job.validation.enable = False
    assert (open_data(job).held_out, open_data(job).identity) == ([], {})


def test_validation_path_scores_another_folders_text(data_folder, tmp_path):
    """Data built with --holdout 0, validated on another build's text."""
    bare, apart = tmp_path / "bare", tmp_path / "apart"
    write_split(bare / "train", 1, 20)
    write_split(apart / "train", 9, 8)
    for folder, split in ((data_folder, "validation"), (apart, "train")):
        job = debug_job(path=str(bare))
        job.validation = dataclasses.replace(job.validation, path=str(folder))
        with TokenShards.open(folder / split) as text:
            opened = open_data(job)
            assert opened.notices == [] and job.validation.enable is True
            assert opened.identity == {"held_out_fingerprint": text.fingerprint}
            assert validator_of(job).names == [folder.name]
    write_split(tmp_path / "foreign" / "train", 9, 8, tokenizer_sha256="f" * 64)
    for code, folder in (("data.overlap", bare), ("data.tokenizers_differ", tmp_path / "foreign")):
        job.validation.path = str(folder)
        with refused(code):
            open_data(job)


@pytest.mark.system
def test_another_held_out_text_is_another_run(data_folder, tmp_path):
    """The held-out split is replaced by another build's, with the same tokenizer."""
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(data_folder, data)
    words = [*debug_run(data, run), "--validation.freq", 4]
    options: dict[str, Any] = {"ranks": 1, "output": tmp_path / "out"}

    def recorded():
        return RunFolder(run).read_config()["identity"]["held_out_fingerprint"]

    launch(*words, "--run.stop_at", 4, **options)
    before = recorded()
    assert [event["held_out_fingerprint"] for event in events(run, "start")] == [before]
    shutil.rmtree(data / "validation")
    write_split(data / "validation", 9, 8)
    assert_refused(launch(*words, check=False, **options), "run.changed")
    # with validation off, the recorded fingerprint is kept
    launch(*words, "--validation.enable", False, "--run.stop_at", 5, **options)
    assert recorded() == before
    launch(*words, "--run.allow_changes", "held_out_fingerprint", **options)
    with TokenShards.open(data / "validation") as shards:
        assert recorded() == shards.fingerprint != before
    found = {e["step"]: e["held_out_fingerprint"] for e in events(run, "validation")}
    assert found == {4: before, 8: recorded(), 12: recorded()}


def test_an_undone_validation_is_repeated(tmp_path):
    """A launch killed between save and validation leaves the validation of an older branch."""
    log = RunLog(tmp_path / "log.jsonl")
    log.write("start")
    for step in (50, 100):
        log.write("validation", step=step, loss=1.0)
        log.write("samples", step=step, samples=[])
    log.flush()
    assert logged_at(log.path, 100) == {"validation", "samples"}
    log.write("resume", from_step=80)
    log.write("step", step=100, loss=1.0)
    log.write("resume", from_step=100)
    log.flush()
    assert logged_at(log.path, 100) == {"step"} and "validation" in logged_at(log.path, 50)
    assert logged_at(tmp_path / "nothing", 100) == set()
    log.close()

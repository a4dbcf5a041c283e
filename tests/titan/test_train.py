"""The training command: stop, resume, other world sizes, golden losses, errors."""

import errno
import hashlib
import json
import os
import shutil
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torchtitan.tools import utils as titan_utils

from canon_pretrain.data.sampler import permuted, window_offset
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.model.args import flavor
from canon_pretrain.model.counts import flops_per_token
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import read_results
from canon_pretrain.titan import metrics
from canon_pretrain.titan.device import CACHE_BYTES, check_compiler_cache
from canon_pretrain.train import main
from eval.__main__ import main as evaluate
from eval.validation import baseline_losses
from tests.fault_runs import flip, resumed_from
from tests.ranks import assert_refused, assert_same_run, events, launch
from tests.support import (
    EOS_ID,
    ROOT,
    VOCAB_SIZE,
    debug_run,
    error_codes,
    refused,
    token_documents,
    train,
)

GOLDEN = ROOT / "tests" / "golden" / "debug_losses.json"
STEPS = 12


def curve(folder, name):
    """Return a field of each of a run's 12 steps."""
    steps = events(folder, "step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    return [event[name] for event in steps]


def assert_same_curves(run, other):
    """Check for equal data and schedules, and for losses equal up to float32's rounding."""
    for name in ("lr", "tokens", "data_digests"):
        assert curve(run, name) == curve(other, name), name
    for name in ("loss", "grad_norm"):
        assert curve(run, name) == pytest.approx(curve(other, name), rel=1e-5), name


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(runs):
    assert_same_run(runs.resumed, runs.straight, step=STEPS)


@pytest.mark.system
def test_a_run_resumes_at_another_world_size(runs):
    """Stopped on 3 ranks, finished on 1: the same samples, token counts, schedule and losses."""
    assert_same_curves(runs.elastic, runs.straight)
    launches = [event for event in events(runs.elastic) if "torch" in event]
    assert [event["world_size"] for event in launches] == [3, 1]


@pytest.mark.system
def test_replicas_resume_a_sharded_run(runs, data_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs.straight, run)
    shutil.rmtree(run / "checkpoint" / "step-12")
    (run / "DONE").unlink()

    launch(
        *debug_run(data_folder, run),
        *("--parallelism.data_parallel_replicate_degree", 2),
        output=tmp_path / "out",
    )

    assert resumed_from(run) == [6]
    assert_same_curves(run, runs.straight)


@pytest.mark.system
def test_a_recurrent_run_resumes_on_two_ranks_and_on_one(data_folder, tmp_path):
    straight = tmp_path / "straight"
    stopped = tmp_path / "stopped"
    elastic = tmp_path / "elastic"

    def launch_run(run, *options, ranks=2):
        launch(
            *debug_run(data_folder, run),
            *("--model.mixer", "gated_deltanet"),
            *("--model.num_heads", 4),
            *("--model.canon_set", "ABCD"),
            *("--model.document_mask", "true"),
            *options,
            ranks=ranks,
            output=tmp_path / "output",
        )

    launch_run(straight)
    launch_run(stopped, "--run.stop_at", 5)
    shutil.copytree(stopped, elastic)

    launch_run(stopped)
    assert_same_run(stopped, straight, step=STEPS)
    launch_run(elastic, ranks=1)
    assert_same_curves(elastic, straight)


@pytest.mark.system
def test_a_run_on_one_document_per_window(tmp_path):
    """On two ranks, and resumed on one: the documents of the formula, in the order of (seed, i).

    Its held-out loss is that of the suite `validation`, on documents too.
    """
    data = tmp_path / "data"
    for split, seed, count in (("train", 100, 50), ("validation", 500, 9)):
        lengths = [3 + 17 * n % 90 for n in range(count)]
        documents = [token_documents(seed + n, 1, length)[0] for n, length in enumerate(lengths)]
        num_bytes = [3 * length for length in lengths]
        write_shards(
            data / split,
            documents,
            vocab_size=VOCAB_SIZE,
            eos_id=EOS_ID,
            num_bytes=num_bytes,
        )
    straight = tmp_path / "straight"
    elastic = tmp_path / "elastic"

    def launch_run(run, *options, ranks):
        launch(
            *debug_run(data, run),
            *("--data.order", "documents"),
            *("--validation.windows", -1),
            *options,
            ranks=ranks,
            output=tmp_path / "output",
        )

    launch_run(straight, ranks=2)
    launch_run(elastic, "--run.stop_at", 5, ranks=3)
    launch_run(elastic, ranks=1)

    assert_same_curves(elastic, straight)
    with TokenShards.open(data / "train") as shards:
        ends = shards.document_ends().tolist()
        stories = [shards.read(start, end - start) for start, end in pairwise([0, *ends])]
    for step, digests in enumerate(curve(straight, "data_digests")):
        total = 0
        for i in range(12 * step, 12 * (step + 1)):
            ids = stories[permuted(0, i, len(stories))][:65]
            window = np.pad(ids, (0, 65 - len(ids)), constant_values=~EOS_ID)
            sample_hash = hashlib.blake2b(window.astype("<i8").tobytes(), digest_size=8)
            total += int.from_bytes(sample_hash.digest(), "little")
        assert digests == [f"{total % 2**64:016x}"]

    # the held-out documents: a label for each token but the first
    (validated,) = events(straight, "validation")
    assert validated["tokens_scored"] == sum(min(3 + 17 * n % 90, 65) - 1 for n in range(9))
    evaluate(["run", "--checkpoint", str(straight), "--suite", "validation"])
    (path,) = (straight / "evals/step-12/validation").glob("*/results.json")
    scores = read_results(path).scores["validation"]
    assert scores["nats_per_token"].value == pytest.approx(validated["loss"], rel=1e-6)


def test_every_step_saw_the_same_token_ids_in_every_run(runs, data_folder):
    """The digests in the log, against samples read from the shards."""
    digests = [digest for (digest,) in curve(runs.straight, "data_digests")]
    assert len(set(digests)) == STEPS
    assert curve(runs.resumed, "data_digests") == [[digest] for digest in digests]

    with TokenShards.open(data_folder / "train") as shards:
        for step, digest in enumerate(digests):
            total = 0
            for i in range(12 * step, 12 * (step + 1)):
                ids = shards.read(window_offset(0, i, shards.num_tokens, 64), 65)
                sample_hash = hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8)
                total += int.from_bytes(sample_hash.digest(), "little")
            assert digest == f"{total % 2**64:016x}"


def test_each_launch_logs_what_count_models_reach(runs, data_folder):
    """The figures are those of `eval run --suite validation`, also after a resume."""
    with TokenShards.open(data_folder / "train") as train_split:
        with TokenShards.open(data_folder / "validation") as held_out:
            expected = baseline_losses(train_split, held_out, seq_len=64)

    for run, num_launches in ((runs.straight, 1), (runs.resumed, 2)):
        logged = events(run, "count_models")
        assert len(logged) == num_launches
        for event in logged:
            for name, loss in expected.items():
                assert event[name] == pytest.approx(loss.nats_per_token, rel=1e-9)
                assert event["tokens_scored"] == loss.num_tokens


def test_losses_are_the_golden_ones(runs):
    """Written by `python -m tests.golden.write`; equal across machines to 1e-4."""
    golden = json.loads(GOLDEN.read_text())
    assert curve(runs.straight, "loss") == pytest.approx(golden["loss"], rel=1e-4)
    assert curve(runs.straight, "grad_norm") == pytest.approx(golden["grad_norm"], rel=1e-3)


ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.system), pytest.param("cuda", marks=ON_A_GPU)]
)
def test_compiled_bfloat16_resumes_bitwise_on(device, data_folder, tmp_path):
    """12 steps against 6 and a resume, with deterministic kernels."""
    straight = tmp_path / "straight"
    resumed = tmp_path / "resumed"

    def train_run(run, *options):
        train(
            *debug_run(data_folder, run),
            *("--compile.enable", "--debug.deterministic"),
            *("--training.mixed_precision_param", "bfloat16"),
            *options,
            on_gpu=device == "cuda",
        )

    train_run(straight)
    train_run(resumed, "--run.stop_at", 6)
    train_run(resumed)

    assert len(events(resumed, "resume")) == 1
    for record in RunFolder(resumed).launches.glob("*/launch.json"):
        assert json.loads(record.read_text())["devices"]["type"] == device
    assert_same_run(resumed, straight, step=STEPS)


@pytest.mark.system
def test_bfloat16_trains_alike_on_one_rank_and_two(data_folder, tmp_path):
    """The default precision: FSDP2 casts at every world size, autocast at none."""

    def losses(ranks):
        run = tmp_path / str(ranks)
        launch(
            *debug_run(data_folder, run),
            *("--model.position", "partial_rope_a"),
            *("--model.qk_norm", "full"),
            *("--training.mixed_precision_param", "bfloat16"),
            *("--run.stop_at", 6),
            ranks=ranks,
            output=tmp_path / "out",
        )
        return [event["loss"] for event in events(run, "step")]

    on_one = losses(ranks=1)
    on_two = losses(ranks=2)

    assert on_two == pytest.approx(on_one, rel=2e-3)  # bf16 rounds at 4e-3
    assert on_two[0] == pytest.approx(on_one[0], rel=1e-5)  # before any rounding differs
    assert on_two[-1] < on_two[0] - 0.05


def code_of(argv, capsys):
    """Run the trainer in this process; return its one error's code; it must exit with 2."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(word) for word in argv])
    assert exit_info.value.code == 2
    printed = capsys.readouterr().err
    (code,) = error_codes(printed)
    assert printed.count("\n") == 1
    return code


def test_data_that_do_not_fit_leave_no_run_folder(data_folder, tmp_path, capsys):
    run = tmp_path / "run"
    damaged = tmp_path / "damaged"
    shutil.copytree(data_folder, damaged)
    (damaged / "train" / "part-00000-0.bin").write_bytes(b"short")
    without_data = ["--config", ROOT / "train_configs" / "debug.toml"]

    for argv, start_of_code in (
        (debug_run(tmp_path / "nowhere", run), "shard."),
        (debug_run(damaged, run), "shard."),
        ([*debug_run(data_folder, run), "--model.vocab_size", 100], "data.vocab_size"),
        (without_data, "data.path_unset"),
    ):
        assert code_of(argv, capsys).startswith(start_of_code)
        assert not run.exists()


@pytest.mark.system
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_byte_flipped_in_a_shard_stops_the_run(data_folder, tmp_path, ranks):
    """The CRC is checked at the read itself: no step is trained on damaged data."""
    run = tmp_path / "run"
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    shard = data / "train" / "part-00000-0.bin"
    flip(shard)

    done = train(*debug_run(data, run), ranks=ranks, check=False)

    (code,) = {*error_codes(done.stderr)}
    assert code.startswith("shard.")
    assert shard.name in done.stderr
    if ranks is None:
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    else:  # torchrun's own exit code and traceback, and none of a worker
        assert done.returncode == 1
        assert "canon_pretrain/" not in done.stderr
    assert events(run, "step") == []


def test_a_launch_that_does_not_fit_exits_with_2(data_folder, tmp_path, capsys, monkeypatch):
    def set_world_size(size):
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)

    # a part of torchrun's variables
    monkeypatch.setenv("RANK", "0")
    argv = debug_run(data_folder, tmp_path / "run")
    assert code_of(argv, capsys) == "launch.environment"

    # fewer GPUs than ranks
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NUMA_BINDING"):
        monkeypatch.setenv(name, "0")
    set_world_size("5")
    monkeypatch.setattr("canon_pretrain.titan.dry_run.has_accelerator", lambda: False)
    monkeypatch.setattr("canon_pretrain.titan.device.has_accelerator", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert code_of(argv, capsys) == "launch.gpus"

    # a batch that 5 ranks do not divide; offloading
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    devices = list[int]()
    monkeypatch.setattr("torch.cuda.set_device", devices.append)
    assert code_of(argv, capsys) == "config.world_size"
    assert devices == [0]  # set before all else
    assert code_of([*argv, "--training.enable_cpu_offload"], capsys) == "config.cpu_offload"

    # Slurm's count of restarts
    set_world_size("1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "abc")
    code_of(argv, capsys)


def test_offloading_to_the_cpu_is_refused_for_gpus_only(data_folder, tmp_path, capsys):
    argv = [*debug_run(data_folder, tmp_path), "--training.enable_cpu_offload", "--dry_run"]
    main([str(word) for word in argv])
    capsys.readouterr()
    assert code_of([*argv, "--gpu", "h100"], capsys) == "config.cpu_offload"


def run_on(rank, device_name):
    """A device of this name on a node where lspci lists an H100's chip."""
    metrics.has_accelerator = lambda: True
    torch.cuda.get_device_name = lambda: device_name
    titan_utils.get_peak_flops = lambda name: 989e12


def first_step_on(device_name, data, tmp_path):
    """Return the event of a run's first step on a GPU of this name."""
    launch(
        *debug_run(data, tmp_path / "run"),
        *("--run.stop_at", 1),
        output=tmp_path / "out",
        ranks=1,
        before=(run_on, device_name),
    )
    (step,) = events(tmp_path / "run", "step")
    return step


def test_the_logged_mfu_is_of_the_named_device(data_folder, tmp_path):
    step = first_step_on("NVIDIA H20", data_folder, tmp_path)
    args = replace(
        flavor("debug"),
        position="nope",
        canon_set="ABCD",
        vocab_size=VOCAB_SIZE,
        max_seq_len=64,
    )
    flops_per_s = flops_per_token(args, 64) * step["tokens_per_second_per_device"]
    h20_flops_per_s = 148e12
    assert step["mfu"] == pytest.approx(flops_per_s / h20_flops_per_s)


def test_an_unknown_device_has_no_mfu(data_folder, tmp_path):
    assert first_step_on("NVIDIA H20Z", data_folder, tmp_path).get("mfu") is None


def be_late(rank):
    if rank == 0:
        time.sleep(1.0)


def test_the_rank_that_prints_an_error_may_find_it_last(tmp_path):
    """torchrun ends all ranks with the first that fails: the others wait for rank 0."""
    ended = launch(
        *("--config", ROOT / "train_configs" / "debug.toml"),
        *("--training.stepz", 3),
        output=tmp_path,
        before=be_late,
        check=False,
    )
    assert_refused(ended, "config.unknown_key")


def test_a_compiler_cache_that_cannot_be_written_is_refused(monkeypatch):
    folder = "/proc/1/cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    with refused("compile.cache", path=folder):
        check_compiler_cache(CACHE_BYTES)

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    check_compiler_cache()  # torch's own default


def test_a_compiler_cache_on_a_full_disk_is_refused(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check_compiler_cache(CACHE_BYTES)
    monkeypatch.setattr(os, "fsync", full)
    with refused("compile.cache", path=str(tmp_path)):
        check_compiler_cache(CACHE_BYTES)

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    check_compiler_cache()

"""The training command: stop, resume, other world sizes, golden losses, errors."""

import errno
import hashlib
import json
import os
import shutil
import time
from dataclasses import replace

import pytest
import torch
from torchtitan.tools import utils as titan_utils

from canon_pretrain.data.sampler import window_offset
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.model.args import flavor
from canon_pretrain.model.counts import flops_per_token
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.titan import metrics
from canon_pretrain.titan.device import CACHE_BYTES, check_compiler_cache
from canon_pretrain.train import main
from eval.validation import baseline_losses
from tests.fault_runs import flip
from tests.ranks import assert_refused, assert_same_run, events, launch
from tests.support import ROOT, VOCAB_SIZE, debug_run, error_codes, refused, train

GOLDEN = ROOT / "tests" / "golden" / "debug_losses.json"
STEPS = 12


def curve(folder, name):
    found = events(folder, "step")
    assert [event["step"] for event in found] == list(range(1, STEPS + 1))
    return [event[name] for event in found]


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
    assert [e["world_size"] for e in events(runs.elastic) if "torch" in e] == [3, 1]


@pytest.mark.system
def test_replicas_resume_a_sharded_run(runs, data_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs.straight, run)
    shutil.rmtree(run / "checkpoint" / "step-12")
    (run / "DONE").unlink()
    words = (*debug_run(data_folder, run), "--parallelism.data_parallel_replicate_degree", 2)
    launch(*words, output=tmp_path / "out")
    assert [e["from_step"] for e in events(run, "resume")] == [6]
    assert_same_curves(run, runs.straight)


MIXER = ("--model.mixer", "gated_deltanet", "--model.num_heads", 4, "--model.canon_set", "ABCD")
MIXER += ("--model.document_mask", "true")


@pytest.mark.system
def test_a_recurrent_run_resumes_on_two_ranks_and_on_one(data_folder, tmp_path):
    straight, stopped, elastic = (tmp_path / name for name in ("straight", "stopped", "elastic"))
    output = tmp_path / "output"
    launch(*debug_run(data_folder, straight), *MIXER, output=output)
    launch(*debug_run(data_folder, stopped), *MIXER, "--run.stop_at", 5, output=output)
    shutil.copytree(stopped, elastic)
    launch(*debug_run(data_folder, stopped), *MIXER, output=output)
    assert_same_run(stopped, straight, step=STEPS)
    launch(*debug_run(data_folder, elastic), *MIXER, output=output, ranks=1)
    assert_same_curves(elastic, straight)


def test_every_step_saw_the_same_token_ids_in_every_run(runs, data_folder):
    """The digests in the log, against samples read from the shards."""
    digests = [digest for (digest,) in curve(runs.straight, "data_digests")]
    assert curve(runs.resumed, "data_digests") == [[digest] for digest in digests]
    assert len(set(digests)) == STEPS
    with TokenShards.open(data_folder / "train") as shards:
        for step, digest in enumerate(digests):
            total = 0
            for i in range(12 * step, 12 * (step + 1)):
                ids = shards.read(window_offset(0, i, shards.num_tokens, 64), 65)
                own = hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8)
                total += int.from_bytes(own.digest(), "little")
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
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    options = ("--compile.enable", "--debug.deterministic")
    options += ("--training.mixed_precision_param", "bfloat16")
    for folder, *stop in ((straight,), (resumed, "--run.stop_at", 6), (resumed,)):
        train(*debug_run(data_folder, folder), *options, *stop, on_gpu=device == "cuda")
    names = [event["event"] for event in events(resumed)]
    assert names.count("resume") == 1
    for record in RunFolder(resumed).launches.glob("*/launch.json"):
        assert json.loads(record.read_text())["devices"]["type"] == device
    assert_same_run(resumed, straight, step=STEPS)


@pytest.mark.system
def test_bfloat16_trains_alike_on_one_rank_and_two(data_folder, tmp_path):
    """The default precision: FSDP2 casts at every world size, autocast at none."""
    words = ("--model.position", "partial_rope_a", "--model.qk_norm", "full")
    words += ("--training.mixed_precision_param", "bfloat16", "--run.stop_at", 6)
    curves = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        launch(*debug_run(data_folder, folder), *words, ranks=ranks, output=tmp_path / "out")
        curves.append([event["loss"] for event in events(folder, "step")])
    assert curves[1] == pytest.approx(curves[0], rel=2e-3)  # bf16 rounds at 4e-3
    assert curves[1][0] == pytest.approx(curves[0][0], rel=1e-5)  # before any rounding differs
    assert curves[1][-1] < curves[1][0] - 0.05


def code_of(argv, capsys):
    """Run the trainer in this process; return its one error's code; it must exit with 2."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in argv])
    assert left.value.code == 2
    printed = capsys.readouterr().err
    (code,) = error_codes(printed)
    assert printed.count("\n") == 1
    return code


def test_data_that_do_not_fit_leave_no_run_folder(data_folder, tmp_path, capsys):
    run, broken = tmp_path / "run", tmp_path / "broken"
    shutil.copytree(data_folder, broken)
    (broken / "train" / "part-00000-0.bin").write_bytes(b"short")
    for argv, area in (
        (debug_run(tmp_path / "nowhere", run), "shard."),
        (debug_run(broken, run), "shard."),
        ([*debug_run(data_folder, run), "--model.vocab_size", 100], "data.vocab_size"),
        (["--config", ROOT / "train_configs" / "debug.toml"], "data.path_unset"),
    ):
        assert code_of(argv, capsys).startswith(area)
        assert not run.exists()


@pytest.mark.system
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_byte_flipped_in_a_shard_stops_the_run(data_folder, tmp_path, ranks):
    """The CRC is checked at the read itself: no step is trained on damaged data."""
    shutil.copytree(data_folder, tmp_path / "data")
    flip(path := tmp_path / "data" / "train" / "part-00000-0.bin")
    done = train(*debug_run(tmp_path / "data", tmp_path / "run"), ranks=ranks, check=False)
    assert done.returncode == (2 if ranks is None else 1)
    (code,) = {*error_codes(done.stderr)}
    assert code.startswith("shard.") and path.name in done.stderr
    # no traceback of a worker; torchrun prints its own
    assert ("Traceback" if ranks is None else "canon_pretrain/") not in done.stderr
    assert events(tmp_path / "run", "step") == []


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


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H20", 148e12), ("NVIDIA H20Z", None)])
def test_the_logged_mfu_is_of_the_named_device(name, peak, data_folder, tmp_path):
    argv = [*debug_run(data_folder, tmp_path / "run"), "--run.stop_at", 1]
    launch(*argv, output=tmp_path / "out", ranks=1, before=(run_on, name))
    (step,) = events(tmp_path / "run", "step")
    args = replace(flavor("debug"), position="nope", canon_set="ABCD", vocab_size=VOCAB_SIZE)
    flops = flops_per_token(replace(args, max_seq_len=64), 64)
    speed = step["tokens_per_second_per_device"]
    assert step.get("mfu") == (peak and pytest.approx(flops * speed / peak))


def be_late(rank):
    if rank == 0:
        time.sleep(1.0)


def test_the_rank_that_prints_an_error_may_find_it_last(tmp_path):
    """torchrun ends all ranks with the first that fails: the others wait for rank 0."""
    words = ["--config", ROOT / "train_configs" / "debug.toml", "--training.stepz", 3]
    ended = launch(*words, output=tmp_path, before=be_late, check=False)
    assert_refused(ended, "config.unknown_key")


@pytest.mark.parametrize("folder", ["/proc/1/cache", "full"])
def test_a_compiler_cache_that_cannot_be_written_is_refused(folder, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path if folder == "full" else folder
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path))
    if folder == "full":
        check_compiler_cache(CACHE_BYTES)
        monkeypatch.setattr(os, "fsync", full)
    with refused("compile.cache", path=str(path)):
        check_compiler_cache(CACHE_BYTES)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    check_compiler_cache()  # torch's own default

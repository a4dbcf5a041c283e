"""The bench commands: what they measure, report and refuse; their statistics and bounds."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch.distributed.tensor import DTensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.model import canon as canon_module
from canon_pretrain.model import canon_check
from canon_pretrain.model.args import FLAVORS, ModelArgs
from canon_pretrain.model.counts import flops_per_token
from canon_pretrain.titan import console
from canon_pretrain.titan.spec import BareStep, job_of, one_rank
from tests.bench import __main__ as bench_main
from tests.bench import kernels, limits, mixers, step, tables, timing
from tests.bench.__main__ import main
from tests.bench.limits import Machine
from tests.support import ROOT, error_codes

SMALL = ("--flavor", "debug", "--tokens", "32")
QUICK = ("--pairs", "2", "--block-seconds", "0")
DEBUG = str(ROOT / "train_configs" / "debug.toml")
# torchtitan's, in this process: stderr has no file, autocast is off
TORCHTITANS = ("ignore:Unable to enable fault handler", "ignore:In CPU autocast")


@pytest.mark.system
def test_memory_counts_what_a_compiled_block_saves(tmp_path):
    file = tmp_path / "result.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "tests.bench", "memory", *SMALL),
            *("--sets", "ABCD", "--backends", "compiled", "--json", str(file)),
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )

    base, row = json.loads(file.read_text())["rows"]
    # 8 D + 3 F values per token
    assert base["bytes_per_token"] == pytest.approx(2 * (8 * 64 + 3 * 176), rel=0.05)
    assert row["variant"] == "ABCD compiled"
    assert row["extra_per_token"] == row["bytes_per_token"] - base["bytes_per_token"]
    assert row["extra_per_channel"] == pytest.approx(row["extra_per_token"] / 672)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a bench in this process, on a machine of known speed and without compilation."""
    file = tmp_path / "result.json"
    monkeypatch.setattr(console, "init_logging", lambda rank: None)  # pytest has its own
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: cls(torch.device("cpu"))))
    monkeypatch.setattr(Machine, "copy_bandwidth", 1e10)
    monkeypatch.setattr(Machine, "matmul_flops", lambda self, dtype: 1e11)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def run(*arguments):
        main([*map(str, arguments), "--json", str(file)])
        return json.loads(file.read_text())

    return run


def test_all_continues_after_failures(run, monkeypatch, tmp_path):
    faults = {"step": UserError("bench.failed", "failed"), "memory": RuntimeError("a fault")}

    def run_one(bench, arguments, *rest):
        if arguments.command in faults:
            raise faults[arguments.command]
        return {"bench": arguments.command}

    monkeypatch.setattr(bench_main, "_run_one", run_one)
    with pytest.raises(SystemExit, match="1"):
        run("all")

    results = json.loads((tmp_path / "result.json").read_text())["results"]
    names = ["step", "memory", "generate", "canon", "attention", "mixers", "trainer"]
    assert list(results) == names
    assert {name for name, result in results.items() if "error" in result} == faults.keys()


@pytest.mark.long
@pytest.mark.filterwarnings(*TORCHTITANS)
def test_generate_and_trainer_run(run):
    options = "--flavor debug --prompt-tokens 8 --new-tokens 4 --pairs 1"
    assert run("generate", *options.split())["bench"] == "generate"
    rows = run("transformers", *options.split(), "--batches", 2)["rows"]
    assert [(row["canon_set"], row["equal"]) for row in rows[:3]] == [("", 2)] * 3
    assert {row["canon_set"] for row in rows[3:]} == {"ABCD"}
    options = f"--config {DEBUG} --repeats 2 --steps 1"
    assert run("trainer", *options.split())["bench"] == "trainer"


def test_attention_compares_the_available_implementations(run):
    result = run("attention", *SMALL, *QUICK)

    assert result["fastest"] == "flash"
    assert {row["way"] for row in result["rows"]} == {"flash"}
    assert {"cudnn", "flash_attn", "fa3", "fa4"} <= result["unavailable"].keys()
    forward, backward = result["rows"][:2]
    assert forward["flops"] == 2 * 2 * 32**2 * 64
    assert backward["flops"] == 2.5 * forward["flops"]
    assert forward["of_matmul"] == pytest.approx(forward["flops"] / forward["other_s"] / 1e11)


def test_mixers_are_compared_per_token_and_by_layers(run, monkeypatch):
    def compare(base, other, **options):
        assert all(torch.isfinite(grad).all() for grad in (*base(), *other()))
        return dict.fromkeys(("base_s", "other_s", "ratio", "ratio_low", "ratio_high"), 3.0)

    monkeypatch.setattr(mixers, "compare_steps", compare)
    result = run("mixers", *SMALL, "--lengths", "16", "32")

    ratios = [(row["part"], row["ratio"]) for row in result["rows"]]
    kernels_of_three_mixers = [("sdpa", 3.0), ("length", 1.5)] * 3
    layers = [("layers", 3.0 * times) for times in (1, 2, 1, 1)]  # twice as many of Mamba2's
    assert ratios == kernels_of_three_mixers + layers
    assert len(result["unavailable"]) == 6  # by fla and triton


def test_step_compares_with_the_least_bytes_and_the_target(run, capsys):
    shape = ("--flavor", "8L512D", "--layers", 1, "--tokens", 4, "--micro-batch", 1)

    result = run("step", *shape, *QUICK, "--sets", "ABCD")

    assert [row["variant"] for row in result["rows"]] == ["ABCD compiled", "ABCD reference"]
    row = result["rows"][0]
    assert row["tokens_per_second"] == pytest.approx(4 / row["other_s"])
    least_s = 5 * 3 * 512 * 4 * 4 / 1e10  # q, k, v read or written: 4 bytes, 4 tokens
    assert row["least"] == pytest.approx(least_s / row["base_s"])
    assert "15/10/5 %: " in capsys.readouterr().out


def test_canon_counts_the_bytes_of_each_kernel(run):
    result = run("canon", *SMALL, *QUICK, "--micro-batch", 2)

    rows = {(row["form"], row["backend"], row["direction"]): row for row in result["rows"]}
    assert len(rows) == 6 * 2 * 2
    assert all(row["max_error"] < 1e-5 for row in rows.values())
    bytes_per_channel = 2 * 32 * 4  # rows, tokens, float32
    for form, backend, direction, num_channels in (
        ("A, C", "compiled", "forward", 2 * 64),
        ("B", "compiled", "backward", 3 * 192),
        ("D", "reference", "forward", 4 * 176),
        ("D + activation", "compiled", "forward", 3 * 176),
        ("D + activation", "compiled", "backward", 5 * 176),
    ):
        row = rows[form, backend, direction]
        assert row["least_bytes"] == num_channels * bytes_per_channel
        assert row["of_copy"] == pytest.approx(row["least_bytes"] / row["other_s"] / 1e10)


@pytest.mark.system
def test_a_gpu_holds_one_model_at_a_time(run, monkeypatch):
    build = step.build
    built = []
    models = weakref.WeakSet()

    def watched(work, variant, *arguments, plain):
        gc.collect()
        assert not len(models)
        built.append((variant.canon_set, plain))
        bare_step = build(work, variant, *arguments, plain=plain)
        models.add(bare_step.model)
        return bare_step

    here = classmethod(lambda cls: cls(torch.device("cpu"), exclusive=True))
    monkeypatch.setattr(Machine, "here", here)
    monkeypatch.setattr(step, "build", watched)
    options = ("--unit", "model", "--backends", "reference", "--sets", "AC")
    result = run("step", *SMALL, *QUICK, *options)

    assert built == [("", True), ("AC", True), ("", True), ("", False)]
    (row,) = result["rows"]
    args = ModelArgs(**result["args"] | {"canon_set": "AC"})
    flops = flops_per_token(args, 32) * 2 * 32
    assert row["mfu_of_measured"] == pytest.approx(flops / row["other_s"] / 1e11)
    assert result["whole"]["forward_backward_s"] > 0
    assert result["whole"]["update_s"] > 0


def test_gradients_of_a_plain_step_equal_those_under_fsdp():
    job = job_of(FLAVORS["debug"], num_tokens=32, micro_batch=2, dtype=torch.float32)
    job.compile.enable = False

    def gradients(*, plain):
        torch.manual_seed(0)
        bare = BareStep(job, torch.device("cpu"), plain=plain)
        bare.forward_backward()
        grads = [p.grad for p in bare.model.parameters()]
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]

    with one_rank():
        under_fsdp = gradients(plain=False)
        plain = gradients(plain=True)
    torch.testing.assert_close(plain, under_fsdp, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("bad", "good", "reason"),
    [("compiled", "reference", "output 0"), ("causal_conv1d", "compiled", "RuntimeError")],
)
def test_a_wrong_or_failing_kernel_leaves_the_others(run, monkeypatch, bad, good, reason):
    def with_fault(right):
        def run(*tensors, backend, **options):
            if backend == bad == "causal_conv1d":
                raise RuntimeError("no kernel image\nis available")
            y = right(*tensors, backend=backend, **options)
            return y * 1.001 if backend == bad else y

        return run

    for name in ("canon", "canon_gate"):
        monkeypatch.setattr(canon_module, name, with_fault(getattr(canon_module, name)))
    all_available = lambda requested, work: (requested, {})  # noqa: E731
    monkeypatch.setattr(kernels.variants, "available_backends", all_available)
    monkeypatch.setattr(canon_check, "check_canon_backend", lambda *backend: None)

    result = run("canon", *SMALL, *QUICK, "--backends", bad, good, "--micro-batch", 2)

    assert {row["backend"] for row in result["rows"]} == {good}
    assert len(result["unavailable"]) == 6
    assert result["unavailable"][f"A, C by {bad}"].startswith(reason)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("step --flavor 1b4", "model.unknown_flavor"),
        ("step --sets AE", "model.canon_set"),
        ("step --backends tritn", "config.unknown_choice"),
        ("step --backends triton", "bench.unavailable"),
        ("step --json /nowhere/x", "bench.no_folder"),
    ],
    ids=["flavor", "set", "backend", "unavailable", "folder"],
)
def test_bad_options_are_refused(run, capsys, command, code):
    with pytest.raises(SystemExit, match="2"):
        main(command.split())

    error = capsys.readouterr().err
    assert error_codes(error) == [code]
    assert error.count("\n") == 1


def test_the_ratio_is_the_median_of_pairs():
    # the machine slows down: only pairs are comparable
    base = [1.0, 2.0, 4.0, 8.0, 16.0]

    comparison = timing.summarize(base, [1.1 * s for s in base])

    assert comparison["ratio"] == pytest.approx(1.1)
    assert comparison["base_s"] == 4.0
    assert comparison["pairs"] == 5


def test_the_spread_is_from_percentile_10_to_90():
    comparison = timing.summarize([1.0] * 20, [1.0 + n / 100 for n in reversed(range(20))])
    assert (comparison["ratio_low"], comparison["ratio_high"]) == (1.02, 1.17)
    assert tables.spread(comparison) == "+2.0% to +17.0%"

    of_one_pair = timing.summarize([2.0], [3.0])
    assert of_one_pair["ratio"] == of_one_pair["ratio_low"] == of_one_pair["ratio_high"] == 1.5


class LoggedCandidates:
    """Factories of candidates that log what happens to them.

    In `log`, "." frees memory, "A" builds a, "a" runs a block of it.
    """

    def __init__(self):
        self.log = []

    def free_memory(self):
        self.log.append(".")

    def factory(self, name, seconds):
        def block():
            self.log.append(name)
            return seconds

        def facts():
            return {"name": name, "blocks": self.log.count(name)}

        def build():
            self.log.append(name.upper())
            return timing.Candidate(block, facts)

        return build


# ---- statistics of paired times, the order of candidates, lower bounds


def too_large():
    raise timing.NotMeasured("bench.out_of_memory", "too large")


@pytest.mark.parametrize(
    ("exclusive", "order"), [(False, ".A.Babbaab."), (True, ".Aaaa.Bbbb..Aaaa")]
)
def test_the_order_of_candidates(exclusive, order):
    candidates = LoggedCandidates()
    base = candidates.factory("a", {"read": 1, "write": 2})
    others = {"b": candidates.factory("b", {"read": 3, "write": 1}), "c": too_large}

    parts, facts, failed = timing.compare_candidates(
        base, others, pairs=3, exclusive=exclusive, free_memory=candidates.free_memory
    )

    assert "".join(candidates.log) == order
    assert list(parts) == ["b"]
    assert parts["b"]["read"]["ratio"] == 3
    assert parts["b"]["write"]["ratio"] == 0.5
    assert parts["b"].keys() == {"read", "write"}
    assert list(failed) == ["c"]
    assert facts["b"] == {"name": "b", "blocks": 3}
    assert facts[timing.BASE]["name"] == "a"


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_base_that_cannot_be_measured_is_an_error(exclusive):
    candidates = LoggedCandidates()
    others = {"b": candidates.factory("b", {"read": 3, "write": 1})}
    with pytest.raises(timing.NotMeasured):
        timing.compare_candidates(
            too_large,
            others,
            pairs=3,
            exclusive=exclusive,
            free_memory=candidates.free_memory,
        )


def test_lower_bounds_equal_counts_by_hand():
    """Without rotation all of B is extra; blocks and ends make the FLOPs of the whole."""
    nope = dataclasses.replace(FLAVORS["1b3"], canon_set="ABCD", position="nope")
    assert limits.min_canon_bytes(nope, 2) == 5 * 6144 * 2
    assert limits.min_canon_bytes(dataclasses.replace(nope, canon_set="ACD"), 2) == 0

    rope = dataclasses.replace(nope, position="rope")
    assert limits.min_canon_bytes(rope, 2) == 2 * (2 + 3) * 2048 + 2 * 4096

    # K and V of 2048 channels: read and written, and backward reads them again. O and F in the sums
    # after them: backward reads and writes; F's gradient of the sum is read as well.
    places = dataclasses.replace(nope, canon_set="FKOV")
    assert limits.min_canon_bytes(places, 2) == 2 * 2048 * (2 * 5 + 2 + 3)
    # the queries rotate with and without Canon-K, the keys are read again
    keys = dataclasses.replace(rope, canon_set="K")
    assert limits.min_canon_bytes(keys, 2) == 2 * 2048

    block = limits.block_flops_per_token(nope, 4096)
    head_and_norm = 6 * (nope.vocab_size * nope.dim + nope.dim)
    assert nope.num_layers * block + head_and_norm == flops_per_token(nope, 4096)

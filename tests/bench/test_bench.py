"""The benches as a user starts them: they measure, say the ratio, and leave nothing behind."""

import argparse
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from canon_pretrain.bench import __main__ as bench_main
from canon_pretrain.bench import kernels, step
from canon_pretrain.bench.__main__ import main
from canon_pretrain.bench.limits import Machine
from canon_pretrain.bench.variants import Variant, Workload
from canon_pretrain.core.errors import UserError
from canon_pretrain.model import canon as canon_module
from canon_pretrain.model import canon_check
from canon_pretrain.model.args import FLAVORS, ModelArgs, flops_per_token
from canon_pretrain.model.transformer import TransformerBlock
from canon_pretrain.titan.spec import BareStep, job_of, one_rank
from tests.support import ROOT

SMALL = ("--flavor", "debug", "--tokens", 32)
QUICK = ("--pairs", 2, "--block-seconds", 0)
BENCHES = ("step", "canon", "generate", "memory", "attention", "trainer")
DEBUG = str(ROOT / "train_configs" / "debug.toml")
# torchtitan's, in this process: stderr has no file, autocast is off
TORCHTITANS = ("ignore:Unable to enable fault handler", "ignore:In CPU autocast")


@pytest.mark.system
def test_memory_counts_what_a_compiled_block_keeps(tmp_path):
    file = tmp_path / "result.json"
    words = [sys.executable, "-m", "canon_pretrain.bench", "memory", *SMALL, "--sets", "ABCD"]
    words += ["--backends", "reference", "compiled", "--json", file]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*map(str, words)], cwd=ROOT, env=environment, check=True)
    base, *rows = json.loads(file.read_text())["rows"]
    none = base["bytes_per_token"]
    # 8 D + 3 F values per token
    assert none == pytest.approx(2 * (8 * 64 + 3 * 176), rel=0.05)
    assert [row["variant"] for row in rows] == ["ABCD reference", "ABCD compiled"]
    for row in rows:
        assert row["extra_per_token"] == row["bytes_per_token"] - none
        assert row["extra_per_channel"] == pytest.approx(row["extra_per_token"] / 672)


def on_cpu(monkeypatch: pytest.MonkeyPatch, exclusive: bool = False) -> None:
    """`exclusive`: as on a GPU, which holds one of the compared at a time."""
    here = classmethod(lambda cls: cls(torch.device("cpu"), exclusive=exclusive))
    monkeypatch.setattr(Machine, "here", here)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[dict[str, Any], str]]:
    """`measured` in this process, on a machine of known speed and without compilation."""
    file = tmp_path / "result.json"
    monkeypatch.setattr(bench_main, "init_logging", lambda rank: None)  # this process has its own
    on_cpu(monkeypatch)
    monkeypatch.setattr(Machine, "copy_bandwidth", 1e10)
    monkeypatch.setattr(Machine, "matmul_flops", lambda self, dtype: 1e11)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def run(*arguments: object) -> tuple[dict[str, Any], str]:
        main([*map(str, arguments), "--json", str(file)])
        return json.loads(file.read_text()), capsys.readouterr().out

    return run


Run = Callable[..., tuple[dict[str, Any], str]]


@pytest.mark.filterwarnings(*TORCHTITANS)
def test_all_is_one_page_and_one_file(run, monkeypatch):
    small: dict[str, list[str]] = {
        name: [*map(str, SMALL), *map(str, QUICK)] for name in ("step", "canon", "attention")
    }
    small["memory"] = [*map(str, SMALL)]
    new = ["--prompt-tokens", "8", "--new-tokens", "4", "--pairs", "1"]
    small["generate"] = ["--flavor", "debug", *new]
    small["trainer"] = ["--config", DEBUG, "--repeats", "2", "--steps", "1"]
    monkeypatch.setattr(bench_main, "ALL_OPTIONS", {name: small[name] for name in BENCHES})
    result, page = run("all")
    assert tuple(result["results"]) == BENCHES
    for name, part in result["results"].items():
        assert part["bench"] == name and "error" not in part, part
        assert bench_main.COMMANDS[name][1][:20] in page


def test_attention_tells_the_fastest_way(run):
    result, page = run("attention", *SMALL, *QUICK)
    assert {row["way"] for row in result["rows"]} == {"flash"}
    assert result["unavailable"]["cudnn"] == "needs a GPU"
    assert all("not installed" in result["unavailable"][x] for x in ("flash_attn", "fa3", "fa4"))
    assert f"both passes: {result['fastest']}" in page
    forward, backward = result["rows"][:2]
    assert backward["flops"] == 2.5 * forward["flops"] == 2.5 * 2 * 2 * 32**2 * 64
    assert forward["of_matmul"] == pytest.approx(forward["flops"] / forward["other_s"] / 1e11)


def test_step_compares_with_the_least_bytes_and_the_target(run):
    options = ("--flavor", "8L512D", "--layers", 1, "--tokens", 4, "--micro-batch", 1)
    result, page = run("step", *options, *QUICK, "--sets", "ABCD")
    assert [row["variant"] for row in result["rows"]] == ["ABCD compiled", "ABCD reference"]
    row = result["rows"][0]
    assert row["tokens_per_second"] == pytest.approx(4 / row["other_s"])
    at_least = 5 * 3 * 512 * 4 * 4 / 1e10  # q, k, v read or written, of 4 bytes, 4 tokens
    assert row["least"] == pytest.approx(at_least / row["base_s"])
    assert "15/10/5 %: " in page


def test_canon_counts_the_bytes_of_each_kernel(run):
    result, _ = run("canon", *SMALL, *QUICK, "--micro-batch", 2)
    rows = {(row["form"], row["backend"], row["direction"]): row for row in result["rows"]}
    assert len(rows) == 6 * 2 * 2
    values = 2 * 32 * 4
    for key, count in {
        ("A, C", "compiled", "forward"): 2 * 64,
        ("B", "compiled", "backward"): 3 * 192,
        ("D", "reference", "forward"): 4 * 176,
        ("D + activation", "compiled", "forward"): 3 * 176,
        ("D + activation", "compiled", "backward"): 5 * 176,
    }.items():
        row = rows[key]
        assert row["least_bytes"] == count * values
        assert row["of_copy"] == pytest.approx(row["least_bytes"] / row["other_s"] / 1e10)
    assert all(row["max_error"] < 1e-5 for row in rows.values())


def counted_blocks(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[TransformerBlock]:
    blocks: weakref.WeakSet[TransformerBlock] = weakref.WeakSet()
    make_block = TransformerBlock.__init__

    def counted(block: TransformerBlock, *given: Any, **options: Any) -> None:
        make_block(block, *given, **options)
        blocks.add(block)

    monkeypatch.setattr(TransformerBlock, "__init__", counted)
    return blocks


def test_a_gpu_holds_one_model_at_a_time(run, monkeypatch):
    build, built, blocks = step.build, [], counted_blocks(monkeypatch)

    def watched(work: Workload, variant: Variant, *how: Any, plain: bool) -> Any:
        gc.collect()
        assert not len(blocks)
        built.append((variant.canon_set, plain))
        return build(work, variant, *how, plain=plain)

    on_cpu(monkeypatch, exclusive=True)
    monkeypatch.setattr(step, "build", watched)
    options = ("--unit", "model", "--backends", "reference", "--sets", "AC")
    result, page = run("step", *SMALL, *QUICK, *options)
    assert built == [("", True), ("AC", True), ("", True), ("", False)]
    assert result["timed"] == "forward and backward"
    (row,) = result["rows"]
    flops = flops_per_token(ModelArgs(**result["args"] | {"canon_set": "AC"}), 32) * 2 * 32
    assert row["mfu_of_measured"] == pytest.approx(flops / row["other_s"] / 1e11)
    assert result["whole"]["forward_backward_s"] > 0 and result["whole"]["update_s"] > 0
    assert "clipping and AdamW of all parameters" in page


def test_a_plain_steps_gradients_are_those_under_fsdp():
    job = job_of(FLAVORS["debug"], num_tokens=32, micro_batch=2, dtype=torch.float32)
    job.compile.enable = False
    gradients = []
    with one_rank():
        for plain in (False, True):
            torch.manual_seed(0)
            bare = BareStep(job, torch.device("cpu"), plain=plain)
            bare.forward_backward()
            found = [p.grad for p in bare.model.parameters()]
            gradients.append([g.full_tensor() if isinstance(g, DTensor) else g for g in found])
    for sharded, plain_one in zip(*gradients, strict=True):
        torch.testing.assert_close(sharded, plain_one, rtol=1e-5, atol=1e-8)


def test_all_keeps_what_is_there_where_one_fails(run, monkeypatch, tmp_path):
    faults = {
        "canon": UserError("todo.test_bench", "no such thing"),
        "generate": RuntimeError("a fault"),
    }

    def one(arguments: argparse.Namespace, *rest: object) -> dict[str, Any]:
        if arguments.command in faults:
            raise faults[arguments.command]
        return {"bench": arguments.command}

    monkeypatch.setattr(bench_main, "_run_one", one)
    with pytest.raises(SystemExit, match="1"):
        run("all")
    results = json.loads((tmp_path / "result.json").read_text())["results"]
    assert tuple(results) == BENCHES
    assert {name for name, result in results.items() if "error" in result} == faults.keys()


def change_kernels(monkeypatch: pytest.MonkeyPatch, change: Callable[..., torch.Tensor]) -> None:
    def changed(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *tensors, **options: change(right(*tensors, **options), options["backend"])

    for name in ("canon", "canon_gate"):
        monkeypatch.setattr(canon_module, name, changed(getattr(canon_module, name)))


@pytest.mark.parametrize(
    ("bad", "good", "words"),
    [
        ("compiled", "reference", "output 0 is 0.000"),  # wrong
        ("causal_conv1d", "compiled", "RuntimeError: no kernel image"),  # on a GPU of this kind
    ],
)
def test_a_kernel_that_is_wrong_or_fails_leaves_the_others(run, monkeypatch, bad, good, words):
    def change(y: torch.Tensor, backend: str) -> torch.Tensor:
        if backend == bad == "causal_conv1d":
            raise RuntimeError("no kernel image\nis available")
        return y * 1.001 if backend == bad else y

    change_kernels(monkeypatch, change)
    monkeypatch.setattr(kernels.variants, "available_backends", lambda asked, work: (asked, {}))
    monkeypatch.setattr(canon_check, "check_canon_backend", lambda *backend: None)
    result, page = run("canon", *SMALL, *QUICK, "--backends", bad, good, "--micro-batch", 2)
    assert {row["backend"] for row in result["rows"]} == {good}
    assert f"not measured: A, C by {bad}: {words}" in page
    assert len(result["unavailable"]) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("step --flavor 1b4", 'model flavor "1b4" is not known; expected one of debug,'),
        ("step --sets AE", 'canon_set = "AE"'),
        ("step --backends tritn", '--backends = "tritn" is not known; expected one of'),
        ("step --backends triton", "--backends triton: none can be had here. triton: n"),
        ("canon --json /nowhere/x", "--json /nowhere/x: the folder /nowhere does not ex"),
    ],
)
def test_bad_input_is_one_message(words, message, run, capsys):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith(f"error: {message}") and error.count("\n") == 1

"""`run profile` on a real CPU trace, and on a GPU trace written by hand with known answers."""

import json
import os
import time
from dataclasses import asdict

import numpy as np
import pytest

from canon_pretrain.report.profile import purpose_of, summarize
from canon_pretrain.run.trace import read_trace
from tests.ranks import assert_same_run, launch
from tests.report_runs import run_command
from tests.support import debug_run, error_codes


def summary_of(trace):
    return asdict(summarize(trace))


@pytest.fixture
def command(capsys):
    def run(*words, code=0):
        """Run the command; return its output, or the codes of its errors."""
        assert run_command("profile", *words) == code
        printed = capsys.readouterr()
        return printed.out if code == 0 else " ".join(error_codes(printed.err))

    return run


@pytest.fixture(scope="session")
def traced(data_folder, tmp_path_factory):
    """A debug run on 2 ranks whose fourth step is traced."""
    base = tmp_path_factory.mktemp("traced")
    ended = launch(
        *debug_run(data_folder, base / "run"),
        *("--run.stop_at", 6, "--profiling.enable_profiling", "--profiling.profile_freq", 4),
        "--profiling.enable_memory_snapshot",
        ranks=2,
        output=base / "out",
    )
    assert "Profiler clears" not in ended.output
    return base / "run"


@pytest.mark.system
def test_profiling_does_not_change_results(traced, runs, data_folder, tmp_path):
    launch(*debug_run(data_folder, traced), "--profiling.profile_freq", 4, output=tmp_path)
    assert_same_run(traced, runs.straight, step=12)


@pytest.mark.system
def test_a_real_trace_and_the_command(traced, command):
    (folder,) = (traced / "profile_traces").iterdir()
    assert folder.name == "iteration_4" and len(os.listdir(folder)) == 2
    path = folder / "rank0_trace.json"
    found = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    summary = summary_of(read_trace(path))
    assert summary["steps"] == [4] and not summary["is_device"]
    (step,) = (e for e in found if e["name"].startswith("ProfilerStep#"))
    assert summary["window_us"] == pytest.approx(step["dur"], rel=1e-6)
    scopes = [e for e in found if e["name"] == "canon"]
    assert len(scopes) == 2 * 2 * 4  # 2 micro-batches, 2 layers, Canon-ABCD
    assert sum(e["name"] == "data_wait" for e in found) == 2
    # self times by sampling: the innermost event at 5,000 times of the main thread
    kinds = ("cpu_op", "user_annotation")
    index = [k for k, e in enumerate(found) if e["tid"] == step["tid"] and e["cat"] in kinds]
    begin = np.array([found[k]["ts"] for k in index])
    end = begin + np.array([found[k]["dur"] for k in index])
    moments = step["ts"] + step["dur"] * (np.arange(5000) + 0.5) / 5000
    running = (begin <= moments[:, None]) & (end > moments[:, None])
    length = np.where(running, end - begin, np.inf)
    innermost = [found[index[k]] for k in length.argmin(1)[running.any(1)]]
    for name in ("aten::mm", "aten::mul", "c10d::_allgather_base_"):
        seen = sum(event["name"] == name for event in innermost) / 5000
        own = sum(row["self_us"] for row in summary["rows"] if row["name"] == name)
        assert own / summary["window_us"] == pytest.approx(seen, abs=0.01), name
    shares = summary["purposes"]
    for name in ("canon", "attention", "matmul", "optimizer", "sharding", "communication"):
        assert 0 < shares[name] < 1, name
    inside = sum(e["dur"] for e in scopes) / summary["window_us"]
    assert shares["canon"] > 0.3 * inside  # with its backward, which has no scope
    names = " ".join(row["name"] for row in summary["rows"] if row["purpose"] == "canon")
    assert "_CanonBackward" in names and "_CanonGateBackward" in names
    assert "iteration_4/rank0_trace.json" in command(traced, "--top", 5)
    document = json.loads(command(traced, "--rank", 1, "--json", "--top", 3))
    assert document["trace"].endswith("rank1_trace.json") and len(document["rows"]) == 3
    assert command(traced, "--rank", 7, code=2) == "profile.no_trace"
    assert command(traced / "nowhere", code=2) == "run.not_a_run"


def host(name, ts, dur, cat="cpu_op", tid=1, **args):
    event = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 7, "tid": tid}
    return event | {"args": args}


def launched(number, ts, tid=1):
    return host("cudaLaunchKernel", ts, 1, "cuda_runtime", tid, correlation=number)


def kernel(name, ts, dur, number, cat="kernel", stream=7):
    return host(name, ts, dur, cat, stream, correlation=number, device=0, stream=stream)


def gpu_events():
    """Return a step of 1000 us; the GPU is idle for 300 us (0-100, 700-900)."""
    note, mul = "user_annotation", "void at::native::elementwise_kernel<MulFunctor>"
    engine = "autograd::engine::evaluate_function"
    first, second, third = ({"Sequence number": k} for k in (1, 2, 3))
    return [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        host("ProfilerStep#41", 0, 1000, note), host("data_wait", 0, 80, note),
        # forward: a product, Canon (its scope around a multiplication), attention
        host("aten::mm", 90, 5, **first), launched(1, 91),
        host("canon", 100, 10, note), host("aten::mul", 101, 5, **second), launched(2, 102),
        host("aten::scaled_dot_product_attention", 112, 9, **third), launched(3, 113),
        host("FSDP::all_gather (layers.1)", 122, 9, note), launched(4, 123),
        host("c10d::_allgather_base_", 125, 5), launched(5, 126),
        # backward, on autograd's thread: the multiplication's is Canon's
        host(f"{engine}: MulBackward0", 140, 9, tid=2, **second), launched(6, 141, tid=2),
        host(f"{engine}: CompiledFunctionBackward", 150, 9, tid=2, **second),
        launched(7, 151, tid=2), launched(8, 152, tid=2),
        host("Optimizer.step#AdamW.step", 200, 50, note), launched(9, 210),
        # the device
        kernel("nvjet_hsh_128x256", 100, 100, 1), kernel(mul, 200, 50, 2),
        kernel("pytorch_flash::flash_fwd_kernel", 250, 100, 3),
        kernel("Memcpy DtoD", 350, 50, 4, cat="gpu_memcpy"),
        kernel("ncclDevKernel_AllGather_RING_LL", 300, 200, 5, stream=20),  # 100 of it alone
        kernel(mul, 500, 50, 6), kernel("triton_poi_fused_add_constant_pad_nd_mul_3", 550, 50, 7),
        kernel("triton_red_fused_rms_norm_1", 600, 100, 8),
        kernel("multi_tensor_apply_kernel", 900, 100, 9),
        {"ph": "s", "id": 5, "pid": 7, "tid": 1, "ts": 126, "cat": "ac2g", "name": "ac2g"},
        host("Trace", 0, 5000, "Trace"),
    ]  # fmt: skip


def written(path, events, indent=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
    path.write_text(json.dumps(head | {"traceEvents": events, "traceName": "x"}, indent=indent))
    return path


def assert_gpu_answers(summary):
    assert summary["is_device"] and summary["steps"] == [42] and summary["window_us"] == 1000
    # Canon: forward, backward, and a compiled kernel with its padding
    shares = {"matmul": 0.1, "attention": 0.1, "canon": 0.15, "optimizer": 0.1, "sharding": 0.05}
    shares |= {"communication": 0.2, "validation": 0.0, "data_wait": 0.08, "other": 0.1}
    assert summary["purposes"] == pytest.approx(shares)
    known = {"busy_share": 0.7, "idle_share": 0.3, "communication_exposed": 0.1}
    known["communication_overlapped"] = 0.1
    assert {name: summary[name] for name in known} == pytest.approx(known)
    first = [summary["rows"][0][name] for name in ("name", "count", "self_us")]
    assert first == ["ncclDevKernel_AllGather_RING_LL", 1, 200]
    (mul,) = (row for row in summary["rows"] if "MulFunctor" in row["name"])
    assert (mul["count"], mul["self_us"], mul["purpose"]) == (2, 100, "canon")
    assert sum(row["count"] for row in summary["rows"]) == 9


def test_a_gpu_trace(tmp_path):
    path = written(tmp_path / "rank0_trace.json", gpu_events(), indent=1)
    found = read_trace(path)
    assert found.num_events == len(gpu_events())
    assert_gpu_answers(summary_of(found))
    path.write_text(json.dumps(gpu_events()[::-1]))  # a bare list, in another order
    assert_gpu_answers(summary_of(read_trace(path)))


def test_validation_is_a_purpose_of_its_own(tmp_path):
    events = [e for e in gpu_events() if e["name"] != "canon"]
    events.append(host("validation", 85, 50, "user_annotation"))
    summary = summary_of(read_trace(written(tmp_path / "trace.json", events)))
    # all kernels that it launched, except for communication
    assert summary["purposes"]["validation"] == pytest.approx(0.1 + 0.05 + 0.1 + 0.05)
    assert summary["purposes"]["communication"] == pytest.approx(0.2)


def test_purposes_by_name():
    for name, purpose in {
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>": "attention",
        "triton_tem_fused_flex_attention_2": "attention",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
        "_canon_forward_kernel": "canon",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "communication",
        "FSDP::post_backward_reduce (layers.3.attention)": "sharding",
        "triton_poi_fused_mul_silu_4": None,
    }.items():
        assert purpose_of(name) == purpose


def test_the_newest_trace_is_taken(tmp_path, command):
    folder = tmp_path / "run" / "profile_traces"
    for k, step in enumerate((30, 20, 10)):  # not the last step
        path = written(folder / f"iteration_{step}" / "rank0_trace.json", gpu_events())
        os.utime(path, (time.time() + k, time.time() + k))
    (folder / "iteration_99").mkdir()
    (folder / "iteration_99" / ".rank0_trace.json").write_text("{")  # still being written
    assert "iteration_10/" in command(tmp_path / "run")


EVENT = b'{"traceEvents": [{"ph": "X", "cat": "kernel", %s}]}'


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"not json", b'{"traceEvents": [{"ph": "X"'),
        *(b"\x1f\x8b" + b"nope" * 20, b'{"a": 1}', b'{"traceEvents": 5}'),
        *(b'{"traceEvents": []}', EVENT % b'"name": "k", "ts": "x"', EVENT % b'"ts": 1'),
    ],
)
def test_files_without_a_trace_are_errors(tmp_path, command, content):
    path = tmp_path / "rank0_trace.json"
    path.write_bytes(content)
    assert command(path, code=2)

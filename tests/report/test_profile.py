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
    """Return the summary of a trace as a dict."""
    return asdict(summarize(trace))


@pytest.fixture
def command(capsys):
    """Return the function that runs the command and returns its output, or its error codes."""

    def run(*words, code=0):
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
        *("--run.stop_at", 6),
        *("--profiling.enable_profiling", "--profiling.profile_freq", 4),
        "--profiling.enable_memory_snapshot",
        ranks=2,
        output=base / "out",
    )

    assert "Profiler clears" not in ended.output
    return base / "run"


@pytest.fixture
def real_trace(traced):
    """The trace of rank 0."""
    (folder,) = (traced / "profile_traces").iterdir()
    assert folder.name == "iteration_4"
    assert len(os.listdir(folder)) == 2
    return folder / "rank0_trace.json"


@pytest.fixture
def real_events(real_trace):
    """The complete events of rank 0's trace."""
    events = json.loads(real_trace.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


@pytest.mark.system
def test_profiling_does_not_change_results(traced, runs, data_folder, tmp_path):
    launch(*debug_run(data_folder, traced), "--profiling.profile_freq", 4, output=tmp_path)

    assert_same_run(traced, runs.straight, step=12)


@pytest.mark.system
def test_a_real_trace_has_its_step_and_scopes(real_trace, real_events):
    summary = summary_of(read_trace(real_trace))

    (step,) = [event for event in real_events if event["name"].startswith("ProfilerStep#")]
    assert summary["steps"] == [4]
    assert not summary["is_device"]
    assert summary["window_us"] == pytest.approx(step["dur"], rel=1e-6)

    names = [event["name"] for event in real_events]
    assert names.count("canon") == 2 * 2 * 4  # 2 micro-batches, 2 layers, Canon-ABCD
    assert names.count("data_wait") == 2


def sample_innermost(events, step, num_moments):
    """Return the innermost event of the main thread at each of `num_moments` in the step."""
    kinds = ("cpu_op", "user_annotation")
    of_thread = [event for event in events if event["tid"] == step["tid"] and event["cat"] in kinds]
    begin = np.array([event["ts"] for event in of_thread])
    end = begin + np.array([event["dur"] for event in of_thread])

    moments = step["ts"] + step["dur"] * (np.arange(num_moments) + 0.5) / num_moments
    is_running = (begin <= moments[:, None]) & (end > moments[:, None])
    duration = np.where(is_running, end - begin, np.inf)
    return [of_thread[k] for k in duration.argmin(1)[is_running.any(1)]]


@pytest.mark.system
def test_self_times_of_a_real_trace_by_sampling(real_trace, real_events):
    num_moments = 5000
    (step,) = [event for event in real_events if event["name"].startswith("ProfilerStep#")]
    innermost = [event["name"] for event in sample_innermost(real_events, step, num_moments)]

    summary = summary_of(read_trace(real_trace))

    for name in ("aten::mm", "aten::mul", "c10d::_allgather_base_"):
        sampled_share = innermost.count(name) / num_moments
        self_us = sum(row["self_us"] for row in summary["rows"] if row["name"] == name)
        assert self_us / summary["window_us"] == pytest.approx(sampled_share, abs=0.01), name


@pytest.mark.system
def test_purposes_of_a_real_trace(real_trace, real_events):
    summary = summary_of(read_trace(real_trace))

    shares = summary["purposes"]
    for name in ("canon", "attention", "matmul", "optimizer", "sharding", "communication"):
        assert 0 < shares[name] < 1, name

    # with its backward, which has no scope
    scope_us = sum(event["dur"] for event in real_events if event["name"] == "canon")
    assert shares["canon"] > 0.3 * scope_us / summary["window_us"]
    names = " ".join(row["name"] for row in summary["rows"] if row["purpose"] == "canon")
    assert "_CanonBackward" in names
    assert "_CanonGateBackward" in names


@pytest.mark.system
def test_the_command_on_a_real_trace(traced, command):
    assert "iteration_4/rank0_trace.json" in command(traced, "--top", 5)

    document = json.loads(command(traced, "--rank", 1, "--json", "--top", 3))
    assert document["trace"].endswith("rank1_trace.json")
    assert len(document["rows"]) == 3

    assert command(traced, "--rank", 7, code=2) == "profile.no_trace"
    assert command(traced / "nowhere", code=2) == "run.not_a_run"


def host(name, ts, dur, cat="cpu_op", tid=1, **args):
    """A complete event of the host: it starts at `ts` and takes `dur`, in us."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 7,
        "tid": tid,
        "args": args,
    }


def numbered(name, ts, dur, sequence_number, tid=1):
    """An operation or its backward, which autograd gives the same number."""
    return host(name, ts, dur, tid=tid, **{"Sequence number": sequence_number})


def launched(number, ts, tid=1):
    """The launch of the kernel with that number."""
    return host("cudaLaunchKernel", ts, 1, "cuda_runtime", tid, correlation=number)


def kernel(name, ts, dur, number, cat="kernel", stream=7):
    """A kernel of the device, launched as `number`."""
    return host(name, ts, dur, cat, stream, correlation=number, device=0, stream=stream)


def gpu_events():
    """Return a step of 1000 us; the GPU is idle for 300 us (0-100, 700-900)."""
    note = "user_annotation"
    mul = "void at::native::elementwise_kernel<MulFunctor>"
    engine = "autograd::engine::evaluate_function"
    return [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        host("ProfilerStep#41", 0, 1000, note),
        host("data_wait", 0, 80, note),
        # forward: a product, Canon (its scope around a multiplication), attention
        numbered("aten::mm", 90, 5, 1),
        launched(1, 91),
        host("canon", 100, 10, note),
        numbered("aten::mul", 101, 5, 2),
        launched(2, 102),
        numbered("aten::scaled_dot_product_attention", 112, 9, 3),
        launched(3, 113),
        host("FSDP::all_gather (layers.1)", 122, 9, note),
        launched(4, 123),
        host("c10d::_allgather_base_", 125, 5),
        launched(5, 126),
        # backward, on autograd's thread: the multiplication's is Canon's
        numbered(f"{engine}: MulBackward0", 140, 9, 2, tid=2),
        launched(6, 141, tid=2),
        numbered(f"{engine}: CompiledFunctionBackward", 150, 9, 2, tid=2),
        launched(7, 151, tid=2),
        launched(8, 152, tid=2),
        host("Optimizer.step#AdamW.step", 200, 50, note),
        launched(9, 210),
        # the device
        kernel("nvjet_hsh_128x256", 100, 100, 1),
        kernel(mul, 200, 50, 2),
        kernel("pytorch_flash::flash_fwd_kernel", 250, 100, 3),
        kernel("Memcpy DtoD", 350, 50, 4, cat="gpu_memcpy"),
        kernel("ncclDevKernel_AllGather_RING_LL", 300, 200, 5, stream=20),  # 100 of it alone
        kernel(mul, 500, 50, 6),
        kernel("triton_poi_fused_add_constant_pad_nd_mul_3", 550, 50, 7),
        kernel("triton_red_fused_rms_norm_1", 600, 100, 8),
        kernel("multi_tensor_apply_kernel", 900, 100, 9),
        {"ph": "s", "id": 5, "pid": 7, "tid": 1, "ts": 126, "cat": "ac2g", "name": "ac2g"},
        host("Trace", 0, 5000, "Trace"),
    ]


def written(path, events, indent=None):
    """Write a trace file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "traceEvents": events,
        "traceName": "x",
    }
    path.write_text(json.dumps(trace, indent=indent))
    return path


def assert_gpu_answers(summary):
    """Compare with the answers for gpu_events."""
    assert summary["is_device"]
    assert summary["steps"] == [42]
    assert summary["window_us"] == 1000
    assert summary["purposes"] == pytest.approx(
        {
            "matmul": 0.1,
            "attention": 0.1,
            "canon": 0.15,  # forward, backward, and a compiled kernel with its padding
            "optimizer": 0.1,
            "sharding": 0.05,
            "communication": 0.2,
            "validation": 0.0,
            "data_wait": 0.08,
            "other": 0.1,
        }
    )
    assert summary["busy_share"] == pytest.approx(0.7)
    assert summary["idle_share"] == pytest.approx(0.3)
    assert summary["communication_exposed"] == pytest.approx(0.1)
    assert summary["communication_overlapped"] == pytest.approx(0.1)

    rows = summary["rows"]
    assert rows[0]["name"] == "ncclDevKernel_AllGather_RING_LL"
    assert (rows[0]["count"], rows[0]["self_us"]) == (1, 200)
    (mul,) = [row for row in rows if "MulFunctor" in row["name"]]
    assert (mul["count"], mul["self_us"], mul["purpose"]) == (2, 100, "canon")
    assert sum(row["count"] for row in rows) == 9


def test_a_gpu_trace(tmp_path):
    path = written(tmp_path / "rank0_trace.json", gpu_events(), indent=1)
    trace = read_trace(path)
    assert trace.num_events == len(gpu_events())
    assert_gpu_answers(summary_of(trace))

    path.write_text(json.dumps(gpu_events()[::-1]))  # a bare list, in another order
    assert_gpu_answers(summary_of(read_trace(path)))


def test_validation_is_a_purpose_of_its_own(tmp_path):
    events = [event for event in gpu_events() if event["name"] != "canon"]
    events.append(host("validation", 85, 50, "user_annotation"))

    summary = summary_of(read_trace(written(tmp_path / "trace.json", events)))

    # all kernels that it launched, except for communication
    assert summary["purposes"]["validation"] == pytest.approx(0.1 + 0.05 + 0.1 + 0.05)
    assert summary["purposes"]["communication"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("name", "purpose"),
    [
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("triton_tem_fused_flex_attention_2", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("_canon_forward_kernel", "canon"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("FSDP::post_backward_reduce (layers.3.attention)", "sharding"),
        ("triton_poi_fused_mul_silu_4", None),
    ],
    ids=["flash", "flex", "gemm", "canon", "nccl", "fsdp", "fused"],
)
def test_purposes_by_name(name, purpose):
    assert purpose_of(name) == purpose


def test_the_newest_trace_is_taken(tmp_path, command):
    folder = tmp_path / "run" / "profile_traces"
    for age, step in enumerate((30, 20, 10)):  # the newest is not the last step
        path = written(folder / f"iteration_{step}" / "rank0_trace.json", gpu_events())
        os.utime(path, (time.time() + age, time.time() + age))
    (folder / "iteration_99").mkdir()
    (folder / "iteration_99" / ".rank0_trace.json").write_text("{")  # still being written

    assert "iteration_10/" in command(tmp_path / "run")


EVENT = b'{"traceEvents": [{"ph": "X", "cat": "kernel", %s}]}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b'{"traceEvents": [{"ph": "X"',
        b"\x1f\x8b" + b"nope" * 20,
        b'{"a": 1}',
        b'{"traceEvents": 5}',
        b'{"traceEvents": []}',
        EVENT % b'"name": "k", "ts": "x"',
        EVENT % b'"ts": 1',
    ],
    ids=["empty", "text", "torn", "gzip", "no-events", "number", "none", "text-time", "no-name"],
)
def test_files_without_a_trace_are_errors(tmp_path, command, content):
    path = tmp_path / "rank0_trace.json"
    path.write_bytes(content)

    assert command(path, code=2)

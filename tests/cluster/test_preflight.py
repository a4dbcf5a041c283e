"""Checks of a job and its nodes, and which node is at fault."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from canon_pretrain.cluster import preflight
from canon_pretrain.cluster.preflight import MATMUL, TWO_NODES, Report, judge, main
from canon_pretrain.run.folder import RunFolder
from tests.commands import fork_server
from tests.fault_runs import checkpoint, unharmed_run
from tests.ports import free_port
from tests.ranks import whole_state
from tests.support import ROOT, debug_run, refused

NOPE_CANON = ["--config", str(ROOT / "train_configs" / "nope_canon.toml")]
TWO_REPLICAS = [*NOPE_CANON, "--parallelism.data_parallel_replicate_degree", "2"]


@pytest.mark.parametrize(("nodes", "ranks"), [(0, 8), (1, 0), (-1, -1)])
def test_a_job_has_nodes_and_ranks(nodes, ranks):
    with refused("slurm.value"):
        preflight.plan_job(NOPE_CANON, nodes, ranks)


@pytest.mark.parametrize(
    ("config", "nodes", "ranks", "fields"),
    [
        (NOPE_CANON, 5, 8, {"valid": [1, 2, 3, 6]}),
        (NOPE_CANON, 1, 7, {"valid": []}),
        (TWO_REPLICAS, 1, 3, {"given": 3}),
    ],
    ids=["5x8", "1x7", "replicas"],
)
def test_the_number_of_ranks_must_divide_the_batch(config, nodes, ranks, fields):
    with refused("config.world_size", **fields):
        preflight.plan_job(config, nodes, ranks)


def test_two_replicas_on_two_nodes_are_planned():
    preflight.plan_job(TWO_REPLICAS, 2, 8)


def test_a_job_for_gpus_that_offloads_to_the_cpu_is_refused():
    offloads = [*NOPE_CANON, "--training.enable_cpu_offload"]

    with refused("config.cpu_offload", key="training.enable_cpu_offload"):
        preflight.plan_job(offloads, 1, 8, gpus=8)
    assert preflight.plan_job(offloads, 1, 8) == preflight.plan_job(NOPE_CANON, 1, 8, gpus=8)


def test_the_plan_counts_one_moment_of_lion():
    """Weights and a moment, where AdamW has two."""
    adamw = preflight.plan_job(NOPE_CANON, 1, 8)
    lion = preflight.plan_job([*NOPE_CANON, "--optimizer.name", "lion"], 1, 8)
    assert 3 * lion.checkpoint_bytes == 2 * adamw.checkpoint_bytes


@pytest.mark.system
def test_the_plan_has_run_folder_and_checkpoint_size(data_folder, tmp_path, capsys):
    odd = tmp_path / 'it\'s "a" run;\n$(x)'
    arguments = [str(word) for word in debug_run(data_folder, odd)]

    main(["job", "--nodes", "3", "--ranks_per_node", "2", "--data", "--", *arguments])

    folder, size, rest = capsys.readouterr().out.split("\0")
    assert (folder, rest) == (str(odd), "")
    assert not odd.exists()

    state = whole_state(checkpoint(unharmed_run(data_folder), 12))
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert 0.98 * num_bytes < int(size) < 1.02 * num_bytes


def test_a_sound_node_has_versions_and_no_faults(tmp_path):
    report = preflight.report_node(tmp_path, 1000, 0)

    assert report.faults == report.disk == []
    assert report.versions["torch"]
    assert len(report.versions) == 5
    assert not [*tmp_path.iterdir()], "the write test leaves nothing"


def test_a_node_reports_its_disk_and_missing_gpus(tmp_path, monkeypatch):
    assert len(preflight.report_node(Path("/proc/1"), 0, 0).disk) == 1

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=9))
    assert len(preflight.report_node(tmp_path, 1000, 0).disk) == 1

    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    assert len(preflight.report_node(tmp_path, 0, 8).faults) == 1


def at(seconds):
    """Return the report of a node whose clock is so far ahead."""
    return Report(clock_s=1e9 + seconds)


def measured(*matmul, device="cuda", network=2e11):
    """Return a node's report: the FLOP/s of its devices, and bandwidth between two nodes."""
    speeds = {f"{device}:{i}": {MATMUL: rate, TWO_NODES: network} for i, rate in enumerate(matmul)}
    return Report(speeds=speeds)


GOOD = Report(versions={"torch": "2.13"})
OTHER = Report(versions={"torch": "2.11"})
FULL = replace(GOOD, disk=["full"])
LOST = Report(left_alone="timeout")
USUAL = measured(600e12, 610e12)
# reports of n1, n2 and n3; faults by node; number of common faults; warnings by node
REPORTS = [
    ([GOOD, None, GOOD], {"n2": ""}, 0, {}),
    ([GOOD, FULL, GOOD], {"n2": ""}, 0, {}),
    ([GOOD, OTHER, GOOD], {"n2": ""}, 0, {}),
    ([GOOD, Report(), GOOD], {"n2": ""}, 0, {}),
    ([FULL, FULL, FULL], {}, 1, {}),  # the fault of none
    ([FULL], {}, 1, {}),
    ([None], {"n1": ""}, 0, {}),
    ([at(0), at(1), at(-1)], {}, 0, {}),  # clocks are compared with the median
    ([at(0), at(-5), at(1)], {}, 0, {"n2": ""}),
    ([at(0), at(40), at(1)], {"n2": ""}, 0, {}),
    ([LOST, Report(["other sums"])], {"n2": ""}, 0, {}),  # a fault explains a lost collective
    ([LOST, None], {"n2": ""}, 0, {}),
    ([LOST, LOST], {}, 2, {}),
    ([USUAL, measured(590e12, 430e12), USUAL], {}, 0, {"n2": "cuda:1"}),
    ([USUAL, USUAL, measured(100e12, 600e12)], {"n3": "cuda:0"}, 0, {}),
    ([measured(300e12, 300e12), USUAL], {"n1": "slow"}, 0, {}),  # of two nodes, the slower one
    ([measured(600e12, 100e12, 600e12)], {"n1": "cuda:1"}, 0, {}),  # of one node, the slowest GPU
    ([USUAL, measured(500e12, 490e12)], {}, 0, {}),
    ([measured(5e10, device="cpu"), measured(1e10, device="cpu")], {}, 0, {"n2": "cpu:0"}),
    ([measured(6e14), measured(6e14, network=3e10), measured(6e14)], {"n2": "30 GB/s"}, 0, {}),
]


@pytest.mark.parametrize(("reports", "faults", "common", "warnings"), REPORTS)
def test_the_node_at_fault_is_found(reports, faults, common, warnings):
    verdict = judge({f"n{i}": report for i, report in enumerate(reports, 1)})

    assert (verdict.nodes.keys(), len(verdict.common)) == (faults.keys(), common)
    for node, text in faults.items():
        assert text in verdict.nodes[node][0]
    for (node, text), warning in zip(warnings.items(), verdict.warnings, strict=True):
        assert warning.startswith(f"{node}: {text}")


def test_the_verdict_prints_nodes_to_exclude(tmp_path, capsys, monkeypatch):
    def verdict(*more):
        with pytest.raises(SystemExit) as ended:
            main(["verdict", "--report", str(tmp_path), "--nodes", "n1,n2", *more])
        return ended.value.code, *capsys.readouterr()

    for node in ("n1", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        main(["node", "--report", str(tmp_path), "--run", str(tmp_path)])
    code, out, _ = verdict()
    assert (code, out) == (0, "")

    (tmp_path / "n2.json").write_text('{"faults": ')
    code, out, error = verdict()
    assert (code, out) == (preflight.EXIT_BROKEN_NODES, "n2\n")
    assert "n2" in error

    code, out, _ = verdict("--ranks")
    assert (code, out) == (1, "")


def test_groups_are_nodes_neighbors_and_all_ranks():
    assert preflight.rank_groups(["n1", "n2", "n1", "n3"]) == [
        (preflight.IN_NODE, [0, 2]), (preflight.IN_NODE, [1]), (preflight.IN_NODE, [3]),
        (TWO_NODES, [0, 1, 2]), (TWO_NODES, [0, 2, 3]), (TWO_NODES, [1, 3]),
        (preflight.ALL_NODES, [0, 1, 2, 3]),
    ]  # fmt: skip
    assert preflight.rank_groups(["n1", "n1"]) == [(preflight.IN_NODE, [0, 1])]


def preflight_rank(rank, port, folder, fault):
    """Check this rank of two nodes; the second one may have a fault."""
    os.environ |= {
        "LOCAL_RANK": "0",
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SLURMD_NODENAME": f"n{rank}",
    }
    if rank == 1 and fault == "no room":
        preflight.CPU_BYTES = 1 << 60
    main(["ranks", "--report", str(folder)])


def slow_down(process):
    """Let a process run a quarter of the time until it ends."""
    while process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGSTOP)
            time.sleep(0.03)
            os.kill(process.pid or 0, signal.SIGCONT)
            time.sleep(0.01)


@pytest.mark.system
@pytest.mark.parametrize("fault", ["", "no room", "slow"])
def test_a_failed_or_slow_rank_is_found_without_a_timeout(fault, tmp_path):
    port = free_port()
    ranks = [
        fork_server.Process(target=preflight_rank, args=(rank, port, tmp_path, fault))
        for rank in (0, 1)
    ]

    for rank in ranks:
        rank.start()
    if fault == "slow":
        slow_down(ranks[1])
    for rank in ranks:
        rank.join(100)
        assert rank.exitcode == 0
    reports = preflight.read_reports(tmp_path, ["n0", "n1"], ranks=True)
    verdict = judge(reports)

    assert not verdict.common
    assert list(verdict.nodes) == (["n1"] if fault == "no room" else [])
    if fault == "slow":
        assert any("n1: cpu:0" in text for text in verdict.warnings)
    if not fault:
        speeds = reports["n0"].speeds["cpu:0"]
        assert speeds.keys() == {MATMUL, preflight.MEMORY, preflight.ALL_NODES}


def test_saves_longer_than_killwait_give_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_PARTITION", "low")
    answers = {"config": "KillWait    = 30 sec\n", "partition low": "   GraceTime=120 x"}
    run = RunFolder(tmp_path)

    def log_save(seconds):
        with open(run.log_file, "a") as log:
            log.write(json.dumps({"event": "checkpoint", "step": 1, "seconds": seconds}) + "\n")

    assert preflight.slow_save_warning(run, answers.__getitem__) is None, "no run, no warning"

    log_save(45)
    warning = preflight.slow_save_warning(run, answers.__getitem__)
    assert re.findall(r"\d+ s", warning or "") == ["45 s", "30 s", "120 s"]

    log_save(12)  # the last save counts
    warning = preflight.slow_save_warning(run, answers.__getitem__)
    assert not re.findall(r"\d+ s", warning or "")

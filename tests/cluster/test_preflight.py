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


def test_the_number_of_nodes_must_divide_the_batch():
    config = ["--config", str(ROOT / "train_configs" / "nope_canon.toml")]
    for nodes, ranks in ((0, 8), (1, 0), (-1, -1)):
        with refused("slurm.value"):
            preflight.plan_job(config, nodes, ranks)
    replicas = [*config, "--parallelism.data_parallel_replicate_degree", "2"]
    preflight.plan_job(replicas, 2, 8)
    for launch, nodes, ranks, fields in (
        (config, 5, 8, {"valid": [1, 2, 3, 6]}),
        (config, 1, 7, {"valid": []}),
        (replicas, 1, 3, {"given": 3}),
    ):
        with refused("config.world_size", **fields):
            preflight.plan_job(launch, nodes, ranks)


def test_a_job_for_gpus_that_offloads_to_the_cpu_is_refused():
    config = ["--config", str(ROOT / "train_configs" / "nope_canon.toml")]
    offloads = [*config, "--training.enable_cpu_offload"]
    with refused("config.cpu_offload", key="training.enable_cpu_offload"):
        preflight.plan_job(offloads, 1, 8, gpus=8)
    assert preflight.plan_job(offloads, 1, 8) == preflight.plan_job(config, 1, 8, gpus=8)


@pytest.mark.system
def test_the_plan_has_run_folder_and_checkpoint_size(data_folder, tmp_path, capsys):
    odd = tmp_path / 'it\'s "a" run;\n$(x)'
    arguments = list(map(str, debug_run(data_folder, odd)))
    main(["job", "--nodes", "3", "--ranks_per_node", "2", "--data", "--", *arguments])
    folder, size, rest = capsys.readouterr().out.split("\0")
    assert folder == str(odd) and rest == "" and not odd.exists()
    state = whole_state(checkpoint(unharmed_run(data_folder), 12))
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    there = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert 0.98 * there < int(size) < 1.02 * there


def test_a_nodes_report(tmp_path, monkeypatch):
    report = preflight.report_node(tmp_path, 1000, 0)
    assert report.faults == report.disk == []
    assert report.versions["torch"] and len(report.versions) == 5
    assert not [*tmp_path.iterdir()], "the write test leaves nothing"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=9))
    assert len(preflight.report_node(tmp_path, 1000, 0).disk) == 1
    assert len(preflight.report_node(Path("/proc/1"), 0, 0).disk) == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    assert len(preflight.report_node(tmp_path, 0, 8).faults) == 1


def at(seconds):
    return Report(clock_s=1e9 + seconds)


def measured(*matmul, device="cuda", network=2e11):
    """Return a node's report: the FLOP/s of its devices, and bandwidth between two nodes."""
    speeds = {f"{device}:{i}": {MATMUL: rate, TWO_NODES: network} for i, rate in enumerate(matmul)}
    return Report(speeds=speeds)


GOOD, OTHER = Report(versions={"torch": "2.13"}), Report(versions={"torch": "2.11"})
FULL, LOST = replace(GOOD, disk=["full"]), Report(left_alone="timeout")
USUAL = measured(600e12, 610e12)
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
    assert all(text in verdict.nodes[node][0] for node, text in faults.items())
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
    assert verdict()[:2] == (0, "")
    (tmp_path / "n2.json").write_text('{"faults": ')
    code, out, error = verdict()
    assert (code, out) == (preflight.EXIT_BROKEN_NODES, "n2\n")
    assert "n2" in error
    assert verdict("--ranks")[:2] == (1, "")


def test_groups_are_nodes_neighbors_and_all_ranks():
    assert preflight.rank_groups(["n1", "n2", "n1", "n3"]) == [
        (preflight.IN_NODE, [0, 2]), (preflight.IN_NODE, [1]), (preflight.IN_NODE, [3]),
        (TWO_NODES, [0, 1, 2]), (TWO_NODES, [0, 2, 3]), (TWO_NODES, [1, 3]),
        (preflight.ALL_NODES, [0, 1, 2, 3]),
    ]  # fmt: skip
    assert preflight.rank_groups(["n1", "n1"]) == [(preflight.IN_NODE, [0, 1])]


def preflight_rank(rank, port, folder, fault):
    os.environ.update(LOCAL_RANK="0", RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), SLURMD_NODENAME=f"n{rank}")
    if rank == 1 and fault == "no room":
        preflight.CPU_BYTES = 1 << 60
    main(["ranks", "--report", str(folder)])


@pytest.mark.system
@pytest.mark.parametrize("fault", ["", "no room", "slow"])
def test_a_failed_or_slow_rank_is_found_without_a_timeout(fault, tmp_path):
    port = free_port()
    rank_arguments = [(rank, port, tmp_path, fault) for rank in (0, 1)]
    ranks = [
        fork_server.Process(target=preflight_rank, args=arguments) for arguments in rank_arguments
    ]
    for process in ranks:
        process.start()
    while fault == "slow" and ranks[1].is_alive():  # it runs a quarter of the time
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[1].pid or 0, signal.SIGSTOP)
            time.sleep(0.03)
            os.kill(ranks[1].pid or 0, signal.SIGCONT)
            time.sleep(0.01)
    for process in ranks:
        process.join(100)
        assert process.exitcode == 0
    reports = preflight.read_reports(tmp_path, ["n0", "n1"], ranks=True)
    verdict = judge(reports)
    assert list(verdict.nodes) == (["n1"] if fault == "no room" else []) and not verdict.common
    assert any("n1: cpu:0" in text for text in verdict.warnings) or fault != "slow"
    if not fault and (report := reports["n0"]):
        speeds = report.speeds["cpu:0"]
        assert speeds.keys() == {MATMUL, preflight.MEMORY, preflight.ALL_NODES}


def test_saves_longer_than_killwait_give_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_PARTITION", "low")
    answers = {"config": "KillWait    = 30 sec\n", "partition low": "   GraceTime=120 x"}
    run = RunFolder(tmp_path)
    assert preflight.slow_save_warning(run, answers.__getitem__) is None, "no run, no warning"
    for seconds, warns in ((45, True), (12, False)):  # the last save counts
        event = {"event": "checkpoint", "step": 1, "seconds": seconds}
        with open(run.log_file, "a") as log:
            log.write(json.dumps(event) + "\n")
        text = preflight.slow_save_warning(run, answers.__getitem__)
        assert re.findall(r"\d+ s", text or "") == (["45 s", "30 s", "120 s"] if warns else [])

"""Checks of a job and its nodes; and which node is told to be at fault."""

import json
import os
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canon_pretrain import preflight
from canon_pretrain.core.errors import UserError
from canon_pretrain.preflight import MATMUL, TWO_NODES, Report, judge, main
from canon_pretrain.run.folder import RunFolder
from tests.fault_runs import checkpoint, unharmed_run
from tests.ranks import _context as rank_context
from tests.ranks import whole_state
from tests.support import ROOT, debug_run

Usage = namedtuple("Usage", "total used free")


def good(**other: Any) -> Report:
    return Report(**{"versions": {"torch": "2.13"}} | other)


@given(st.integers(1, 500), st.integers(-1, 40), st.integers(-1, 20))
def test_nodes_fit_whose_ranks_divide_the_batch(batch, nodes, ranks):
    if nodes > 0 < ranks and batch % (nodes * ranks) == 0:
        preflight.check_nodes(batch, nodes, ranks)
    else:
        with pytest.raises(UserError):
            preflight.check_nodes(batch, nodes, ranks)


def test_the_papers_batch_on_nodes_of_eight():
    config = ["--config", str(ROOT / "train_configs" / "nope_canon.toml")]
    with pytest.raises(UserError, match=r"5 node\(s\) of 8 can't share .* = 48. .*: 1, 2, 3, 6 "):
        preflight.plan_job(config, 5, 8)
    with pytest.raises(UserError, match="can: none "):
        preflight.plan_job(config, 1, 7)
    replicas = [*config, "--parallelism.data_parallel_replicate_degree", "2"]
    preflight.plan_job(replicas, 2, 8)
    with pytest.raises(UserError, match="= 2: 3 ranks can't"):
        preflight.plan_job(replicas, 1, 3)


def test_the_plan_is_the_run_folder_and_a_checkpoints_size(data_folder, tmp_path, capsys):
    odd = tmp_path / 'it\'s "a" run;\n$(x)'
    arguments = list(map(str, debug_run(data_folder, odd)))
    main(["job", "--nodes", "3", "--ranks_per_node", "2", "--data", "--", *arguments])
    folder, size, rest = capsys.readouterr().out.split("\0")
    assert folder == str(odd) and rest == "" and not odd.exists()
    state = whole_state(checkpoint(unharmed_run(data_folder), 12))
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    there = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert 0.98 * there < int(size) < 1.02 * there, "as large as a real one's tensors"


def test_a_nodes_report(tmp_path, monkeypatch):
    report = preflight.report_node(tmp_path, 1000, 0)
    assert report.faults == report.disk == []
    assert report.versions["torch"] and len(report.versions) == 5
    assert not [*tmp_path.iterdir()], "the write test leaves nothing"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 1, 9))
    assert "9 bytes are free" in preflight.report_node(tmp_path, 1000, 0).disk[0]
    assert "cannot be written to" in preflight.report_node(Path("/proc/1"), 0, 0).disk[0]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    assert preflight.report_node(tmp_path, 0, 8).faults == ["7 of 8 GPUs can be used"]


def at(seconds: float) -> Report:
    return Report(clock_s=1e9 + seconds)


FULL, LOST = good(disk=["full"]), Report(left_alone="timeout")
FOUND: list[tuple[list[Report | None], dict[str, list[str]], list[str], list[str]]] = [
    ([good(), None, good()], {"n2": ["no report"]}, [], []),
    ([good(), FULL, good()], {"n2": ["full"]}, [], []),
    ([good(), good(versions={"torch": "2.11"}), good()],
     {"n2": ["torch is 2.11, elsewhere 2.13"]}, [], []),
    ([good(), good(versions={}), good()], {"n2": ["torch is unknown, elsewhere 2.13"]}, [], []),
    # full for all, or for the only one, which can't tell: no node's fault
    ([FULL, FULL, FULL], {}, ["full"], []),
    ([FULL], {}, ["full"], []),
    ([None], {"n1": ["no report"]}, [], []),
    # clocks are compared with the middle one
    ([at(0), at(1), at(-1)], {}, [], []),
    ([at(0), at(-5), at(1)], {}, [], ["n2: its clock is 5.0 s off the others'"]),
    ([at(0), at(40), at(1)], {"n2": ["its clock is 39.0 s off the others'"]}, [], []),
    # a rank that was left alone is at fault only where no other is
    ([LOST, Report(["other sums"])], {"n2": ["other sums"]}, [], []),
    ([LOST, None], {"n2": ["no report"]}, [], []),
    ([LOST, LOST], {}, ["n1: timeout", "n2: timeout"], []),
]  # fmt: skip


@pytest.mark.parametrize(("reports", "nodes", "common", "warnings"), FOUND)
def test_the_node_at_fault_is_named(reports, nodes, common, warnings):
    there = {f"n{i}": report for i, report in enumerate(reports, 1)}
    assert judge(there) == (nodes, common, warnings)


def test_the_verdict_names_nodes_for_the_script(tmp_path, capsys, monkeypatch):
    def verdict(*more: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["verdict", "--report", str(tmp_path), "--nodes", "n1,n2", *more])
        return ended.value.code, *capsys.readouterr()

    for node in ("n1", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        main(["node", "--report", str(tmp_path), "--run", str(tmp_path)])
    assert verdict()[:2] == (0, "")
    (tmp_path / "n2.json").write_text('{"faults": ')  # cut short
    code, out, error = verdict()
    assert (code, out) == (preflight.EXIT_BROKEN_NODES, "n2\n")
    assert "node n2 is not fit: no report" in error
    assert verdict("--ranks")[:2] == (1, "")


def measured(*matmul: float, device: str = "cuda", network: float = 2e11) -> Report:
    """A node's report: the FLOP/s of its devices, and what two nodes reach with it."""
    speeds = {
        f"{device}:{i}": {MATMUL: flops, TWO_NODES: network} for i, flops in enumerate(matmul)
    }
    return Report(speeds=speeds)


USUAL = measured(600e12, 610e12)
SPEEDS: list[tuple[list[Report], dict[str, str], dict[str, str]]] = [
    (
        [USUAL, measured(590e12, 430e12), USUAL],
        {},
        {"n2": "cuda:1 is slow: matmul 430 TFLOP/s, 70% of the usual 610 TFLOP/s"},
    ),
    ([USUAL, USUAL, measured(100e12, 600e12)], {"n3": "cuda:0 is slow"}, {}),
    ([measured(300e12, 300e12), USUAL], {"n1": "slow"}, {}),  # of two nodes the better one's
    ([measured(600e12, 100e12, 600e12)], {"n1": "cuda:1"}, {}),  # a single node: its other GPUs
    ([USUAL, measured(500e12, 490e12)], {}, {}),
    ([measured(5e10, device="cpu"), measured(1e10, device="cpu")], {}, {"n2": "cpu:0 is slow"}),
    # of a node's two neighbors on the network, the better one counts
    ([measured(6e14), measured(6e14, network=3e10), measured(6e14)], {"n2": "30 GB/s"}, {}),
]


@pytest.mark.parametrize(("reports", "faults", "warnings"), SPEEDS)
def test_a_slow_gpu_is_warned_of_and_a_very_slow_ones_node_is_at_fault(reports, faults, warnings):
    verdict = judge({f"n{i}": report for i, report in enumerate(reports, 1)})
    assert verdict.nodes.keys() == faults.keys() and not verdict.common
    assert all(text in verdict.nodes[node][0] for node, text in faults.items())
    for (node, text), warning in zip(warnings.items(), verdict.warnings, strict=True):
        assert warning.startswith(f"{node}: ") and text in warning


def test_all_reduces_are_of_each_node_of_neighbors_and_of_all():
    assert preflight.rank_groups(["n1", "n2", "n1", "n3"]) == [
        (preflight.IN_NODE, [0, 2]), (preflight.IN_NODE, [1]), (preflight.IN_NODE, [3]),
        (TWO_NODES, [0, 1, 2]), (TWO_NODES, [0, 2, 3]), (TWO_NODES, [1, 3]),
        (preflight.ALL_NODES, [0, 1, 2, 3]),
    ]  # fmt: skip
    assert preflight.rank_groups(["n1", "n1"]) == [(preflight.IN_NODE, [0, 1])]


def preflight_rank(environment: dict[str, str], folder: Path, fault: str) -> None:
    os.environ.update(environment)
    if fault == "no room":
        preflight.CPU_BYTES = 1 << 60
    main(["ranks", "--report", str(folder)])


@pytest.mark.parametrize("fault", ["", "no room"])
def test_a_rank_whose_device_fails_is_named_and_the_others_do_not_wait(fault, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    base = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank, own in enumerate(["", fault]):
        environment = {**base, "RANK": str(rank), "SLURMD_NODENAME": f"n{rank}"}
        words = (environment, tmp_path, own)
        ranks.append(rank_context.Process(target=preflight_rank, args=words))
        ranks[-1].start()
    for each in ranks:
        each.join(100)
        assert each.exitcode == 0
    reports = preflight.read_reports(tmp_path, ["n0", "n1"], ranks=True)
    verdict = judge(reports)
    assert list(verdict.nodes) == (["n1"] if fault else []) and not verdict.common
    if not fault and (report := reports["n0"]):
        speeds = report.speeds["cpu:0"]
        assert speeds.keys() == {MATMUL, preflight.MEMORY, preflight.ALL_NODES}


def test_saves_that_take_longer_than_slurm_waits_are_warned_of(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_PARTITION", "low")
    answers = {"config": "KillWait    = 30 sec\n", "partition low": "   GraceTime=120 x"}
    run = RunFolder(tmp_path)
    assert preflight.slow_save_warning(run, answers.__getitem__) is None, "no run, no warning"
    for seconds, warns in ((45, True), (12, False)):  # the last save counts
        event = {"event": "checkpoint", "step": 1, "seconds": seconds}
        with open(run.log_file, "a") as log:
            log.write(json.dumps(event) + "\n")
        text = preflight.slow_save_warning(run, answers.__getitem__)
        assert text is None or "45 s" in text and "kills 30 s after" in text and "120 s" in text
        assert (text is not None) == warns

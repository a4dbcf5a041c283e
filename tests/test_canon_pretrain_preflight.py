"""Checks of a job and its nodes; and which node is told to be at fault."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canon_pretrain.errors import UserError
from canon_pretrain.preflight.__main__ import EXIT_BROKEN_NODES, main
from canon_pretrain.preflight.job import plan_job, valid_node_counts, words_on_waits
from canon_pretrain.preflight.reports import report_node
from canon_pretrain.preflight.verdict import judge_nodes, judge_ranks, read_reports
from canon_pretrain.run.folder import RunFolder
from tests.fault_runs import checkpoint, unharmed_run
from tests.ranks import whole_state
from tests.support import ROOT, debug_run

NODES = ("n1", "n2", "n3")
Usage = namedtuple("Usage", "total used free")


def good(**other: Any) -> dict[str, Any]:
    return {"faults": [], "disk": [], "versions": {"torch": "2.13"}} | other


@given(batch=st.integers(1, 500), ranks=st.integers(1, 20))
def test_valid_node_counts_are_those_whose_ranks_divide_the_batch(batch: int, ranks: int) -> None:
    expected = [nodes for nodes in range(1, batch + 1) if batch % (ranks * nodes) == 0]
    assert valid_node_counts(batch, ranks) == expected


def test_the_papers_batch_on_nodes_of_eight() -> None:
    assert valid_node_counts(48, 8) == [1, 2, 3, 6]
    config = str(ROOT / "train_configs" / "nope_canon.toml")
    with pytest.raises(UserError, match=r"5 node\(s\) of 8 can't share .* = 48. .*: 1, 2, 3, 6 "):
        plan_job(["--config", config], 5, 8)
    with pytest.raises(UserError, match=r"on 1 node: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48 "):
        plan_job(["--config", config], 1, 7)
    with pytest.raises(UserError, match="at least 1"):
        plan_job(["--config", config], 0, 8)


def test_the_plan_is_the_run_folder_and_a_checkpoints_size(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / 'it\'s "a" run;\n$(x)'
    arguments = list(map(str, debug_run(data_folder, odd)))
    main(["job", "--nodes", "3", "--ranks_per_node", "2", "--data", "--", *arguments])
    folder, size, rest = capsys.readouterr().out.split("\0")
    assert folder == str(odd) and rest == "" and not odd.exists()
    state = whole_state(checkpoint(unharmed_run(data_folder), 12))
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    there = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert 0.98 * there < int(size) < 1.02 * there, "as large as a real one's tensors"


def test_data_that_is_not_there_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    arguments = list(map(str, debug_run(tmp_path / "nothing", tmp_path / "run")))
    plan_job(arguments, 1, 2)
    with pytest.raises(UserError, match="nothing"):
        plan_job(arguments, 1, 2, data=True)


def test_a_nodes_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_node(tmp_path, 1000, 0)
    assert report["faults"] == report["disk"] == []
    assert report["versions"]["torch"] and len(report["versions"]) == 5
    assert not [*tmp_path.iterdir()], "the write test leaves nothing"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 1, 9))
    assert "9 bytes are free" in report_node(tmp_path, 1000, 0)["disk"][0]
    assert "cannot be written to" in report_node(Path("/proc/1"), 0, 0)["disk"][0]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    assert report_node(tmp_path, 0, 8)["faults"] == ["7 of 8 GPUs can be used"]


@pytest.mark.parametrize(
    ("n2", "fault"),
    [
        (None, "no report"),
        (good(faults=["7 of 8 GPUs can be used"]), "7 of 8 GPUs can be used"),
        (good(disk=["full"]), "full"),
        (good(versions={"torch": "2.11"}), "torch is 2.11, elsewhere 2.13"),
        (good(versions={}), "torch is unknown, elsewhere 2.13"),
    ],
)
def test_a_node_that_differs_is_at_fault(n2: dict[str, Any] | None, fault: str) -> None:
    verdict = judge_nodes({"n1": good(), "n2": n2, "n3": good()})
    assert verdict.nodes == {"n2": [fault]} and not verdict.common


def test_a_disk_that_is_full_for_all_is_no_nodes_fault() -> None:
    verdict = judge_nodes(dict.fromkeys(NODES, good(disk=["full"])))
    assert verdict.common == ["full"] and not verdict.nodes
    assert judge_nodes({"n1": good(disk=["full"])}).common == ["full"], "one node can't tell"
    assert judge_nodes({"n1": None}).nodes == {"n1": ["no report"]}


def test_clocks_are_compared_with_the_middle_one() -> None:
    def at(seconds: float) -> dict[str, Any]:
        return {"faults": [], "clock_s": 1e9 + seconds}

    verdict = judge_ranks({"n1": at(0), "n2": at(1), "n3": at(-1)})
    assert verdict == ({}, [], [])
    verdict = judge_ranks({"n1": at(0), "n2": at(-5), "n3": at(1)})
    assert verdict.warnings == ["n2: its clock is 5.0 s off the others'"] and not verdict.nodes
    verdict = judge_ranks({"n1": at(0), "n2": at(40), "n3": at(1)})
    assert verdict.nodes == {"n2": ["its clock is 39.0 s off the others'"]}


def test_a_rank_that_was_left_alone_is_at_fault_only_where_no_other_is() -> None:
    alone, broken = {"faults": [], "left_alone": "timeout"}, {"faults": ["other sums"]}
    assert judge_ranks({"n1": alone, "n2": broken}).nodes == {"n2": ["other sums"]}
    assert judge_ranks({"n1": alone, "n2": None}).nodes == {"n2": ["no report"]}
    verdict = judge_ranks({"n1": alone, "n2": alone})
    assert verdict.common == ["n1: timeout", "n2: timeout"] and not verdict.nodes
    assert judge_ranks({"n1": None, "n2": None}).common


def test_the_verdict_names_nodes_for_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = ["verdict", "--report", str(tmp_path), "--nodes", "n1,n2"]
    for node in ("n1", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        main(["node", "--report", str(tmp_path), "--run", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main(verdict)
    assert ended.value.code == 0 and capsys.readouterr().out == ""
    (tmp_path / "n2.json").write_text('{"faults": ')  # cut short
    with pytest.raises(SystemExit) as ended:
        main(verdict)
    told = capsys.readouterr()
    assert ended.value.code == EXIT_BROKEN_NODES and told.out == "n2\n"
    assert "node n2 is not fit: no report" in told.err
    with pytest.raises(SystemExit) as ended:
        main([*verdict, "--ranks"])
    assert ended.value.code == 1 and capsys.readouterr().out == ""


def test_two_ranks_meet_and_report(tmp_path: Path) -> None:
    """By torchrun, as a job does it: both add up numbers, and their clocks are one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "canon_pretrain.preflight", "ranks", "--report", str(tmp_path)]
    environ = os.environ | {"SLURMD_NODENAME": "n1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environ, timeout=120, capture_output=True)
    reports = [json.loads((tmp_path / f"n1.rank{rank}.json").read_text()) for rank in (0, 1)]
    assert all(report["faults"] == [] for report in reports)
    assert abs(reports[0]["clock_s"] - reports[1]["clock_s"]) < 2
    merged = read_reports(tmp_path, ["n1", "n2"], ranks=True)
    assert merged["n1"]["faults"] == [] and merged["n2"] is None


def test_saves_that_take_longer_than_slurm_waits_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_PARTITION", "low")
    answers = {
        "config": "KillWait                = 30 sec\n",
        "partition low": "   GraceTime=120 x",
    }
    run = RunFolder(tmp_path)
    assert words_on_waits(run, answers.__getitem__) is None, "no run, no warning"

    def saved(seconds: float) -> None:
        event = {"event": "checkpoint", "step": 1, "seconds": seconds}
        with open(run.log_file, "a") as log:
            log.write(json.dumps(event) + "\n")

    saved(45)
    text = words_on_waits(run, answers.__getitem__)
    assert text is not None and "45 s" in text and "kills 30 s after" in text and "120 s" in text
    saved(12)
    assert words_on_waits(run, answers.__getitem__) is None, "the last one counts"
    saved(45)
    assert words_on_waits(run, lambda what: "") is None, "no Slurm, no warning"

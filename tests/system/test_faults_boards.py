"""Boards whose driver and runs are killed at random, stopped, and run out of disk.

The driver and its runs are forks (tests/forked_driver.py), and kills wait for steps, not for time.
"""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from canon_pretrain.cluster.sweep import read_sweep
from canon_pretrain.core.lock import live_holder
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import read_log
from tests.checkpoint_folders import small_disk
from tests.commands import Command
from tests.fault_runs import wait_for
from tests.ranks import logged_step
from tests.support import HANGS_AFTER_S, ROOT

BOARD = f"""
seeds = [0, 1]
[architectures.rope]
canon_set = ""
[architectures.rope_canon]
canon_set = "ABCD"
[tasks.copy]
config = "{ROOT / "train_configs" / "playground" / "tiny" / "copy.toml"}"
score = "loss"
[tasks.copy.set]
"data.task.n" = 8
"training.seq_len" = 18
"training.steps" = 160
"lr_scheduler.warmup_steps" = 10
"checkpoint.interval" = 10
"validation.freq" = 40
"compile.enable" = false
[[claims]]
task = "copy"
better = "rope_canon"
worse = "rope"
"""
SAME = ("arms", "cells", "claims", "differences", "rankings", "curves")
KILLS = ["driver", "run", "stop", "stop twice"] * 2
MAX_STEPS = 24
"""Between two kills, over all runs."""


def start(folder, out):
    """Start the driver of the board, with results in `out`."""
    path = folder / "board.toml"
    path.write_text(BOARD)
    return Command(
        "tests.forked_driver",
        *("playground", "run", path, "--out", out, "--parallel", 2),
        stdout=folder / "printed",
        # a background job of a shell ignores SIGINT, and so would the driver
        interrupts=True,
    )


def runs(out):
    return [out / run.name for run in read_sweep(out).runs]


def is_done(run):
    return RunFolder(run).done_file.exists()


def training(driver, out):
    """Return the process ids of the driver's runs that train now, at a step after 0."""
    pids = []
    for run in runs(out):
        holder = live_holder(RunFolder(run).lock_file) if logged_step(run) else None
        if holder is not None and parent(holder.pid) == driver.pid:
            pids.append(holder.pid)
    return pids


def parent(pid):
    """Return the parent's process id; 0 if the process has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def page(out):
    """Return what report.json says of scores, and the loss of each step."""
    report = json.loads((out / "report.json").read_text())
    losses = {}
    for run in runs(out):
        # every tenth step: a run that is stopped logs its last step too
        losses[run.name] = {
            event["step"]: event["loss"]
            for event in read_log(RunFolder(run).log_file)
            if event["event"] == "step" and event["step"] % 10 == 0
        }
    return {key: report[key] for key in SAME} | {"losses": losses}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder, folder / "out").wait(HANGS_AFTER_S) == 0
    return page(folder / "out")


def disturb(driver, kind, out, rng):
    """Kill the driver or a run, or press Ctrl-C once or twice."""
    if kind == "driver":
        driver.kill()
    elif kind == "run":
        with suppress(ProcessLookupError):
            os.kill(rng.choice(training(driver, out)), signal.SIGKILL)
    else:
        driver.send_signal(signal.SIGINT)
        if kind == "stop twice":
            time.sleep(rng.uniform(0, 0.3))
            driver.send_signal(signal.SIGINT)


def steps(out):
    """Return the steps of all runs together."""
    return sum(map(logged_step, runs(out)))


@pytest.mark.system
@pytest.mark.timeout(600)
def test_kills_at_random_end_with_the_same_page(undisturbed, tmp_path):
    """Each kind of them in a random order, some steps after the last one."""
    out = tmp_path / "out"
    rng = random.Random(0)
    driver = start(tmp_path, out)
    wait_for(lambda: (out / "sweep.json").exists(), driver)

    for kind in rng.sample(KILLS, len(KILLS)):
        # of the runs that a killed driver leaves, some still save
        wait_for(lambda driver=driver: training(driver, out), driver)
        target = steps(out) + rng.randrange(1, MAX_STEPS)
        wait_for(
            lambda target=target, driver=driver: steps(out) >= target and training(driver, out),
            driver,
        )
        disturb(driver, kind, out, rng)
        if kind != "run":
            assert driver.wait(HANGS_AFTER_S) in (-signal.SIGKILL, 130)
            driver = start(tmp_path, out)

    # this driver ends without the run that was killed last, which the next one continues
    driver.wait(HANGS_AFTER_S)
    driver = start(tmp_path, out)
    assert driver.wait(HANGS_AFTER_S) == 0, (tmp_path / "printed").read_text()[-4000:]
    assert page(out) == undisturbed


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_full_disk_ends_with_the_same_page(undisturbed, tmp_path):
    """Runs that cannot write are reported; with room the same command finishes them."""
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        out = disk / "out"
        driver = start(tmp_path, out)
        assert driver.wait(HANGS_AFTER_S) in (1, 2)
        assert not all(map(is_done, runs(out)))

        subprocess.run(["mount", "-o", "remount,size=256m", disk], check=True)
        driver = start(tmp_path, out)
        assert driver.wait(HANGS_AFTER_S) == 0, (tmp_path / "printed").read_text()[-4000:]
        assert page(out) == undisturbed

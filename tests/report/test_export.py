"""wandb and TensorBoard as copies of the log: read back by their own formats, and live."""

import json
import logging
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from canon_pretrain.core.lock import LinkLock
from canon_pretrain.report.export import RunMetadata, TensorBoardTarget, copy, run_metadata
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run import background
from canon_pretrain.run.__main__ import main
from canon_pretrain.run.background import LiveExports
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import RunLog, number
from canon_pretrain.run.results import Score
from tests.ranks import events, launch
from tests.report_runs import TOKENS_A_STEP, plant_results, plant_run
from tests.support import ROOT, debug_run, error_codes

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
WRONG = 99.0
SECRET = "c0ffee" * 7
LAUNCHES = (
    # event, first step to last, of which those after this one were lost with a kill
    ({"event": "start", "world_size": 2}, range(1, 7), 4),
    ({"event": "resume", "from_step": 4, "world_size": 2}, range(5, 9), 6),
    ({"event": "resume", "from_step": 6, "world_size": 1}, range(7, 11), 10),
)


def loss_of(step: int) -> float:
    return math.nan if step == 9 else 10 - 0.1 * step


def write_launch(folder: Path, number_: int) -> None:
    """One launch of a run that is killed twice and ends on one rank; what was lost is WRONG."""
    first, steps, good = LAUNCHES[number_]
    run_file = {"run_id": "0a1b2c3d", "created": "t", "launches": number_ + 1}
    (folder / "run.json").write_text(json.dumps(run_file))
    log = RunLog(folder / "log.jsonl")
    log.write(**first)  # type: ignore[arg-type]
    same = {"lr": 1e-3, "tokens_per_second": 9000.0, "skipped_steps": 0, "data_digests": ["0" * 16]}
    for step in steps:
        loss = loss_of(step) if step <= good else WRONG
        at = {"step": step, "tokens": step * TOKENS_A_STEP, "loss": loss}
        norm = math.inf if step == 9 else 1.0
        log.write(
            "step", **at, **same, grad_norm=norm, source_tokens={"a b/c": 7 * step, "d": step}
        )
        if step in (5, 10):
            sources = {"a b/c": {"loss": 1.0, "bits_per_byte": loss / 2, "tokens": 5}, "d": {}}
            scored = {"bits_per_byte": loss / 3, "seconds": 0.1, "tokens_scored": 10}
            log.write("validation", **at, **scored, sources=sources)
    if number_ == 2:
        log.write("done", step=10)
    log.close()
    if number_ < 2:  # the kill tears the line that is being written
        with open(folder / "log.jsonl", "ab") as file:
            file.write(b'{"event": "step", "step": 1')


@pytest.fixture
def killed_twice(tmp_path: Path) -> Path:
    """A finished run with two kills and a changed world size, two suites of evaluations."""
    run = plant_run(tmp_path / "seed0", [])
    for number_ in range(3):
        write_launch(run.path, number_)
    plant_results(run, 4, "validation", {"all": {"bits_per_byte": Score(1.5)}})
    plant_results(run, 12, "birth-year", {"1-hop/0": {"exact": Score(0.25)}}, limit=100)
    return run.path


def export(*words: object) -> None:
    with pytest.raises(SystemExit) as left:
        main(["export", *map(str, words)])
    assert left.value.code == 0


def check_curve(curve: dict[int, dict[str, float]]) -> None:
    """Each step once, with what its last launch wrote; evaluations at their checkpoints."""
    assert sorted(curve) == [*range(1, 11), 12]
    for step in range(1, 11):
        values = curve[step]
        assert values["train/loss"] == pytest.approx(loss_of(step), nan_ok=True), step
        assert values["tokens"] == step * TOKENS_A_STEP
        assert values["train/grad_norm"] == (math.inf if step == 9 else 1.0)
        assert values["data/tokens/a_b_c"] == 7 * step
    for step in (5, 10):
        assert curve[step]["validation/loss"] == pytest.approx(loss_of(step))
        assert curve[step]["validation/a_b_c/bits_per_byte"] == pytest.approx(loss_of(step) / 2)
    assert [step for step in curve if "validation/loss" in curve[step]] == [5, 10]
    assert curve[4]["eval/validation/all/bits_per_byte"] == 1.5
    assert curve[12] == {
        "eval/birth-year-first100/1-hop_0/exact": 0.25,
        "tokens": 12 * TOKENS_A_STEP,
    }


# -- TensorBoard --------------------------------------------------------------------------------


def tensorboard_curve(folder: Path) -> dict[int, dict[str, float]]:
    """What TensorBoard's own reader finds: name and value by step; a step has a name once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    curve: dict[int, dict[str, float]] = {}
    for name in reader.Tags()["scalars"]:
        for scalar in reader.Scalars(name):
            values = curve.setdefault(scalar.step, {})
            assert name not in values, f"{name} is there twice at step {scalar.step}"
            values[name] = pytest.approx(scalar.value, rel=1e-6, nan_ok=True)
    return {step: {k: v.expected for k, v in values.items()} for step, values in curve.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tensorboard_shows_one_clean_curve(killed_twice, capsys):
    stranger = killed_twice / "tb" / "events.out.tfevents.123.other"
    stranger.parent.mkdir()
    stranger.write_bytes(b"")
    export("tensorboard", killed_twice)
    assert str(killed_twice / "tb") in capsys.readouterr().out
    first = files_of(killed_twice / "tb")
    check_curve(tensorboard_curve(killed_twice / "tb"))
    export("tensorboard", killed_twice)
    assert files_of(killed_twice / "tb") == first, "a copy has the same bytes every time"
    assert len(first) == 2 and stranger.name in first
    export("tensorboard", killed_twice, "--out", killed_twice / "elsewhere")
    (name,) = set(first) - {stranger.name}
    assert files_of(killed_twice / "elsewhere" / "tb") == {name: first[name]}


def script(*actions: Callable[[], object]) -> Callable[[float], bool]:
    """The `ended` of `copy`: each look of the follower does the next thing first."""
    left = iter(actions)

    def ended(wait_s: float) -> bool:
        if action := next(left, None):
            action()
        return action is None

    return ended


def test_tensorboard_is_followed_over_launches(tmp_path):
    """Live over all three launches, looked at in between; the lost steps are gone in the end."""
    run = plant_run(tmp_path / "run", [])
    run.log_file.unlink()
    seen = []

    def look() -> None:
        curve = tensorboard_curve(tmp_path / "tb")
        seen.append({step: values["train/loss"] for step, values in curve.items()})

    def live(facts: RunMetadata) -> TensorBoardTarget:
        return TensorBoardTarget(tmp_path / "tb", facts, live=True)

    began, resumed = (partial(write_launch, run.path, k) for k in (0, 1))
    # at first the log is not there yet
    ended = script(bool, began, bool, look, resumed, look, look)
    told = copy(RunRecord(run.path), live, ended)
    assert str(tmp_path / "tb") in told
    assert seen[0] == pytest.approx({k: loss_of(k) if k <= 4 else WRONG for k in range(1, 7)})
    assert seen[2] == pytest.approx({k: loss_of(k) if k <= 6 else WRONG for k in range(1, 9)})
    # a later follower replaces the file of the first, and ends by itself when the run is done
    write_launch(run.path, 2)
    time.sleep(1.1)  # a second's difference in the name
    copy(RunRecord(run.path), live, lambda wait_s: not wait_s)
    assert len(list((tmp_path / "tb").iterdir())) == 1
    curve = tensorboard_curve(tmp_path / "tb")
    losses = {step: values["train/loss"] for step, values in curve.items()}
    assert losses == pytest.approx({step: loss_of(step) for step in range(1, 11)}, nan_ok=True)


# -- wandb --------------------------------------------------------------------------------------


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: wandb's own messages in LevelDB's log format.

    After a head of 7 bytes: blocks of 32 KiB, in them chunks of (CRC, length, type) and data; a
    record is a whole chunk (1) or a first (2), middle (3) and last one (4).
    """
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    position, data = 7, b""
    while position < len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        data += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record
            data = b""


def wandb_run(folder: Path) -> tuple[Any, dict[int, dict[str, float]]]:
    """The run's message and its history by step, from the one offline folder in `folder`."""
    (file,) = folder.glob("offline-run-*/*.wandb")
    run, curve = None, {}
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "run":
            run = record.run
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in items}
            values = {name: number(value) for name, value in values.items()}
            step = int(values.pop("_step"))
            assert step == values.pop("step") and step not in curve
            curve[step] = {k: v for k, v in values.items() if k[0] != "_" and k != "time"}
    return run, curve


def start(*words: object, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "canon_pretrain.run", "export", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def test_wandb_shows_one_clean_curve_live_and_whole(killed_twice, tmp_path):
    """Offline: a live copy of a run that goes on, then a whole one in its place; the planted secret
    is in none of their files."""
    home = tmp_path / "home"
    home.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), str(home))
    env |= {"WANDB_API_KEY": SECRET[:40], "MY_TOKEN": SECRET, "PYTHONPATH": str(ROOT)}
    log = killed_twice / "log.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[: whole.index(b'"from_step": 6')])  # as it was before the third launch
    # wandb sends every SLURM_ variable
    planted = {"SLURM_JOB_COMMENT": SECRET, "SLURM_SPANK_OPTION": "my-token", "SLURM_JOB_ID": "77"}
    words = ("--follow", "--beside_trainer", "--tags", "live")
    live = start("wandb", killed_twice, *words, env=env | planted)
    deadline = time.monotonic() + 60
    while not list((killed_twice / "wandb").glob("offline-run-*/*.wandb")):
        assert live.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    log.write_bytes(whole.removesuffix(b"\n"))  # the last line is still being written
    output, _ = live.communicate(timeout=60)  # closes the pipe: the trainer has gone
    assert live.returncode == 0, output
    run, curve = wandb_run(killed_twice / "wandb")
    (content,) = [p.read_bytes() for p in (killed_twice / "wandb").glob("offline-run-*/*.wandb")]
    assert SECRET.encode() not in content and b"my-token" not in content and b"77" in content
    # wandb takes no step back: of those taken twice it has the first, until a whole copy is made
    assert sorted(curve) == list(range(1, 11))
    assert curve[10]["train/loss"] == pytest.approx(9.0)
    names = [path.name for path in (killed_twice / "wandb").iterdir()]
    env |= {"WANDB_NAME": "mine", "WANDB_PROJECT": "theirs"}
    output, _ = (done := start("wandb", killed_twice, "--tags", "a", "b c", env=env)).communicate()
    assert done.returncode == 0, output
    run, curve = wandb_run(killed_twice / "wandb")
    check_curve(curve)
    assert [path.name for path in (killed_twice / "wandb").iterdir()] == names and len(names) == 1
    assert (run.run_id, run.project, run.display_name) == ("0a1b2c3d", "theirs", "mine")
    assert run.run_group.startswith("quickstart-nope-canonABCD-")
    assert list(run.tags) == ["quickstart", "nope", "canonABCD", "a", "b c"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["identity"]["model.init_seed"] == 7
    assert config["launch"]["world_size"] == 1 and config["launches"] == 3
    for folder in (killed_twice / "wandb", home):
        for path in folder.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert SECRET[:12].encode() not in content, f"the secret is in {path}"


# -- what both need -----------------------------------------------------------------------------


def test_runs_that_differ_in_their_seeds_alone_are_a_group(tmp_path):
    def facts(name: str, **identity: Any) -> Any:
        run = plant_run(tmp_path / name, [], **identity)
        return run_metadata(RunRecord(run.path), [])

    one, other = facts("a"), facts("b", model__init_seed=8, data__data_seed=9)
    assert (one.group, one.name, other.name) == (other.group, "a", "b")
    assert facts("c", optimizer__lr=0.1).group != one.group


def test_a_run_in_training_is_not_copied_over_its_live_copy(killed_twice, capsys):
    lock = LinkLock.acquire(RunFolder(killed_twice).lock_file, heartbeat_s=60.0, log=print)
    try:
        with pytest.raises(SystemExit) as left:
            main(["export", "tensorboard", str(killed_twice)])
        assert left.value.code == 2
        assert error_codes(capsys.readouterr().err) == ["export.run_is_live"]
        assert not (killed_twice / "tb").exists()
        export("tensorboard", killed_twice, "--out", killed_twice / "copy")
    finally:
        lock.release()


# -- beside the trainer -------------------------------------------------------------------------


def test_commands_of_the_live_copies(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    job = {"enable_tensorboard": False, "enable_wandb": False, "save_tb_folder": "tb"}
    job |= {f"wandb_{name}": "" for name in ("mode", "project", "entity", "name")}

    def commands(**settings: Any) -> dict[str, list[str]]:
        metrics = SimpleNamespace(**{**job, "wandb_tags": [], **settings})
        found = background.follow_commands(metrics, tmp_path)
        return {target: words[4:] for target, words in found}

    both = [str(tmp_path), "--follow", "--beside_trainer"]
    assert commands() == {}
    assert commands(enable_wandb=True, wandb_project="p", wandb_tags=["a", "b"]) == {
        "wandb": ["wandb", *both, "--project=p", "--mode=online", "--tags", "a", "b"]
    }
    assert commands(enable_tensorboard=True, save_tb_folder="x") == {
        "tensorboard": ["tensorboard", *both, "--tb_folder=x"]
    }
    assert commands(enable_wandb=True, wandb_mode="disabled") == {}
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert commands(enable_wandb=True)["wandb"][-1] == "--mode=offline"


def test_a_live_copy_that_fails_or_hangs_ends(tmp_path, monkeypatch, caplog):
    failing = [sys.executable, "-c", "raise SystemExit('error: no network.')"]
    hanging = ["sh", "-c", "sleep 100 & echo $! > child; wait"]
    missing = [str(tmp_path / "nothing")]
    wanted = {"wandb": failing, "tensorboard": hanging, "other": missing}
    monkeypatch.setattr(background, "follow_commands", lambda *_: wanted.items())
    monkeypatch.chdir(tmp_path)
    exports = LiveExports()
    with caplog.at_level(logging.WARNING):
        exports.start(None, tmp_path)
        deadline = time.monotonic() + 30
        while len(caplog.records) < 2 or not (tmp_path / "child").exists():
            exports.check()
            assert time.monotonic() < deadline
        exports.check()
        begin = time.monotonic()
        exports.finish(wait_s=0.2)
        assert time.monotonic() - begin < 5
    for text, target in zip(caplog.messages, ("other", "wandb", "tensorboard"), strict=True):
        assert target in text
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < begin + 10, "what the live copy had started lives on"
    exports.finish()  # a second time there is nothing to end


@pytest.mark.system
def test_a_run_shows_itself_in_tensorboard_while_it_trains(data_folder, tmp_path):
    """Stopped and resumed on another number of ranks; and the log has what the copies show."""
    run = tmp_path / "run"
    argv = [*debug_run(data_folder, run), "--metrics.enable_tensorboard"]
    argv += ["--training.steps", 7, "--checkpoint.interval", 3]
    launch(*argv, "--run.stop_at", 2, output=tmp_path / "out")
    ended = launch(*argv, ranks=1, output=tmp_path / "out")
    assert "live copy" not in ended.output
    log = events(run, "step")
    curve = tensorboard_curve(run / "tb")
    assert sorted(curve) == [event["step"] for event in log] == list(range(1, 8))
    for event in log:
        assert curve[event["step"]]["train/loss"] == pytest.approx(event["loss"], rel=1e-6)
        assert curve[event["step"]]["train/restarts"] == (event["step"] > 2)
    assert not list(run.glob(".export-*"))
    saved = [(line["step"], line["tokens"]) for line in events(run, "checkpoint")]
    assert saved == [(at, at * 12 * 64) for at in (2, 3, 6, 7)]

"""Copies of the log in other tools, read back by their own formats, whole and live."""

import json
import logging
import math
import os
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import SimpleNamespace
from typing import Any

import pytest

from canon_pretrain.core.lock import LinkLock
from canon_pretrain.report.export import TensorBoardTarget, copy, run_metadata
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run import background
from canon_pretrain.run.background import LiveExports
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import RunLog, number
from canon_pretrain.run.results import Score
from tests.ranks import events, launch
from tests.report_runs import TOKENS_A_STEP, plant_results, plant_run, run_command
from tests.support import HANGS_AFTER_S, ROOT, debug_run, error_codes, is_running, wait_until

WRONG = 99.0
SECRET = "c0ffee" * 7


@dataclass
class Launch:
    """A launch of a run: its first event, its steps, and the last one that was not lost."""

    event: dict[str, Any]
    steps: range
    last_kept: int


LAUNCHES = (
    Launch({"event": "start", "world_size": 2}, range(1, 7), 4),
    Launch({"event": "resume", "from_step": 4, "world_size": 2}, range(5, 9), 6),
    Launch({"event": "resume", "from_step": 6, "world_size": 1}, range(7, 11), 10),
)


def loss_of(step):
    """The loss of a step that was not lost."""
    return math.nan if step == 9 else 10 - 0.1 * step


def write_step(log, step, loss):
    """Write the events of a step; steps 5 and 10 have a validation and samples."""
    at = {"step": step, "tokens": step * TOKENS_A_STEP, "loss": loss}
    log.write(
        "step",
        **at,
        lr=1e-3,
        tokens_per_second=9000.0,
        skipped_steps=0,
        data_digests=["0" * 16],
        grad_norm=math.inf if step == 9 else 1.0,
        source_tokens={"a b/c": 7 * step, "d": step},
    )
    if step in (5, 10):
        sources = {"a b/c": {"loss": 1.0, "bits_per_byte": loss / 2, "tokens": 5}, "d": {}}
        sample = {"prompt": "Ü", "text": f"{loss}", "tokens": 3}
        log.write("validation", **at, bits_per_byte=loss / 3, seconds=0.1, sources=sources)
        log.write("samples", step=step, samples=[sample])


def write_launch(folder, index):
    """Write one launch of a run that is killed twice; lost steps have the loss WRONG."""
    launched = LAUNCHES[index]
    is_last = index == len(LAUNCHES) - 1
    run_file = {"run_id": "0a1b2c3d", "created": "t", "launches": index + 1}
    (folder / "run.json").write_text(json.dumps(run_file))

    log = RunLog(folder / "log.jsonl")
    log.write(**launched.event)
    for step in launched.steps:
        write_step(log, step, loss_of(step) if step <= launched.last_kept else WRONG)
    if is_last:
        log.write("done", step=10)
    log.close()

    if not is_last:  # the kill leaves an incomplete line
        with open(folder / "log.jsonl", "ab") as file:
            file.write(b'{"event": "step", "step": 1')


@pytest.fixture
def killed_twice(tmp_path):
    """The folder of a run that was killed twice, with evaluations at steps 4 and 12."""
    run = plant_run(tmp_path / "seed0", [])
    for index in range(len(LAUNCHES)):
        write_launch(run.path, index)
    plant_results(run, 4, "validation", {"all": {"bits_per_byte": Score(1.5)}})
    plant_results(run, 12, "birth-year", {"1-hop/0": {"exact": Score(0.25)}}, limit=100)
    return run.path


export = partial(run_command, "export")


def check_curve(curve):
    """Each step is there once, from its last launch; evaluations are at their checkpoints."""
    assert sorted(curve) == [*range(1, 11), 12]
    for step in range(1, 11):
        values = curve[step]
        assert values["train/loss"] == pytest.approx(loss_of(step), nan_ok=True), step
        assert values["tokens"] == step * TOKENS_A_STEP
        assert values["train/grad_norm"] == (math.inf if step == 9 else 1.0)
        assert values["data/tokens/a_b_c"] == 7 * step

    assert [step for step in sorted(curve) if "validation/loss" in curve[step]] == [5, 10]
    for step in (5, 10):
        values = curve[step]
        assert values["validation/loss"] == pytest.approx(loss_of(step))
        assert values["validation/a_b_c/bits_per_byte"] == pytest.approx(loss_of(step) / 2)

    assert curve[4]["eval/validation/all/bits_per_byte"] == 1.5
    name = "eval/birth-year-first100/1-hop_0/exact"
    assert curve[12] == {name: 0.25, "tokens": 12 * TOKENS_A_STEP}


def tensorboard_curve(folder):
    """Read with TensorBoard's own reader: name and value by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    curve: dict[int, dict[str, float]] = {}
    for name in reader.Tags()["scalars"]:
        for scalar in reader.Scalars(name):
            values = curve.setdefault(scalar.step, {})
            assert name not in values, f"{name} is there twice at step {scalar.step}"
            values[name] = float(scalar.value)
    return curve


def tensorboard_samples(folder):
    """Return the texts by step, as TensorBoard's text plugin finds them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    assert set(reader.PluginTagToContent("text")) == {"samples/0"}
    return {
        event.step: event.tensor_proto.string_val[0].decode()
        for event in reader.Tensors("samples/0")
    }


def files_of(folder):
    """Return the contents of the files of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tensorboard_shows_one_clean_curve(killed_twice, capsys):
    folder = killed_twice / "tb"
    stranger = folder / "events.out.tfevents.123.other"
    stranger.parent.mkdir()
    stranger.write_bytes(b"")

    assert export("tensorboard", killed_twice) == 0
    assert str(folder) in capsys.readouterr().out
    check_curve(tensorboard_curve(folder))
    assert tensorboard_samples(folder) == {at: f"Ü|{loss_of(at)}" for at in (5, 10)}

    # a second copy has the same bytes
    first = files_of(folder)
    assert export("tensorboard", killed_twice) == 0
    assert files_of(folder) == first
    (name,) = first.keys() - {stranger.name}
    assert len(first) == 2

    assert export("tensorboard", killed_twice, "--out", killed_twice / "elsewhere") == 0
    assert files_of(killed_twice / "elsewhere" / "tb") == {name: first[name]}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"model__canon_set": "FKOV"}, ("nope", "canonFKOV")),
        ({"model__mixer": "gla", "model__canon_set": ""}, ("gla", "no-canon")),
        (
            {"model__pattern": ["gla", "gla", "mixers/my.py:Own"]},
            ("gla", "my.py:Own", "canonABCD"),
        ),
    ],
)
def test_tags_name_the_architecture(tmp_path, model, expected):
    run = plant_run(tmp_path / "run", [], **model)
    metadata = run_metadata(RunRecord(run.path), [])
    assert metadata.tags == ("quickstart", *expected)


def test_tensorboard_is_followed_over_launches(tmp_path, monkeypatch):
    run = plant_run(tmp_path / "run", [])
    run.log_file.unlink()
    folder = tmp_path / "tb"
    live = partial(TensorBoardTarget, folder, live=True)

    def losses():
        return {step: values["train/loss"] for step, values in tensorboard_curve(folder).items()}

    def follow():
        """Yield, at each call of `wait`, whether it has ended; the log does not exist at first."""
        for index, last_step in ((0, 6), (1, 8)):
            yield False
            write_launch(run.path, index)
            yield False
            yield False
            last_kept = LAUNCHES[index].last_kept
            kept = {step: loss_of(step) for step in range(1, last_kept + 1)}
            lost = dict.fromkeys(range(last_kept + 1, last_step + 1), WRONG)
            assert losses() == pytest.approx(kept | lost)
        yield True

    calls = follow()
    assert str(folder) in copy(RunRecord(run.path), live, lambda wait_s: next(calls))

    # a later follower replaces the file of the first, and ends when the run is done
    write_launch(run.path, 2)
    monkeypatch.setattr("time.time", lambda: 4e9)  # file names have seconds
    copy(RunRecord(run.path), live, lambda wait_s: not wait_s)
    assert len(list(folder.iterdir())) == 1
    assert losses() == pytest.approx({step: loss_of(step) for step in range(1, 11)}, nan_ok=True)


def wandb_records(path):
    """Yield the records of a .wandb file: protobuf messages in LevelDB's log format.

    After a header of 7 bytes: blocks of 32 KiB with chunks of (CRC, length, type) and data; a
    record is a full chunk (1), or a first (2), middle (3) and last (4) one.
    """
    from wandb.proto import wandb_internal_pb2

    block_bytes = 32768
    header_bytes = 7
    content = path.read_bytes()
    data = b""
    for begin in range(0, len(content), block_bytes):
        block = content[begin : begin + block_bytes]
        position = 0 if begin else header_bytes
        while len(block) - position >= header_bytes:
            header = block[position : position + header_bytes]
            _, length, kind = struct.unpack("<IHB", header)
            position += header_bytes + length
            data += block[position - length : position]
            if kind in (1, 4):
                yield wandb_internal_pb2.Record.FromString(data)
                data = b""


def wandb_run(folder):
    """Return the run message and the history by step of the only offline run in `folder`."""
    (file,) = folder.glob("offline-run-*/*.wandb")
    run = None
    curve = {}
    for record in wandb_records(file):
        if record.HasField("run"):
            run = record.run
        if not record.history.item:
            continue
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        step = int(row["_step"])
        assert step == row["step"]
        assert step not in curve
        if path := row.get("samples/path"):
            page = (file.parent / "files" / path).read_text()
            assert f"<b>Ü</b>{loss_of(step)}" in page

        curve[step] = {
            name: number(value)
            for name, value in row.items()
            if not name.startswith(("samples/", "_")) and name not in ("step", "time")
        }
    return run, curve


@pytest.fixture
def wandb_environment(tmp_path):
    """A new home folder, and variables for wandb with a secret."""
    home = tmp_path / "home"
    home.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), str(home))
    env |= {"WANDB_API_KEY": SECRET[:40], "MY_TOKEN": SECRET, "PYTHONPATH": str(ROOT)}
    return env


def start_wandb(run, *words, env):
    """Start `run export wandb`."""
    command = [sys.executable, "-m", "canon_pretrain", "run", "export", "wandb", str(run), *words]
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True, env=env)


def copy_live(run, env):
    """Copy a run to wandb during its third launch, until its end."""
    log = run / "log.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[: whole.index(b'"from_step": 6')])  # before the third launch
    live = start_wandb(run, "--follow", "--beside-trainer", "--tags", "live", env=env)
    deadline = time.monotonic() + HANGS_AFTER_S
    while not list((run / "wandb").glob("offline-run-*/*.wandb")):
        assert live.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)

    log.write_bytes(whole.removesuffix(b"\n"))  # the last line is incomplete
    output, _ = live.communicate(
        timeout=HANGS_AFTER_S
    )  # closes the pipe, as at the end of the trainer
    assert live.returncode == 0, output


@pytest.mark.system
def test_wandb_shows_one_clean_curve_live_and_whole(killed_twice, wandb_environment):
    """A live copy, then a whole copy in its place; neither contains the planted secret."""
    folder = killed_twice / "wandb"
    # wandb would send every SLURM_ variable
    slurm = {"SLURM_JOB_COMMENT": SECRET, "SLURM_SPANK_OPTION": "my-token", "SLURM_JOB_ID": "77"}

    copy_live(killed_twice, wandb_environment | slurm)

    (file,) = folder.glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert SECRET.encode() not in content
    assert b"my-token" not in content
    assert b"77" in content
    # wandb keeps the first of repeated steps, until a whole copy is made
    _, curve = wandb_run(folder)
    assert sorted(curve) == list(range(1, 11))
    assert curve[10]["train/loss"] == pytest.approx(9.0)
    names = [path.name for path in folder.iterdir()]
    assert len(names) == 1

    env = wandb_environment | {"WANDB_NAME": "mine", "WANDB_PROJECT": "theirs"}
    whole = start_wandb(killed_twice, "--tags", "a", "b c", env=env)
    output, _ = whole.communicate()
    assert whole.returncode == 0, output

    run, curve = wandb_run(folder)
    check_curve(curve)
    assert len(list(folder.rglob("samples_*.html"))) == 2
    assert [path.name for path in folder.iterdir()] == names
    assert (run.run_id, run.project, run.display_name) == ("0a1b2c3d", "theirs", "mine")
    assert run.run_group.startswith("quickstart-nope-canonABCD-")
    assert list(run.tags) == ["quickstart", "nope", "canonABCD", "a", "b c"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["identity"]["model.init_seed"] == 7
    assert config["launch"]["world_size"] == 1
    assert config["launches"] == 3

    for path in (*folder.rglob("*"), *Path(wandb_environment["HOME"]).rglob("*")):
        assert path.is_dir() or SECRET[:12].encode() not in path.read_bytes(), path


READ_TRACKIO = """
import json
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage
(run,) = Api().runs("theirs")
logs = SQLiteStorage.get_logs("theirs", run.name, run_id=run.id)
print(json.dumps({"name": run.name, "config": run.config, "logs": logs}, default=str))
"""


def read_trackio(folder):
    """Return the name, config and rows of the only run of trackio's project "theirs"."""
    read = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO],
        env=os.environ | {"TRACKIO_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(read.stdout)


def trackio_curve(run):
    """Return the values of a run by step, each of which it has once."""
    curve = {}
    for row in run["logs"]:
        step = row["step"]
        assert step not in curve
        if step in (5, 10):
            assert f"**Ü**{loss_of(step)}" in row["samples"]["_value"]
        curve[step] = {
            name: number(value)
            for name, value in row.items()
            if name not in ("step", "timestamp", "samples")
        }
    return curve


@pytest.mark.system
def test_trackio_shows_one_clean_curve(killed_twice):
    """The second copy takes the place of the first, in trackio's own database."""
    pytest.importorskip("trackio")
    command = [sys.executable, "-m", "canon_pretrain", "run", "export", "trackio"]
    options = ["--out", killed_twice, "--project", "theirs", "--name", "mine"]
    env = os.environ | {"TRACKIO_SPACE_ID": "nobody/nothing", "PYTHONPATH": str(ROOT)}
    for _ in range(2):
        copied = subprocess.run(
            [*command, killed_twice, *options], env=env, capture_output=True, text=True
        )
        assert copied.returncode == 0, copied.stderr
        assert "trackio show" in copied.stdout

        run = read_trackio(killed_twice / "trackio")
        check_curve(trackio_curve(run))
        assert run["name"] == "mine"
        assert run["config"]["identity"]["model.init_seed"] == 7


def test_trackio_that_is_missing_is_named(killed_twice, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert export("trackio", killed_twice) == 2
    assert error_codes(capsys.readouterr().err) == ["export.no_trackio"]


def test_a_run_in_training_keeps_its_live_copy(killed_twice, capsys):
    lock = LinkLock.acquire(RunFolder(killed_twice).lock_file, heartbeat_s=60.0, log=print)
    try:
        assert export("tensorboard", killed_twice) == 2
        assert error_codes(capsys.readouterr().err) == ["export.run_is_live"]
        assert not (killed_twice / "tb").exists()

        assert export("tensorboard", killed_twice, "--out", killed_twice / "copy") == 0
    finally:
        lock.release()


def test_commands_of_the_live_copies(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def commands(**settings):
        metrics = {
            "enable_tensorboard": False,
            "enable_wandb": False,
            "enable_trackio": False,
            "save_tb_folder": "x",
            "wandb_mode": "",
            "wandb_project": "",
            "wandb_entity": "",
            "wandb_name": "",
            "wandb_tags": [],
        }
        section = SimpleNamespace(**metrics | settings)
        return [words[5:] for _, words in background.follow_commands(section, tmp_path)]

    assert commands() == []
    assert commands(enable_wandb=True, wandb_mode="disabled") == []

    follow = [str(tmp_path), "--follow", "--beside-trainer"]
    assert commands(enable_tensorboard=True) == [["tensorboard", *follow, "--tb-folder=x"]]
    options = ["--project=p", "--mode=online", "--tags", "a", "b"]
    of_wandb = commands(enable_wandb=True, wandb_project="p", wandb_tags=["a", "b"])
    assert of_wandb == [["wandb", *follow, *options]]
    of_trackio = commands(enable_trackio=True, wandb_project="p", wandb_name="n")
    assert of_trackio == [["trackio", *follow, "--project=p", "--name=n"]]


def test_a_live_copy_that_fails_or_hangs_is_ended(tmp_path, monkeypatch, caplog):
    commands = {
        "wandb": [sys.executable, "-c", "raise SystemExit('error: no network.')"],
        "tensorboard": ["sh", "-c", "sleep 100 & echo $! > child; wait"],
        "other": [str(tmp_path / "nothing")],
    }
    monkeypatch.setattr(background, "follow_commands", lambda *_: commands.items())
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.WARNING)
    exports = LiveExports()

    exports.start(None, tmp_path)
    deadline = time.monotonic() + HANGS_AFTER_S
    while len(caplog.records) < 2 or not (tmp_path / "child").exists():
        exports.check()
        assert time.monotonic() < deadline
    begin = time.monotonic()
    exports.finish(wait_s=0.2)

    assert time.monotonic() - begin < 5
    for text, target in zip(caplog.messages, ("other", "wandb", "tensorboard"), strict=True):
        assert target in text
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_running(child), timeout_s=10)
    exports.finish()  # a second call does nothing


@pytest.mark.system
def test_a_training_run_is_shown_by_other_tools(data_folder, tmp_path, monkeypatch):
    """Stopped and resumed on another number of ranks; by trackio, where it is installed."""
    run = tmp_path / "run"
    has_trackio = find_spec("trackio") is not None
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    argv = [
        *debug_run(data_folder, run),
        "--metrics.enable_tensorboard",
        f"--metrics.{'' if has_trackio else 'no-'}enable_trackio",
        *("--metrics.wandb_project", "theirs"),
        *("--training.steps", 7),
        *("--checkpoint.interval", 3),
    ]

    launch(*argv, "--run.stop_at", 2, output=tmp_path / "out")
    ended = launch(*argv, ranks=1, output=tmp_path / "out")

    assert "live copy" not in ended.output
    assert not list(run.glob(".export-*"))
    steps = events(run, "step")
    curve = tensorboard_curve(run / "tb")
    assert sorted(curve) == [event["step"] for event in steps] == list(range(1, 8))
    for event in steps:
        assert curve[event["step"]]["train/loss"] == pytest.approx(event["loss"], rel=1e-6)
        assert curve[event["step"]]["train/restarts"] == (event["step"] > 2)
    if has_trackio:
        rows = [row for row in read_trackio(tmp_path / "trackio")["logs"] if "train/loss" in row]
        assert [(row["step"], row["train/loss"]) for row in rows] == [
            (event["step"], event["loss"]) for event in steps
        ]

    saved = [(event["step"], event["tokens"]) for event in events(run, "checkpoint")]
    assert saved == [(at, at * 12 * 64) for at in (2, 3, 6, 7)]

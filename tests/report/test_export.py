"""Copies of the log in wandb and TensorBoard, read back by their own formats, whole and live."""

import json
import logging
import math
import os
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import SimpleNamespace

import pytest

from canon_pretrain.core.lock import LinkLock
from canon_pretrain.report.export import TensorBoardTarget, copy
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run import background
from canon_pretrain.run.background import LiveExports
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import RunLog, number
from canon_pretrain.run.results import Score
from tests.ranks import events, launch
from tests.report_runs import TOKENS_A_STEP, plant_results, plant_run, run_command
from tests.support import ROOT, debug_run, error_codes

WRONG = 99.0
SECRET = "c0ffee" * 7
LAUNCHES = (
    # event, steps, and the last step that was not lost when the launch was killed
    ({"event": "start", "world_size": 2}, range(1, 7), 4),
    ({"event": "resume", "from_step": 4, "world_size": 2}, range(5, 9), 6),
    ({"event": "resume", "from_step": 6, "world_size": 1}, range(7, 11), 10),
)


def loss_of(step):
    return math.nan if step == 9 else 10 - 0.1 * step


def write_launch(folder, number_):
    """Write one launch of a run that is killed twice; lost steps have the loss WRONG."""
    first, steps, good = LAUNCHES[number_]
    run_file = {"run_id": "0a1b2c3d", "created": "t", "launches": number_ + 1}
    (folder / "run.json").write_text(json.dumps(run_file))
    log = RunLog(folder / "log.jsonl")
    log.write(**first)  # type: ignore[arg-type]
    same = {"lr": 1e-3, "tokens_per_second": 9000.0, "skipped_steps": 0, "data_digests": ["0" * 16]}
    for step in steps:
        loss = loss_of(step) if step <= good else WRONG
        at = {"step": step, "tokens": step * TOKENS_A_STEP, "loss": loss}
        sources = {"a b/c": 7 * step, "d": step}
        norm = math.inf if step == 9 else 1.0
        log.write("step", **at, **same, grad_norm=norm, source_tokens=sources)
        if step in (5, 10):
            parts = {"a b/c": {"loss": 1.0, "bits_per_byte": loss / 2, "tokens": 5}, "d": {}}
            log.write("validation", **at, bits_per_byte=loss / 3, seconds=0.1, sources=parts)
            log.write(
                "samples", step=step, samples=[{"prompt": "Ü", "text": f"{loss}", "tokens": 3}]
            )
    if number_ == 2:
        log.write("done", step=10)
    log.close()
    if number_ < 2:  # the kill leaves an incomplete line
        with open(folder / "log.jsonl", "ab") as file:
            file.write(b'{"event": "step", "step": 1')


@pytest.fixture
def killed_twice(tmp_path):
    run = plant_run(tmp_path / "seed0", [])
    for number_ in range(3):
        write_launch(run.path, number_)
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
        if step in (5, 10):
            assert values["validation/loss"] == pytest.approx(loss_of(step))
            assert values["validation/a_b_c/bits_per_byte"] == pytest.approx(loss_of(step) / 2)
    assert [step for step in sorted(curve) if "validation/loss" in curve[step]] == [5, 10]
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
    found = {each.step: each.tensor_proto for each in reader.Tensors("samples/0")}
    return {at: tensor.string_val[0].decode() for at, tensor in found.items()}


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tensorboard_shows_one_clean_curve(killed_twice, capsys):
    stranger = killed_twice / "tb" / "events.out.tfevents.123.other"
    stranger.parent.mkdir()
    stranger.write_bytes(b"")
    assert export("tensorboard", killed_twice) == 0
    assert str(killed_twice / "tb") in capsys.readouterr().out
    first = files_of(killed_twice / "tb")
    check_curve(tensorboard_curve(killed_twice / "tb"))
    texts = {at: f"Ü|{loss_of(at)}" for at in (5, 10)}
    assert tensorboard_samples(killed_twice / "tb") == texts
    assert export("tensorboard", killed_twice) == 0
    assert files_of(killed_twice / "tb") == first  # the same bytes again
    assert len(first) == 2 and stranger.name in first
    assert export("tensorboard", killed_twice, "--out", killed_twice / "elsewhere") == 0
    (name,) = set(first) - {stranger.name}
    assert files_of(killed_twice / "elsewhere" / "tb") == {name: first[name]}


def test_tensorboard_is_followed_over_launches(tmp_path, monkeypatch):
    run = plant_run(tmp_path / "run", [])
    run.log_file.unlink()
    live = partial(TensorBoardTarget, tmp_path / "tb", live=True)

    def losses():
        curve = tensorboard_curve(tmp_path / "tb")
        return {step: values["train/loss"] for step, values in curve.items()}

    def follow():
        """Yield, at each call of `wait`, whether it has ended; the log does not exist at first."""
        for launched, last, good in ((0, 6, 4), (1, 8, 6)):
            yield False
            write_launch(run.path, launched)
            yield False
            yield False
            expected = {k: loss_of(k) if k <= good else WRONG for k in range(1, last + 1)}
            assert losses() == pytest.approx(expected)
        yield True

    calls = follow()
    assert str(tmp_path / "tb") in copy(RunRecord(run.path), live, lambda wait_s: next(calls))
    # a later follower replaces the file of the first, and ends when the run is done
    write_launch(run.path, 2)
    monkeypatch.setattr("time.time", lambda: 4e9)  # file names have seconds
    copy(RunRecord(run.path), live, lambda wait_s: not wait_s)
    assert len(list((tmp_path / "tb").iterdir())) == 1
    assert losses() == pytest.approx({step: loss_of(step) for step in range(1, 11)}, nan_ok=True)


def wandb_records(path):
    """Yield the records of a .wandb file: protobuf messages in LevelDB's log format.

    After a header of 7 bytes: blocks of 32 KiB with chunks of (CRC, length, type) and data; a
    record is a full chunk (1), or a first (2), middle (3) and last (4) one.
    """
    from wandb.proto import wandb_internal_pb2

    content, data = path.read_bytes(), b""
    for begin in range(0, len(content), 32768):
        block = content[begin : begin + 32768]
        position = 0 if begin else 7
        while len(block) - position >= 7:
            _, length, kind = struct.unpack("<IHB", block[position : position + 7])
            position += 7 + length
            data += block[position - length : position]
            if kind in (1, 4):
                yield wandb_internal_pb2.Record.FromString(data)
                data = b""


def wandb_run(folder):
    """Return the run message and the history by step of the only offline run in `folder`."""
    (file,) = folder.glob("offline-run-*/*.wandb")
    run, curve = None, {}
    for record in wandb_records(file):
        run = record.run if record.HasField("run") else run
        if items := record.history.item:
            read = {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items}
            if path := read.get("samples/path"):
                assert (
                    f"<b>Ü</b>{loss_of(read['_step'])}"
                    in (file.parent / "files" / path).read_text()
                )
            values = {name: number(x) for name, x in read.items() if name[:8] != "samples/"}
            step = int(values.pop("_step"))
            assert step == values.pop("step") and step not in curve
            curve[step] = {k: v for k, v in values.items() if k[0] != "_" and k != "time"}
    return run, curve


@pytest.mark.system
def test_wandb_shows_one_clean_curve_live_and_whole(killed_twice, tmp_path):
    """A live copy, then a whole copy in its place; neither contains the planted secret."""
    home = tmp_path / "home"
    home.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), str(home))
    env |= {"WANDB_API_KEY": SECRET[:40], "MY_TOKEN": SECRET, "PYTHONPATH": str(ROOT)}
    log = killed_twice / "log.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[: whole.index(b'"from_step": 6')])  # before the third launch
    # wandb would send every SLURM_ variable
    planted = {"SLURM_JOB_COMMENT": SECRET, "SLURM_SPANK_OPTION": "my-token", "SLURM_JOB_ID": "77"}
    start = partial(subprocess.Popen, stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True)
    command = [sys.executable, "-m", "canon_pretrain", "run", "export", "wandb", str(killed_twice)]
    words = ("--follow", "--beside-trainer", "--tags", "live")
    live = start([*command, *words], env=env | planted)
    deadline = time.monotonic() + 60
    while not list((killed_twice / "wandb").glob("offline-run-*/*.wandb")):
        assert live.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    log.write_bytes(whole.removesuffix(b"\n"))  # the last line is incomplete
    output, _ = live.communicate(timeout=60)  # closes the pipe, as at the end of the trainer
    assert live.returncode == 0, output
    run, curve = wandb_run(killed_twice / "wandb")
    (file,) = (killed_twice / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert SECRET.encode() not in content and b"my-token" not in content and b"77" in content
    # wandb keeps the first of repeated steps, until a whole copy is made
    assert sorted(curve) == list(range(1, 11))
    assert curve[10]["train/loss"] == pytest.approx(9.0)
    names = [path.name for path in (killed_twice / "wandb").iterdir()]
    env |= {"WANDB_NAME": "mine", "WANDB_PROJECT": "theirs"}
    output, _ = (done := start([*command, "--tags", "a", "b c"], env=env)).communicate()
    assert done.returncode == 0, output
    run, curve = wandb_run(killed_twice / "wandb")
    check_curve(curve)
    assert len([*(killed_twice / "wandb").rglob("samples_*.html")]) == 2
    assert [path.name for path in (killed_twice / "wandb").iterdir()] == names and len(names) == 1
    assert (run.run_id, run.project, run.display_name) == ("0a1b2c3d", "theirs", "mine")
    assert run.run_group.startswith("quickstart-nope-canonABCD-")
    assert list(run.tags) == ["quickstart", "nope", "canonABCD", "a", "b c"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["identity"]["model.init_seed"] == 7
    assert config["launch"]["world_size"] == 1 and config["launches"] == 3
    for path in (*(killed_twice / "wandb").rglob("*"), *home.rglob("*")):
        assert path.is_dir() or SECRET[:12].encode() not in path.read_bytes(), path


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
    job = {"enable_tensorboard": False, "enable_wandb": False, "save_tb_folder": "x"}
    job |= {f"wandb_{name}": "" for name in ("mode", "project", "entity", "name")}

    def commands(**settings):
        metrics = SimpleNamespace(**{**job, "wandb_tags": [], **settings})
        return [words[5:] for _, words in background.follow_commands(metrics, tmp_path)]

    both = [str(tmp_path), "--follow", "--beside-trainer"]
    assert commands() == commands(enable_wandb=True, wandb_mode="disabled") == []
    assert commands(enable_tensorboard=True) == [["tensorboard", *both, "--tb-folder=x"]]
    options = ["--project=p", "--mode=online", "--tags", "a", "b"]
    found = commands(enable_wandb=True, wandb_project="p", wandb_tags=["a", "b"])
    assert found == [["wandb", *both, *options]]


def test_a_live_copy_that_fails_or_hangs_is_ended(tmp_path, monkeypatch, caplog):
    failing = [sys.executable, "-c", "raise SystemExit('error: no network.')"]
    hanging = ["sh", "-c", "sleep 100 & echo $! > child; wait"]
    wanted = {"wandb": failing, "tensorboard": hanging, "other": [str(tmp_path / "nothing")]}
    monkeypatch.setattr(background, "follow_commands", lambda *_: wanted.items())
    monkeypatch.chdir(tmp_path)
    exports = LiveExports()
    caplog.set_level(logging.WARNING)
    exports.start(None, tmp_path)
    deadline = time.monotonic() + 30
    while len(caplog.records) < 2 or not (tmp_path / "child").exists():
        exports.check()
        assert time.monotonic() < deadline
    begin = time.monotonic()
    exports.finish(wait_s=0.2)
    assert time.monotonic() - begin < 5
    for text, target in zip(caplog.messages, ("other", "wandb", "tensorboard"), strict=True):
        assert target in text
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < begin + 10, "a child of the live copy is still running"
    exports.finish()  # a second call does nothing


@pytest.mark.system
def test_a_training_run_is_shown_in_tensorboard(data_folder, tmp_path):
    """Stopped and resumed on another number of ranks."""
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

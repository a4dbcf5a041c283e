"""What `canon new` proposes: by its rules, for text and machine; nothing is overwritten."""

import json
import math
import random
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from canon_pretrain import new
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.job_config import check_job, micro_batch_size
from tests.support import ROOT, error_codes

CPU = new.Machine("2 cores", False, 1, 8e9)
NODE = new.Machine("8 GPUs", True, 8, 80e9)


@pytest.fixture(autouse=True)
def fast_timing(monkeypatch, tmp_path):
    """No timing: 60 GFLOP/s, a thousand times more on a node of GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new.Machine, "find", classmethod(lambda cls: CPU))

    def speed(self, args):
        return (1 if self.ranks == 1 else 30_000) * 6e10 / (6 * num_parameters(args))

    monkeypatch.setattr(new.Machine, "tokens_per_second", speed)


def prose(seed, words):
    """Return random words, enough different ones to train a tokenizer on."""
    known = random.Random(0)
    lexicon = ["".join(known.choices("etaoinshrdlu", k=3 + i % 7)) for i in range(2000)]
    return " ".join(random.Random(seed).choices(lexicon, k=words))


def write_text(folder, files, words=1000):
    folder.mkdir()
    for number in range(files):
        (folder / f"{number}.txt").write_text(prose(number, words))
    return folder


def run(*words):
    with pytest.raises(SystemExit) if "fails" in words else pytest.MonkeyPatch.context():
        new.main([str(word) for word in words if word != "fails"])


def job_of(name):
    job = parse_job(["--config", f"{name}.toml"])
    check_job(job)
    return job


def test_the_file_is_a_job_by_the_rules(tmp_path, capsys):
    write_text(tmp_path / 'a "text"', 40)
    run("mine", "--data", 'a "text"', "--minutes", 1)
    job, printed = job_of("mine"), capsys.readouterr().out
    training = job.training
    assert (job.data.path, job.job.dump_folder) == ("outputs/mine/data", "outputs/mine/canon")
    assert job.model_args.canon_set == "ABCD" and micro_batch_size(job, 1)
    assert job.lr_scheduler.warmup_steps <= training.steps
    seen = training.steps * training.global_batch_size * training.seq_len
    assert seen >= 0.9 * new.LEAST_STEPS * new.LEAST_BATCH_TOKENS
    # the commands are what a shell reads
    lines = [line for line in printed.splitlines() if 'a "text"' not in line or "build" in line]
    [build] = [shlex.split(line) for line in lines if " data build " in line]
    assert build[build.index("--files") + 1] == 'a "text"'
    # too few documents to hold some out
    assert 1000 <= int(build[build.index("--max-document-bytes") + 1]) <= 20_000


@pytest.mark.parametrize("machine", [CPU, NODE], ids=["cpu", "gpus"])
@pytest.mark.parametrize("num_bytes", [1e6, 1e8, 1e10, 1e13])
def test_sizes_grow_with_text_and_time(machine, num_bytes):
    found = [new.propose(machine, num_bytes, 60.0 * minutes) for minutes in (1, 10, 1000)]
    for one in found:
        assert one.tokens <= one.speed * one.seconds
        assert one.epochs <= 1.01 * new.EPOCHS or one.steps <= new.LEAST_STEPS + 1
        assert one.batch % machine.ranks == 0
        off = abs(math.log(one.ratio / 20))
        others = [
            new.Proposal(machine, name, args, speed, one.unique, one.seconds)
            for name, (vocab, length) in new.SIZES.items()
            for args in [
                replace(new.flavor(name), vocab_size=vocab, max_seq_len=length, canon_set="ABCD")
            ]
            for speed in [machine.tokens_per_second(args)]
            if machine.micro_batch(args)
        ]
        assert off <= min(abs(math.log(each.ratio / 20)) for each in others) + 0.02
    parameters = [one.parameters for one in found]
    assert parameters == sorted(parameters)


def test_repeated_tokens_are_worth_less():
    def ratio(tokens):
        one = new.Proposal(CPU, "debug", new.flavor("debug"), tokens, 1e5, 1.0)
        return one.ratio * one.parameters

    assert ratio(9e4) == pytest.approx(9e4)
    # Muennighoff et al.: four epochs are worth almost four, eight clearly less; more are not made
    assert 0.93 < ratio(4e5) / 4e5 < 1 and 0.8 < ratio(8e5) / 8e5 < 0.85
    assert ratio(1.6e6) == ratio(8e5)


def test_refusals_lose_nothing(tmp_path, capsys):
    text = write_text(tmp_path / "text", 40)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "mine.toml").write_text("mine")
    (tmp_path / "outputs/old").mkdir(parents=True)
    for name, data, code in (
        ("mine", text, "new.exists"),
        ("old", text, "new.exists"),
        ("../x", text, "option.invalid"),
        ("x", tmp_path / "short.txt", "new.too_little_text"),
        ("x", tmp_path / "nothing", "input.none"),
        ("x", tmp_path / "mine.toml", "new.too_little_text"),
    ):
        run(name, "--data", data, "fails")
        assert error_codes(capsys.readouterr().err) == [code]
    assert [path.name for path in tmp_path.glob("*.toml")] == ["mine.toml"]
    assert (tmp_path / "mine.toml").read_text() == "mine"


def test_micro_batches_follow_memory():
    args = new.flavor("162M")
    sizes = [new.Machine("", True, 1, memory).micro_batch(args) for memory in (1e9, 1e11, 4e11)]
    assert sizes[0] == 0 < sizes[1] <= sizes[2] <= 64


MODULES = {"data": "data_prep", "train": "canon_pretrain.train", "eval": "eval"}


@pytest.mark.system
def test_one_long_file_to_a_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("\n\n".join(prose(i, 60) for i in range(400)))
    run("mine", "--data", "book.txt", "--minutes", 1)
    path = tmp_path / "mine.toml"
    path.write_text(path.read_text().replace("\nsteps = ", "\nsteps = 12 # "))
    path.write_text(path.read_text().replace("\nwarmup_steps = ", "\nwarmup_steps = 1 # "))
    lines = capsys.readouterr().out.split("Next:")[1].splitlines()
    ran = []
    for words in (shlex.split(line) for line in lines if line and line[0] != "#"):
        words = words[1:] if words[0] == "canon" else words[3:]
        if words[0] in MODULES:
            command = [sys.executable, "-m", MODULES[words[0]], *words[1:]]
            subprocess.run(command, check=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
            ran.append(words[0])
    assert ran == ["data", "train", "train", "eval", "eval"]
    manifest = json.loads((tmp_path / "outputs/mine/data/validation/manifest.json").read_text())
    assert len(list(tmp_path.glob("outputs/mine/*/evals/step-12/validation/*/results.json"))) == 2
    assert manifest["plan_sha256"]

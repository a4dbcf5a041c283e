"""What `canon new` proposes: by its rules, for text and machine; nothing is overwritten."""

import json
import math
import random
import shlex
from dataclasses import replace

import pytest
from scipy import stats

from canon_pretrain import new
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import count_memory, on_meta
from canon_pretrain.titan.job_config import check_job, micro_batch_size
from data_prep.plan import AIMED_HELD_OUT
from data_prep.planning import train_tokenizer
from tests.commands import run_command
from tests.support import canon_stage, error_codes

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
        canon_stage("new")([word for word in words if word != "fails"])


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
    assert seen >= 0.9 * new.MIN_STEPS * new.MIN_BATCH_TOKENS
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
        assert one.epochs <= 1.01 * new.EPOCHS or one.steps <= new.MIN_STEPS + 1
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


def test_gpus_share_the_states_and_fit_what_dry_run_counts(tmp_path):
    for name, (vocab_size, seq_len) in new.SIZES.items():
        args = replace(
            new.flavor(name), vocab_size=vocab_size, max_seq_len=seq_len, canon_set="ABCD"
        )
        proposal = new.Proposal(NODE, name, args, 1e6, 1e11, 1e6)
        (tmp_path / "x.toml").write_text(new.toml("x", "text", "a", proposal))
        job = job_of("x")
        assert micro_batch_size(job, 8) == min(NODE.micro_batch(args), proposal.batch // 8) >= 4
        parts = count_memory(job, on_meta(job.model_args), 8)
        assert sum(parts.values()) < NODE.memory


def test_outputs_are_never_read_as_text(tmp_path, capsys, monkeypatch):
    text = write_text(tmp_path / "text", 40)
    monkeypatch.chdir(text)
    for data in (".", "..", text):
        run("mine", "--data", data, "fails")
        assert error_codes(capsys.readouterr().err) == ["new.outputs_in_data"]


def test_the_prompt_is_short_and_has_words(tmp_path):
    assert new.first_words(["one", " two  three four five ", " \n"]) == "two three four"
    assert len(new.first_words(["文" * 5000])) == new.PROMPT_CHARACTERS
    folder = write_text(tmp_path / "text", 40)
    (folder / "z.txt").write_text(" \n")
    run("mine", "--data", folder)
    assert all(job_of("mine").samples.prompts)


def test_text_of_another_encoding_is_refused(tmp_path, capsys):
    folder = write_text(tmp_path / "text", 3, 10_000)
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    run("mine", "--data", folder)
    assert "1 of 4 sampled documents" in capsys.readouterr().out
    for path in folder.iterdir():
        path.write_text(path.read_text(errors="replace"), encoding="utf-16")
    run("other", "--data", folder, "fails")
    assert error_codes(capsys.readouterr().err) == ["input.other_format"]
    for path in folder.iterdir():
        path.write_bytes(prose(1, 5000).replace("e", "é").encode("latin-1"))
    run("third", "--data", folder, "fails")
    assert error_codes(capsys.readouterr().err) == ["new.not_utf8"]


def test_skipped_text_is_advised_if_it_is_most(tmp_path, capsys):
    folder = write_text(tmp_path / "text", 1, 20)
    for number in range(150):
        (folder / f"{number}.md").write_text(prose(number, 1000))
    run("mine", "--data", folder, "fails")
    printed = capsys.readouterr()
    assert error_codes(printed.err) == ["new.too_little_text"]
    for text in (printed.out, printed.err):
        assert "150 .md" in text and "add --text-suffixes .md" in text
    run("mine", "--data", folder, "--text-suffixes", ".md")
    # most common first, and no advice to read what is not text
    for number in range(3):
        (folder / f"{number}.gz").write_bytes(b"\x1f\x8b\xff")
    (folder / "a.png").write_bytes(b"\x89PNG\0")
    run("other", "--data", folder, "--text-suffixes", ".md")
    [line] = [one for one in capsys.readouterr().out.splitlines() if " skipped: " in one]
    assert "skipped: 3 .gz, 1 .png; gunzip" in line and "--text-suffixes" not in line
    # the manual that is advised exists
    (tmp_path / "short.txt").write_text("short")
    run("x", "--data", tmp_path / "short.txt", "fails")
    words = capsys.readouterr().err.split("manual: ")[1].split()
    run("x", *words)


def test_options_are_called_as_the_user_gave_them(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0")
    for path in ("nowhere", "a.png"):
        run("x", "--data", tmp_path / path, "fails")
        assert "--files" not in capsys.readouterr().err


@pytest.mark.parametrize(("speed", "factor"), [(1000.0, 4), (100.0, 1)])
def test_many_characters_have_a_larger_vocabulary_if_time_allows(
    speed, factor, tmp_path, monkeypatch, capsys
):
    timed = []
    monkeypatch.setattr(
        new.Machine,
        "tokens_per_second",
        lambda self, args: timed.append(args.vocab_size) or speed,
    )
    monkeypatch.setattr(new, "MIN_TOKENS_PER_PIECE", 10)
    monkeypatch.setattr(new.os, "getloadavg", lambda: (1e4, 0, 0))
    folder = write_text(tmp_path / "text", 3, 10_000)
    characters = [chr(0x4E00 + k) for k in range(3000)]
    random.Random(0).shuffle(characters)
    (folder / "z.txt").write_text("".join(characters) * 10)
    run("mine", "--data", folder, "--minutes", "1")

    vocab_size = new.SIZES["debug"][0]
    assert timed == [vocab_size, 4 * vocab_size]
    printed = capsys.readouterr().out
    assert f"--tokenizer train:{factor * vocab_size}" in printed
    assert "load average 10000.0" in printed


def test_a_low_ratio_has_its_reason():
    def shortfall(unique, seconds):
        return new.Proposal(CPU, "debug", new.flavor("debug"), 1e5, unique, seconds).shortfall

    parameters = num_parameters(new.flavor("debug"))
    assert "text" in shortfall(parameters / 2, 1e9)
    assert not shortfall(1e9, 1e9)
    # both limit: the most that the text allows
    assert float(shortfall(parameters / 2, 0.1).split()[1]) < 10
    for unique in (1e9, 5 * parameters):
        minutes = int(shortfall(unique, 10.0).split()[-4])
        one = new.Proposal(CPU, "debug", new.flavor("debug"), 1e5, unique, 60.0 * minutes)
        assert one.ratio >= 20 > replace(one, seconds=60.0 * (minutes - 1)).ratio


def test_large_text_is_held_out_and_built_in_part():
    def found(num_files, num_bytes):
        return new.Survey(num_files, 0, (), {}, {}, [], num_files, num_bytes, 0, 0, 0)

    assert new.cut_and_holdout(found(10_000, 10**6)) == (0, 0.02)
    for num_files in (200, 1000, 10**6):
        holdout = new.cut_and_holdout(found(num_files, 10**10))[1]
        # a hash chooses 20 or more in 98 % of such texts
        assert stats.binom.cdf(19, num_files, holdout) < 0.03
        assert holdout * 10**10 <= 1.1 * max(4e6, AIMED_HELD_OUT * 1e10 / num_files)
    one = new.propose(CPU, 1e10, 6000.0)
    needed = one.steps * one.batch * one.args.max_seq_len
    assert 4 * needed > new.MIN_BUILT_BYTES / 3.5
    large, total = found(10**6, 10**10), 1e10 / 3.5
    limited = new.limit_tokens(large, total, one)
    assert limited.max_tokens == pytest.approx(4 * needed, rel=0.05)
    assert limited.share == pytest.approx(limited.max_tokens / total, rel=0.01)
    assert limited.epochs == pytest.approx(0.25, rel=0.05) and limited.steps == one.steps
    [build, *_] = [command for _, command in new.next_commands("x", [], large, None, limited)]
    words = build.split()
    assert int(words[words.index("--max-tokens") + 1]) == limited.max_tokens
    # of the part that is built
    held_out = float(words[words.index("--holdout") + 1]) * limited.share * 1e10
    assert held_out == pytest.approx(min(4e6, 0.2 * limited.share * 1e10), rel=0.1)
    small = found(10**6, 10**7)
    assert not new.limit_tokens(small, 1e7 / 3.5, new.propose(CPU, 1e7, 1.0)).max_tokens
    # a single file is built whole, and a run may use most of the text
    assert not new.limit_tokens(found(1, 10**10), total, one).max_tokens
    assert not new.limit_tokens(large, 3.0 * needed, one).max_tokens


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
            run_command(MODULES[words[0]], *words[1:], cwd=tmp_path, check=True)
            ran.append(words[0])
    assert ran == ["data", "train", "train", "eval", "eval"]
    manifest = json.loads((tmp_path / "outputs/mine/data/validation/manifest.json").read_text())
    assert len(list(tmp_path.glob("outputs/mine/*/evals/step-12/validation/*/results.json"))) == 2
    assert manifest["plan_sha256"]


DIGITS = random.Random(0).choices("0123456789", k=25_000)
FEW_WORDS = {
    "digits": "".join(DIGITS),
    "numbers": " ".join(DIGITS),
    "words": "the cat sat on the mat. " * 1000,
    "letter": "a" * 25_000,
    "lines": "\n".join("ab"[int(digit) % 2] for digit in DIGITS),
}


@pytest.mark.parametrize("text", FEW_WORDS)
def test_texts_of_few_words_have_a_small_vocabulary(text, tmp_path, capsys):
    (tmp_path / "few.txt").write_text(FEW_WORDS[text])
    run("few", "--data", "few.txt")
    [build] = [line for line in capsys.readouterr().out.splitlines() if " data build " in line]
    vocab_size = int(build.split("--tokenizer train:")[1].split()[0])
    assert 259 < vocab_size < 300
    assert len(train_tokenizer([FEW_WORDS[text]], vocab_size))


def test_a_text_without_words_is_refused_by_its_name(tmp_path, capsys):
    (tmp_path / "blank.txt").write_text("\n" * 25_000)
    run("x", "--data", "blank.txt", "fails")
    printed = capsys.readouterr().err
    assert error_codes(printed) == ["input.no_tokenizer"] and "--tokenizer" not in printed

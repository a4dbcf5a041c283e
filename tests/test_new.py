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
from canon_pretrain.titan.dry_run import count_memory
from canon_pretrain.titan.job_config import check_job, micro_batch_size
from canon_pretrain.titan.spec import on_meta
from data_prep.plan import AIMED_HELD_OUT
from data_prep.planning import train_tokenizer
from tests.commands import run_command
from tests.corpora import prose
from tests.support import canon_stage, error_codes

CPU = new.Machine("2 cores", False, 1, 8e9)
NODE = new.Machine("8 GPUs", True, 8, 80e9)


@pytest.fixture(autouse=True)
def fast_timing(monkeypatch, tmp_path):
    """No timing: 60 GFLOP/s, a thousand times more on a node of GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new.Machine, "find", classmethod(lambda cls: CPU))

    def speed(self, args):
        flops = 6e10 if self.ranks == 1 else 30_000 * 6e10
        return flops / (6 * num_parameters(args))

    monkeypatch.setattr(new.Machine, "tokens_per_second", speed)


def write_text(folder, num_files, num_words=1000):
    """Write a folder of .txt files."""
    folder.mkdir()
    for number in range(num_files):
        (folder / f"{number}.txt").write_text(prose(number, num_words))
    return folder


run = canon_stage("new")


def refusal(capsys, *words):
    """Return the error codes and the output of a `canon new` that fails."""
    with pytest.raises(SystemExit):
        run(words)
    printed = capsys.readouterr()
    return error_codes(printed.err), printed


def job_of(name):
    """Return the checked job of a proposed file."""
    job = parse_job(["--config", f"{name}.toml"])
    check_job(job)
    return job


def build_command(printed):
    """Return the words of the `data build` command among the next commands."""
    [build] = [shlex.split(line) for line in printed.splitlines() if " data build " in line]
    return build


def option(words, name):
    """Return the word after an option."""
    return words[words.index(name) + 1]


def test_the_file_is_a_job_by_the_rules(tmp_path, capsys):
    write_text(tmp_path / 'a "text"', 40)

    run(["mine", "--data", 'a "text"', "--minutes", 1])

    job = job_of("mine")
    assert (job.data.path, job.job.dump_folder) == ("outputs/mine/data", "outputs/mine/canon")
    assert job.model_args.canon_set == "ABCD"
    assert micro_batch_size(job, 1)

    training = job.training
    num_tokens = training.steps * training.global_batch_size * training.seq_len
    assert job.lr_scheduler.warmup_steps <= training.steps
    assert num_tokens >= 0.9 * new.MIN_STEPS * new.MIN_BATCH_TOKENS

    # the commands are what a shell reads
    build = build_command(capsys.readouterr().out)
    assert option(build, "--files") == 'a "text"'
    # too few documents to hold some out
    assert 1000 <= int(option(build, "--max-document-bytes")) <= 20_000


def distance_from_20(proposal):
    """Return how far the ratio of tokens to parameters is from 20, on a log scale."""
    return abs(math.log(proposal.ratio / 20))


def sized_args(name):
    """Return the ModelArgs that a proposal of this size has."""
    vocab_size, seq_len = new.SIZES[name]
    return replace(new.flavor(name), vocab_size=vocab_size, max_seq_len=seq_len, canon_set="ABCD")


def fitting_proposals(machine, unique_tokens, seconds):
    """Return a proposal of each size that fits the machine's memory."""
    proposals = []
    for name in new.SIZES:
        args = sized_args(name)
        if machine.micro_batch(args):
            speed = machine.tokens_per_second(args)
            proposals.append(new.Proposal(machine, name, args, speed, unique_tokens, seconds))
    return proposals


@pytest.mark.parametrize("machine", [CPU, NODE], ids=["cpu", "gpus"])
@pytest.mark.parametrize("num_bytes", [1e6, 1e8, 1e10, 1e13])
def test_sizes_grow_with_text_and_time(machine, num_bytes):
    proposals = [new.propose(machine, num_bytes, 60.0 * minutes) for minutes in (1, 10, 1000)]

    for proposal in proposals:
        assert proposal.tokens <= proposal.speed * proposal.seconds
        assert proposal.epochs <= 1.01 * new.EPOCHS or proposal.steps <= new.MIN_STEPS + 1
        assert proposal.batch % machine.ranks == 0

        others = fitting_proposals(machine, proposal.unique, proposal.seconds)
        assert distance_from_20(proposal) <= min(map(distance_from_20, others)) + 0.02

    parameters = [proposal.parameters for proposal in proposals]
    assert parameters == sorted(parameters)


def test_repeated_tokens_are_worth_less():
    def effective_tokens(num_tokens):
        proposal = new.Proposal(CPU, "debug", new.flavor("debug"), num_tokens, 1e5, 1.0)
        return proposal.ratio * proposal.parameters

    assert effective_tokens(9e4) == pytest.approx(9e4)
    # Muennighoff et al.: four epochs are worth almost four, eight clearly less; more are not made
    assert 0.93 < effective_tokens(4e5) / 4e5 < 1
    assert 0.8 < effective_tokens(8e5) / 8e5 < 0.85
    assert effective_tokens(1.6e6) == effective_tokens(8e5)


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("mine", "text", "new.exists"),
        ("old", "text", "new.exists"),
        ("../x", "text", "option.invalid"),
        ("x", "short.txt", "new.too_little_text"),
        ("x", "nothing", "input.none"),
        ("x", "mine.toml", "new.too_little_text"),
    ],
)
def test_refusals_lose_nothing(name, data, code, tmp_path, capsys):
    write_text(tmp_path / "text", 40)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "mine.toml").write_text("mine")
    (tmp_path / "outputs/old").mkdir(parents=True)

    codes, _ = refusal(capsys, name, "--data", tmp_path / data)

    assert codes == [code]
    assert [path.name for path in tmp_path.glob("*.toml")] == ["mine.toml"]
    assert (tmp_path / "mine.toml").read_text() == "mine"


def test_micro_batches_follow_memory():
    args = new.flavor("162M")
    sizes = [new.Machine("", True, 1, memory).micro_batch(args) for memory in (1e9, 1e11, 4e11)]
    assert sizes[0] == 0 < sizes[1] <= sizes[2] <= 64


@pytest.mark.parametrize("name", new.SIZES)
def test_gpus_share_the_states_and_fit_what_dry_run_counts(name, tmp_path):
    args = sized_args(name)
    proposal = new.Proposal(NODE, name, args, 1e6, 1e11, 1e6)

    (tmp_path / "x.toml").write_text(new.toml("x", "text", "a", proposal))

    job = job_of("x")
    assert micro_batch_size(job, 8) == min(NODE.micro_batch(args), proposal.batch // 8) >= 4
    bytes_by_part = count_memory(job, on_meta(job.model_args), 8)
    assert sum(bytes_by_part.values()) < NODE.memory


def test_outputs_are_never_read_as_text(tmp_path, capsys, monkeypatch):
    text = write_text(tmp_path / "text", 40)
    monkeypatch.chdir(text)

    for data in (".", "..", text):
        codes, _ = refusal(capsys, "mine", "--data", data)
        assert codes == ["new.outputs_in_data"]


def test_the_prompt_is_short_and_has_words(tmp_path):
    assert new.first_words(["one", " two  three four five ", " \n"]) == "two three four"
    assert len(new.first_words(["文" * 5000])) == new.PROMPT_CHARACTERS

    folder = write_text(tmp_path / "text", 40)
    (folder / "z.txt").write_text(" \n")
    run(["mine", "--data", folder])
    assert all(job_of("mine").samples.prompts)


def test_text_of_another_encoding_is_refused(tmp_path, capsys):
    folder = write_text(tmp_path / "text", 3, 10_000)

    # one document is skipped
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    run(["mine", "--data", folder])
    assert "1 of 4 sampled documents" in capsys.readouterr().out

    for path in folder.iterdir():
        path.write_text(path.read_text(errors="replace"), encoding="utf-16")
    codes, _ = refusal(capsys, "other", "--data", folder)
    assert codes == ["input.other_format"]

    for path in folder.iterdir():
        path.write_bytes(prose(1, 5000).replace("e", "é").encode("latin-1"))
    codes, _ = refusal(capsys, "third", "--data", folder)
    assert codes == ["new.not_utf8"]


def write_markdown(folder):
    """Write a folder of little text in a .txt file and much in .md files."""
    write_text(folder, 1, 20)
    for number in range(150):
        (folder / f"{number}.md").write_text(prose(number, 1000))
    return folder


def test_skipped_text_is_advised_if_it_is_most(tmp_path, capsys):
    folder = write_markdown(tmp_path / "text")

    codes, printed = refusal(capsys, "mine", "--data", folder)

    assert codes == ["new.too_little_text"]
    for text in (printed.out, printed.err):
        assert "150 .md" in text
        assert "add --text-suffixes .md" in text
    run(["mine", "--data", folder, "--text-suffixes", ".md"])


def test_skipped_files_are_listed_most_common_first(tmp_path, capsys):
    """Without the advice to read what is not text."""
    folder = write_markdown(tmp_path / "text")
    for number in range(3):
        (folder / f"{number}.gz").write_bytes(b"\x1f\x8b\xff")
    (folder / "a.png").write_bytes(b"\x89PNG\0")

    run(["other", "--data", folder, "--text-suffixes", ".md"])

    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if " skipped: " in line]
    assert "skipped: 3 .gz, 1 .png; gunzip" in line
    assert "--text-suffixes" not in line


def test_the_manual_that_is_advised_exists(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("short")

    _, printed = refusal(capsys, "x", "--data", tmp_path / "short.txt")

    manual = printed.err.split("manual: ")[1].split()
    run(["x", *manual])


def test_options_are_called_as_the_user_gave_them(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0")

    for path in ("nowhere", "a.png"):
        _, printed = refusal(capsys, "x", "--data", tmp_path / path)
        assert "--files" not in printed.err


@pytest.mark.parametrize(("speed", "factor"), [(1000.0, 4), (100.0, 1)])
def test_many_characters_have_a_larger_vocabulary_if_time_allows(
    speed, factor, tmp_path, monkeypatch, capsys
):
    timed_sizes = []

    def tokens_per_second(self, args):
        timed_sizes.append(args.vocab_size)
        return speed

    monkeypatch.setattr(new.Machine, "tokens_per_second", tokens_per_second)
    monkeypatch.setattr(new, "MIN_TOKENS_PER_PIECE", 10)
    monkeypatch.setattr(new.os, "getloadavg", lambda: (1e4, 0, 0))

    folder = write_text(tmp_path / "text", 3, 10_000)
    characters = [chr(0x4E00 + k) for k in range(3000)]
    random.Random(0).shuffle(characters)
    (folder / "z.txt").write_text("".join(characters) * 10)

    run(["mine", "--data", folder, "--minutes", "1"])

    vocab_size = new.SIZES["debug"][0]
    assert timed_sizes == [vocab_size, 4 * vocab_size]
    printed = capsys.readouterr().out
    assert f"--tokenizer train:{factor * vocab_size}" in printed
    assert "load average 10000.0" in printed


def test_a_low_ratio_has_its_reason():
    def proposal(unique_tokens, seconds):
        return new.Proposal(CPU, "debug", new.flavor("debug"), 1e5, unique_tokens, seconds)

    parameters = num_parameters(new.flavor("debug"))
    assert "text" in proposal(parameters / 2, 1e9).shortfall
    assert not proposal(1e9, 1e9).shortfall
    # both limit: the most that the text allows
    assert float(proposal(parameters / 2, 0.1).shortfall.split()[1]) < 10

    # the minutes that it names are enough, and a minute less is not
    for unique_tokens in (1e9, 5 * parameters):
        minutes = int(proposal(unique_tokens, 10.0).shortfall.split()[-4])
        assert proposal(unique_tokens, 60.0 * minutes).ratio >= 20
        assert proposal(unique_tokens, 60.0 * (minutes - 1)).ratio < 20


def survey(num_files, num_bytes):
    """Return the survey of a folder of as many files, each one document."""
    return new.Survey(num_files, 0, (), {}, {}, [], num_files, num_bytes, 0, 0, 0)


def test_a_small_share_of_a_large_text_is_held_out():
    assert new.cut_and_holdout(survey(10_000, 10**6)) == (0, 0.02)

    for num_files in (200, 1000, 10**6):
        _, holdout = new.cut_and_holdout(survey(num_files, 10**10))
        # a hash chooses 20 or more in 98 % of such texts
        assert stats.binom.cdf(19, num_files, holdout) < 0.03
        assert holdout * 10**10 <= 1.1 * max(4e6, AIMED_HELD_OUT * 1e10 / num_files)


def test_a_large_text_is_built_in_part():
    num_bytes = 10**10
    large = survey(10**6, num_bytes)
    num_tokens = num_bytes / 3.5
    proposal = new.propose(CPU, float(num_bytes), 6000.0)
    trained_tokens = proposal.steps * proposal.batch * proposal.args.max_seq_len
    assert 4 * trained_tokens > new.MIN_BUILT_BYTES / 3.5

    limited = new.limit_tokens(large, num_tokens, proposal)

    assert limited.max_tokens == pytest.approx(4 * trained_tokens, rel=0.05)
    assert limited.share == pytest.approx(limited.max_tokens / num_tokens, rel=0.01)
    assert limited.epochs == pytest.approx(0.25, rel=0.05)
    assert limited.steps == proposal.steps

    (_, build), *_ = new.next_commands("x", [], large, None, limited)
    words = build.split()
    assert int(option(words, "--max-tokens")) == limited.max_tokens
    built_bytes = limited.share * num_bytes
    held_out_bytes = float(option(words, "--holdout")) * built_bytes
    assert held_out_bytes == pytest.approx(min(4e6, 0.2 * built_bytes), rel=0.1)

    # a single file is built whole, and a run may use most of the text
    assert not new.limit_tokens(survey(1, num_bytes), num_tokens, proposal).max_tokens
    assert not new.limit_tokens(large, 3.0 * trained_tokens, proposal).max_tokens


def test_a_small_text_is_built_whole():
    proposal = new.propose(CPU, 1e7, 1.0)
    assert not new.limit_tokens(survey(10**6, 10**7), 1e7 / 3.5, proposal).max_tokens


MODULES = {"data": "data_prep", "train": "canon_pretrain.train", "eval": "eval"}


@pytest.mark.system
def test_one_long_file_to_a_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("\n\n".join(prose(i, 60) for i in range(400)))
    run(["mine", "--data", "book.txt", "--minutes", 1])

    # 12 steps suffice
    path = tmp_path / "mine.toml"
    path.write_text(path.read_text().replace("\nsteps = ", "\nsteps = 12 # "))
    path.write_text(path.read_text().replace("\nwarmup_steps = ", "\nwarmup_steps = 1 # "))

    # run the advised commands
    lines = capsys.readouterr().out.split("Next:")[1].splitlines()
    stages = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        words = shlex.split(line)
        stage, *rest = words[1:] if words[0] == "canon" else words[3:]
        if stage in MODULES:
            run_command(MODULES[stage], *rest, cwd=tmp_path, check=True)
            stages.append(stage)

    assert stages == ["data", "train", "train", "eval", "eval"]
    manifest = json.loads((tmp_path / "outputs/mine/data/validation/manifest.json").read_text())
    assert manifest["plan_sha256"]
    assert len(list(tmp_path.glob("outputs/mine/*/evals/step-12/validation/*/results.json"))) == 2


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

    run(["few", "--data", "few.txt"])

    build = build_command(capsys.readouterr().out)
    vocab_size = int(option(build, "--tokenizer").removeprefix("train:"))
    assert 259 < vocab_size < 300
    assert len(train_tokenizer([FEW_WORDS[text]], vocab_size))


def test_a_text_without_words_is_refused_by_its_name(tmp_path, capsys):
    (tmp_path / "blank.txt").write_text("\n" * 25_000)

    codes, printed = refusal(capsys, "x", "--data", "blank.txt")

    assert codes == ["input.no_tokenizer"]
    assert "--tokenizer" not in printed.err

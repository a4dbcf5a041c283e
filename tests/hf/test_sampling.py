"""Samples of checkpoints and exports: seeds, streams of text, losses, the loop in a terminal."""

import copy
import io
import json
import math
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from canon_pretrain.core.cli import _DroppingFile
from canon_pretrain.core.terminal import printable
from canon_pretrain.data.id_tokenizer import id_tokenizer
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.hf.export import export
from canon_pretrain.hf.modeling_canon import LlamaCanonForCausalLM
from canon_pretrain.hf.sampling import Answer, Detokenizer, Sampler, Segment, Settings, compare
from canon_pretrain.sample import converse, print_compared
from eval.model.lm import CanonLM
from tests.data_folders import sentence
from tests.eval_text_runs import VOCAB_SIZE, write_run
from tests.scripted_lm import requests
from tests.support import canon_stage, command_error, error_codes, refused

main = canon_stage("sample")

PROMPT = "the river said"
ODD = "of the \u00e9t\u00e9, \u4e16\u754c \U0001f642\U0001f642 x\ufffdy  </s>\n a\u0301 \u20ac"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run on text, its export, and a run with another tokenizer."""
    base = tmp_path_factory.mktemp("sampling")
    write_run(base)
    export(base / "run", base / "out")
    write_run(base / "other", vocab_size=340, more=[sentence(3, 200)])
    return base


@pytest.fixture(scope="module")
def samplers(base):
    """Samplers of the run, of its export and of the other run."""
    return [Sampler.load(base / name) for name in ("run", "out", "other/run")]


def draw(sampler, num, seed=5, limit=12, first=0, **options):
    """Return the ids of `num` samples of PROMPT."""
    answers = [sampler.answer(sampler.encode(PROMPT), limit) for _ in range(num)]
    sampler.extend(answers, Settings(seed=seed, **options), first_index=first)
    return [answer.ids for answer in answers]


def test_seeds_reproduce_for_any_number_of_samples(samplers):
    run, exported, _ = samplers
    four = draw(run, 4)
    assert len({tuple(ids) for ids in four}) == 4

    # the same ids again, from the export, and in other numbers
    assert draw(run, 4) == four
    assert draw(exported, 4) == four
    assert draw(run, 9)[:4] == four
    assert [draw(run, 1, first=k)[0] for k in range(4)] == four
    assert draw(run, 4, limit=5) == [ids[:5] for ids in four]

    # others of other seeds, unless the temperature is 0
    assert draw(run, 1, seed=5 + 4096) != four[:1]
    assert draw(run, 1, seed=6) != four[:1]
    assert draw(run, 2, temperature=0.0)[0] == draw(run, 1, temperature=0.0, seed=8)[0]


@torch.no_grad()
def test_ids_that_pad_the_vocabulary_are_never_drawn(tmp_path):
    """By a run, its exports in transformers, and `eval`; an imported model may be padded."""
    run = write_run(tmp_path, padding=40)
    export(run, tmp_path / "out")
    export(run, tmp_path / "bare", with_tokenizer=False)
    trained = Sampler.load(tmp_path / "run")
    exported = Sampler.load(tmp_path / "out")
    prompt = trained.encode(PROMPT)

    # the model prefers an id of the padding; the sampler takes the best of the others
    logits = trained.model(torch.tensor([prompt]))[0, -1]
    assert logits.argmax() >= VOCAB_SIZE
    (greedy,) = draw(trained, 1, temperature=0.0)
    assert greedy[0] == logits[:VOCAB_SIZE].argmax()
    assert max(greedy) < VOCAB_SIZE
    assert draw(exported, 1, temperature=0.0) == [greedy]
    assert max(token for ids in draw(trained, 9) for token in ids) < VOCAB_SIZE

    # so does transformers, by the export's generation_config.json
    prompt_BT = torch.tensor([prompt])
    for name in ("out", "bare"):
        opened = LlamaCanonForCausalLM.from_pretrained(tmp_path / name)
        answer_BT = opened.generate(
            prompt_BT,
            attention_mask=torch.ones_like(prompt_BT),
            max_new_tokens=len(greedy),
            do_sample=False,
        )
        assert answer_BT[0, len(prompt) :].tolist() == greedy

    # and eval
    lm = CanonLM(trained.model, trained.tokenizer, max_length=100, add_bos=True)
    options = {"until": [], "max_gen_toks": len(greedy)}
    (text,) = lm.generate_until(requests("generate_until", [(PROMPT, options)]))
    assert trained.decode(prompt) + text == trained.decode([*prompt, *greedy])


def test_log_probabilities_are_those_of_one_pass(samplers):
    run = samplers[0]
    answer = run.answer(run.encode(PROMPT), 20)

    run.extend([answer], Settings(temperature=3.0, top_k=40))

    ids = [*answer.prompt, *answer.ids]
    with torch.no_grad():
        logps_TV = run.model(torch.tensor([ids]))[0].double().log_softmax(-1)
    expected = [logps_TV[k, token].item() for k, token in enumerate(ids[1:])]
    assert answer.logps == pytest.approx(expected[-len(answer.ids) :], abs=1e-5)
    assert [-nats for nats in run.losses(ids)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("at", [0, 3, 10])
def test_streamed_text_is_never_broken(samplers, which, at):
    """By SentencePiece and by tokenizers; ODD needs sequences of one to four byte tokens."""
    sampler = samplers[which]
    answer = Answer(sampler, sampler.encode(ODD[:at]), 99)
    if at == 0:
        tokens = sampler.tokenizer.encode(ODD).tolist()
    else:
        tokens = sampler.encode(ODD)[len(answer.prompt) :]

    shown = ""
    for token in tokens:
        answer.add(token, 0.0)
        shown += answer.new_text()
        assert ODD[at:].startswith(shown)
    answer.is_done = True

    assert shown + answer.new_text() == answer.text == ODD[at:]


@pytest.mark.parametrize("which", [0, 1])
def test_an_answer_that_ends_within_a_character(samplers, which):
    sampler = samplers[which]
    answer = Answer(sampler, [2], 9)
    emoji = sampler.tokenizer.encode("a\U0001f642").tolist()
    assert len(emoji) > 4

    for token in emoji[:-1]:
        answer.add(token, 0.0)
        assert "\ufffd" not in answer.new_text()
    answer.is_done = True

    assert set(answer.new_text()) == {"\ufffd"}


def sum_of_nats(segments, model):
    """The losses of segments by the model with that number."""
    return math.fsum(segment.nats[model] for segment in segments)


def text_of(segments):
    """The text of segments."""
    return "".join(segment.text for segment in segments)


@pytest.mark.parametrize("pair", [(0, 0), (0, 2), (2, 0)])
def test_compared_losses_are_those_of_each_model(samplers, pair):
    first, second = [samplers[which] for which in pair]

    answers, (of_prompt, *of_answers) = compare((first, second), PROMPT, 15, Settings(seed=1))

    assert text_of(of_prompt) == PROMPT
    for k, sampler in enumerate((first, second)):
        expected = math.fsum(sampler.losses(sampler.encode(PROMPT)))
        assert sum_of_nats(of_prompt, k) == pytest.approx(expected, abs=1e-4)
        assert answers[k].text.endswith(text_of(of_answers[k]))


def test_a_model_compared_with_itself(samplers):
    """The same draws; a segment per token, unless it ends within a character."""
    run = samplers[0]

    answers, (_, *of_answers) = compare((run, run), PROMPT, 15, Settings(seed=1))

    for k in (0, 1):
        answer = answers[k]
        segments = of_answers[k]
        total = -math.fsum(answer.logps)
        assert sum_of_nats(segments, k) == pytest.approx(total, abs=1e-4)
        assert 10 < len(segments) <= len(answer.ids)
        for segment in segments:
            assert segment.nats[0] == segment.nats[1]


def test_a_dropped_space_is_part_of_the_first_segment(samplers):
    run = samplers[0]

    _, (of_prompt, *_) = compare((run, run), PROMPT, 1, Settings())

    space, first, *rest = run.losses(run.encode(PROMPT))
    nats = [segment.nats[0] for segment in of_prompt]
    assert nats == pytest.approx([space + first, *rest], abs=1e-4)


def json_lines(capsys):
    """Return the printed objects."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_command_prints_text_or_an_object_per_sample(base, capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    words = [str(base / "run"), "--file", str(file), "--max_tokens", "6", "--num", "2"]

    main([*words, "--json"])
    first, second = json_lines(capsys)
    assert (first["sample"], second["sample"]) == (0, 1)
    assert len(first["ids"]) == len(first["logps"]) == 6
    assert len(first["prompt_logps"]) == len(first["prompt_ids"]) - 1

    main(words)
    texts = [printable(record["text"], "\n\t") for record in (first, second)]
    assert capsys.readouterr().out == "".join(f"{PROMPT}{text}\n" for text in texts)


def test_the_command_compares_a_run_with_its_export(base, capsys):
    words = ["--compare", str(base / "run"), str(base / "out"), "--prompt", PROMPT]

    main([*words, "--max_tokens", "6"])
    assert len(capsys.readouterr().out.splitlines()) > 20

    main([*words, "--max_tokens", "6", "--json"])
    first, second = json_lines(capsys)
    assert first["ids"] == second["ids"]
    total = math.fsum(nats[0] for _, nats in first["segments"])
    assert total == pytest.approx(-math.fsum(first["logps"]), abs=1e-4)


def test_bad_prompts_are_refused(base, capsys, tmp_path):
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"a\xff")
    large = tmp_path / "large.txt"
    large.touch()
    os.truncate(large, 20_000_000_000)  # takes no disk space

    for code, words in (
        ("sample.not_utf8", ["--file", str(broken)]),
        ("sample.prompt_too_long", ["--prompt", "the a one " * 400]),
        ("sample.prompt_too_long", ["--file", str(large)]),
        ("sample.prompt_too_long", ["--file", "/dev/zero"]),
        ("sample.not_utf8", ["--prompt", "bad\udcff"]),
    ):
        assert command_error(capsys, main, [str(base / "run"), *words]) == code


def test_other_tokenizers_are_refused(base, samplers):
    other_data = base / "other" / "data"
    with refused("hf.other_tokenizer"):
        Sampler.load(base / "run", tokenizer_path=other_data)
    with refused("sample.vocab_size"):
        Sampler.load(base / "out", tokenizer_path=other_data)

    of_ids = replace(samplers[0], tokenizer=Tokenizer(id_tokenizer(300), "ids"))
    assert of_ids.encode("12 45") == [12, 45]
    with refused("sample.no_ids"):
        of_ids.encode("")


@dataclass(frozen=True)
class Scripted(Sampler):
    """A sampler whose answer in each call is the tokens of `script`; an error ends the call."""

    script: Callable[[int], tuple[list[int], BaseException | None]]
    prompts: list[list[int]] = field(default_factory=list)

    def extend(self, answers, settings, on_change=None, first=0):
        (answer,) = answers
        self.prompts.append(answer.prompt)
        tokens, error = self.script(len(self.prompts))
        for token in tokens:
            answer.add(token, 0.0)
        if error is not None:
            raise error
        answer.is_done = True


@pytest.fixture
def type_lines(monkeypatch):
    """Return the function that sets the lines a user types, or exceptions such as Ctrl-C."""

    def set_lines(*typed):
        lines = iter(typed)

        def read(_):
            line = next(lines)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)

    return set_lines


def test_the_loop_keeps_its_text_and_says_what_it_drops(samplers, type_lines, capsys):
    run = samplers[0]
    limit = 100

    def script(number):
        tokens = run.tokenizer.encode("of " * (900 if number == 2 else 2)).tolist()
        if number == 1:
            return tokens, KeyboardInterrupt()
        if number == 4:
            tokens.append(run.tokenizer.eos_id)
        return tokens, None

    type_lines("the", "a", "", "", KeyboardInterrupt, "bad\udcff", "one", EOFError)
    scripted = Scripted(run.checkpoint, run.model, run.tokenizer, None, script)

    converse(scripted, Settings(), limit)

    first, second, third, fourth, fifth = scripted.prompts
    text = "the" + " of of "
    assert run.decode(first) == "the"
    assert run.decode(second) == f"{text}\na"
    room = run.model.args.max_seq_len + 1 - limit
    assert len(third) == room
    assert len(fourth) == room
    assert fifth == run.encode("one")  # the text before had ended

    printed = capsys.readouterr().err
    assert printed.count(str(run.model.args.max_seq_len)[1:]) >= 2
    assert "not UTF-8" in printed


def test_the_loop_continues_its_own_tokens(samplers, type_lines):
    """Encoding the text again would replace these bytes by tokens of letters."""
    run = samplers[0]
    added = [3 + byte for byte in b" of the"]
    type_lines("the", "", "", "bad\udcff", "", EOFError)
    scripted = Scripted(
        run.checkpoint, run.model, run.tokenizer, None, lambda number: (added, None)
    )

    converse(scripted, Settings(), 20)

    first = scripted.prompts[0]
    assert run.encode(run.decode(first + added)) != first + added
    assert scripted.prompts == [first + added * k for k in range(4)]


class Counting(Sampler):
    """Counts decoded ids; a nat per token."""

    num_decoded = 0

    def decode(self, ids):
        Counting.num_decoded += len(ids)
        return super().decode(ids)

    def losses(self, ids):
        return [1.0] * (len(ids) - 1)


@pytest.fixture
def counting(samplers, which):
    """A sampler that counts decoded ids."""
    sampler = samplers[which]
    Counting.num_decoded = 0
    return Counting(sampler.checkpoint, sampler.model, sampler.tokenizer, None)


def odd_ids(sampler):
    """Return the ids of a long text with odd characters."""
    return sampler.tokenizer.encode(ODD * 4 + "  the    a\n\n" * 9).tolist()


@pytest.mark.parametrize("which", [0, 1])
def test_text_is_decoded_in_steps_as_at_once(samplers, which):
    sampler = samplers[which]
    rng = random.Random(which)
    odd = odd_ids(sampler)
    for _ in range(30):
        ids = [sampler.tokenizer.eos_id, *rng.sample(odd, 40), *odd]
        text = sampler.decode(ids)
        detokenizer = Detokenizer(sampler.decode)

        shown = ""
        while ids:
            count = rng.randint(1, 3)
            shown += detokenizer.add(ids[:count])
            ids = ids[count:]

        # tokenizers decodes a run of bytes as a whole, so that those shown may change
        is_same = shown + detokenizer.flush() == text
        assert is_same or (which == 1 and len(shown) == len(text))


def short(sampler, length):
    """Return `sampler` with a context of `length` tokens."""
    model = copy.copy(sampler.model)
    model.args = replace(model.args, max_seq_len=length)
    return replace(sampler, model=model)


@pytest.mark.parametrize("which", [0, 1])
def test_losses_by_place_decode_each_id_a_few_times(samplers, counting, which):
    sampler = samplers[which]
    ids = [sampler.tokenizer.eos_id, *odd_ids(sampler)]
    text = sampler.decode(ids)
    expected = {}
    for k in range(1, len(ids) + 1):
        before = sampler.decode(ids[:k])
        if text.startswith(before):
            expected.setdefault(len(before), float(k - 1))

    sums = counting.loss_sums(ids)

    assert sums == expected | {len(text): len(ids) - 1}
    assert Counting.num_decoded < 20 * len(ids)


@pytest.mark.parametrize("which", [0, 1])
def test_streaming_decodes_each_id_a_few_times(counting, which):
    tokens = odd_ids(counting)
    answer = Answer(counting, [counting.tokenizer.eos_id], 999)

    for token in tokens:
        answer.add(token, 0.0)
        answer.new_text()

    assert Counting.num_decoded < 20 * (len(tokens) + 1)


def test_models_of_unequal_context_are_compared(samplers):
    run = samplers[0]
    notes = []
    shorter = short(run, len(run.encode(PROMPT)) + 8)

    for pair in ((run, shorter), (shorter, run)):
        answers, _ = compare(pair, PROMPT, 30, Settings(), notes.append)
        assert [len(answer.ids) for answer in answers] == [9, 9]
        assert not notes


def test_an_answer_is_read_as_far_as_it_fits(samplers):
    run, _, other = samplers
    notes = []
    length = max(len(sampler.encode(PROMPT)) for sampler in (run, other)) + 8

    answers, parts = compare((run, short(other, length)), PROMPT, 30, Settings(), notes.append)

    answer = answers[0]
    read = text_of(parts[1])
    assert len(answer.ids) == 30
    assert len(notes) == 1
    assert read in answer.text
    assert 0 < len(read) < len(answer.text)


def test_a_prompt_beyond_a_context_names_its_model(samplers):
    run = samplers[0]
    tiny = replace(short(run, 3), checkpoint="tiny")

    with refused("sample.prompt_too_long") as error:
        compare((run, tiny), PROMPT, 30, Settings())

    assert "tiny" in str(error.value)


def test_compared_tables_do_not_claim_too_much(samplers, capsys):
    run = samplers[0]
    answers = [run.answer(run.encode(""), 5) for _ in range(2)]
    piece = Segment("a", (1.0, 2.0))
    broken = Segment("\ufffd", (1.0, 2.0))

    print_compared((run, run), answers, [[piece] * 76, [broken], []])
    printed = capsys.readouterr().out
    assert "the last 64 of 76" in printed
    assert "pieces" in printed
    first_row = next(line for line in printed.splitlines() if "A's text" in line)
    assert first_row.split()[-2:] == ["-", "-"]

    print_compared((run, run), answers, [[], [], []])
    assert "B - A" not in capsys.readouterr().out


@pytest.fixture
def pipe(monkeypatch):
    """Return the function that sets the bytes on stdin."""

    def set_stdin(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))

    return set_stdin


@pytest.mark.parametrize(
    ("options", "content", "prompt"),
    [
        ([], b"the river\n", "the river"),
        (["--file", "-"], b"the\n\n", "the\n"),
        ([], b"", ""),
        (["--prompt", "a"], b"the", "a"),
    ],
    ids=["stdin", "file", "empty", "prompt"],
)
def test_a_prompt_may_be_piped(base, pipe, capsys, options, content, prompt):
    pipe(content)

    main([str(base / "run"), "--max_tokens", "1", "--json", *options])

    assert json.loads(capsys.readouterr().out)["prompt"] == prompt


def test_a_closed_stdin_is_no_prompt(base, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)  # what Python sets for `<&-`

    main([str(base / "run"), "--max_tokens", "1", "--json"])

    assert json.loads(capsys.readouterr().out)["prompt"] == ""


def test_a_piped_prompt_is_utf8(base, pipe, capsys):
    pipe(b"\xff")

    words = [str(base / "run"), "--max_tokens", "1", "--json"]
    assert command_error(capsys, main, words) == "sample.not_utf8"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_closed_pipe_stops_the_model(base, monkeypatch, options):
    read_end, write_end = os.pipe()
    os.close(read_end)
    tokens = []
    add = Answer.add

    def add_and_count(answer, token, logp):
        tokens.append(token)
        add(answer, token, logp)

    monkeypatch.setattr(Answer, "add", add_and_count)
    words = [str(base / "run"), "--prompt", "a", "--num", "40", "--max_tokens", "400", *options]
    with io.TextIOWrapper(io.BufferedWriter(_DroppingFile(write_end, "w"))) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit, match="0"):
            main(words)
        monkeypatch.undo()

    assert len(tokens) < (12_000 if options else 100)


def test_a_written_prompt_is_exact(base, capsys):
    prompt = "the\triver " + "said " * 70
    main([str(base / "run"), "--prompt", prompt, "--max_tokens", "1"])
    assert capsys.readouterr().out.startswith(prompt)


@pytest.fixture
def note_of(base, monkeypatch, capsys):
    """Return the function that answers with one token again and again, and returns the note."""

    def run(token, max_tokens):
        def generate(*_, max_new_tokens, on_token, on_end, **__):
            for _ in range(max_new_tokens[0]):
                on_token(0, token, -1.0)
            on_end(0)

        monkeypatch.setattr("canon_pretrain.hf.sampling.generate", generate)
        main([str(base / "run"), "--prompt", "the " * 240, "--max_tokens", str(max_tokens)])
        return capsys.readouterr().err.splitlines()[-1]

    return run


def test_the_note_has_the_reason_of_an_early_end(samplers, note_of):
    assert note_of(9, 900).endswith(", the context of 1,000 tokens is full]")
    assert note_of(9, 3).endswith("1.00 nats per token]")

    note = note_of(samplers[0].tokenizer.eos_id, 1)
    assert note.endswith(", the text ended]")
    assert "nats" not in note


def test_losses_of_the_prompt_are_computed_once(base, monkeypatch, capsys):
    calls = []
    losses = Sampler.losses

    def losses_and_count(sampler, ids):
        calls.append(ids)
        return losses(sampler, ids)

    monkeypatch.setattr(Sampler, "losses", losses_and_count)
    main([str(base / "run"), "--prompt", PROMPT, "--num", "3", "--max_tokens", "2", "--json"])

    assert len(capsys.readouterr().out.splitlines()) == 3
    assert len(calls) == 1


@pytest.mark.parametrize(
    "words",
    [
        "--temperature nan",
        "--temperature -1",
        "--top-k -1",
        "--top-p 2",
        "--temperature 0 --top_k 3",
        "--temperature 0 --top_p 0.5",
        "--seed abc",
        "--seed -1",
    ],
)
def test_options_are_checked_before_loading(tmp_path, capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "nothing"), "--prompt", "a", *words.split()])
    printed = capsys.readouterr().err
    assert words.split()[0] in printed and "value: " not in printed
    assert error_codes(printed) == ["cli.usage"]

"""Samples of checkpoints and exports: seeds, streams of text, losses, the loop in a terminal."""

import copy
import io
import json
import math
import os
import random
import sys
from dataclasses import replace

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
from tests.support import canon_stage, error_codes, refused

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
    return [Sampler.load(base / name) for name in ("run", "out", "other/run")]


def draw(sampler, num, seed=5, limit=12, first=0, **options):
    answers = [sampler.answer(sampler.encode(PROMPT), limit) for _ in range(num)]
    sampler.extend(answers, Settings(seed=seed, **options), first_index=first)
    return [answer.ids for answer in answers]


def test_seeds_reproduce_for_any_number_of_samples(samplers):
    run, exported, _ = samplers
    four = draw(run, 4)
    assert len({tuple(ids) for ids in four}) == 4
    assert four == draw(run, 4) == draw(exported, 4) == draw(run, 9)[:4]
    assert four == [draw(run, 1, first=k)[0] for k in range(4)]
    assert [ids[:5] for ids in four] == draw(run, 4, limit=5)
    assert draw(run, 1, seed=5 + 4096) != four[:1] != draw(run, 1, seed=6)
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
    assert greedy[0] == logits[:VOCAB_SIZE].argmax() and max(greedy) < VOCAB_SIZE
    assert draw(exported, 1, temperature=0.0) == [greedy]
    assert max(map(max, draw(trained, 9))) < VOCAB_SIZE

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
    shown, whole = "", sampler.tokenizer.encode(ODD).tolist()
    rest = sampler.encode(ODD)[len(answer.prompt) :] if at else whole
    for token in rest:
        answer.add(token, 0.0)
        shown += answer.new_text()
        assert ODD[at:].startswith(shown)
    answer.is_done = True
    assert shown + answer.new_text() == answer.text == ODD[at:]
    cut = Answer(sampler, [2], 9)  # an answer that ends within a character
    emoji = sampler.tokenizer.encode("a\U0001f642").tolist()
    assert len(emoji) > 4
    for token in emoji[:-1]:
        cut.add(token, 0.0)
        assert "\ufffd" not in cut.new_text()
    cut.is_done = True
    assert set(cut.new_text()) == {"\ufffd"}


def test_compared_losses_are_those_of_each_model(samplers):
    run, _, other = samplers
    for pair in ((run, run), (run, other), (other, run)):
        answers, parts = compare(pair, PROMPT, 15, Settings(seed=1))
        assert "".join(segment.text for segment in parts[0]) == PROMPT
        for k, sampler in enumerate(pair):
            expected = math.fsum(sampler.losses(sampler.encode(PROMPT)))
            found = math.fsum(segment.nats[k] for segment in parts[0])
            assert found == pytest.approx(expected, abs=1e-4)
            answer, part = answers[k], parts[1 + k]
            if pair == (run, run):
                # the same draws; a segment per token, unless it ends within a character
                total = math.fsum(segment.nats[k] for segment in part)
                assert total == pytest.approx(-math.fsum(answer.logps), abs=1e-4)
                assert 10 < len(part) <= len(answer.ids)
                assert all(segment.nats[0] == segment.nats[1] for segment in part)
            assert answer.text.endswith("".join(segment.text for segment in part))
    one = [s.nats[0] for s in compare((run, run), PROMPT, 1, Settings())[1][0]]
    first, second, *rest = run.losses(run.encode(PROMPT))  # the first token is a dropped space
    assert one == pytest.approx([first + second, *rest], abs=1e-4)


def test_the_command_prints_text_or_an_object_per_sample(base, capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    words = [str(base / "run"), "--file", str(file), "--max_tokens", "6", "--num", "2"]
    main([*words, "--json"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["sample"] for one in records] == [0, 1]
    assert len(records[0]["ids"]) == len(records[0]["logps"]) == 6
    assert len(records[0]["prompt_logps"]) == len(records[0]["prompt_ids"]) - 1
    main(words)
    texts = [printable(one["text"], "\n\t") for one in records]
    assert capsys.readouterr().out == "".join(f"{PROMPT}{text}\n" for text in texts)
    pair = ["--compare", str(base / "run"), str(base / "out"), "--prompt", PROMPT]
    main([*pair, "--max_tokens", "6"])
    assert len(capsys.readouterr().out.splitlines()) > 20
    main([*pair, "--max_tokens", "6", "--json"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["ids"] == second["ids"]
    total = math.fsum(nats[0] for _, nats in first["segments"])
    assert total == pytest.approx(-math.fsum(first["logps"]), abs=1e-4)


def test_bad_input_is_refused(base, samplers, capsys, tmp_path):
    run, broken, large = samplers[0], tmp_path / "broken.txt", tmp_path / "large.txt"
    broken.write_bytes(b"a\xff")
    large.touch()
    os.truncate(large, 20_000_000_000)  # takes no disk space
    for code, words in (
        ("sample.not_utf8", ["--file", str(broken)]),
        ("sample.prompt_too_long", ["--prompt", "the a one " * 400]),
        ("sample.prompt_too_long", ["--file", str(large)]),
        ("sample.prompt_too_long", ["--file", "/dev/zero"]),
        ("sample.not_utf8", ["--prompt", "bad\udcff"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([str(base / "run"), *words])
        assert error_codes(capsys.readouterr().err) == [code]
    with refused("hf.other_tokenizer"):
        Sampler.load(base / "run", tokenizer_path=base / "other" / "data")
    with refused("sample.vocab_size"):
        Sampler.load(base / "out", tokenizer_path=base / "other" / "data")
    ids = replace(run, tokenizer=Tokenizer(id_tokenizer(300), "ids"))
    assert ids.encode("12 45") == [12, 45]
    with refused("sample.no_ids"):
        ids.encode("")


def test_the_loop_keeps_its_text_and_says_what_it_drops(samplers, monkeypatch, capsys):
    prompts = []

    class Scripted(Sampler):
        def extend(self, answers, settings, on_change=None, first=0):
            prompts.append(answers[0].prompt)
            number = len(prompts)
            for token in self.tokenizer.encode("of " * (900 if number == 2 else 2)).tolist():
                answers[0].add(token, 0.0)
            if number == 1:
                raise KeyboardInterrupt
            if number == 4:
                answers[0].add(self.tokenizer.eos_id, 0.0)
            answers[0].is_done = True

    lines = iter(["the", "a", "", "", KeyboardInterrupt, "bad\udcff", "one", EOFError])

    def read(_):
        if isinstance(line := next(lines), str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    run = samplers[0]
    scripted = Scripted(run.checkpoint, run.model, run.tokenizer, None)
    converse(scripted, Settings(), 100)
    texts = [run.decode(prompt) for prompt in prompts]
    first = "the" + " of of "
    assert texts[:2] == ["the", f"{first}\na"]
    room = run.model.args.max_seq_len + 1 - 100
    assert [len(prompt) for prompt in prompts[2:4]] == [room, room]
    assert prompts[4] == run.encode("one")  # the text before had ended
    printed = capsys.readouterr().err
    assert printed.count(str(run.model.args.max_seq_len)[1:]) >= 2
    assert "not UTF-8" in printed


def test_the_loop_continues_its_own_tokens(samplers, monkeypatch):
    """Encoding the text again would replace these bytes by tokens of letters."""
    prompts = []
    run = samplers[0]
    added = [3 + byte for byte in b" of the"]

    class Scripted(Sampler):
        def extend(self, answers, settings, on_change=None, first=0):
            prompts.append(answers[0].prompt)
            for token in added:
                answers[0].add(token, 0.0)
            answers[0].is_done = True

    def read(_):
        if isinstance(line := next(lines), str):
            return line
        raise line

    lines = iter(["the", "", "", "bad\udcff", "", EOFError])
    monkeypatch.setattr("builtins.input", read)
    converse(Scripted(run.checkpoint, run.model, run.tokenizer, None), Settings(), 20)
    assert run.encode(run.decode(prompts[0] + added)) != prompts[0] + added
    assert prompts == [prompts[0] + added * k for k in range(4)]


class Counting(Sampler):
    """Counts decoded ids; a nat per token."""

    num_decoded = 0

    def decode(self, ids):
        Counting.num_decoded += len(ids)
        return super().decode(ids)

    def losses(self, ids):
        return [1.0] * (len(ids) - 1)


@pytest.mark.parametrize("which", [0, 1])
def test_text_is_decoded_in_steps_as_at_once(samplers, which):
    sampler = samplers[which]
    counting = Counting(sampler.checkpoint, sampler.model, sampler.tokenizer, None)
    rng = random.Random(which)
    words = sampler.tokenizer.encode(ODD * 4 + "  the    a\n\n" * 9).tolist()
    for _ in range(30):
        ids = [sampler.tokenizer.eos_id, *rng.sample(words, 40), *words]
        text, detokenizer, shown = sampler.decode(ids), Detokenizer(sampler.decode), ""
        while ids:
            count = rng.randint(1, 3)
            shown += detokenizer.add(ids[:count])
            ids = ids[count:]
        # tokenizers decodes a run of bytes as a whole, so that those shown may change
        is_same = shown + detokenizer.flush() == text
        assert is_same or (which == 1 and len(shown) == len(text))
    ids = [sampler.tokenizer.eos_id, *words]
    text, expected = sampler.decode(ids), {}
    for k in range(1, len(ids) + 1):
        if text.startswith(before := sampler.decode(ids[:k])):
            expected.setdefault(len(before), float(k - 1))
    Counting.num_decoded = 0
    assert counting.loss_sums(ids) == expected | {len(text): len(ids) - 1}
    assert Counting.num_decoded < 20 * len(ids)
    Counting.num_decoded = 0
    answer = Answer(counting, [counting.tokenizer.eos_id], 999)
    for token in words:
        answer.add(token, 0.0)
        answer.new_text()
    assert Counting.num_decoded < 20 * len(ids)


def short(sampler, length):
    """Return `sampler` with a context of `length` tokens."""
    model = copy.copy(sampler.model)
    model.args = replace(model.args, max_seq_len=length)
    return replace(sampler, model=model)


def test_models_of_unequal_context_are_compared(samplers):
    run, _, other = samplers
    length = len(run.encode(PROMPT)) + 8
    notes = []
    for pair in ((run, short(run, length)), (short(run, length), run)):
        answers, parts = compare(pair, PROMPT, 30, Settings(), notes.append)
        assert [len(answer.ids) for answer in answers] == [9, 9] and not notes
    length = max(len(one.encode(PROMPT)) for one in (run, other)) + 8
    answers, parts = compare((run, short(other, length)), PROMPT, 30, Settings(), notes.append)
    assert len(answers[0].ids) == 30 and len(notes) == 1
    read = "".join(segment.text for segment in parts[1])
    assert read and read in answers[0].text and len(read) < len(answers[0].text)
    with refused("sample.prompt_too_long") as error:
        compare((run, replace(short(run, 3), checkpoint="tiny")), PROMPT, 30, Settings())
    assert "tiny" in str(error.value)


def test_compared_tables_do_not_claim_too_much(samplers, capsys):
    run = samplers[0]
    answers = [run.answer(run.encode(""), 5) for _ in range(2)]
    piece = Segment("a", (1.0, 2.0))
    broken = [Segment("\ufffd", (1.0, 2.0))]
    print_compared((run, run), answers, [[piece] * 76, broken, []])
    printed = capsys.readouterr().out
    assert "the last 64 of 76" in printed and "pieces" in printed
    rows = [line.split() for line in printed.splitlines() if "A's text" in line]
    assert rows[0][-2:] == ["-", "-"]
    print_compared((run, run), answers, [[], [], []])
    assert "B - A" not in capsys.readouterr().out


def test_a_prompt_may_be_piped(base, monkeypatch, capsys):
    words = [str(base / "run"), "--max_tokens", "1", "--json"]
    for more, given, expected in (
        ([], b"the river\n", "the river"),
        (["--file", "-"], b"the\n\n", "the\n"),
        ([], b"", ""),
        (["--prompt", "a"], b"the", "a"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
        main([*words, *more])
        assert json.loads(capsys.readouterr().out)["prompt"] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"))
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert error_codes(capsys.readouterr().err) == ["sample.not_utf8"]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_closed_pipe_stops_the_model(base, monkeypatch, more):
    read, write = os.pipe()
    os.close(read)
    tokens, add = [], Answer.add
    monkeypatch.setattr(Answer, "add", lambda *x: (tokens.append(1), add(*x))[1])
    with io.TextIOWrapper(io.BufferedWriter(_DroppingFile(write, "w"))) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit, match="0"):
            main([str(base / "run"), "--prompt", "a", "--num", "40", "--max_tokens", "400", *more])
        monkeypatch.undo()
    assert len(tokens) < (12_000 if more else 100)


def test_a_written_prompt_is_exact(base, capsys):
    prompt = "the\triver " + "said " * 70
    main([str(base / "run"), "--prompt", prompt, "--max_tokens", "1"])
    assert capsys.readouterr().out.startswith(prompt)


def test_the_note_has_the_reason_of_an_early_end(samplers, base, monkeypatch, capsys):
    token = 9

    def generated(*_, max_new_tokens, on_token, on_end, **__):
        for _ in range(max_new_tokens[0]):
            on_token(0, token, -1.0)
        on_end(0)

    monkeypatch.setattr("canon_pretrain.hf.sampling.generate", generated)
    words = [str(base / "run"), "--prompt", "the " * 240, "--max_tokens"]
    notes = []
    for limit in ("900", "3"):
        main([*words, limit])
        notes.append(capsys.readouterr().err.splitlines()[-1])
    assert notes[0].endswith(", the context of 1,000 tokens is full]")
    assert notes[1].endswith("1.00 nats per token]")
    token = samplers[0].tokenizer.eos_id
    main([*words, "1"])
    note = capsys.readouterr().err.splitlines()[-1]
    assert note.endswith(", the text ended]") and "nats" not in note


def test_losses_of_the_prompt_are_computed_once(base, monkeypatch, capsys):
    calls, losses = [], Sampler.losses
    monkeypatch.setattr(Sampler, "losses", lambda *x: (calls.append(1), losses(*x))[1])
    main([str(base / "run"), "--prompt", PROMPT, "--num", "3", "--max_tokens", "2", "--json"])
    assert len(capsys.readouterr().out.splitlines()) == 3 and len(calls) == 1


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

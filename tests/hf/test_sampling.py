"""Samples of checkpoints and exports: seeds, streams of text, losses, the loop in a terminal."""

import json
import math
from dataclasses import replace

import pytest
import torch

from canon_pretrain.core.terminal import printable
from canon_pretrain.data.id_tokenizer import id_tokenizer
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.hf.export import export
from canon_pretrain.hf.sampling import Answer, Sampler, Settings, compare
from canon_pretrain.sample import converse, main
from tests.data_folders import sentence
from tests.eval_text_runs import write_run
from tests.support import error_codes, refused

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
    sampler.extend(answers, Settings(seed=seed, **options), first=first)
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
    run, broken = samplers[0], tmp_path / "broken.txt"
    broken.write_bytes(b"a\xff")
    for code, words in (
        ("sample.not_utf8", ["--file", str(broken)]),
        ("sample.prompt_too_long", ["--prompt", "the a one " * 400]),
        ("generate.sampling", ["--prompt", "a", "--top_p", "2"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([str(base / "run"), *words])
        assert error_codes(capsys.readouterr().err) == [code]
    with refused("hf.other_tokenizer"):
        Sampler.load(base / "run", tokenizer=base / "other" / "data")
    with refused("sample.vocab_size"):
        Sampler.load(base / "out", tokenizer=base / "other" / "data")
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

    lines = iter(["the", "a", "", "", KeyboardInterrupt, "one", EOFError])

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
    assert capsys.readouterr().err.count(str(run.model.args.max_seq_len)[1:]) >= 2

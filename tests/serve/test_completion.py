"""Bodies of requests, and tokens as text and as OpenAI's objects, without a server."""

import itertools
import json
import math

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.sampling import Sampler
from canon_pretrain.model.decode import Sampling
from canon_pretrain.serve.body import read_body
from canon_pretrain.serve.completion import Completion, TokenTexts
from canon_pretrain.serve.scheduler import Scheduler, ScoredToken
from tests.eval_text_runs import write_run
from tests.support import refused

TEXT = "The river said: café \U0001f642 and no stone."


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    base = tmp_path_factory.mktemp("serve")
    return Sampler.load(write_run(base))


def check_room(num_answers):
    if num_answers > 1000:
        raise UserError("serve.too_many", "too many answers")


def options_of(sampler, **values):
    body = {"prompt": "the river", **values}
    return read_body(json.dumps(body).encode(), sampler, ["run/step-3"], check_room)


def completion_of(sampler, **values):
    """Return a completion, and the list that receives what it streams."""
    changes = []
    options = options_of(sampler, **values)
    return Completion(options, sampler, TokenTexts(sampler), "run", changes.append), changes


def play(completion, texts_ids, reason="length"):
    """Let the answers of the first prompt have these ids."""
    listener = completion.requests[0].listener
    for index, ids in enumerate(texts_ids):
        for token in ids:
            if not listener.on_token(index, ScoredToken(token, -1.0, ((token, -1.0),))):
                listener.on_end(index, "stop")
                break
        else:
            listener.on_end(index, reason)


def continuation_ids(sampler, text):
    """Return the ids of `text` after "the river"."""
    whole = sampler.encode(f"the river{text}")
    return whole[len(sampler.encode("the river")) :]


def test_every_parameter_reaches_its_request(sampler):
    options = options_of(
        sampler, prompt=[[5, 6], [7]], max_tokens=4, n=2, temperature=0.5, top_p=0.9, top_k=3,
        seed=11, stop="a", logprobs=2, echo=True, stream=True, model=None, user="x",
        stream_options={"include_usage": True}, best_of=2, presence_penalty=0,
    )  # fmt: skip
    assert options.prompts == [([5, 6], 0), ([7], 0)]
    assert options.max_tokens == [4, 4]
    assert options.sampling == Sampling(0.5, 3, 0.9)
    assert (options.seed, options.stops, options.num_top) == (11, ("a",), 2)
    assert options.echo and options.stream and options.include_usage

    default = options_of(sampler)
    assert default.prompts == [(sampler.encode("the river"), 1)]
    assert (default.max_tokens, default.sampling) == ([16], Sampling(1.0, 0, 1.0))
    assert default.seed != options_of(sampler).seed
    assert options_of(sampler, temperature=0, top_p=0.5).sampling == Sampling(0.0, 0, 1.0)
    assert options_of(sampler, prompt=["a", "b", ""]).prompts[2] == (sampler.encode(""), 1)


def test_the_default_number_of_tokens_fits_the_model(sampler):
    assert options_of(sampler, prompt=[5] * 995).max_tokens == [6]
    assert options_of(sampler, prompt=[5] * 1000).max_tokens == [1]
    with refused("serve.prompt_too_long", param="prompt", given=1001, expected=1000):
        options_of(sampler, prompt=[5] * 1001)
    with refused("serve.prompt_too_long"):
        options_of(sampler, prompt=[[5], [5] * 996], max_tokens=6)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *itertools.product(["temperature", "top_p"], [-1, "1", [1], True]),
        ("top_p", 0),
        ("top_p", 1.1),
        *itertools.product(["n", "max_tokens", "logprobs", "seed"], [1.5, "2", {}, True, 1e30]),
        ("n", 0),
        ("n", 10**9),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("best_of", 3),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ["a"] * 17),
        ("stop", "a" * 2000),
        ("temperature", 1e-320),
        ("echo", 1),
        ("stream", "yes"),
        ("stream_options", {"other": True}),
        ("suffix", "end"),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("messages", []),
        ("temprature", 1),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [5, "a"]),
        ("prompt", ["a", 5]),
        ("prompt", [[5], [True]]),
        ("prompt", [5.0]),
        ("prompt", {"text": "a"}),
        ("prompt", [300]),
        ("prompt", [-1]),
        ("prompt", [[5], [10**30]]),
        ("prompt", "half \ud83d"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(sampler, param, value):
    with refused("serve.parameter", param=param):
        options_of(sampler, **{param: value})


def test_a_deep_value_of_an_unknown_parameter_is_refused(sampler):
    content = '{"foo": ' + "[" * 900 + "]" * 900 + "}"
    with refused("serve.parameter", param="foo"):
        read_body(content.encode(), sampler, ["run"], check_room)


def test_too_many_answers_are_refused_before_they_are_read(sampler):
    with refused("serve.too_many"):
        options_of(sampler, prompt=["half \ud83d"] * 600, n=2)


def test_another_model_is_refused(sampler):
    with refused("serve.model"):
        options_of(sampler, model="gpt-4")
    assert options_of(sampler, model="run/step-3")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"a"', b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b"9" * 5000],
)
def test_a_body_that_is_no_object_is_refused(sampler, content):
    with refused("serve.body"):
        read_body(content, sampler, ["run"], check_room)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_the_text_is_that_of_all_tokens(sampler, stream, echo):
    ids = continuation_ids(sampler, TEXT)
    completion, changes = completion_of(sampler, stream=stream, echo=echo, n=2, max_tokens=400)
    if echo:
        assert completion.requests[0].scores_prompt is False
    play(completion, [ids, ids[:5]])

    assert changes.pop() is None
    expected = ("the river" if echo else "") + TEXT
    if stream:
        texts = {0: "", 1: ""}
        for chunk in changes:
            [choice] = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts[0] == expected
        assert expected.startswith(texts[1].rstrip("\ufffd"))
    else:
        assert not changes
        first, second = completion.result()["choices"]
        assert first["text"] == expected
        assert (first["index"], second["index"]) == (0, 1)
        assert (first["finish_reason"], first["logprobs"]) == ("length", None)
        num_prompt = len(sampler.encode("the river"))
        assert completion.usage() == {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(ids) + 5,
            "total_tokens": num_prompt + len(ids) + 5,
        }


@pytest.mark.parametrize("stop", ["said", " said:", "and", "é", "\U0001f642 and", "stone.", "."])
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_before_a_stop_text(sampler, stop, stream):
    ids = continuation_ids(sampler, TEXT)
    completion, changes = completion_of(
        sampler, stop=["never", stop], stream=stream, echo=True, logprobs=0, max_tokens=400
    )
    prompt = completion.options.prompts[0].ids
    listener = completion.requests[0].listener
    listener.on_prompt([ScoredToken(token, -1.0) for token in prompt])
    play(completion, [ids])

    assert changes.pop() is None
    choices = [chunk["choices"][0] for chunk in changes] or completion.result()["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert text == "the river" + TEXT[: TEXT.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    # every token begins in the text; all of the prompt's are there, but for the added EOS
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)
    assert sum(offset < len("the river") for offset in offsets) == len(prompt) - 1
    assert offsets[-1] < len(text)


def test_a_stop_text_in_the_prompt_does_not_count(sampler):
    completion, _ = completion_of(sampler, stop="river", echo=True, max_tokens=400)
    answer = " said no"
    play(completion, [continuation_ids(sampler, answer)])
    assert completion.result()["choices"][0]["text"] == f"the river{answer}"


def test_eos_is_a_token_without_text(sampler):
    eos = sampler.tokenizer.eos_id
    completion, _ = completion_of(sampler, logprobs=1, max_tokens=400)
    play(completion, [[*continuation_ids(sampler, " said"), eos]])
    [choice] = completion.result()["choices"]
    assert choice["text"] == " said"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == sampler.tokenizer.eos_token


def test_log_probabilities_name_each_token_once(sampler):
    """Parts of characters have no text of their own; the chosen token is among the likeliest."""
    texts = TokenTexts(sampler)
    by_text = {}
    for token in range(sampler.tokenizer.vocab_size):
        by_text.setdefault(texts.of(token), []).append(token)
    eos, *ids = sampler.encode("the river")
    assert "".join(map(texts.of, ids)) == " the river"
    assert texts.of(eos) == sampler.tokenizer.eos_token

    twins = next((ids for ids in by_text.values() if len(ids) > 1), [5, 6])
    completion, _ = completion_of(sampler, logprobs=2, max_tokens=400)
    listener = completion.requests[0].listener
    listener.on_token(0, ScoredToken(9, -3.0, ((twins[0], -0.5), (twins[1], -1.5))))
    listener.on_end(0, "length")
    [top] = completion.result()["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top.values()) == [-0.5, -1.5, -3.0]
    assert len(top) == 3


def test_a_model_answers_with_log_probabilities_of_eval(sampler):
    """The whole way without HTTP: an echoed prompt scored as lm_eval asks for it."""
    ids = sampler.encode("the stone house said no one of it")
    completion, changes = completion_of(
        sampler, prompt=ids, max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    tokenizer = sampler.tokenizer
    scheduler = Scheduler(
        sampler.model, eos_id=tokenizer.eos_id, vocab_size=tokenizer.vocab_size, read_tokens=4
    )
    scheduler.submit(completion.requests)
    while scheduler.step():
        pass

    assert changes == [None]
    logprobs = completion.result()["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    losses = sampler.losses(ids)
    assert logprobs["token_logprobs"][1:-1] == pytest.approx([-nats for nats in losses], abs=1e-5)
    for logp, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert max(top.values()) >= logp and math.isfinite(logp)

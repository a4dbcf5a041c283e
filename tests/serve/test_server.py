"""`canon serve` as a process, and clients of it: openai's, and connections that break."""

import asyncio
import json
import signal
import socket
import time
import urllib.request

import openai
import pytest

from canon_pretrain.hf.sampling import Sampler, Settings
from tests.commands import run_command
from tests.served_runs import serve, write_text_run
from tests.support import HANGS_AFTER_S, error_codes

pytestmark = pytest.mark.system
NAME = "rope ABCD gqa"
PROMPTS = [
    "the river",
    "of a stone and",
    "",
    "a house in the light was born, and no one saw it " * 6,
]
LONG = 20_000
"""Tokens that take longer than any test waits."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_text_run(tmp_path_factory.mktemp("served"), NAME, max_seq_len=LONG + 100)


@pytest.fixture(scope="module")
def sampler(run):
    return Sampler.load(run)


@pytest.fixture(scope="module")
def served(run):
    with serve(run) as server:
        yield server


def options_of(server):
    """Return the options of a client that waits as long as a busy machine needs."""
    return {
        "base_url": f"{server.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "timeout": HANGS_AFTER_S,
    }


@pytest.fixture
def client(served):
    with openai.OpenAI(**options_of(served)) as client:
        yield client


def text_alone(sampler, prompt, max_tokens, temperature=0.0, seed=0, index=0):
    """Return what `canon sample` answers."""
    answer = sampler.answer(sampler.encode(prompt), max_tokens)
    sampler.extend([answer], Settings(temperature, seed=seed), first_index=index)
    return answer.text


def test_the_openai_client_completes_text(client, sampler):
    [model] = client.models.list().data
    assert model.id == "run/step-3"

    for prompt in PROMPTS:
        done = client.completions.create(
            model=model.id, prompt=prompt, max_tokens=20, temperature=0, logprobs=2
        )
        [choice] = done.choices
        assert choice.text == text_alone(sampler, prompt, 20)
        assert len(choice.logprobs.tokens) == done.usage.completion_tokens
        assert done.usage.prompt_tokens == len(sampler.encode(prompt))

    several = client.completions.create(
        model=model.id, prompt=PROMPTS, n=2, max_tokens=12, temperature=0.8, seed=5
    )
    assert [choice.text for choice in several.choices] == [
        text_alone(sampler, prompt, 12, 0.8, 5, index) for prompt in PROMPTS for index in range(2)
    ]


def test_the_openai_client_streams_text(client, sampler):
    stream = client.completions.create(
        model="run/step-3", prompt="the river", max_tokens=40, temperature=0.8, seed=3, n=2,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    texts = {0: "", 1: ""}
    reasons = {}
    num_chunks = 0
    usage = None
    for chunk in stream:
        num_chunks += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {k: text_alone(sampler, "the river", 40, 0.8, 3, k) for k in range(2)}
    assert reasons.keys() == {0, 1}
    assert num_chunks > 20
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_errors_are_those_of_openai(client, served):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="run/step-3", prompt="a", temperature=-1)
    assert (error.value.param, error.value.code) == ("temperature", "serve.parameter")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="run/step-3", prompt="a", max_tokens=10**6)
    assert error.value.code == "serve.prompt_too_long"
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-4", prompt="a")
    assert error.value.code == "serve.model"
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="run/step-3", messages=[])
    assert error.value.code == "serve.no_chat"
    with pytest.raises(openai.NotFoundError) as error:
        client.embeddings.create(model="run/step-3", input="a")
    assert error.value.code == "serve.route"
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model="run/step-3", prompt="a" * (33 << 20))
    assert error.value.status_code == 413
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="run/step-3", prompt=["a"] * 600, n=2)
    assert error.value.code == "serve.too_many"
    assert "Traceback" not in served.stderr.read_text()


def request_of(k):
    """Return request k of 200: prompts and answers of many lengths, greedy or sampled."""
    return {
        "prompt": " ".join(PROMPTS[(k + i) % 4] for i in range(k % 5)),
        "max_tokens": 2_000 if k < NUM_CANCELLED else 3 + k % 23,
        "temperature": 0.7 if k % 2 else 0.0,
        "seed": k,
    }


NUM_CANCELLED = 30


def test_200_requests_at_once_of_which_30_are_cancelled(served, sampler):
    async def ask(client, k):
        streamed = ""
        stream = await client.completions.create(model="run/step-3", stream=True, **request_of(k))
        async for chunk in stream:
            streamed += chunk.choices[0].text
            if k < 15 and streamed:  # some are cancelled by leaving the stream
                await stream.close()
                return None
        return streamed

    async def ask_all():
        async with openai.AsyncOpenAI(**options_of(served)) as client:
            tasks = [asyncio.create_task(ask(client, k)) for k in range(200)]
            # others where they are: in the queue, or being generated
            await asyncio.sleep(0.5)
            # all but those that EOS has already ended
            cancelled.extend(task for task in tasks[15:NUM_CANCELLED] if task.cancel())
            return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled = []
    texts = asyncio.run(ask_all())
    assert texts[:15] == [None] * 15
    assert len(cancelled) > 5
    assert all(task.cancelled() for task in cancelled)
    for k in range(NUM_CANCELLED, 200):
        assert texts[k] == text_alone(sampler, **request_of(k)), k
    served.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_row(served, stream):
    body = json.dumps({"prompt": "the", "max_tokens": LONG, "temperature": 0, "stream": stream})
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANGS_AFTER_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body.encode())
        while not served.health()["rows"]:
            time.sleep(0.02)
    served.wait_until_idle()


def test_a_full_queue_is_answered_by_429(run):
    with serve(run, "--max-rows", 1, "--max-waiting", 2) as server:
        with openai.OpenAI(**options_of(server)) as client:

            def ask(max_tokens, **options):
                return client.completions.create(
                    model="run/step-3",
                    prompt="the",
                    max_tokens=max_tokens,
                    temperature=0,
                    **options,
                )

            running = ask(LONG, stream=True)
            next(iter(running))
            waiting = ask(LONG, n=2, stream=True)
            with pytest.raises(openai.RateLimitError) as error:
                ask(5)
            assert error.value.response.headers["Retry-After"] == "1"
            assert error.value.code == "serve.queue_full"
            assert server.health() | {"status": ""} == {
                "status": "", "rows": 1, "max_rows": 1, "waiting": 2, "max_waiting": 2
            }  # fmt: skip

            # a request is accepted again once there is room
            waiting.close()
            running.close()
            server.wait_until_idle()
            assert ask(5).choices


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_signal_lets_short_requests_end_and_fails_long_ones(run, number, code):
    with serve(run) as server:
        with openai.OpenAI(**options_of(server)) as client:
            options = {"model": "run/step-3", "prompt": "the", "temperature": 0, "stream": True}
            long = client.completions.create(max_tokens=LONG, **options)
            chunks = iter(long)
            next(chunks)
            short = client.completions.create(max_tokens=20, **options)
            start = time.monotonic()
            server.process.send_signal(number)
            assert list(short)[-1].choices[0].finish_reason == "length"
            with pytest.raises(openai.APIError) as error:
                list(chunks)
            assert error.value.code == "serve.stopping"
            assert server.process.wait(HANGS_AFTER_S) == code
            assert time.monotonic() - start < 60
        assert "Traceback" not in server.stderr.read_text()


def test_what_cannot_be_served_is_refused_at_once(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_command("canon", "serve", run, "--port", taken.getsockname()[1])
    assert (done.returncode, error_codes(done.stderr)) == (2, ["serve.address"])
    done = run_command("canon", "serve", tmp_path, "--port", 0)
    assert done.returncode == 2
    for wrong in (["--max-rows", 0], ["--max-waiting", -1], ["--port", 70_000]):
        done = run_command("canon", "serve", run, *wrong)
        assert (done.returncode, error_codes(done.stderr)) == (2, ["cli.usage"])


def test_the_first_word_of_a_text_comes_before_the_last(served):
    """Server-sent events are sent as they come."""
    values = {"prompt": "the", "max_tokens": LONG, "temperature": 0, "stream": True}
    body = json.dumps(values).encode()
    request = urllib.request.Request(f"{served.url}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=HANGS_AFTER_S) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        first = json.loads(response.readline().removeprefix(b"data: "))
    assert first["choices"][0]["finish_reason"] is None
    served.wait_until_idle()

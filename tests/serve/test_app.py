"""The HTTP side in this process: who does the work, and errors of answers and streams."""

import asyncio
import json
import threading

import httpx
import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.sampling import Sampler
from canon_pretrain.model.decode import logits_not_finite
from canon_pretrain.serve import app as serving
from canon_pretrain.serve.app import Service
from canon_pretrain.serve.completion import Completion
from canon_pretrain.serve.scheduler import Scheduler, ScoredToken
from tests.eval_text_runs import write_run

PROMPT = "the river " * 10


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    return Sampler.load(write_run(tmp_path_factory.mktemp("serve")))


class ScriptedScheduler(Scheduler):
    """Answers each request with 40 tokens, or fails it with `failure`."""

    def __init__(self, model, failure=None):
        super().__init__(model, eos_id=2)
        self.failure = failure

    def submit(self, requests):
        for request in requests:
            listener = request.listener
            if self.failure is not None:
                listener.on_error(self.failure)
                continue
            listener.on_prompt([ScoredToken(token, -1.0) for token in request.prompt])
            for token in range(10, 50):
                listener.on_token(0, ScoredToken(token, -1.0, ((token, -1.0),)))
            listener.on_end(0, "length")


def answer_of(sampler, scheduler, **values):
    """Return the response to a request for a completion."""
    service = Service(sampler, scheduler, ["run"])

    async def ask():
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json={"prompt": PROMPT, **values})

    return asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_large_answers_are_made_outside_of_the_event_loop(sampler, stream, monkeypatch):
    calls = []  # the thread, and whether it wrote the prompt

    def recorded(function):
        def record(*arguments):
            calls.append((threading.current_thread(), PROMPT in str(arguments)))
            return function(*arguments)

        return record

    monkeypatch.setattr(serving, "LARGE_TEXT", len(PROMPT) - 1)
    monkeypatch.setattr(Completion, "result", recorded(Completion.result))
    monkeypatch.setattr(serving, "_event", recorded(serving._event))
    response = answer_of(
        sampler, ScriptedScheduler(sampler.model), stream=stream, echo=True, logprobs=1
    )

    assert response.status_code == 200 and PROMPT in response.text
    large = [thread for thread, has_prompt in calls if has_prompt or not stream]
    assert large and threading.main_thread() not in large


@pytest.mark.parametrize(
    ("failure", "status", "kind", "code"),
    [
        (logits_not_finite(), 500, "server_error", "generate.logits_not_finite"),
        (torch.OutOfMemoryError("out of memory"), 500, "server_error", "serve.failed"),
        (UserError("serve.stopping", "the server stops"), 503, "server_error", "serve.stopping"),
        (UserError("serve.model", "gone"), 404, "invalid_request_error", "serve.model"),
    ],
)
def test_a_failure_is_the_same_error_in_answers_and_streams(sampler, failure, status, kind, code):
    scheduler = ScriptedScheduler(sampler.model, failure)

    answer = answer_of(sampler, scheduler)
    streamed = answer_of(sampler, scheduler, stream=True)

    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == (kind, code)
    event = streamed.text.strip().removeprefix("data: ")
    assert json.loads(event)["error"] == error

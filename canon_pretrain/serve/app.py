"""The HTTP side: OpenAI's routes for completions, over a scheduler that runs in a thread.

Errors are OpenAI's objects: {"error": {message, type, param, code}}, where `code` is that of
error_codes.txt.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.sampling import Sampler
from canon_pretrain.serve.body import CompletionOptions, read_body, unknown_model
from canon_pretrain.serve.completion import Completion, TokenTexts
from canon_pretrain.serve.scheduler import Scheduler

MAX_BODY_BYTES = 32 << 20
RETRY_AFTER_S = 1
LARGE_TEXT = 1000
"""Characters in a chunk of a stream; more are written outside of the event loop."""
STATUSES = {
    "serve.body_size": 413,
    "serve.failed": 500,
    "serve.model": 404,
    "serve.no_chat": 404,
    "serve.queue_full": 429,
    "serve.route": 404,
    "serve.stopping": 503,
}
"""Of errors by code; others are 400 before a request is queued, and AFTER_QUEUE_STATUS later."""
AFTER_QUEUE_STATUS = 500

NO_CHAT = (
    "this is a base model without a chat template: use /v1/completions, with the text to continue"
    " as prompt"
)


class Service:
    """Answers HTTP requests for one model; `model_names`: what clients may call it."""

    def __init__(self, sampler: Sampler, scheduler: Scheduler, model_names: list[str]) -> None:
        self._sampler = sampler
        self._scheduler = scheduler
        self._model_names = model_names
        self._token_texts = TokenTexts(sampler)
        # requests are encoded one after another, outside of the event loop
        self._encoder = ThreadPoolExecutor(1)
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["GET", "POST"]),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _fault},
        )

    async def health(self, request: Request) -> Response:
        """Return 200 and the load, or 503 once requests are not accepted any more."""
        scheduler = self._scheduler
        if scheduler.error is not None:
            return error_response(scheduler.error)
        return json_response(
            {
                "status": "ok",
                "rows": scheduler.num_rows,
                "max_rows": scheduler.max_rows,
                "waiting": scheduler.num_waiting,
                "max_waiting": scheduler.max_waiting,
            }
        )

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name in self._model_names:
            return json_response(self._model_card())
        return error_response(unknown_model(name, self._model_names))

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model_names[0],
            "object": "model",
            "created": 0,
            "owned_by": "canon_pretrain",
            "max_model_len": self._sampler.model.args.max_seq_len,
        }

    async def chat(self, request: Request) -> Response:
        return error_response(UserError("serve.no_chat", NO_CHAT))

    async def completions(self, request: Request) -> Response:
        """Queue a request's prompts; return its answers, at once or as a stream."""
        loop = asyncio.get_running_loop()
        try:
            self._scheduler.check_room(1)
            content = await _read_content(request)
            options = await loop.run_in_executor(
                self._encoder,
                read_body,
                content,
                self._sampler,
                self._model_names,
                self._scheduler.check_room,
            )
            running = _Running(self._scheduler, loop)
            completion = await loop.run_in_executor(
                self._encoder, self._completion, options, running
            )
            self._scheduler.submit(completion.requests)
        except UserError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it

        if options.stream:
            return _Events(running, completion)
        return await running.result(completion, request)

    def _completion(self, options: CompletionOptions, running: "_Running") -> Completion:
        name = self._model_names[0]
        return Completion(options, self._sampler, self._token_texts, name, running.put)


class _Running:
    """A completion that is queued or running."""

    def __init__(self, scheduler: Scheduler, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduler = scheduler
        self._loop = loop
        self._changes: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

    def put(self, change: dict[str, Any] | Exception | None) -> None:
        """Receive a change, in the scheduler's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._changes.put_nowait, change)

    def cancel(self, completion: Completion) -> None:
        """Free the rows of what has not ended."""
        for request in completion.requests:
            self._scheduler.cancel(request)

    async def result(self, completion: Completion, request: Request) -> Response:
        """Return the whole completion; nothing, if the client disconnects before."""
        change = asyncio.ensure_future(self._changes.get())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((change, gone), return_when=asyncio.FIRST_COMPLETED)
            if not change.done():
                return Response(status_code=499)  # nobody reads it
            ending = change.result()
        finally:
            change.cancel()
            gone.cancel()
            self.cancel(completion)
        if isinstance(ending, Exception):
            return error_response(ending, AFTER_QUEUE_STATUS)
        # of many tokens, with log-probabilities, it takes long
        return await asyncio.to_thread(lambda: json_response(completion.result()))

    async def events(self, completion: Completion) -> AsyncIterator[bytes]:
        """Yield server-sent events."""
        while (change := await self._changes.get()) is not None:
            if isinstance(change, Exception):
                yield _event(error_object(change, AFTER_QUEUE_STATUS))
                return
            if _is_large(change):
                yield await asyncio.to_thread(_event, change)
            else:
                yield _event(change)
        if completion.options.include_usage:
            yield _event(completion.chunk([], completion.usage()))
        yield b"data: [DONE]\n\n"


class _Events(StreamingResponse):
    """Server-sent events of a completion, which ends when the client disconnects."""

    def __init__(self, running: _Running, completion: Completion) -> None:
        super().__init__(running.events(completion), media_type="text/event-stream")
        self._running = running
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel(self._completion)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_content(request: Request) -> bytes:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise UserError(
                "serve.body_size",
                f"the body has more than {MAX_BODY_BYTES >> 20} MiB: send fewer prompts at once",
            )
    return bytes(content)


def status_of(error: Exception, default_status: int) -> int:
    """Return the HTTP status of an error; `default_status` of those that have none of their own."""
    return STATUSES.get(_code_of(error), default_status)


def _code_of(error: Exception) -> str:
    # others are such as out of memory
    return error.code if isinstance(error, UserError) else "serve.failed"


def error_object(error: Exception, default_status: int = 400) -> dict[str, Any]:
    """Return OpenAI's object of an error, the same in an answer and in a stream."""
    is_of_request = status_of(error, default_status) < 429
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if is_of_request else "server_error",
            "param": error.fields.get("param") if isinstance(error, UserError) else None,
            "code": _code_of(error),
        }
    }


def error_response(error: Exception, default_status: int = 400) -> Response:
    status = status_of(error, default_status)
    response = json_response(error_object(error, default_status), status)
    if status == 429:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def json_response(content: dict[str, Any], status: int = 200) -> Response:
    # ASCII: an error may show half of a surrogate pair, which has no UTF-8
    return Response(json.dumps(content), status, media_type="application/json")


def _is_large(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk takes long to write, as the first one with an echoed prompt does."""
    return any(len(choice["text"]) > LARGE_TEXT for choice in chunk["choices"])


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer for a route or a method that does not exist."""
    assert isinstance(error, HTTPException)
    message = (
        f"{request.method} {request.url.path}: {error.detail}. There are GET /health, "
        "GET /v1/models and POST /v1/completions"
    )
    response = error_response(UserError("serve.route", message))
    response.status_code = error.status_code
    return response


async def _fault(request: Request, error: Exception) -> Response:
    return error_response(UserError("serve.failed", f"the server has failed: {error!r}"))

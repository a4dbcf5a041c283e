"""The body of a request for completions in OpenAI's API: read, checked, in our terms."""

import json
import reprlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.hf.sampling import Sampler
from canon_pretrain.model.decode import Sampling

MAX_TOP = 20
"""Of `logprobs`; OpenAI's limit is 5, that of vLLM 20."""
MAX_ANSWERS = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MIN_TEMPERATURE = 1e-4
DEFAULT_MAX_TOKENS = 16
SHOWN_CHARACTERS = 60
SEED_BITS = 48

Number = Annotated[float, Field(allow_inf_nan=False)]
Zero = Annotated[float, Field(ge=0, le=0)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
PROMPT = "a text, a list of token ids, or a list of these that is not empty"


def wrong(param: str, given: object, expected: str) -> UserError:
    """Return the error of a parameter that is not what is expected."""
    return UserError(
        "serve.parameter",
        f"{param} is {_shown(given)}, expected {expected}",
        param=param,
        given=given,
    )


def _shown(value: object) -> str:
    """Return the beginning of a value of JSON, which may be large and deep."""
    if isinstance(value, list | dict):
        text = reprlib.repr(value)
    else:
        text = json.dumps(value[: SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Body(BaseModel):
    """What a request may contain; null means the default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: Any = None
    max_tokens: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    best_of: int | None = None
    temperature: Number = Field(1.0, ge=0)
    top_p: Number = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # vLLM's; -1 and 0: all
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] = []
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""

    # Accepted where they change nothing.
    suffix: Annotated[str, Field(max_length=0)] = ""
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}


class Prompt(NamedTuple):
    """The ids of a prompt, the first `num_added` of which are not the client's: EOS, of a text."""

    ids: list[int]
    num_added: int = 0


@dataclass(frozen=True)
class CompletionOptions:
    """A checked request; `num_top` and `seed` as in `scheduler.Request`."""

    prompts: list[Prompt]
    max_tokens: list[int]  # by prompt
    num_answers: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...]
    num_top: int | None
    echo: bool
    stream: bool
    include_usage: bool


def read_body(
    content: bytes,
    sampler: Sampler,
    model_names: Sequence[str],
    check_room: Callable[[int], None],
) -> CompletionOptions:
    """Return the request in `content`. Raises UserError, with `param` if it is about one.

    `check_room` raises it for more answers than may wait.
    """
    body = _parse(content)
    if body.model is not None and body.model not in model_names:
        raise unknown_model(body.model, model_names)
    if body.best_of not in (None, body.n):
        raise wrong("best_of", body.best_of, f"n ({body.n}): all answers are returned")

    # What ends an answer.
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.max_tokens == 0 and not body.echo:
        raise wrong("max_tokens", 0, "at least 1, or echo to score the prompt")

    # Greedy decoding needs no further settings.
    sampling = Sampling(0.0, 0, 1.0)
    if body.temperature:
        if body.temperature < MIN_TEMPERATURE:
            raise wrong("temperature", body.temperature, f"0, or at least {MIN_TEMPERATURE}")
        sampling = Sampling(body.temperature, max(0, body.top_k), body.top_p)

    # before what takes time and memory
    listed = _listed(body.prompt)
    check_room(len(listed) * body.n)
    prompts = _prompts(listed, sampler)
    return CompletionOptions(
        prompts=prompts,
        max_tokens=[_max_tokens(prompt.ids, body.max_tokens, sampler) for prompt in prompts],
        num_answers=body.n,
        sampling=sampling,
        seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed,
        stops=tuple(stop for stop in stops if stop),
        num_top=body.logprobs,
        echo=body.echo,
        stream=body.stream,
        include_usage=body.stream_options.include_usage,
    )


def unknown_model(name: str, model_names: Sequence[str]) -> UserError:
    return UserError(
        "serve.model",
        f"model {_shown(name)} is not served here, expected {model_names[0]}",
        param="model",
        given=name,
    )


def _parse(content: bytes) -> Body:
    try:
        values = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError("serve.body", f"the body is no JSON: {error}") from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise UserError("serve.body", f"the body is a {kind}, expected an object of parameters")

    for name in values:
        if name not in Body.model_fields:
            hint = suggestion(name, Body.model_fields)
            expected = f"one of the parameters {', '.join(Body.model_fields)}.{hint}"
            raise wrong(name, values[name], expected)
    try:
        return Body(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = str(first["loc"][0])
        expected = first["msg"].removeprefix("Input should be ")
        raise wrong(param, values[param], expected) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _listed(prompt: Any) -> list[Any]:
    """Return a text or ids, or a list of either, as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        return [prompt] if _is_id(prompt[0]) else prompt
    raise wrong("prompt", prompt, PROMPT)


def _prompts(listed: list[Any], sampler: Sampler) -> list[Prompt]:
    vocab_size = sampler.model.args.vocab_size
    prompts = []
    for item in listed:
        if isinstance(item, str):
            try:
                prompts.append(Prompt(sampler.encode(item), int(not sampler.has_ids)))
            # such as words, of a model that knows ids, or an id of thousands of digits
            except (UserError, ValueError) as error:
                raise wrong("prompt", item, f"another text: {error}") from None
        elif not isinstance(item, list) or not item or not all(map(_is_id, item)):
            raise wrong("prompt", item, PROMPT)
        elif not 0 <= min(item) <= max(item) < vocab_size:
            wrong_id = next(i for i in item if not 0 <= i < vocab_size)
            raise wrong("prompt", wrong_id, f"ids from 0 to {vocab_size - 1}")
        else:
            prompts.append(Prompt(item))
    return prompts


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _max_tokens(prompt: list[int], max_tokens: int | None, sampler: Sampler) -> int:
    """Return the largest number of tokens of an answer, the last of which is not read."""
    max_seq_len = sampler.model.args.max_seq_len
    room = max_seq_len - len(prompt) + 1
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, room))
    if len(prompt) > max_seq_len or max_tokens > room:
        raise UserError(
            "serve.prompt_too_long",
            f"prompt has {len(prompt):,} tokens, with max_tokens = {max_tokens:,}: the model reads "
            f"{max_seq_len:,} (max_seq_len), of an answer all but the last token",
            param="prompt",
            given=len(prompt),
            expected=max_seq_len,
        )
    return max_tokens

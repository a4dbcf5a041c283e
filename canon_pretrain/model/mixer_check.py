"""Check that a mixer keeps the contract of train_configs/mixers/README.md, on tiny models.

A check is a function of a Subject. It returns what it measured, or raises Violation with the place
and the amount. Checks that need exact numbers run in float64, also where the mixer asks for
float32 (`exact`), so that a difference is a mistake and not rounding.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

import contextlib
import copy
import functools
import math
import os
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.model.args import MIXERS, ModelArgs, fill_model, flavor, is_own_mixer
from canon_pretrain.model.cache import Cache, Context
from canon_pretrain.model.counts import flops_per_token, state_bytes
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.mixer_files import mixer_file
from canon_pretrain.model.mixers import fresh_class, measure, mixer_class
from canon_pretrain.model.transformer import Transformer

SIZES = ((32, 4), (64, 4), (128, 8), (256, 8))
"""Widths and heads, tried in this order until the class accepts one."""

# The vocabulary: 64 ids, of which ids from FIRST_TOKEN on are drawn, so that no text has an EOS
# by chance.
VOCAB_SIZE = 64
EOS_ID = 2
FIRST_TOKEN = 3
MAX_TOKENS = 512

# The length of the texts whose every pair of tokens is checked.
TOKENS = 24
LONG = 144
"""Longer than two chunks of 64 tokens."""
CUTS = (0, 15, 16, 31, 63, 64, 127)
"""Last tokens before a change: around the borders of usual chunks."""
LENGTHS = (1, 17, 64, 65)  # a single token, and the borders of usual chunks
EXACT = 1e-8
"""Largest error in float64, over the largest value (at least 1)."""
NO_GRADIENT = 1e-12  # largest norm of a gradient that counts as none, in float64

# A central difference in float64 is wrong by about STEP^2 (truncation) and 1e-16 / STEP
# (rounding): 1e-10 and 1e-11, far below the tolerance.
STEP = 1e-5
SLOPE_TOLERANCE = 1e-4
"""Of a slope by finite differences, relative."""
NOISE = 0.1
"""Added to initial values, so that no parameter is 0 and hides what follows it."""

# Tolerances of the checks that do not run in float64.
ROUNDING = 0.1
"""Largest error in bfloat16, in the Euclidean norm, relative; the product's mixers have 0.01."""
LARGE = 30.0
"""Factor of large inputs: a normed channel is at most sqrt(D), 45 at D = 2048."""
COMPILED_TOLERANCE = 1e-4  # in float32, over the largest value (at least 1)
# A frame as torch.compile quotes it in its message: file, line, function.
USER_FRAME = re.compile(r'File "(.*)", line (\d+), in (\w+)')

SPEED_LENGTHS = (1024, 4096, 16384)
MASKED_LENGTH = 4096
"""At most, of a mixer that computes with a mask: its scores are T x T."""
GROWTH = 16.0
"""Expected growth of the time from a length to the next, 4 times as long: that of attention."""


@dataclass(frozen=True)
class Row:
    """The result of a check. `state`: ok, failed or skipped; `measured`: what, or why.

    `token`: the token that a failure names, in batch row `row`; `source`: the token that it sees;
    `parameter`: the parameter, buffer or state; `amount`: by how much.
    """

    name: str
    state: str
    measured: str
    seconds: float
    row: int | None = None
    token: int | None = None
    source: int | None = None
    parameter: str = ""
    amount: float | None = None


class Violation(Exception):
    """A check failed. The message and the fields are those of Row."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


class Skipped(Exception):
    """A check cannot be run; the message says why."""


class Check(NamedTuple):
    """A check: its name, and the function that returns what it measured."""

    name: str
    function: Callable[["Subject"], str]


# -- the model that is checked


def tiny_args(mixer: str, overrides: Mapping[str, Any] | None = None) -> ModelArgs:
    """Return a tiny model of two layers of `mixer`, FILE.py:Name or a name of MIXERS.

    `overrides`: keys of `[model]`. Raises UserError if the class cannot be built at any size.
    """
    if not is_own_mixer(mixer):
        check_choice("mixer", mixer, MIXERS)
    else:
        mixer_class(mixer)  # its own error, if there is no such class

    # The smallest size that the class accepts. The rest of the model is small and has no positions,
    # so that what a check finds comes from the mixer. `overrides` come last and may fix any size.
    error: Exception | None = None
    for dim, num_heads in SIZES:
        sizes = {
            "vocab_size": VOCAB_SIZE,
            "num_layers": 2,
            "dim": dim,
            "num_heads": num_heads,
            "ffn": "gated",
            "ffn_dim": 2 * dim,
            "max_seq_len": MAX_TOKENS,
            "position": "nope",
            "eos_id": EOS_ID,
        }
        try:
            args = fill_model(flavor("debug"), {**sizes, "mixer": mixer, **(overrides or {})})

            # Build it without data, and ask for a row of each initial value: a parameter without
            # a known one raises UserError.
            with torch.device("meta"):
                model = Transformer(args)
            for name, parameter in model.named_parameters():
                initial_value(args, name, parameter.shape).rows(0, 1)
        except Exception as caught:  # of the user's class
            error = caught
        else:
            return args

    # The error of the last, largest size is shown. A UserError says by itself what is wrong.
    assert error is not None
    if isinstance(error, UserError):
        raise error
    raise UserError(
        "check.cannot_build",
        f"{mixer} cannot be built at any of the sizes (dim, num_heads) = {SIZES}: "
        f"{_failure(error, mixer)}. Pass others: --model.dim 512 --model.num_heads 8",
        given=mixer,
    ) from error


class Subject:
    """Tiny models of a mixer, built when they are first used.

    `deadline`: the time.monotonic() at which the speed of longer texts is left out.
    """

    def __init__(self, args: ModelArgs, deadline: float = math.inf) -> None:
        self.args = args
        self.deadline = deadline

    @functools.cached_property
    def plain(self) -> Transformer:
        """The model in float64."""
        return make_model(self.args).double()

    @functools.cached_property
    def masked(self) -> Transformer:
        """The same with document masks."""
        return make_model(replace(self.args, document_mask=True)).double()


def make_model(args: ModelArgs) -> Transformer:
    """Return the model in float32 with weights of which every one matters.

    Matrices are drawn with deviation in^-1/2, so that a value passes at its size; to other
    parameters, which keep their initial values, noise is added.
    """
    model = Transformer(args, attention_backend="sdpa")
    model.init_weights()

    # The initial values of training would hide mistakes: at a deviation of 0.02 what passes several
    # products is tiny, and a parameter that starts at 0 cuts off what it multiplies.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            kind = initial_value(args, name, parameter.shape).kind
            if parameter.ndim == 2 and kind in ("normal", "truncated_normal"):
                parameter.copy_(noise * parameter.shape[1] ** -0.5)  # [out, in]
            else:
                parameter.add_(NOISE * noise)
    return model


def random_tokens(num_rows: int, num_tokens: int) -> Tensor:
    """Return token ids without EOS, int64 [B, T], always the same."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(FIRST_TOKEN, VOCAB_SIZE, (num_rows, num_tokens), generator=generator)


class Call(NamedTuple):
    """A call of the last layer's mixer in a model: mixer(x_BTD, context)."""

    mixer: nn.Module
    x_BTD: Tensor
    context: Context

    def __call__(self, x_BTD: Tensor) -> Tensor:
        return self.mixer(x_BTD, self.context)


def mixer_call(model: Transformer, tokens_BT: Tensor, **options: Any) -> Call:
    """Return how the last layer's mixer is called when the model reads these tokens."""
    # A pre-hook sees what the block passes to its mixer, `attention` whatever its class: here x of
    # the last layer, which has passed a whole block, and the context with masks and segments.
    calls: list[Any] = []
    (*_, block) = model.layers.values()
    mixer = block.get_submodule("attention")
    hook = mixer.register_forward_pre_hook(lambda module, inputs: calls.append(inputs))
    with hook, torch.no_grad():
        model(tokens_BT, **options)
    ((x_BTD, context),) = calls
    return Call(mixer, x_BTD.detach(), context)


# -- float64


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class _Wide(TorchDispatchMode):
    """Makes every cast and every new tensor of a narrower dtype float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # At this level x.float(), x.to(dtype), sum(dtype=..) and torch.zeros(dtype=..) all have
        # their dtype as the keyword `dtype`.
        options = dict(kwargs or {})
        if options.get("dtype") in _NARROW:
            options["dtype"] = torch.float64
        return func(*args, **options)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Compute in float64, also what a mixer computes in float32 on purpose (`x.float()`)."""
    # torch.zeros(3) passes no dtype that _Wide could replace: it takes the default.
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(default)


class Difference(NamedTuple):
    """The first token, of the first row, that differs from what is expected, and by how much."""

    row: int
    token: int
    amount: float


def difference(y_BTX: Tensor, expected_BTX: Tensor) -> Difference | None:
    """Return the first token that differs by more than EXACT, if there is one; NaN differs."""
    errors_BT = token_errors(y_BTX, expected_BTX)

    # "not <=" rather than ">": a comparison with NaN is false.
    scale = max(1.0, expected_BTX.abs().max().item())
    wrong = (~(errors_BT <= EXACT * scale)).nonzero()
    if not len(wrong):
        return None

    # nonzero() sorts by row, then by token
    row, token = wrong[0].tolist()
    return Difference(row, token, errors_BT[row, token].item())


def token_errors(y_BTX: Tensor, expected_BTX: Tensor) -> Tensor:
    """Return the largest error of each token, [B, T]. Raises Violation for another shape."""
    if y_BTX.shape != expected_BTX.shape:
        raise Violation(f"shape {tuple(y_BTX.shape)}, expected {tuple(expected_BTX.shape)}")
    return (y_BTX - expected_BTX).abs().amax(dim=-1)


def input_gradients(y_BTD: Tensor, x_BTD: Tensor, row: int, token: int) -> Tensor:
    """Return how much y of a token depends on x of each token: norms of the gradient, [B, T]."""
    # Random weights: in a plain sum the gradients of channels could cancel, as after a norm.
    generator = torch.Generator().manual_seed(3)
    weights_D = torch.randn(y_BTD.shape[-1], generator=generator, dtype=torch.float64)
    if not y_BTD.requires_grad:
        raise Violation("the result has no gradient")

    # The graph is kept: callers ask for one token after the other. No gradient at all is 0.
    (grad_BTD,) = torch.autograd.grad(
        (y_BTD[row, token] * weights_D).sum(), x_BTD, retain_graph=True, allow_unused=True
    )
    return torch.zeros(x_BTD.shape[:2]) if grad_BTD is None else grad_BTD.norm(dim=-1)


# -- checks of one pass


def check_forward(subject: Subject) -> str:
    """The result is [B, T, D] at any number of rows and tokens, and finite."""
    # A single token, few tokens, and lengths below, at and above usual chunks of 16 and 64.
    model = make_model(subject.args)
    shapes = ((1, 1), (2, 3), (3, 17), (1, 64), (2, 130))
    for num_rows, num_tokens in shapes:
        call = mixer_call(model, random_tokens(num_rows, num_tokens))
        y_BTD = call(call.x_BTD)
        if y_BTD.shape != call.x_BTD.shape:
            raise Violation(
                f"x of shape {tuple(call.x_BTD.shape)} gives {tuple(y_BTD.shape)}, expected the "
                "same shape"
            )
        if not y_BTD.isfinite().all():
            raise Violation(f"{num_rows} x {num_tokens} tokens give NaN or infinity")
    return "rows x tokens: " + ", ".join(f"{rows} x {tokens}" for rows, tokens in shapes)


def check_dtype(subject: Subject) -> str:
    """The result has the dtype of x."""
    call = mixer_call(make_model(subject.args), random_tokens(2, TOKENS))
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    for dtype in dtypes:
        mixer = copy.deepcopy(call.mixer).to(dtype)
        y_dtype = mixer(call.x_BTD.to(dtype), _cast(call.context, dtype)).dtype
        if y_dtype != dtype:
            raise Violation(f"x in {_short(dtype)} gives {_short(y_dtype)}: cast the result")
    return "that of x in " + ", ".join(map(_short, dtypes))


def check_causality(subject: Subject) -> str:
    """A token depends on tokens up to itself only: by gradient, by changes, and by lengths."""
    with exact():
        # By gradient, every token on every other.
        call = mixer_call(subject.plain, random_tokens(1, TOKENS))
        x_BTD = call.x_BTD.requires_grad_()
        y_BTD = call(x_BTD)
        for token in range(TOKENS):
            size_T = input_gradients(y_BTD, x_BTD, 0, token)[0]

            # the later token that it depends on most; the last token has none, and is its own
            source = token + 1 + int(size_T[token + 1 :].argmax()) if token + 1 < TOKENS else token
            if source > token and not size_T[source] <= NO_GRADIENT:
                raise Violation(
                    f"token {token} sees token {source} (gradient {size_T[source]:.2g})",
                    token=token,
                    source=source,
                    amount=size_T[source].item(),
                )

        # By changes of all later tokens: what has no gradient, such as an argmax or a length that
        # sets a scale, and texts of several chunks. The changed inputs are those of other tokens.
        call = mixer_call(subject.plain, random_tokens(1, LONG))
        other_BTD = call.x_BTD.flip(1)
        with torch.no_grad():
            y_BTD = call(call.x_BTD)
            for cut in CUTS:
                changed_BTD = torch.cat((call.x_BTD[:, : cut + 1], other_BTD[:, cut + 1 :]), dim=1)
                wrong = difference(call(changed_BTD)[:, : cut + 1], y_BTD[:, : cut + 1])
                if wrong is not None:
                    raise Violation(
                        f"token {wrong.token} of {LONG} changes by {wrong.amount:.2g} when the "
                        f"tokens from {cut + 1} on change",
                        token=wrong.token,
                        source=cut + 1,
                        amount=wrong.amount,
                    )

            # By lengths: a token does not know how many follow. The shorter call is for its mask
            # and segments only: x is that of the long text, so that no earlier layer plays a part.
            for length in LENGTHS:
                shorter = mixer_call(subject.plain, random_tokens(1, LONG)[:, :length])
                wrong = difference(shorter(call.x_BTD[:, :length]), y_BTD[:, :length])
                if wrong is not None:
                    raise Violation(
                        f"token {wrong.token} differs by {wrong.amount:.2g} between texts of "
                        f"{length} and {LONG} tokens",
                        token=wrong.token,
                        amount=wrong.amount,
                    )
    return f"no later token is seen: gradients of {TOKENS} tokens, changes in {LONG}"


def check_rows(subject: Subject) -> str:
    """A row of the batch does not depend on the other rows."""
    tokens_BT = random_tokens(3, TOKENS)
    with exact():
        call = mixer_call(subject.plain, tokens_BT)
        x_BTD = call.x_BTD.requires_grad_()
        y_BTD = call(x_BTD)
        for row in range(3):
            # of the last token, which may see all tokens of its row
            size_BT = input_gradients(y_BTD, x_BTD, row, TOKENS - 1)
            size_BT[row] = 0.0
            other, source = divmod(int(size_BT.argmax()), TOKENS)
            if not size_BT[other, source] <= NO_GRADIENT:
                raise Violation(
                    f"row {row} sees row {other}: token {TOKENS - 1} depends on its token "
                    f"{source} (gradient {size_BT[other, source]:.2g})",
                    row=row,
                    token=TOKENS - 1,
                    source=source,
                    amount=size_BT[other, source].item(),
                )

        # By comparison: what has no gradient, such as the number of rows.
        for row in range(3):
            alone = mixer_call(subject.plain, tokens_BT[row : row + 1])
            wrong = difference(y_BTD[row : row + 1], alone(x_BTD[row : row + 1]))
            if wrong is not None:
                raise Violation(
                    f"row {row} differs from the same row alone at token {wrong.token} by "
                    f"{wrong.amount:.2g}",
                    row=row,
                    token=wrong.token,
                    amount=wrong.amount,
                )
    return "3 rows together equal each alone"


# -- checks of the cache


# Lengths of the parts in which a text is read: TOKENS tokens, or LONG in the last row, with borders
# that are not those of chunks of 64.
PARTS = {
    "one token at a time": (1,) * TOKENS,
    "a prompt in parts": (5, 1, 1, 9, 8),
    "a prompt and a token": (TOKENS - 1, 1),
    "a token and a prompt": (1, TOKENS - 1),
    "long parts": (70, 1, 64, 9),
}
FIRST_PART = 8  # tokens of the prompt, before single tokens in a cache of fixed size


@torch.no_grad()
def read_in_parts(
    model: Transformer,
    tokens_BT: Tensor,
    parts: Sequence[int],
    is_real_BT: Tensor | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """Return logits_BTV of tokens that are read into a cache in parts of these lengths.

    `is_real_BT`: of the first tokens; those after are real.
    """
    cache = cache or Cache.of(model.args)
    logits = []
    start = 0
    for length in parts:
        stop = start + length

        # None once all tokens are real, as generation calls the model after the prompts
        is_real = None
        if is_real_BT is not None and start < is_real_BT.shape[1]:
            is_real = is_real_BT[:, start:stop]
        logits.append(model(tokens_BT[:, start:stop], is_real_BT=is_real, cache=cache))
        start = stop
    return torch.cat(logits, dim=1)


@torch.no_grad()
def read_fixed(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Return logits_BTV of a prompt and then single tokens in place, as a CUDA graph reads them."""
    # The prompt is read as usual; from then on no tensor may change its shape or address.
    cache = Cache.of(model.args, capacity=tokens_BT.shape[1])
    logits = [model(tokens_BT[:, :FIRST_PART], cache=cache)]
    cache.fix(tokens_BT.device)
    for token in range(FIRST_PART, tokens_BT.shape[1]):
        # A mixer's `keep` puts a new tensor in place of the old one.
        earlier = cache.replaced()
        logits.append(model(tokens_BT[:, token : token + 1], cache=cache))
        for old, new in zip(earlier, cache.replaced(), strict=True):
            if old is not None and new is not None and old.shape != new.shape:
                raise Violation(
                    f"a state of shape {[*old.shape]} is {[*new.shape]} after a token: `keep` "
                    "holds what has one size"
                )

        # Copy the new values into the old tensors, whose addresses a captured graph reads.
        cache.keep(earlier, copies=True)
    return torch.cat(logits, dim=1)


def check_cache(subject: Subject) -> str:
    """Reading into a cache in parts equals one pass over all tokens."""
    model = subject.plain
    with exact(), torch.no_grad():
        for way, parts in PARTS.items():
            tokens_BT = random_tokens(3, sum(parts))
            wrong = difference(read_in_parts(model, tokens_BT, parts), model(tokens_BT))
            if wrong is not None:
                raise _cache_violation(way, wrong)

        # And in a cache whose tensors stay where they are.
        tokens_BT = random_tokens(3, TOKENS)
        wrong = difference(read_fixed(model, tokens_BT), model(tokens_BT))
        if wrong is not None:
            raise _cache_violation("in a cache of fixed size, as on a GPU", wrong)
    return f"equal to a full pass: {', '.join(PARTS)}, fixed size"


def _cache_violation(way: str, wrong: Difference) -> Violation:
    return Violation(
        f"{way}: row {wrong.row} differs from a full pass at token {wrong.token} by "
        f"{wrong.amount:.2g}",
        **wrong._asdict(),
    )


def check_padding(subject: Subject) -> str:
    """A row that is padded on the left equals the row alone, also in the cache."""
    # Rows of these lengths end at the same place and are padded before it. Then each row gets
    # `num_new` tokens, which need no marks.
    model = subject.plain
    lengths = (TOKENS, 17, 9, 1)
    num_new = 3
    tokens_BT = random_tokens(len(lengths), TOKENS + num_new)
    starts_B1 = torch.tensor([TOKENS - length for length in lengths])[:, None]
    is_real_BT = torch.arange(TOKENS) >= starts_B1

    # In parts of 10, 9 and 5 tokens: a part is all padding in one row, and some of it in another.
    with exact(), torch.no_grad():
        ways = {
            "in one pass": model(tokens_BT[:, :TOKENS], is_real_BT=is_real_BT),
            "prompts and single tokens": read_in_parts(
                model, tokens_BT, (TOKENS, *(1,) * num_new), is_real_BT
            ),
            "prompts in parts": read_in_parts(model, tokens_BT, (10, 9, 5, num_new), is_real_BT),
        }

        # Logits of padding are not compared; `token` counts from the row's first real one.
        for way, logits_BTV in ways.items():
            for row, length in enumerate(lengths):
                start = TOKENS - length
                stop = logits_BTV.shape[1]
                alone = model(tokens_BT[row : row + 1, start:stop])
                wrong = difference(logits_BTV[row : row + 1, start:], alone)
                if wrong is not None:
                    raise Violation(
                        f"{way}: row {row}, after {start} tokens of padding, differs from the row "
                        f"alone at its token {wrong.token} by {wrong.amount:.2g}",
                        row=row,
                        token=wrong.token,
                        amount=wrong.amount,
                    )
    return f"rows of {', '.join(map(str, lengths))} tokens equal each alone"


def check_beams(subject: Subject) -> str:
    """Rows of the cache can be reordered, repeated, dropped and branched."""
    # Other orders of 3 rows, with repeats and with more or fewer rows than before. The rows are
    # selected after `num_prompt` tokens.
    model = subject.plain
    orders = ([2, 0, 1], [1, 1, 0, 2], [2])
    num_prompt = 12
    with exact(), torch.no_grad():
        for order in orders:
            tokens_BT = random_tokens(3, num_prompt)
            new_BT = random_tokens(len(order), TOKENS)[:, num_prompt:]

            # What is expected: the selected prompts, each with its new tokens, in one pass.
            both_BT = torch.cat((tokens_BT[order], new_BT), dim=1)
            expected = model(both_BT)[:, num_prompt:]
            single = (1,) * new_BT.shape[1]

            # The same rows of the cache itself and of a branch. The branch is made first and read
            # last: it must not share a tensor that reading the cache writes.
            cache = Cache.of(model.args)
            model(tokens_BT, cache=cache)
            branch = cache.branch(torch.tensor(order))
            cache.select_rows(torch.tensor(order))
            for read_cache in (cache, branch):
                logits = read_in_parts(model, new_BT, single, cache=read_cache)
                wrong = difference(logits, expected)
                if wrong is not None:
                    token = num_prompt + wrong.token
                    raise Violation(
                        f"row {wrong.row} after rows {order} were selected differs at token "
                        f"{token} by {wrong.amount:.2g}",
                        row=wrong.row,
                        token=token,
                        amount=wrong.amount,
                    )
    return f"rows {', '.join(map(str, orders))} of 3, and branches"


# -- documents


DOCUMENT_ENDS = ((4, 5, 22), (), (0, 11, 23))
"""Last tokens of documents by row: one of a single token, a start at the last token, an end."""
# in LONG tokens of one row: around the borders of chunks of 16 and 64
LONG_ENDS = ((15, 62, 63, 64, 127),)
# Parts of TOKENS + 3 tokens. "At the borders": each document of the first row starts a part.
DOCUMENT_PARTS = {
    "one token at a time": (1,) * (TOKENS + 3),
    "cut at the borders": (5, 1, 17, 1, 3),
    "cut within documents": (3, 5, 12, 7),
}


def document_tokens(ends: Sequence[Sequence[int]], num_tokens: int) -> Tensor:
    """Return tokens with an EOS at these places of each row, int64 [B, T]."""
    tokens_BT = random_tokens(len(ends), num_tokens)
    for row, places in enumerate(ends):
        tokens_BT[row, list(places)] = EOS_ID
    return tokens_BT


def check_documents(subject: Subject) -> str:
    """With document masks, nothing crosses the start of a document, also in the cache."""
    model = subject.masked
    tokens_BT = document_tokens(DOCUMENT_ENDS, TOKENS)
    with exact():
        # By gradient. The EOS at `end` belongs to its document: the next one starts after it.
        call = mixer_call(model, tokens_BT)
        x_BTD = call.x_BTD.requires_grad_()
        y_BTD = call(x_BTD)
        for row, ends in enumerate(DOCUMENT_ENDS):
            for token in range(TOKENS):
                first = max((end + 1 for end in ends if end < token), default=0)
                size_T = input_gradients(y_BTD, x_BTD, row, token)[row, :first]
                if first and not size_T.max() <= NO_GRADIENT:
                    source = int(size_T.argmax())
                    raise Violation(
                        f"row {row}: token {token}, in the document from token {first} on, sees "
                        f"token {source} before it (gradient {size_T[source]:.2g})",
                        row=row,
                        token=token,
                        source=source,
                        amount=size_T[source].item(),
                    )

        # By comparison: in one pass, and in the cache beyond the last token.
        passes = {"in one pass": (tokens_BT, model(tokens_BT))}

        long_BT = document_tokens(LONG_ENDS, LONG)
        passes["a longer text"] = (long_BT, model(long_BT))

        cached_BT = document_tokens(DOCUMENT_ENDS, TOKENS + 3)
        for way, parts in DOCUMENT_PARTS.items():
            passes[way] = (cached_BT, read_in_parts(model, cached_BT, parts))

        for way, (read_BT, logits_BTV) in passes.items():
            _compare_documents(model, way, read_BT, logits_BTV)
    return "equal to separate documents: " + ", ".join(passes)


@torch.no_grad()
def _compare_documents(model: Transformer, way: str, tokens_BT: Tensor, logits_BTV: Tensor) -> None:
    """Raise Violation unless each document's logits are those of the document alone."""
    num_tokens = tokens_BT.shape[1]
    for row, tokens_T in enumerate(tokens_BT):
        ends = (tokens_T == EOS_ID).nonzero().flatten().tolist()

        # [first, end] is a document; the last one may lack its EOS
        first = 0
        for end in [*ends, num_tokens - 1]:
            if first > end:  # the last token was the end of one
                continue

            alone = model(tokens_BT[row : row + 1, first : end + 1])
            wrong = difference(logits_BTV[row : row + 1, first : end + 1], alone)
            if wrong is not None:
                token = first + wrong.token
                raise Violation(
                    f"{way}: row {row}, token {token} differs by {wrong.amount:.2g} from its "
                    f"document alone, which starts at token {first}",
                    row=row,
                    token=token,
                    amount=wrong.amount,
                )
            first = end + 1


# -- weights


def check_initial_values(subject: Subject) -> str:
    """Initial weights depend on the model's arguments only: the same bits on any rank."""
    # The whole parameter, as init_weights wrote it, and the same rows drawn as two shards.
    args = subject.args
    model = _new_model(args)
    num_values = 0
    for name, parameter in model.named_parameters():
        value = initial_value(args, name, parameter.shape)
        num_values += parameter.numel()
        if not parameter.isfinite().all():
            raise Violation(f"{name} starts with NaN or infinity", parameter=name)

        # each rank writes a shard of the rows
        num_rows = parameter.shape[0]
        shards = torch.cat((value.rows(0, num_rows // 2), value.rows(num_rows // 2, num_rows)))
        if not torch.equal(shards, parameter):
            raise Violation(f"shards of {name} differ from the whole", parameter=name)

    # Again, with other random states, and as another rank of a larger world.
    states = _random_states()
    with _other_process():
        again = _all_tensors(_new_model(args))
        changed_init = _changed_init(args.mixer) if args.is_own_mixer else None
    if changed_init:
        raise Violation(
            f"init[{changed_init!r}] differs when the file is imported again, with another random "
            "state, RANK and WORLD_SIZE",
            parameter=changed_init,
        )
    problem = "differs when the model is built again, with another random state, RANK, WORLD_SIZE"
    _check_equal_tensors(again, _all_tensors(model), problem)

    # The constructor draws nothing: on the meta device, since elsewhere nn.Linear itself draws.
    with torch.device("meta"):
        Transformer(args)
    if generator := _changed_states(states):
        raise Violation(f"the constructor draws from the global state of {generator}")

    # forward draws nothing, and writes to no parameter and no buffer.
    drawn = make_model(args)
    states = _random_states()
    before = {name: value.clone() for name, value in drawn.state_dict().items()}
    with torch.no_grad():
        drawn(random_tokens(2, TOKENS))
    if generator := _changed_states(states):
        raise Violation(f"forward draws from the global state of {generator}")
    _check_equal_tensors(dict(drawn.state_dict()), before, "is changed by forward")
    return f"{num_values:,} values, the same again and in shards; nothing is drawn"


def check_meta_device(subject: Subject) -> str:
    """A model that is built on the meta device, as in training, equals one built on the CPU."""
    # In training the model is built on the meta device, gets memory by to_empty, and then only its
    # parameters get values. A table that the constructor computes is lost on the way.
    model = _new_model(subject.args)
    with torch.device("meta"):
        meta_model = Transformer(subject.args, attention_backend="sdpa")
    meta_model.to_empty(device="cpu")

    # That memory may hold anything: fill it with NaN, so that what nobody writes is noticed.
    # to_empty moves parameters and buffers only: a tensor that is a plain attribute stays on meta.
    tensors = _all_tensors(meta_model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.is_meta:
                raise Violation(
                    f"{name} stays on the meta device: it is neither a parameter nor a buffer. "
                    "Compute it in forward",
                    parameter=name,
                )
            tensor.fill_(math.nan if tensor.is_floating_point() or tensor.is_complex() else 1)
    meta_model.init_weights()

    # All tensors have the bits of the model on the CPU, and so has the result.
    problem = (
        "has no value after the meta device: only parameters are initialized. Compute it in "
        "forward, or make it a parameter with a value in `init`"
    )
    _check_equal_tensors(_all_tensors(meta_model), _all_tensors(model), problem)

    tokens_BT = random_tokens(2, TOKENS)
    with torch.no_grad():
        wrong = difference(meta_model(tokens_BT), model(tokens_BT))
    if wrong is not None:
        raise Violation(
            f"the result differs by {wrong.amount:.2g} from a model built on the CPU",
            **wrong._asdict(),
        )
    return f"{len(tensors)} tensors have the same bits"


def _new_model(args: ModelArgs) -> Transformer:
    model = Transformer(args, attention_backend="sdpa")
    model.init_weights()
    return model


def _all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers, and tensors that are plain attributes of modules, by name."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors |= dict(model.named_buffers())

    # nn.Module keeps parameters and buffers in dicts of their own: a tensor in vars() is neither
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                tensors[f"{module_name}.{name}"] = value.detach()
    return tensors


def _check_equal_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], problem: str
) -> None:
    """Raise Violation, with the `problem`, for the first tensor that has other bits."""
    for name, value in expected.items():
        other = tensors.get(name)
        if other is None or other.shape != value.shape or not _has_equal_bits(other, value):
            raise Violation(f"{name} {problem}", parameter=name)


def _has_equal_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of a shape are equal; NaN equals NaN."""
    if not x.is_floating_point():
        return torch.equal(x, y)
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def _changed_init(mixer: str) -> str | None:
    """Return a key of the class's `init` that has another value if its file is imported again."""
    init = mixer_class(mixer).init
    again = fresh_class(mixer).init
    for name in {**init, **again}:
        if init.get(name) != again.get(name):
            return name
    return None


@contextlib.contextmanager
def _other_process() -> Iterator[None]:
    """Be the last of four ranks, with other random states, in the block."""
    # Both sources of a rank: the variables that torchrun sets, and torch.distributed.
    states = _random_states()
    ranks = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    with (
        mock.patch.dict(os.environ, ranks),
        mock.patch("torch.distributed.is_initialized", lambda: True),
        mock.patch("torch.distributed.get_rank", lambda *group: 3),
        mock.patch("torch.distributed.get_world_size", lambda *group: 4),
    ):
        # any states but those of the caller
        torch.manual_seed(4)
        random.seed(4)
        try:
            yield
        finally:
            torch.set_rng_state(states["torch"])
            random.setstate(states["random"])


def _random_states() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "random": random.getstate()}


def _changed_states(states: Mapping[str, Any]) -> str | None:
    """Return the name of a generator that has drawn since `states`, and put all back."""
    # torch's generator of the CPU, and Python's.
    changed = None
    if not torch.equal(states["torch"], torch.get_rng_state()):
        changed = "torch"
    elif states["random"] != random.getstate():
        changed = "random"
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    return changed


# -- gradients


def _gradient_call(subject: Subject) -> Call:
    """Return a call in float64 of two short rows, one of them with documents."""
    return mixer_call(subject.masked, document_tokens(((3, 8), ()), TOKENS // 2))


def check_gradients(subject: Subject) -> str:
    """Gradients of each parameter and of x are the slopes of finite differences."""
    worst = 0.0
    with exact():
        call = _gradient_call(subject)
        generator = torch.Generator().manual_seed(5)

        def directions(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator, dtype=torch.float64)

        # A scalar of the result, and its gradients.
        x_BTD = call.x_BTD.requires_grad_()
        y_BTD = call(x_BTD)
        weights_BTD = directions(y_BTD)
        parameters = {n: p for n, p in call.mixer.named_parameters() if p.requires_grad}
        inputs = {"x": x_BTD, **parameters}
        grads = torch.autograd.grad(
            (y_BTD * weights_BTD).sum(), [*inputs.values()], allow_unused=True
        )

        # The slope of that scalar along random directions: x by token, parameters twice. A
        # direction moves all elements at once, or those of one token, which the message then names.
        # A probe: name, gradient, direction, token.
        probes: list[tuple[str, Tensor, Tensor, int | None]] = []
        for (name, tensor), grad in zip(inputs.items(), grads, strict=True):
            grad = torch.zeros_like(tensor) if grad is None else grad
            if name == "x":
                for t in range(x_BTD.shape[1]):
                    direction = torch.zeros_like(tensor)
                    direction[:, t] = directions(tensor[:, t])
                    probes.append((name, grad, direction, t))
            else:
                probes += [(name, grad, directions(tensor), None) for _ in range(2)]

        # Each slope equals the product of gradient and direction.
        for name, grad, direction, probed_token in probes:
            tensor = inputs[name].detach()  # shares the memory that the mixer reads
            slope = _slope(call, x_BTD.detach(), tensor, direction, weights_BTD)
            expected = (grad * direction).sum().item()
            error = abs(slope - expected)
            scale = max(abs(slope), abs(expected), 1e-3)  # both may be nearly 0
            worst = max(worst, error / scale)
            if not error <= SLOPE_TOLERANCE * scale:
                place = name if probed_token is None else f"{name} at token {probed_token}"
                raise Violation(
                    f"{place}: the gradient says {expected:.4g} along a direction, finite "
                    f"differences {slope:.4g}",
                    parameter=name,
                    token=probed_token,
                    amount=error,
                )
    return f"{len(parameters)} parameters and x, relative error at most {worst:.0e}"


@torch.no_grad()
def _slope(
    call: Call, x_BTD: Tensor, tensor: Tensor, direction: Tensor, weights_BTD: Tensor
) -> float:
    """Return the central difference of the weighted result as `tensor` moves; it is put back."""
    before = tensor.clone()
    values = []
    for step in (STEP, -STEP):
        tensor.copy_(before + step * direction)
        values.append((call(x_BTD) * weights_BTD).sum().item())
    tensor.copy_(before)
    return (values[0] - values[1]) / (2 * STEP)


def check_every_gradient(subject: Subject) -> str:
    """Every parameter gets a gradient that is finite and not 0."""
    with exact():
        call = _gradient_call(subject)
        parameters = {n: p for n, p in call.mixer.named_parameters() if p.requires_grad}
        if not parameters:
            return "0 parameters"

        # x too: without it, a class that uses none of its parameters has no graph.
        y_BTD = call(call.x_BTD.requires_grad_())

        # Of a random sum of the result: in a plain one, gradients can cancel to exactly 0.
        generator = torch.Generator().manual_seed(6)
        weights_BTD = torch.randn(y_BTD.shape, generator=generator, dtype=torch.float64)
        grads = torch.autograd.grad(
            (y_BTD * weights_BTD).sum(), [*parameters.values()], allow_unused=True
        )

    # None: not in the graph. 0: in the graph, but without effect, as by a product with 0.
    for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
        size = f"{name} {[*parameter.shape]}"
        if grad is None:
            raise Violation(f"{size} gets no gradient: forward does not use it", parameter=name)
        if not grad.isfinite().all():
            raise Violation(f"the gradient of {size} has NaN or infinity", parameter=name)
        if not grad.any():
            raise Violation(f"the gradient of {size} is 0", parameter=name)
    return f"{len(parameters)} parameters"


# -- precision


def _cast(context: Context, dtype: torch.dtype) -> Context:
    """Return the context with a mask of numbers, if it has one, in `dtype`."""
    # SDPA wants a bias in the dtype of q. A bool mask, a BlockMask or None has no dtype to adapt.
    mask = context.mask
    if isinstance(mask, Tensor) and mask.is_floating_point():
        mask = mask.to(dtype)
    return context._replace(mask=mask)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_bfloat16(subject: Subject) -> str:
    """Results and gradients in bfloat16 are close to float32, and finite for large inputs and 0."""
    # Two copies of the mixer with the same weights and the same x, in bfloat16 and in float32.
    call = mixer_call(make_model(subject.args), random_tokens(2, LONG))
    low = copy.deepcopy(call.mixer).bfloat16()
    high = copy.deepcopy(low).float()  # the same rounded weights
    x_BTD = call.x_BTD.bfloat16()
    errors = {}

    # Usual inputs: the rounding of the computation.
    y_low, grad_low = _result_and_gradient(low, x_BTD, _cast(call.context, torch.bfloat16))
    y_high, grad_high = _result_and_gradient(high, x_BTD.float(), call.context)
    for what, x_low, x_high in (("result", y_low, y_high), ("gradient of x", grad_low, grad_high)):
        error = ((x_low.float() - x_high).norm() / x_high.norm().clamp(min=1e-30)).item()
        errors[what] = error

        # Name the token with the largest error, over rows and channels; NaN is the largest.
        if not error <= ROUNDING:
            error_T = (x_low.float() - x_high).norm(dim=(0, 2)).nan_to_num(math.inf)
            token = int(error_T.argmax())
            raise Violation(
                f"the {what} is {error:.1%} away from float32 (allowed: {ROUNDING:.0%}), most at "
                f"token {token} of {LONG}. Keep what must be exact in float32: x.float()",
                token=token,
                amount=error,
            )

    # Large inputs, and 0: no overflow, no division by 0.
    for factor in (LARGE, 0.0):
        for module, x in ((low, x_BTD), (high, x_BTD.float())):
            y, grad = _result_and_gradient(module, factor * x, _cast(call.context, x.dtype))
            for what, values in (("result", y), ("gradient of x", grad)):
                bad = (~values.isfinite()).nonzero()  # places [.., 3]: row, token, channel
                if len(bad):
                    row, token, _ = bad[0].tolist()
                    raise Violation(
                        f"the {what} of inputs times {factor:g} is {values[tuple(bad[0])].item()} "
                        f"at token {token} in {_short(x.dtype)}",
                        row=row,
                        token=token,
                    )

    texts = [f"{what} {error:.2%}" for what, error in errors.items()]
    return f"{', '.join(texts)} away from float32; finite at inputs times {LARGE:g} and 0"


def _result_and_gradient(
    mixer: nn.Module, x_BTD: Tensor, context: Context
) -> tuple[Tensor, Tensor]:
    """Return y, detached, and the gradient of x for a random gradient of y, both [B, T, D]."""
    x_BTD = x_BTD.detach().requires_grad_()
    y_BTD = mixer(x_BTD, context)

    # the same in each dtype: drawn in float32, then rounded
    generator = torch.Generator().manual_seed(7)
    grad_BTD = torch.randn(y_BTD.shape, generator=generator, dtype=torch.float32)
    (x_grad_BTD,) = torch.autograd.grad(y_BTD, x_BTD, grad_BTD.to(y_BTD.dtype))
    return y_BTD.detach(), x_grad_BTD


# -- the trainer's needs


def check_compile(subject: Subject) -> str:
    """torch.compile makes one graph, forward and backward, that equals eager."""
    # With documents, as training calls it: the context then holds tensors that are traced too.
    model = make_model(replace(subject.args, document_mask=True))
    mixer, x_BTD, context = mixer_call(model, document_tokens(((3, 8), ()), TOKENS // 2))

    # aot_eager: the graphs of the trainer, without the time of its code generator. fullgraph raises
    # where the trainer would break the graph. The resets keep other compilations out of this one,
    # such as a limit of recompilations that they have used up, and the other way round.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own use of torch
        torch._dynamo.reset()
        try:
            compiled: Any = torch.compile(mixer, backend="aot_eager", fullgraph=True)
            results = _all_gradients(compiled, mixer, x_BTD, context)
        except torch._dynamo.exc.TorchDynamoException as fault:
            raise Violation(f"no single graph: {_failure(fault, subject.args.mixer)}") from fault
        finally:
            torch._dynamo.reset()

    # The same results and gradients without compilation.
    expected = _all_gradients(mixer, mixer, x_BTD, context)
    for name, value in expected.items():
        difference = (results[name] - value).abs().max().item()
        if not difference <= COMPILED_TOLERANCE * max(1.0, value.abs().max().item()):
            raise Violation(
                f"compiled, the {name} differs from eager by {difference:.2g}",
                parameter=name,
                amount=difference,
            )
    return "one graph, forward and backward, equal to eager"


def _all_gradients(
    run: Callable[..., Tensor], mixer: nn.Module, x_BTD: Tensor, context: Context
) -> dict[str, Tensor]:
    """Return the result of `run`, and the gradients of x and of the mixer's parameters, by name."""
    x_BTD = x_BTD.detach().requires_grad_()
    parameters = {f"gradient of {n}": p for n, p in mixer.named_parameters() if p.requires_grad}
    y_BTD = run(x_BTD, context)

    # Gradients of a random sum of the result; those of unused parameters are left out.
    generator = torch.Generator().manual_seed(8)
    weights_BTD = torch.randn(y_BTD.shape, generator=generator, dtype=torch.float32)
    grads = torch.autograd.grad(
        (y_BTD * weights_BTD).sum(), [x_BTD, *parameters.values()], allow_unused=True
    )
    named = zip(("gradient of x", *parameters), grads, strict=True)
    results = {name: grad for name, grad in named if grad is not None}
    return {"result": y_BTD.detach(), **results}


def check_saving(subject: Subject) -> str:
    """The state dict has all that training changes: after loading, the model is the same."""
    tokens_BT = random_tokens(2, TOKENS)
    with exact():
        # Two steps of training. Any loss and any rate do: the model only has to change.
        model = make_model(subject.args).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            loss = model(tokens_BT).logsumexp(dim=-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        # Load the state dict into a new model: what is not in it has its value before training.
        state = {name: value.clone() for name, value in model.state_dict().items()}
        loaded = make_model(subject.args).double()
        loaded.load_state_dict(state)
        with torch.no_grad():
            wrong = difference(loaded(tokens_BT), model(tokens_BT))
    if wrong is not None:
        # suspects: buffers that are not persistent, and tensors that are plain attributes
        others = [name for name in _all_tensors(model) if name not in state]
        raise Violation(
            f"after saving and loading, the result differs by {wrong.amount:.2g}: something that "
            f"training changes is no parameter{' (' + ', '.join(others) + ')' if others else ''}",
            **wrong._asdict(),
        )
    return f"{len(state)} tensors"


def check_state(subject: Subject) -> str:
    """What `keep` holds has a row for each row, and does not grow with the text."""
    # Read 64 tokens, then 192 more, and note the size of each state after both.
    num_rows = 3
    lengths = (64, 256)
    model = make_model(subject.args)
    cache = Cache.of(subject.args)
    tokens_BT = random_tokens(num_rows, max(lengths))
    layer = cache.layers[-1]
    state_bytes_at = []
    with torch.no_grad():
        for start, stop in zip((0, *lengths), lengths, strict=False):
            model(tokens_BT[:, start:stop], cache=cache)
            state_bytes_at.append({name: x.nbytes / num_rows for name, x in layer.states.items()})

    # Beams select rows of dim 0.
    for name, state in layer.states.items():
        if state.shape[:1] != (num_rows,):
            raise Violation(
                f'state "{name}" is {[*state.shape]} for {num_rows} rows: rows must be first',
                parameter=name,
            )

    # In bytes per row and token; a state that is kept only later counts as grown from 0.
    short, long = state_bytes_at
    for name, num_bytes in long.items():
        growth = (num_bytes - short.get(name, 0.0)) / (lengths[1] - lengths[0])
        if growth:
            raise Violation(
                f'state "{name}" grows by {growth:,.0f} bytes per token, from '
                f"{short.get(name, 0.0):,.0f} to {num_bytes:,.0f} bytes of a row after "
                f"{lengths[0]} and {lengths[1]} tokens: use context.append for what grows",
                parameter=name,
                amount=growth,
            )

    # What `append` holds grows by design: a number is 4 bytes in float32.
    text = f"{sum(long.values()):,.0f} bytes of a row after {lengths[0]} and {lengths[1]} tokens"
    if layer.numbers_per_token:
        text += f"; keeps {4 * layer.numbers_per_token:,} bytes per token besides"
    return text


# -- costs


def check_counts(subject: Subject) -> str:
    """Parameters, FLOPs and bytes of state can be counted; they are those of one layer's mixer."""
    # Parameters: of the mixer alone, without the block's norms and feed-forward.
    args = subject.args
    with torch.device("meta"):
        model = Transformer(args)
    (*_, block) = model.layers.values()
    num_parameters = sum(p.numel() for p in block.get_submodule("attention").parameters())

    # FLOPs: those of a user's mixer are counted by running it. Those of a built-in one are the part
    # of the model's closed form that is not the rest of the block.
    if args.is_own_mixer:
        flops = measure(args).flops_per_token(SPEED_LENGTHS[0])
    else:
        flops = _flops_of_mixer(args, num_parameters)

    # Bytes of the state in float32, of one layer.
    state = state_bytes(replace(args, num_layers=1), itemsize=4)
    return (
        f"dim {args.dim}: {num_parameters:,} parameters, {flops:,.0f} FLOPs per token of "
        f"{SPEED_LENGTHS[0]:,}, {state.per_row:,} bytes per row and {state.per_token:,} per token"
    )


def _flops_of_mixer(args: ModelArgs, num_parameters: int) -> float:
    """Return the FLOPs of a token in a mixer of MIXERS: its products, and its mixing."""
    # A second layer adds what a layer costs: the embedding and the output cancel.
    one = replace(args, num_layers=1)
    two = replace(args, num_layers=2)
    of_layer = flops_per_token(two, SPEED_LENGTHS[0]) - flops_per_token(one, SPEED_LENGTHS[0])

    # `flops_per_token` counts 6 per parameter: 2 forward and 4 backward. Without those of the rest
    # of the block (norms, feed-forward, Canon layers outside the mixer), the mixer is left.
    with torch.device("meta"):
        (block,) = Transformer(one).layers.values()
    others = sum(p.numel() for p in block.parameters()) - num_parameters
    return of_layer - 6 * others


def check_speed(subject: Subject) -> str:
    """Forward and backward of the mixer next to attention, float32, on this machine."""
    # One layer each. The reference is the product's attention, with as many heads at this width.
    own = replace(subject.args, num_layers=1, max_seq_len=SPEED_LENGTHS[-1])
    attention = fill_model(
        flavor("debug"),
        {
            "num_layers": 1,
            "dim": own.dim,
            "num_heads": own.num_heads,
            "position": "nope",
            "max_seq_len": own.max_seq_len,
        },
    )

    # Longer and longer texts, until time or memory would run out.
    texts = []
    took_s = 0.0  # of the length before, both mixers and the passes that prepare them
    for length in SPEED_LENGTHS:
        if took_s * GROWTH > subject.deadline - time.monotonic():
            texts.append(f"{length:,}: no time left")
            break
        if length > MASKED_LENGTH and own.is_own_mixer and mixer_class(own.mixer).reads_mask:
            texts.append(f"{length:,}: not with a mask of T x T")
            break

        # One right after the other: the ratio depends less on what else the machine does.
        start = time.monotonic()
        attention_s = _step_seconds(attention, length)
        mixer_s = _step_seconds(own, length)
        took_s = time.monotonic() - start
        texts.append(f"{length:,}: {mixer_s / attention_s:.2g}x ({1000 * mixer_s:,.0f} ms)")
    return f"time over attention's at dim {own.dim}, by tokens: {', '.join(texts)}"


def _step_seconds(args: ModelArgs, num_tokens: int) -> float:
    """Return the seconds of a forward and backward of the mixer of one row, after a forward."""
    # mixer_call runs a forward of the model, which warms up; only the mixer alone is timed.
    call = mixer_call(make_model(args), random_tokens(1, num_tokens))
    x_BTD = call.x_BTD.requires_grad_()
    start = time.perf_counter()
    call(x_BTD).sum().backward()
    return time.perf_counter() - start


# -- all checks


CHECKS = (
    Check("forward", check_forward),
    Check("dtype", check_dtype),
    Check("causality", check_causality),
    Check("rows", check_rows),
    Check("cache", check_cache),
    Check("padding", check_padding),
    Check("beams", check_beams),
    Check("documents", check_documents),
    Check("initial values", check_initial_values),
    Check("meta device", check_meta_device),
    Check("gradients", check_gradients),
    Check("every gradient", check_every_gradient),
    Check("bfloat16", check_bfloat16),
    Check("save and load", check_saving),
    Check("state", check_state),
    Check("counts", check_counts),
    Check("compile", check_compile),
    Check("speed", check_speed),
)
"""In the order in which they run; all but the first need a forward."""


def run_checks(
    args: ModelArgs, checks: Sequence[Check] = CHECKS, *, seconds: float = math.inf
) -> Iterator[Row]:
    """Yield the result of each check; `seconds` limits the lengths of the speed, no proof."""
    # One subject for all: the models that it builds are shared by the checks.
    begin = time.monotonic()
    subject = Subject(args, begin + seconds)
    has_failed_forward = False
    for check in checks:
        start = time.monotonic()
        row = _run(check, subject, has_failed_forward)

        # a mixer that cannot run fails everywhere: one row says so, the others are skipped
        has_failed_forward |= row.name == "forward" and row.state == "failed"
        yield replace(row, seconds=time.monotonic() - start)


def _run(check: Check, subject: Subject, has_failed_forward: bool) -> Row:
    """Return the result of a check, without its time."""
    if has_failed_forward:
        return Row(check.name, "skipped", "forward fails", 0.0)
    try:
        return Row(check.name, "ok", check.function(subject), 0.0)
    except Skipped as reason:
        return Row(check.name, "skipped", str(reason), 0.0)
    except Violation as violation:
        return Row(check.name, "failed", str(violation), 0.0, **violation.fields)
    except Exception as error:  # of the user's class
        return Row(check.name, "failed", _failure(error, subject.args.mixer), 0.0)


def _failure(error: Exception, mixer: str) -> str:
    """Return an exception in one line, with the line of the user's file where it was raised."""
    # The first line of the message. A built-in mixer has no line that the user could mend.
    text = str(error).strip()
    message = next(iter(text.splitlines()), "")
    if not is_own_mixer(mixer):
        return f"{type(error).__name__}: {message}"

    # Of the frames in the user's file the innermost, which is the last. torch.compile has them in
    # its message only, other errors have them in their traceback.
    path = str(mixer_file(mixer).path)
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    frames += USER_FRAME.findall(text)
    places = [f" (line {line}, in {name})" for file, line, name in frames if file == path]
    return f"{type(error).__name__}: {message}{places[-1] if places else ''}"

"""Forward passes with a cache: chunks, padding, selected rows, branches; all equal one pass."""

import pytest
import torch
from torch import Tensor

from canon_pretrain.model.cache import FIRST_CAPACITY, Cache
from canon_pretrain.model.transformer import Transformer
from tests.support import refused
from tests.variants import BASE, EOS_ID, VARIANTS, build, every_variant, random_tokens, variant

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def _in_parts(
    model: Transformer, tokens: Tensor, sizes: list[int], cache: Cache | None = None
) -> Tensor:
    cache = cache or Cache(model.args.num_layers)
    start, parts = cache.length, tokens.split(sizes, dim=1)
    logits = torch.cat([model(part, cache=cache) for part in parts], dim=1)
    assert cache.length == start + tokens.shape[1]
    return logits


@torch.no_grad()
@every_variant
def test_chunks_and_single_tokens_equal_one_pass(args):
    model = build(args)
    tokens = random_tokens(args, rows=3, num_tokens=13)
    expected = model(tokens)
    for sizes in ([13], [1] * 13, [12, 1], [1, 3, 2, 6, 1]):
        torch.testing.assert_close(_in_parts(model, tokens, sizes), expected, **TOLERANCE)
    for kept in (1, 3):
        given = model(tokens, logits_to_keep=kept)
        torch.testing.assert_close(given, expected[:, -kept:], **TOLERANCE)
    places = torch.tensor([0, 32, 7, 7, 21])
    given = model(tokens, logits_at_M=places)
    torch.testing.assert_close(given, expected.flatten(0, 1)[places], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["rope ABCD gqa", "alibi BD documents"])
def test_the_cache_grows_past_its_first_and_second_capacity(name):
    assert FIRST_CAPACITY == 64
    model = build(variant(name))
    tokens = random_tokens(model.args, rows=2, num_tokens=140)
    expected = model(tokens)
    # past 64 by single tokens, past 128 by four; a first chunk above the capacity
    for sizes in ([60, 1, 1, 1, 1, 1, 1, 57, 4, 1, 1, 11], [129, 1, 10]):
        torch.testing.assert_close(_in_parts(model, tokens, sizes), expected, **TOLERANCE)


def _prompts(seed: int) -> list[Tensor]:
    rows = [random_tokens(BASE, 1, n, seed)[0] for n in (2, 5, 9)]
    rows[1][3] = rows[2][0] = rows[2][6] = EOS_ID
    return rows


def _padded(rows: list[Tensor], side: str, pad_id: int) -> tuple[Tensor, Tensor]:
    tokens = torch.full((len(rows), max(len(row) for row in rows)), pad_id)
    is_real = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(rows):
        places = slice(tokens.shape[1] - len(ids), None) if side == "left" else slice(len(ids))
        tokens[row, places], is_real[row, places] = ids, True
    return tokens, is_real


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@every_variant
def test_padded_rows_equal_unpadded_rows(args, side):
    model, rows = build(args), _prompts(seed=0)
    given = []
    for pad_id in (EOS_ID, 33):
        tokens, is_real = _padded(rows, side, pad_id)
        logits = model(tokens, is_real_BT=is_real)
        assert torch.isfinite(logits).all()
        given.append(logits[is_real])
    alone = torch.cat([model(row[None])[0] for row in rows])
    torch.testing.assert_close(given[0], alone, **TOLERANCE)
    assert torch.equal(*given)


@torch.no_grad()
@every_variant
def test_left_padded_rows_continue_and_are_selected(args):
    model, rows = build(args), _prompts(seed=1)
    tokens, is_real = _padded(rows, "left", EOS_ID)
    cache, pasts = Cache(args.num_layers), list(rows)
    for part, real in zip(tokens.split([3, 5, 1], 1), is_real.split([3, 5, 1], 1), strict=True):
        model(part, is_real_BT=real, cache=cache, logits_to_keep=1)
    # beams: repeated rows, one ends; then one row; then several again
    for step, selected in enumerate(([0, 1, 2], [2, 0, 0, 1], [3, 1, 1, 0], [2], [0, 0])):
        if step:
            cache.select_rows(torch.tensor(selected))
        after = random_tokens(args, rows=len(selected), num_tokens=1 + step % 2, seed=10 + step)
        pasts = [torch.cat((pasts[row], after[i])) for i, row in enumerate(selected)]
        logits = model(after, cache=cache)
        for row, past in enumerate(pasts):
            expected = model(past[None])[0, -after.shape[1] :]
            torch.testing.assert_close(logits[row], expected, **TOLERANCE)


@torch.no_grad()
@every_variant
def test_branches_of_one_prompt_are_independent(args):
    model = build(args)
    prompts, more = random_tokens(args, 2, 9), random_tokens(args, 5, 4, seed=1)
    rows = torch.tensor([1, 0, 0, 1, 1])
    trunk = Cache(args.num_layers, capacity=13)
    model(prompts, cache=trunk)
    whole = model(torch.cat((prompts[rows], more), dim=1))[:, 9:]
    for part in (slice(0, 3), slice(3, 5)):
        found = model(more[part], cache=trunk.branch(rows[part]))
        torch.testing.assert_close(found, whole[part], rtol=1e-4, atol=1e-4)
    whole = model(torch.cat((prompts, more[:2]), dim=1))[:, 9:]
    torch.testing.assert_close(model(more[:2], cache=trunk), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_past_max_seq_len_is_refused_without_effect():
    model = build(VARIANTS["rope"])
    tokens = random_tokens(model.args, rows=1, num_tokens=160)
    cache = Cache(model.args.num_layers)
    model(tokens[:, :159], cache=cache)
    with refused("model.sequence_too_long"):
        model(tokens[:, :2], cache=cache)
    last = model(tokens[:, 159:], cache=cache)
    torch.testing.assert_close(last, model(tokens)[:, -1:], **TOLERANCE)


@torch.no_grad()
def test_a_cache_after_an_interrupted_pass_is_refused():
    """The token is in the Canon state of some layers only."""
    model = build(variant("nope ABCD"))
    tokens, cache = random_tokens(model.args, rows=1, num_tokens=7), Cache(model.args.num_layers)
    model(tokens[:, :5], cache=cache)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.layers["1"].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens[:, 5:6], cache=cache)
    hook.remove()
    with refused("cache.incomplete"):
        model(tokens[:, 5:6], cache=cache)

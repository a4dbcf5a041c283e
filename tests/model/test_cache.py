"""Forward passes with a cache: chunks, padding, selected rows, branches; all equal one pass."""

import pytest
import torch

from canon_pretrain.model.cache import FIRST_CAPACITY, Cache
from tests.support import refused
from tests.variants import BASE, EOS_ID, VARIANTS, build, every_variant, random_tokens, variant

assert_close = torch.testing.assert_close
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def _in_chunks(model, tokens, sizes):
    cache = Cache(model.args.num_layers)
    logits = [model(chunk, cache=cache) for chunk in tokens.split(sizes, dim=1)]
    assert cache.length == tokens.shape[1]
    return torch.cat(logits, dim=1)


@every_variant
def test_chunks_and_single_tokens_equal_one_pass(args):
    model, tokens = build(args), random_tokens(args, rows=3, num_tokens=140)
    expected = model(tokens)
    assert FIRST_CAPACITY == 64  # passed by single tokens, by four, and by a first chunk
    for sizes in ([140], [1, 3, 2, 6, 48, *[1] * 8, 57, 4, 1, 1, 9], [129, 1, 10]):
        assert_close(_in_chunks(model, tokens, sizes), expected, **TOLERANCE)
    for kept in (1, 3):
        assert_close(model(tokens, logits_to_keep=kept), expected[:, -kept:], **TOLERANCE)
    places = torch.tensor([0, 32, 7, 7, 21])
    found = model(tokens, logits_at_M=places)
    assert_close(found, expected.flatten(0, 1)[places], rtol=1e-5, atol=1e-5)


def _prompts(seed):
    rows = [random_tokens(BASE, 1, n, seed)[0] for n in (2, 5, 9)]
    rows[1][3] = rows[2][0] = rows[2][6] = EOS_ID
    return rows


def _padded(rows, side, pad_id):
    tokens = torch.full((len(rows), max(len(row) for row in rows)), pad_id)
    is_real = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(rows):
        places = slice(tokens.shape[1] - len(ids), None) if side == "left" else slice(len(ids))
        tokens[row, places], is_real[row, places] = ids, True
    return tokens, is_real


@pytest.mark.parametrize("side", ["left", "right"])
@every_variant
def test_padded_rows_equal_unpadded_rows(args, side):
    model, rows = build(args), _prompts(seed=0)
    found = []
    for pad_id in (EOS_ID, 33):
        tokens, is_real = _padded(rows, side, pad_id)
        logits = model(tokens, is_real_BT=is_real)
        assert torch.isfinite(logits).all()
        found.append(logits[is_real])
    assert_close(found[0], torch.cat([model(row[None])[0] for row in rows]), **TOLERANCE)
    assert torch.equal(*found)


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
            assert_close(logits[row], model(past[None])[0, -after.shape[1] :], **TOLERANCE)


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
        assert_close(found, whole[part], rtol=1e-4, atol=1e-4)
    whole = model(torch.cat((prompts, more[:2]), dim=1))[:, 9:]
    assert_close(model(more[:2], cache=trunk), whole, rtol=1e-4, atol=1e-4)


def test_past_max_seq_len_is_refused_without_effect():
    model = build(VARIANTS["rope"])
    tokens = random_tokens(model.args, rows=1, num_tokens=160)
    cache = Cache(model.args.num_layers)
    model(tokens[:, :159], cache=cache)
    with refused("model.sequence_too_long"):
        model(tokens[:, :2], cache=cache)
    assert_close(model(tokens[:, 159:], cache=cache), model(tokens)[:, -1:], **TOLERANCE)


def test_a_cache_after_an_interrupted_pass_is_refused():
    """The token is in the Canon state of some layers only."""
    model = build(variant("nope ABCD"))
    tokens, cache = random_tokens(model.args, rows=1, num_tokens=7), Cache(model.args.num_layers)
    model(tokens[:, :5], cache=cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.layers["1"].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens[:, 5:6], cache=cache)
    hook.remove()
    with refused("cache.incomplete"):
        model(tokens[:, 5:6], cache=cache)

"""Reading in parts: chunks, single tokens, padding, rows taken; all equal to one full pass."""

from collections.abc import Iterator

import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.cache import FIRST_CAPACITY, NOWHERE, PADDING, Cache, near_segments
from canon_pretrain.model.transformer import Transformer
from tests.variants import BASE, EOS_ID, VARIANTS, build, every_variant, random_tokens, variant

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def _in_parts(
    model: Transformer, tokens: torch.Tensor, sizes: list[int], cache: Cache | None = None
) -> torch.Tensor:
    """The logits of all tokens, read in parts of these sizes."""
    cache = cache or Cache(model.args.num_layers)
    start, parts = cache.length, tokens.split(sizes, dim=1)
    logits = torch.cat([model(part, cache=cache) for part in parts], dim=1)
    assert cache.length == start + tokens.shape[1]
    return logits


@every_variant
def test_chunks_and_single_tokens_give_the_logits_of_one_pass(args):
    model = build(args)
    tokens = random_tokens(args, rows=3, num_tokens=13)
    expected = model(tokens)
    for sizes in ([13], [1] * 13, [12, 1], [2, 11], [1, 3, 2, 6, 1]):
        torch.testing.assert_close(_in_parts(model, tokens, sizes), expected, **TOLERANCE)


@pytest.mark.parametrize("kernel", ["", "k2", "k3"])
@pytest.mark.parametrize("name", ["rope ABCD documents", "nope BD documents", "alibi A documents"])
def test_a_chunk_may_end_inside_a_documents_first_tokens(name, kernel):
    model = build(variant(f"{name} {kernel}"))
    tokens = torch.tensor([[5, 6, 7, 8, EOS_ID, 9, 10, 11, 12, 13, EOS_ID, EOS_ID, 14]])
    expected = model(tokens)
    for cut in range(1, 13):
        for sizes in ([cut, 13 - cut], [cut, 1, 12 - cut]):
            torch.testing.assert_close(_in_parts(model, tokens, sizes), expected, **TOLERANCE)


GROWING = ["rope ABCD gqa", "alibi BD documents", "h_alibi AC tied documents", "partial_rope_a"]


@pytest.mark.parametrize("name", GROWING)
def test_the_cache_grows_past_its_first_room_and_past_its_double(name):
    assert FIRST_CAPACITY == 64
    model = build(variant(name))
    tokens = random_tokens(model.args, rows=2, num_tokens=140)
    sizes = [60, 1, 1, 1, 1, 1, 1, 57, 4, 1, 1, 11]  # over 64 by single tokens, over 128 by four
    assert sum(sizes) == 140
    expected = model(tokens)
    torch.testing.assert_close(_in_parts(model, tokens, sizes), expected, **TOLERANCE)
    # a first part that is longer than the room
    torch.testing.assert_close(_in_parts(model, tokens, [129, 1, 10]), expected, **TOLERANCE)


def _prompts(seed: int) -> list[torch.Tensor]:
    """Three rows of 2, 5 and 9 tokens, each with an EOS where it has room for one."""
    rows = [random_tokens(BASE, 1, n, seed)[0] for n in (2, 5, 9)]
    rows[1][3] = rows[2][0] = rows[2][6] = EOS_ID
    return rows


def _padded(rows: list[torch.Tensor], side: str, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows on one `side` of a rectangle, and which of its tokens are real."""
    tokens = torch.full((len(rows), max(len(row) for row in rows)), pad_id)
    is_real = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(rows):
        places = slice(tokens.shape[1] - len(ids), None) if side == "left" else slice(len(ids))
        tokens[row, places], is_real[row, places] = ids, True
    return tokens, is_real


# EOS is what tokenizers without a padding token pad with; 33 is any other
@pytest.mark.parametrize("pad_id", [EOS_ID, 33])
@every_variant
def test_rows_padded_on_either_side_equal_the_rows_by_themselves(args, pad_id):
    model, rows = build(args), _prompts(seed=0)
    alone = torch.cat([model(row[None])[0] for row in rows])
    for side in ("left", "right"):
        tokens, is_real = _padded(rows, side, pad_id)
        logits = model(tokens, is_real_BT=is_real)
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits[is_real], alone, **TOLERANCE)


@pytest.mark.parametrize("sizes", [[9], [3, 5, 1]], ids=["whole", "parts"])
@every_variant
def test_unequal_rows_padded_on_the_left_are_continued(args, sizes):
    model, rows = build(args), _prompts(seed=1)
    tokens, is_real = _padded(rows, "left", EOS_ID)
    cache = Cache(args.num_layers)
    for part, real in zip(tokens.split(sizes, 1), is_real.split(sizes, 1), strict=True):
        last = model(part, is_real_BT=real, cache=cache, logits_to_keep=1)
    after = random_tokens(args, rows=3, num_tokens=5, seed=2)
    after[0, 1] = EOS_ID
    given = torch.cat((last, _in_parts(model, after, [1, 1, 2, 1], cache)), dim=1)
    for row, ids in enumerate(rows):
        expected = model(torch.cat((ids, after[row]))[None])[0, -6:]
        torch.testing.assert_close(given[row], expected, **TOLERANCE)


@every_variant
def test_rows_taken_in_another_order_or_twice_go_on_as_their_own_past(args):
    model, rows = build(args), _prompts(seed=3)
    tokens, is_real = _padded(rows, "left", EOS_ID)
    cache, pasts = Cache(args.num_layers), list(rows)
    model(tokens, is_real_BT=is_real, cache=cache)
    # beams: some go twice, one ends; then down to one row; then to several again
    for step, taken in enumerate(([2, 0, 0, 1], [3, 1, 1, 0], [2], [0, 0])):
        cache.take(torch.tensor(taken))
        after = random_tokens(args, rows=len(taken), num_tokens=1 + step % 2, seed=10 + step)
        pasts = [torch.cat((pasts[row], after[i])) for i, row in enumerate(taken)]
        logits = model(after, cache=cache)
        for row, past in enumerate(pasts):
            expected = model(past[None])[0, -after.shape[1] :]
            torch.testing.assert_close(logits[row], expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["alibi ABCD gqa", "rope AC documents"])
def test_a_row_that_ends_sooner_is_padded_in_the_last_part(name):
    model = build(variant(name))
    tokens = random_tokens(model.args, rows=2, num_tokens=8)
    expected = model(tokens)
    cache = Cache(model.args.num_layers)
    model(tokens[:, :5], cache=cache)  # no padding so far
    is_real = torch.tensor([[True, True, True], [True, False, False]])
    given = model(tokens[:, 5:], is_real_BT=is_real, cache=cache)
    torch.testing.assert_close(given[is_real], expected[:, 5:][is_real], **TOLERANCE)


@pytest.mark.parametrize("name", ["rope ABCD", "h_alibi ABCD documents"])
def test_what_stands_in_padding_changes_nothing(name):
    model, rows = build(variant(name)), _prompts(seed=4)
    for side in ("left", "right"):
        tokens, is_real = _padded(rows, side, EOS_ID)
        noise = random_tokens(model.args, 3, 9, seed=5)
        other = torch.where(is_real, tokens, noise)
        given = model(other, is_real_BT=is_real)[is_real]
        assert torch.equal(given, model(tokens, is_real_BT=is_real)[is_real])


@pytest.mark.parametrize("name", ["nope A", "rope BD no_res", "rope"])
def test_a_chunk_that_forgets_what_was_read_is_noticed(name):
    # the released model ignores Canon's state there: its logits differ by O(1)
    model = build(variant(name))
    tokens = random_tokens(model.args, rows=1, num_tokens=8)
    expected, cache = model(tokens)[:, 5:], Cache(model.args.num_layers)
    model(tokens[:, :5], cache=cache)
    for layer in cache.layers:
        if layer.canon:
            layer.canon.clear()
        else:
            layer._keys.zero_()
    assert (model(tokens[:, 5:], cache=cache) - expected).abs().max() > 1e-2


def test_logits_of_the_last_tokens_only():
    model = build(variant("nope ABCD tied"))
    tokens = random_tokens(model.args, rows=2, num_tokens=7)
    expected = model(tokens)
    assert expected.shape[1] == 7
    for kept in (1, 3, 7):
        given = model(tokens, logits_to_keep=kept)
        torch.testing.assert_close(given, expected[:, -kept:], **TOLERANCE)


def test_a_cached_sequence_past_max_seq_len_is_refused_and_changes_nothing():
    model = build(VARIANTS["rope"])
    tokens = random_tokens(model.args, rows=1, num_tokens=159)
    cache = Cache(model.args.num_layers)
    model(tokens, cache=cache)
    with pytest.raises(UserError, match="161 tokens.*max_seq_len = 160"):
        model(tokens[:, :2], cache=cache)
    assert cache.length == 159
    last = torch.cat((tokens, tokens[:, :1]), dim=1)
    torch.testing.assert_close(
        model(tokens[:, :1], cache=cache), model(last)[:, -1:], **TOLERANCE
    )  # fmt: skip


def test_a_bfloat16_model_keeps_bfloat16_and_reads_the_same_in_parts():
    model = build(variant("alibi ABCD gqa documents")).bfloat16()
    tokens = random_tokens(model.args, rows=2, num_tokens=12)
    cache = Cache(model.args.num_layers)
    given = _in_parts(model, tokens, [5, 1, 6], cache)
    assert cache.layers[0]._keys.dtype == torch.bfloat16
    expected = model(tokens)
    assert (given - expected).norm() < 0.02 * expected.norm()


def test_places_before_the_first_token_are_in_no_segment():
    segments = torch.tensor([[PADDING, 0, 0, 1, 1]], dtype=torch.int32)
    assert near_segments(segments, 5, 3).tolist() == [[NOWHERE] * 3 + [PADDING, 0, 0, 1, 1]]
    assert near_segments(segments, 4, 3).tolist() == [[NOWHERE] * 2 + [PADDING, 0, 0, 1, 1]]
    assert near_segments(segments, 1, 3).tolist() == [[0, 0, 1, 1]]
    assert near_segments(segments, 2, 1).tolist() == [[0, 1, 1]]
    assert len({NOWHERE, PADDING, 0}) == 3


def test_a_cache_that_an_error_left_half_read_is_refused():
    """Some layers' Canon memories hold the tokens then, others' do not."""
    model = build(variant("nope ABCD"))
    tokens = random_tokens(model.args, rows=1, num_tokens=7)
    cache = Cache(model.args.num_layers)
    model(tokens[:, :5], cache=cache)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.layers["1"].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens[:, 5:6], cache=cache)
    hook.remove()
    with pytest.raises(UserError, match="after 5 tokens: an error .* into a new cache"):
        model(tokens[:, 5:6], cache=cache)

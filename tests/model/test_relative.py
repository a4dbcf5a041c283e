"""Learned biases of scores by distance: transformers' own class, masks, backends, counts.

tests/variants.py has them in every mixer's tests, against the loops of the reference model.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.flop_counter import FlopCounterMode
from transformers import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingAttention, InklingRelativeLogits

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import HIDDEN, Attend
from canon_pretrain.model.attention import Attention
from canon_pretrain.model.cache import PADDING, Context
from canon_pretrain.model.counts import flops_per_token
from canon_pretrain.model.transformer import Transformer
from tests.variants import BASE, build, random_tokens

# flex attention without torch.compile
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
CPU = torch.device("cpu")
NUM_TOKENS = 9
SEGMENTS = torch.tensor(
    [[0, 0, 0, 1, 1, 1, 1, 2, 2], [PADDING, PADDING, 5, 5, 5, 5, 5, PADDING, PADDING]],
    dtype=torch.int32,
)
ARGS = replace(
    BASE,
    position="relative",
    relative_dim=3,
    relative_extent=4,
    num_kv_heads=2,
    qk_norm="per_head",
    canon_set="FKOV",
)
KINDS = {"full": ARGS, "sliding": replace(ARGS, window=5, relative_extent=0)}


# -- transformers' class


def inkling_attention(args: ModelArgs, ours: Attention) -> InklingAttention:
    """Return Inkling's attention with the weights of ours; its scores are divided by K."""
    heads = {"num_attention_heads": args.num_heads, "num_key_value_heads": args.kv_heads}
    heads["head_dim"] = args.head_dim
    config = InklingTextConfig(
        hidden_size=args.dim,
        num_hidden_layers=1,
        **heads,
        **{f"swa_{name}": value for name, value in heads.items()},
        d_rel=args.relative_dim,
        rel_extent=args.bias_extent,
        sliding_window_size=args.window or 1,
        layer_types=["hybrid_sliding" if args.window else "hybrid"],
        mlp_layer_types=["dense"],
        rms_norm_eps=args.norm_eps,
        attn_implementation="eager",
    )
    theirs = InklingAttention(config, layer_idx=0)
    assert ours.relative is not None and ours.canon_k is not None and ours.canon_v is not None
    pairs = [
        (theirs.q_proj, ours.wq),
        (theirs.k_proj, ours.wk),
        (theirs.v_proj, ours.wv),
        (theirs.o_proj, ours.wo),
        (theirs.r_proj, ours.relative.wr),
        (theirs.k_norm, ours.k_norm),
        (theirs.k_sconv.conv1d, ours.canon_k),
        (theirs.v_sconv.conv1d, ours.canon_v),
    ]
    with torch.no_grad():
        for their_module, our_module in pairs:
            their_module.weight.copy_(our_module.weight)
        theirs.q_norm.weight.copy_(ours.q_norm.weight * args.head_dim**0.5)
        theirs.rel_logits_proj.proj.copy_(ours.relative.profiles.weight.T)
    return theirs


@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_inkling(kind):
    """Outputs and gradients, of rows shorter and longer than the distances."""
    args = KINDS[kind]
    ours = build(args).layers["0"].attention
    theirs = inkling_attention(args, ours)
    for num_tokens in (1, 3, 12):
        mask = ours.attend.mask(num_tokens, None, num_tokens, CPU)
        their_mask = torch.zeros(mask.shape).masked_fill(mask == HIDDEN, -torch.inf)
        x = torch.randn(2, num_tokens, args.dim, requires_grad=True)
        y_grad = torch.randn(x.shape)

        y = ours(x, Context(mask))
        expected, _ = theirs(x, their_mask)

        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        relative = ours.relative
        weights = (x, relative.wr.weight, relative.profiles.weight, ours.wq.weight)
        their_weights = (x, theirs.r_proj.weight, theirs.rel_logits_proj.proj, theirs.q_proj.weight)
        dx, dwr, dprofiles, dwq = torch.autograd.grad(y, weights, y_grad)
        gradients = (dx, dwr, dprofiles.T, dwq)
        their_gradients = torch.autograd.grad(expected, their_weights, y_grad)
        for gradient, their_gradient in zip(gradients, their_gradients, strict=True):
            torch.testing.assert_close(gradient, their_gradient, rtol=1e-4, atol=1e-4)


# -- masks and backends


def inputs(args, num_tokens=NUM_TOKENS):
    """Return random q, k, v [2, T, H, 8] and biases [2, T, H, E]."""
    generator = torch.Generator().manual_seed(num_tokens)
    sizes = [(args.num_heads, 8), (args.kv_heads, 8), (args.kv_heads, 8)]
    sizes.append((args.num_heads, args.bias_extent))
    return [torch.randn(2, num_tokens, *size, generator=generator) for size in sizes]


def by_loops(args, q, k, v, biases, segments):
    """Attend from all tokens to all, one query and head at a time."""
    y = torch.zeros_like(q)
    for row in range(len(q)):
        for t in range(q.shape[1]):
            first = max(0, t - args.window + 1) if args.window else 0
            keys = list(range(first, t + 1))
            if segments is not None:
                keys = [s for s in keys if segments[row, s] == segments[row, t]]
            for head in range(args.num_heads):
                kv_head = head * args.kv_heads // args.num_heads
                scores = k[row, keys, kv_head] @ q[row, t, head] / 8**0.5
                for i, s in enumerate(keys):
                    if t - s < args.bias_extent:
                        scores[i] += biases[row, t, head, t - s]
                y[row, t, head] = scores.softmax(dim=0) @ v[row, keys, kv_head]
    return y


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_backends_and_last_tokens_equal_loops(kind, masked):
    args = KINDS[kind]
    segments = SEGMENTS if masked else None
    q, k, v, biases = inputs(args)
    expected = by_loops(args, q, k, v, biases, segments)

    for backend in ("sdpa", "cudnn", "flex"):
        attend = Attend(args, backend)
        whole = attend.mask(NUM_TOKENS, segments, NUM_TOKENS, CPU)
        assert isinstance(whole, BlockMask) == (backend == "flex")
        y = attend(q, k, v, whole, biases)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)

        # the last tokens, whose keys are all (no window) or those of a ring
        for num_queries in (1, 2, 8):
            first = NUM_TOKENS - num_queries
            keys = torch.arange(NUM_TOKENS)
            if args.window and num_queries > 1:
                keys = keys[max(0, first - args.window + 1) :]
            elif args.window:  # slot i of the ring has the last position that is i modulo 5
                keys = torch.tensor([5, 6, 7, 8, 4])
            mask = attend.mask(num_queries, segments, NUM_TOKENS, CPU)
            y = attend(q[:, first:], k[:, keys], v[:, keys], mask, biases[:, first:])
            torch.testing.assert_close(y, expected[:, first:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_distances_of_a_fixed_cache():
    """Of the token at position 6: its keys are the slots of a buffer, or of a ring of 5."""
    position = torch.tensor([6])
    full = Attend(KINDS["full"]).step_mask(position, None, 9)
    assert full.flatten().tolist() == [6, 5, 4, 3, 2, 1, 0, HIDDEN, HIDDEN]
    ring = Attend(KINDS["sliding"]).step_mask(position, None, 9)
    assert ring.flatten().tolist() == [1, 0, 4, 3, 2]
    early = Attend(KINDS["sliding"]).step_mask(torch.tensor([1]), None, 9)
    assert early.flatten().tolist() == [1, 0, HIDDEN, HIDDEN, HIDDEN]


def test_biases_equal_inkling():
    """Of every query and key that a mask does not hide, without attention."""
    biases_BTHE = inputs(ARGS)[3]
    theirs = InklingRelativeLogits(d_rel=4, rel_extent=4)
    with torch.no_grad():
        theirs.proj.copy_(torch.eye(4))
    positions = torch.arange(NUM_TOKENS)
    expected = theirs(biases_BTHE, positions, positions)

    # queries and keys of 0 have scores that are the biases alone
    q = torch.zeros(2, NUM_TOKENS, 4, NUM_TOKENS)
    k = torch.zeros(2, NUM_TOKENS, 2, NUM_TOKENS)
    v = torch.eye(NUM_TOKENS).expand(2, 2, -1, -1).transpose(1, 2)
    attend = Attend(ARGS)
    mask = attend.mask(NUM_TOKENS, None, NUM_TOKENS, CPU)
    weights_BTHS = attend(q, k, v, mask, biases_BTHE)

    hidden = torch.ones(NUM_TOKENS, NUM_TOKENS).triu(1).bool()
    expected_weights = expected.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(weights_BTHS, expected_weights.transpose(1, 2))


def test_a_token_beyond_the_distances_is_seen_without_a_bias():
    """Large biases of all distances change nothing if they are equal, up to the last distance."""
    args = replace(ARGS, canon_set="", qk_norm="none", num_layers=1)
    model = build(args)
    attention = model.layers["0"].attention
    tokens = random_tokens(args, rows=1, num_tokens=args.bias_extent + 1)
    with torch.no_grad():
        attention.relative.profiles.weight.zero_()
        plain = model(tokens)
        attention.relative.profiles.weight.fill_(3.0)
        biased = model(tokens)
    torch.testing.assert_close(biased[:, :-1], plain[:, :-1], rtol=1e-4, atol=1e-4)
    assert (biased[:, -1] - plain[:, -1]).abs().max() > 1e-3


# -- initial values and counts


@pytest.mark.parametrize(("init", "std"), [("paper", 0.02), ("lingua", 16**-0.5)])
def test_initial_values(init, std):
    """Those of matrices; other parameters begin as without biases."""
    args = replace(BASE, position="relative", init=init)
    model = Transformer(args)
    model.init_weights()
    profiles = model.layers["0"].attention.relative.profiles.weight
    assert profiles.shape == (1024, 16)
    assert abs(float(profiles.detach().std()) / std - 1) < 0.03

    plain = Transformer(replace(BASE, position="nope", init=init))
    plain.init_weights()
    state = model.state_dict()
    assert len(state) == len(plain.state_dict()) + 2 * args.num_layers
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name


def test_flops_equal_those_that_torch_counts():
    """Of further channels and distances: their products with parameters, of every head."""
    num_tokens = 16

    def counted(args):
        model = Transformer(args)
        model.init_weights()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(random_tokens(args, rows=1, num_tokens=num_tokens))
        return 3 * counter.get_total_flops() / num_tokens  # with backward

    args = replace(BASE, position="relative", relative_dim=4, relative_extent=8)
    for changes in ({"relative_dim": 7}, {"relative_extent": 16}, {"relative_dim": 2}):
        other = replace(args, **changes)
        expected = counted(other) - counted(args)
        assert expected != 0
        found = flops_per_token(other, num_tokens) - flops_per_token(args, num_tokens)
        assert found == expected


def test_embeddings_are_normalized():
    """So that their scale is of no importance, and their gain is."""
    args = replace(BASE, embed_norm=True, norm_eps=1e-12)
    model = build(args)
    tokens = random_tokens(args, rows=2, num_tokens=9)
    with torch.no_grad():
        expected = model(tokens)
        model.tok_embeddings.weight.mul_(64.0)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
        model.embed_norm.weight.mul_(2.0)
        assert (model(tokens) - expected).abs().max() > 1e-2

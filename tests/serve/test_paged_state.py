"""Blocks that read many sequences in one row, with their states in pages: equal to full passes.

The server is a stand-in: it holds keys and values by sequence, and assigns pages. vLLM itself
is in test_vllm.py.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from canon_pretrain.model.cache import Context
from canon_pretrain.serve.paged_state import Batch, BySequence, Group, PagedCache
from canon_pretrain.serve.vllm_plugin import check_options, check_served, state_shapes
from tests.support import refused
from tests.variants import build, variant

VARIANTS = [
    "rope ABCD gqa",
    "partial_rope_c A no_res act qk_full gqa",
    "nope FKOV sqrt",
    "rope post ABCDFO k2",
    "nope AC shift sqrt",
    "rope ABCD scalar k5",
    "rope AC moe capacity",
    "gla ABCD",
    "gla AC conv",
    "gdn BD k3 gate_rank",
    "gdn conv reflect",
    "mamba2 AB",
    "mamba2_mlp conv FO",
]
REFUSED = {
    "alibi ABCD k3 cst relu2 qk_per_head tied": "model.position",
    "relative ABCD distances6 qk_full gqa": "model.position",
    "nope BD dynamic sqrt": "model.canon_filter",
    "partial_rope_b AKQ heads gqa": "model.canon_filter",
    "rope ABCD documents": "model.document_mask",
    "nope smear": "model.smear",
}
LENGTHS = [1, 2, 3, 9, 20, 20, 31, 7]
NUM_PAGES = 4  # fewer than sequences
PADDING = 2


class Attention(nn.Module):
    """Holds keys and values of each sequence."""

    def __init__(self):
        super().__init__()
        self.keys = {}
        self.values = {}
        self.parts = []

    def forward(self, q, k, v, mask):
        y = torch.zeros_like(q)
        stop = 0
        for sequence, first, last in self.parts:
            tokens = slice(stop, stop + last - first)
            stop = tokens.stop
            for held, new in ((self.keys, k), (self.values, v)):
                before = held[sequence] if first else new[0, :0]
                held[sequence] = torch.cat((before, new[0, tokens]))
            heads = [self.keys[sequence], self.values[sequence]]
            repeats = q.shape[2] // k.shape[2]
            keys, values = (
                x.repeat_interleave(repeats, dim=1).transpose(0, 1)[None] for x in heads
            )
            queries = q[0, tokens].transpose(0, 1)[None]
            is_seen = torch.ones(last - first, last, dtype=torch.bool).tril(first)
            answer = F.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen)
            y[0, tokens] = answer[0].transpose(0, 1)
        return y


def schedule(lengths, seed):
    """Yield steps, lists of (sequence, first token, end, page); some sequences start again."""
    chance = random.Random(seed)
    position = dict.fromkeys(range(len(lengths)), 0)
    page_of = {}
    free = list(range(1, NUM_PAGES + 1))
    while position:
        for sequence in sorted(position):
            if sequence not in page_of and free:
                page_of[sequence] = free.pop(chance.randrange(len(free)))
        running = [sequence for sequence in page_of if chance.random() < 0.7]
        if not running:
            continue

        step = []
        for sequence in running:
            first = position[sequence]
            size = chance.choice([1, 1, 2, 3, 8])
            step.append((sequence, first, min(first + size, lengths[sequence])))
        # those with one token and a state come first
        step.sort(key=lambda part: not (part[1] and part[2] - part[1] == 1))
        yield [(*part, page_of[part[0]]) for part in step]

        for sequence, _, last in step:
            position[sequence] = last
            is_preempted = chance.random() < 0.1
            if last == lengths[sequence] or is_preempted:
                free.append(page_of.pop(sequence))
                position[sequence] = 0
                if last == lengths[sequence]:
                    del position[sequence]


def groups_of(step):
    """Return the sequences with one token and a state as a group, then every other one."""
    num_single = sum(first > 0 and last - first == 1 for _, first, last, _ in step)
    groups = []
    if num_single:
        groups.append(Group(slice(0, num_single), slice(0, num_single), is_first=False))
    stop = num_single
    for row in range(num_single, len(step)):
        _, first, last, _ = step[row]
        tokens = slice(stop, stop + last - first)
        stop = tokens.stop
        groups.append(Group(slice(row, row + 1), tokens, is_first=first == 0))
    return groups


def read_in_pages(model, kind, x_by_sequence, seed):
    """Return the outputs of the first block, by sequence, as a server computes them."""
    block = model.layers["0"]
    cache = PagedCache(block, kind.canon_kernel - 1)
    *conv_shapes, last_shape = state_shapes(kind)
    if kind.recurrent is None:
        conv_shapes = [last_shape]
        block.attention.attend = Attention()
    else:
        block.attention = BySequence(block.attention)
    # a page that is read before it is written shows
    conv_pages = None
    if conv_shapes:
        conv_pages = torch.full((NUM_PAGES + 1, *conv_shapes[0]), torch.nan)
        assert conv_pages.shape[2] == cache.state.num_channels
    recurrent_pages = torch.full((NUM_PAGES + 1, *last_shape), torch.nan)

    outputs = {}
    for step in schedule([len(x) for x in x_by_sequence], seed):
        sizes = [last - first for _, first, last, _ in step]
        starts = torch.tensor([0, *sizes]).cumsum(0)
        pages = torch.tensor([page for *_, page in step])
        is_first = torch.tensor([first == 0 for _, first, _, _ in step])
        num_tokens = sum(sizes) + PADDING
        batch = Batch.of(starts, pages, is_first, num_tokens, cache.state.reach)

        x = torch.cat([x_by_sequence[sequence][first:last] for sequence, first, last, _ in step])
        positions = torch.cat([torch.arange(first, last) for _, first, last, _ in step])
        cache.positions_1N = F.pad(positions, (0, PADDING))[None]
        if kind.recurrent is None:
            block.attention.attend.parts = [part[:3] for part in step]
        else:
            cache.groups = groups_of(step)
            cache.recurrent_R = recurrent_pages[pages]
        with cache.state.reading(batch, conv_pages, torch.float32, x.device):
            y = block(F.pad(x, (0, 0, 0, PADDING))[None], Context(cache=cache))[0]
        recurrent_pages[pages] = cache.recurrent_R if kind.recurrent else torch.nan

        for (sequence, first, last, _), start in zip(step, starts.tolist(), strict=False):
            before = outputs[sequence] if first else y[:0]
            outputs[sequence] = torch.cat((before, y[start : start + last - first]))
    return outputs


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_pages_of_many_sequences_are_full_passes(name):
    args = replace(variant(name), num_layers=1)
    model = build(args).eval()
    (kind,) = args.kinds.values()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(length, args.dim, generator=generator) for length in LENGTHS]
    expected = [model.layers["0"](x[None])[0] for x in inputs]

    outputs = read_in_pages(model, kind, inputs, seed=0)
    assert len(outputs) == len(LENGTHS)
    for i, y in enumerate(expected):
        assert (outputs[i] - y).abs().max() < 1e-5 * max(1.0, float(y.abs().max()))


def test_schedule_starts_again_and_reuses_pages():
    steps = list(schedule(LENGTHS, seed=0))
    starts = [(sequence, page) for step in steps for sequence, first, _, page in step if first == 0]
    assert len(starts) > len(LENGTHS)  # preempted
    assert len({sequence for sequence, _ in starts}) == len(LENGTHS)
    assert any(len(step) > 1 for step in steps)


@pytest.mark.parametrize(("name", "field"), REFUSED.items())
def test_models_that_are_not_served_are_refused(name, field):
    with refused("serve.vllm_model", name=field):
        check_served(variant(name))


def test_options_that_are_not_supported_are_refused():
    class Config:
        class parallel_config:
            tensor_parallel_size = 1
            pipeline_parallel_size = 1

        class model_config:
            quantization = None
            enforce_eager = False

        class device_config:
            device_type = "cpu"

        speculative_config = None

    check_options(Config)
    Config.parallel_config.tensor_parallel_size = 2
    with refused("serve.vllm_option", name="--tensor-parallel-size", given="2"):
        check_options(Config)
    Config.parallel_config.tensor_parallel_size = 1
    Config.model_config.quantization = "fp8"
    with refused("serve.vllm_option", name="--quantization", given="fp8"):
        check_options(Config)

    Config.model_config.quantization = None
    Config.device_config.device_type = "cuda"
    with refused("serve.vllm_eager"):
        check_options(Config)
    Config.model_config.enforce_eager = True
    check_options(Config)

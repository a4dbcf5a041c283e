"""Rows that join and leave a running batch, against full passes of each alone."""

import pytest
import torch

from canon_pretrain.model.cache import Cache
from canon_pretrain.model.row_cache import RowCache, order_without
from tests.support import refused
from tests.variants import BASE, PATTERNS, build, every_variant, random_tokens, variant

CPU = torch.device("cpu")


class Rows:
    """Texts of random tokens that are read by a RowCache; every logit is compared."""

    def __init__(self, model):
        self.model = model
        self.cache = RowCache(model.args, CPU)
        self.texts = []
        self.positions = []
        self.num_compared = 0

    def replace(self, leaving=(), lengths=(), chunk=160):
        """Let rows leave, and new texts join after prompts of these lengths."""
        joining = []
        texts = []
        for length in lengths:
            text = random_tokens(self.model.args, 1, 100, seed=length)
            cache = Cache.of(self.model.args)
            for start in range(0, length, chunk):
                with torch.no_grad():
                    self.model(text[:, start : min(length, start + chunk)], cache=cache)
            joining.append(cache)
            texts.append(text)
        order = self.cache.replace(leaving, joining)
        self.texts = [self.texts[row] for row in order] + texts
        self.positions = [self.positions[row] for row in order] + [*lengths]
        assert self.cache.lengths == self.positions

    def read(self, num_steps):
        for _ in range(num_steps):
            places = list(zip(self.texts, self.positions, strict=True))
            tokens_B = torch.stack([text[0, position] for text, position in places])
            logits_BV = self.cache.read(self.model, tokens_B)
            self.positions = [position + 1 for position in self.positions]
            for (text, position), logits_V in zip(places, logits_BV, strict=True):
                with torch.no_grad():
                    whole_V = self.model(text[:, : position + 1], logits_to_keep=1)[0, -1]
                torch.testing.assert_close(logits_V, whole_V, rtol=0, atol=1e-4)
                self.num_compared += 1


@every_variant
def test_each_row_computes_what_it_computes_alone(args):
    rows = Rows(build(args).eval())
    rows.replace(lengths=[9])
    rows.read(2)
    rows.replace(lengths=[1, 30], chunk=7)
    rows.read(3)
    rows.replace(leaving=[0], lengths=[2, 5])  # the last row takes the first one's place
    rows.read(2)
    rows.replace(leaving=[1, 3])
    rows.read(1)
    rows.replace(leaving=[0, 1], lengths=[3])
    rows.read(2)

    assert rows.num_compared == 2 + 9 + 8 + 2 + 2


@pytest.mark.parametrize("name", ["rope ABCD gqa", "gla BD dynamic", "alibi AC layernorm"])
def test_buffers_grow_in_rows_and_tokens(name):
    rows = Rows(build(variant(name)).eval())
    rows.replace(lengths=[60, 61])
    rows.read(6)  # past the first capacity
    rows.replace(lengths=[3, 70, 4, 5, 6, 7, 8])
    rows.read(2)
    rows.replace(leaving=range(9), lengths=[3, 4])
    rows.read(1)


def test_a_prompt_joins_several_times_and_is_unchanged():
    model = build(variant("rope ABCD dynamic gqa documents")).eval()
    text = random_tokens(model.args, 1, 12)
    prefilled = Cache.of(model.args)
    cache = RowCache(model.args, CPU)
    with torch.no_grad():
        model(text, cache=prefilled)
        cache.replace([], [prefilled, prefilled])
        cache.read(model, torch.tensor([5, 6]))
        cache.replace([0, 1], [prefilled])
        later_V = cache.read(model, torch.tensor([7]))[0]
        whole_V = model(torch.cat((text, torch.tensor([[7]])), dim=1))[0, -1]
    torch.testing.assert_close(later_V, whole_V, rtol=0, atol=1e-4)


def test_the_last_rows_fill_the_holes():
    assert order_without([], 3) == [0, 1, 2]
    assert order_without([0], 3) == [2, 1]
    assert order_without([0, 2], 5) == [4, 1, 3]
    assert order_without([1, 2], 3) == [0]
    assert order_without([0, 1], 2) == []


@pytest.mark.parametrize("name", ["select_rows", "branch", "cut", "snapshot", "fix", "undo_pass"])
def test_rows_have_no_methods_of_a_cache_of_one_length(name):
    assert hasattr(Cache, name) and not hasattr(RowCache, name)


def test_a_row_longer_than_the_model_reads_is_refused():
    model = build(BASE).eval()
    cache = RowCache(model.args, CPU)
    prefilled = Cache.of(model.args)
    with torch.no_grad():
        model(random_tokens(model.args, 1, model.args.max_seq_len), cache=prefilled)
    cache.replace([], [prefilled])
    with refused("model.sequence_too_long"):
        cache.read(model, torch.tensor([5]))


@pytest.mark.parametrize("args", [variant("rope ABCD gqa"), PATTERNS["window"]])
def test_a_row_that_was_not_finite_leaves_nothing_behind(args):
    rows = Rows(build(args).eval())
    rows.replace(lengths=[30, 25, 20])
    for layer in rows.cache.layers:
        for storage in layer._storages.values():
            storage[:2] = torch.nan

    rows.replace(leaving=[0, 1], lengths=[3, 28])  # one row moves into a place, two join
    rows.read(2)

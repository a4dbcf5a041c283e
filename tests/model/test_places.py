"""Places and filters of a convolution besides the paper's: outputs, parts of Canon-B, a scale.

tests/variants.py has them in every mixer, against the reference model. Here: transformers' own
classes, the startup check, mixers of the user's own.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers.models.inkling.modeling_inkling import InklingShortConvolution
from transformers.models.inkling2.modeling_inkling2 import (
    Inkling2DynamicShortConvolution,
    Inkling2ShortConvolution,
)

from canon_pretrain.model.args import CANON_SITES, ModelArgs
from canon_pretrain.model.cache import Context, LayerCache
from canon_pretrain.model.canon import Canon
from canon_pretrain.model.canon_check import training_cases, training_problem
from canon_pretrain.model.transformer import Transformer
from tests.support import HANGS_AFTER_S, refused
from tests.variants import BASE

FILTERS = (
    {"canon_scale": "sqrt"},
    {"canon_filter": "scalar"},
    {"canon_filter": "shift", "canon_kernel": 2},
    {"canon_filter": "shift", "canon_kernel": 2, "canon_scale": "sqrt"},
)
PLACES = ("K", "V", "O", "F")
"""Where Inkling has a convolution."""


def theirs(their_class, canon):
    """Return a convolution of transformers with the weights of ours."""
    channels, _, taps = canon.weight.shape
    module = their_class(channels, taps, layer_idx=0, conv_idx=0)
    with torch.no_grad():
        module.conv1d.weight.copy_(canon.weight)
    return module


def compare_with(their_class, canon):
    """Assert equal outputs and gradients, to 1e-6, of rows longer and shorter than the kernel."""
    other = theirs(their_class, canon)
    for num_tokens in (1, 2, 9):
        x = torch.randn(2, num_tokens, canon.weight.shape[0], requires_grad=True)
        y_grad = torch.randn(x.shape)
        (ours,) = canon((x,))
        expected = other(x)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
        ours_grads = torch.autograd.grad(ours, (x, canon.weight), y_grad)
        expected_grads = torch.autograd.grad(expected, (x, other.conv1d.weight), y_grad)
        for grad, expected_grad in zip(ours_grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("site", PLACES)
def test_a_place_equals_inkling(site, taps):
    args = replace(BASE, canon_set="FKOV", canon_kernel=taps, num_kv_heads=2)
    compare_with(InklingShortConvolution, Canon(args, site))


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("site", PLACES)
def test_a_scaled_place_equals_inkling2(site, taps):
    args = replace(BASE, canon_set="FKOV", canon_kernel=taps, num_kv_heads=2, canon_scale="sqrt")
    compare_with(Inkling2ShortConvolution, Canon(args, site))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("site", "KV")
def test_filters_of_heads_equal_inkling2(site, taps, kv_heads):
    """Values and gradients, of rows longer and shorter than the kernel."""
    args = replace(
        BASE,
        canon_set="KV",
        canon_filter="dynamic_heads",
        canon_scale="sqrt",
        canon_kernel=taps,
        num_kv_heads=kv_heads,
    )
    canon = Canon(args, site)
    assert canon.per_head is not None
    torch.nn.init.normal_(canon.per_head, std=0.1, generator=torch.Generator().manual_seed(1))
    channels = kv_heads * args.head_dim
    other = Inkling2DynamicShortConvolution(
        channels, args.dim, kv_heads, taps, layer_idx=0, conv_idx=0
    )

    # their first tap is the current token's, our last
    def reversed_taps(rows):
        return rows.unflatten(0, (kv_heads, taps)).flip(1).flatten(0, 1)

    with torch.no_grad():
        other.static_weight.copy_(canon.weight[:, 0].T.flip(0))
        other.weight_proj.weight.copy_(reversed_taps(canon.per_head))

    for num_tokens in (1, 2, 9):
        x = torch.randn(2, num_tokens, channels, requires_grad=True)
        source = torch.randn(2, num_tokens, args.dim, requires_grad=True)
        y_grad = torch.randn(x.shape)
        (ours,) = canon((x,), source_BTD=source)
        expected = other(x, source)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)

        weights = (canon.weight, canon.per_head)
        dx, dsource, dweight, dheads = torch.autograd.grad(ours, (x, source, *weights), y_grad)
        their_weights = (other.static_weight, other.weight_proj.weight)
        their_grads = torch.autograd.grad(expected, (x, source, *their_weights), y_grad)
        our_grads = (dx, dsource, dweight[:, 0].T.flip(0), reversed_taps(dheads))
        for grad, expected_grad in zip(our_grads, their_grads, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-5)


@torch.no_grad()
def test_filters_of_heads_decode_as_inkling2():
    """A token at a time with our cache, against their whole row."""
    args = replace(BASE, canon_set="K", canon_filter="dynamic_heads", canon_scale="sqrt")
    canon = Canon(args, "K")
    torch.nn.init.normal_(canon.per_head, std=0.1, generator=torch.Generator().manual_seed(1))
    other = Inkling2DynamicShortConvolution(args.dim, args.dim, 4, 4, layer_idx=0, conv_idx=0)
    other.static_weight.copy_(canon.weight[:, 0].T.flip(0))
    rows = canon.per_head.unflatten(0, (4, 4)).flip(1).flatten(0, 1)
    other.weight_proj.weight.copy_(rows)
    x = torch.randn(2, 9, args.dim)
    source = torch.randn(2, 9, args.dim)

    context = Context(cache=LayerCache())
    outputs = []
    for chunk in (slice(0, 3), *(slice(t, t + 1) for t in range(3, 9))):
        outputs += canon((x[:, chunk],), context, source[:, chunk])

    torch.testing.assert_close(torch.cat(outputs, dim=1), other(x, source), rtol=0, atol=1e-6)


def test_filters_of_heads_are_of_queries_keys_and_values_only():
    args = replace(BASE, canon_set="FKOQV", canon_filter="dynamic_heads", num_kv_heads=2)
    block = Transformer(args).layers["0"]
    # a row per head and tap
    assert block.attention.canon_q.per_head.shape == (4 * 4, args.dim)
    assert block.attention.canon_k.per_head.shape == (2 * 4, args.dim)
    assert block.attention.canon_v.per_head.shape == (2 * 4, args.dim)
    assert block.canon_o.per_head is None
    assert block.canon_f.per_head is None

    # of the sum at the static sites K + 1 terms, at the others 2 K + 1
    scaled = replace(args, canon_scale="sqrt")
    assert [round(scaled.canon_factor_at(site) ** -2) for site in "FKOQV"] == [5, 9, 5, 9, 9]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("canon_filter", {"canon_set": "ABCD"}),
        ("canon_filter", {"canon_set": "FO"}),
        ("canon_filter", {"canon_set": "K", "mixer": "a.py:Own"}),
        ("canon_trainable", {"canon_set": "K", "canon_trainable": False}),
    ],
)
def test_filters_of_heads_need_heads(name, changes):
    with refused("model.conflict", name=name):
        ModelArgs(canon_filter="dynamic_heads", **changes)


@pytest.mark.parametrize("site", "ABCD")
@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_a_filter_is_right_in_every_backend(site, changes):
    """On a CPU: the formula, and plain torch; the Triton kernels interpreted are below."""
    args = replace(BASE, canon_set=site, document_mask=True, **changes)
    shape, device = (2, 9), torch.device("cpu")
    for backend in ("reference", "compiled"):
        assert training_problem(args, backend, shape, torch.float32, device) is None


@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_a_filter_is_right_in_the_triton_kernels(changes):
    pytest.importorskip("triton")
    code = f"""
import torch
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.canon_check import training_problem
small = dict(dim=12, num_heads=2, ffn_dim=14, vocab_size=32, num_layers=1)
for canon_set in ("ABCD", "KVOF"):
    args = ModelArgs(**small, qk_norm="per_head", canon_set=canon_set, **{changes!r})
    for dtype in (torch.float32, torch.bfloat16):
        problem = training_problem(args, "triton", (2, 9), dtype, torch.device("cpu"))
        assert problem is None, (canon_set, dtype, problem)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=HANGS_AFTER_S)


def test_filters_begin_as_documented():
    def first_block(**changes):
        model = Transformer(replace(BASE, canon_set="A", **changes))
        model.init_weights()
        return model.layers["0"].canon_a

    # scalar: x_t + .4 x_{t-1} + .2 x_{t-2} + .1 x_{t-3} in all channels, with and without residual
    taps = torch.tensor([0.1, 0.2, 0.4])
    for residual in (True, False):
        canon = first_block(canon_filter="scalar", canon_residual=residual)
        assert canon.weight.shape == (1, 1, 4)
        one = torch.zeros(1, 5, BASE.dim)
        one[:, 0] = 1.0  # an impulse, which shows the taps
        (y,) = canon((one,))
        expected = torch.cat((torch.ones(1), taps.flip(0), torch.zeros(1)))
        torch.testing.assert_close(y, expected[None, :, None].expand_as(y))

    # shift: shares in [0, 1] that differ between channels
    shares = first_block(canon_filter="shift", canon_kernel=2).weight
    assert shares.shape == (BASE.dim, 1, 1)
    assert 0 <= shares.min() < 0.2 and 0.8 < shares.max() <= 1


def test_a_shift_is_a_mix_of_two_tokens():
    args = replace(BASE, canon_set="A", canon_filter="shift", canon_kernel=2)
    canon = Canon(args, "A")
    x = torch.randn(2, 7, args.dim)
    (y,) = canon((x,))
    mix = canon.weight.flatten()
    torch.testing.assert_close(y[:, 1:], torch.lerp(x[:, 1:], x[:, :-1], mix))
    torch.testing.assert_close(y[:, 0], x[:, 0] * (1 - mix))


def test_taps_of_dynamic_filters_count_twice_in_the_scale():
    args = replace(BASE, canon_set="V", canon_filter="dynamic")
    plain = Canon(args, "V")
    scaled = Canon(replace(args, canon_scale="sqrt"), "V")
    for canon in (plain, scaled):
        for parameter in canon.parameters():
            torch.nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 7, args.dim)
    torch.testing.assert_close(scaled((x,))[0], plain((x,))[0] / 3)  # sqrt(2 * 4 + 1)


@pytest.mark.parametrize("mixer", ["attention", "gla"])
def test_the_startup_check_covers_every_place(mixer):
    position = "rope" if mixer == "attention" else "nope"
    shape, dtype, device = (2, 9), torch.float32, torch.device("cpu")
    checked = set()
    for canon_set in ("ACDFKOQV", "B"):
        args = replace(BASE, mixer=mixer, position=position, canon_set=canon_set)
        checked |= {name for case in training_cases(args) for name in case.name.split()}
        assert training_problem(args, "compiled", shape, dtype, device) is None
    assert checked >= set(CANON_SITES)


@pytest.mark.parametrize("site", "KOQV")
def test_the_startup_check_finds_a_fault_at_every_place(site, monkeypatch):
    correct = Canon.forward

    def leaks(self, parts, *others):
        parts = correct(self, parts, *others)
        if self.backend == "reference":  # in float64
            return parts
        return tuple(part + 0.01 * part.roll(1, dims=1) for part in parts)

    monkeypatch.setattr(Canon, "forward", leaks)
    args = replace(BASE, canon_set=site)
    shape, dtype, device = (2, 9), torch.float32, torch.device("cpu")
    problem = training_problem(args, "compiled", shape, dtype, device)
    assert problem is not None and problem.startswith(f"{site}: ")


MIXER = """
import torch
from torch import Tensor, nn

from canon_pretrain.model.canon import make_canon
from canon_pretrain.model.cache import NO_CONTEXT
from canon_pretrain.model.mixers import Mixer


class Plain(Mixer):
    def __init__(self, args):
        super().__init__()
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.canon_k = make_canon("K", args, widths=(args.dim,))

    def forward(self, x_BTD, context=NO_CONTEXT):
        k = self.wk(x_BTD)
        if self.canon_k is not None:
            (k,) = self.canon_k((k,), context, x_BTD)
        return k
"""


def test_an_own_mixer_has_the_places_that_it_makes(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(MIXER)
    args = replace(BASE, mixer=f"{path}:Plain", position="nope")
    for canon_set in ("K", "AKOF"):
        model = Transformer(replace(args, canon_set=canon_set))
        model.init_weights()
        sites = {m.site for m in model.modules() if isinstance(m, Canon)}
        assert sites == set(canon_set)
    with refused("mixer.no_canon_b", given="KV"):
        Transformer(replace(args, canon_set="KV"))


def test_the_order_of_sites_is_of_no_importance():
    assert ModelArgs(canon_set="fOkV") == ModelArgs(canon_set="VKOF")
    assert ModelArgs(canon_set="VKOF").canon_set == "FKOV"

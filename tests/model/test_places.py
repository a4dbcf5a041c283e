"""Places of a convolution besides the paper's: outputs, and parts of Canon-B.

tests/variants.py has them in every mixer, against the reference model. Here: transformers' own
classes, the startup check, mixers of the user's own.
"""

from dataclasses import replace

import pytest
import torch
from transformers.models.inkling.modeling_inkling import InklingShortConvolution

from canon_pretrain.model.args import CANON_SITES, ModelArgs
from canon_pretrain.model.canon import Canon
from canon_pretrain.model.canon_check import training_cases, training_problem
from canon_pretrain.model.transformer import Transformer
from tests.support import refused
from tests.variants import BASE

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

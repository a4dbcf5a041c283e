"""The mixers of train_configs/mixers against the papers' recurrences and transformers' classes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attention import rope_tables
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.mixers import measure
from canon_pretrain.model.transformer import Transformer
from tests.canon_inputs import randoms
from tests.mixers import recurrences
from tests.support import ROOT
from tests.variants import BASE, build, random_tokens

FOLDER = ROOT / "train_configs" / "mixers"
D, H, K = BASE.dim, BASE.num_heads, BASE.head_dim
LATENT, TURNING = 4 * K, K // 2


@dataclass(frozen=True)
class Example:
    """A file of the folder, its formulas and what it costs by hand."""

    mixer: str
    reference: Callable[..., torch.Tensor]
    num_parameters: int
    state_per_row: int = 0
    state_per_token: int = 0
    canon_set: str = "ABCD"
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def args(self) -> ModelArgs:
        settings = {"position": "nope"} | dict(self.settings)
        return replace(BASE, mixer=f"{FOLDER}/{self.mixer}", **settings)


N = 8  # Mamba-3's states
EXAMPLES = {
    "gated_attention": Example(
        "gated_attention.py:GatedAttention",
        recurrences.gated_attention,
        num_parameters=2 * D * D + 2 * D * D // 2 + D * D,
        state_per_token=2 * D // 2,
        settings=(("position", "rope"), ("num_kv_heads", 2)),
    ),
    "gated_attention window": Example(
        "gated_attention.py:GatedAttention",
        recurrences.gated_attention,
        num_parameters=5 * D * D,
        state_per_row=5 * 2 * D,
        settings=(("position", "rope"), ("window", 5)),
    ),
    "kimi_delta_attention": Example(
        "kimi_delta_attention.py:KimiDeltaAttention",
        recurrences.kimi_delta_attention,
        # q, k (D / 2), v, o; step; decay and gate of rank K; norm, A, dt_bias
        num_parameters=3 * D * D + D * H + (D * K + K * D // 2) + 2 * D * K + K + H + D // 2,
        state_per_row=D // 2 * K,
    ),
    "kimi_delta_attention conv": Example(
        "kimi_delta_attention.py:KimiDeltaAttention",
        recurrences.kimi_delta_attention,
        num_parameters=4 * D * D + D * H + 4 * D * K + K + H + D + 3 * 4 * D,
        state_per_row=D * K + 3 * 3 * D,
        canon_set="ACD",
        settings=(("expand_k", 1.0), ("mixer_conv", True)),
    ),
    "mla": Example(
        "mla.py:LatentAttention",
        recurrences.latent_attention,
        num_parameters=D * (D + H * TURNING) + D * (LATENT + TURNING) + LATENT * (2 * D + 1) + D * D,
        state_per_token=LATENT + TURNING,
    ),
    "rwkv7": Example(
        "rwkv7.py:RWKV7",
        recurrences.rwkv7,
        num_parameters=4 * D * D + 3 * 2 * 32 * D + 6 * D + 5 * D + 2 * D,
        state_per_row=D * K + D,
        canon_set="ACD",
    ),
    "mamba3": Example(
        "mamba3.py:Mamba3",
        recurrences.mamba3,
        num_parameters=D * (2 * D + 2 * N + 3 * H + N // 4) + 2 * N * (1 + H) + 2 * H + D * D,
        state_per_row=D * N + H * N // 4 + H * N + D,
        settings=(("state_dim", N),),
    ),
}
each_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)


def build_example(args: ModelArgs, seed: int = 0) -> Transformer:
    """Return the model in float64, with weights for which every part of a formula counts."""
    model = build(args).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.layers.values():
            for name, parameter in layer.attention.named_parameters():
                if "canon_" in name or "conv1d" in name:
                    continue
                parameter.normal_(generator=generator)
                if parameter.ndim == 1:
                    parameter.mul_(0.5).add_(0.5)
                else:
                    parameter.mul_(parameter.shape[-1] ** -0.5)
    return model


class Recorder:
    """The inputs and outputs of the first layer's mixer, [B, T, D], of all passes so far."""

    def __init__(self, model: Transformer) -> None:
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        model.layers["0"].attention.register_forward_hook(self._record)

    def _record(self, module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.inputs.append(inputs[0].detach())
        self.outputs.append(output.detach())


def expected_outputs(example, args, model, x_BTD, documents_BT):
    """Return the reference's outputs of every document (padding is -1), NaN for padding."""
    weights = dict(model.layers["0"].attention.state_dict())
    y_BTD = torch.full_like(x_BTD, torch.nan)
    for row, documents_T in enumerate(documents_BT):
        for document in documents_T.unique().tolist():
            if document < 0:
                continue
            (positions,) = (documents_T == document).nonzero(as_tuple=True)
            start = int(positions[0])
            x_TD = x_BTD[row, positions]
            y_BTD[row, positions] = example.reference(weights, args, x_TD, start)
    return y_BTD


@each_example
@pytest.mark.parametrize("canon", [False, True], ids=["plain", "canon_docs"])
def test_equals_the_formulas_token_by_token(example, canon):
    args = example.args
    if canon:
        args = replace(args, canon_set=example.canon_set, document_mask=True)
    model = build_example(args)
    recorder = Recorder(model)
    tokens = random_tokens(args, 2, 39)
    with torch.no_grad():
        model(tokens)

    documents = torch.zeros_like(tokens)
    if canon:
        ends = (tokens == args.eos_id).long()
        documents = ends.cumsum(1) - ends
        assert documents.max() >= 3
    expected = expected_outputs(example, args, model, recorder.inputs[0], documents)
    assert expected.abs().mean() > 1e-2
    torch.testing.assert_close(recorder.outputs[0], expected, atol=1e-5, rtol=0)


@each_example
def test_random_parts_of_a_padded_text_equal_the_formulas(example):
    """A cache continued by random numbers of tokens, rows with documents and left padding."""
    args = replace(example.args, canon_set=example.canon_set, document_mask=True)
    model = build_example(args, seed=1)
    random = np.random.default_rng(3)
    for seed in range(3):
        recorder = Recorder(model)
        lengths = random.choice([1, 1, 2, 5, 16, 17, 23], size=4).tolist()
        num_tokens = sum(lengths)
        tokens = random_tokens(args, 3, num_tokens, seed=seed)
        pads = torch.tensor([0, 1, int(random.integers(lengths[0]))])
        is_real = torch.arange(lengths[0]) >= pads[:, None].clamp(max=lengths[0] - 1)

        cache = Cache.of(args)
        start = 0
        with torch.no_grad():
            for number, length in enumerate(lengths):
                part = tokens[:, start : start + length]
                model(part, cache=cache, is_real_BT=is_real if number == 0 else None)
                start += length

        is_padding = ~torch.nn.functional.pad(is_real, (0, num_tokens - lengths[0]), value=True)
        ends = ((tokens == args.eos_id) & ~is_padding).long()
        documents = (ends.cumsum(1) - ends).masked_fill(is_padding, -1)
        x_BTD = torch.cat(recorder.inputs, dim=1)
        y_BTD = torch.cat(recorder.outputs, dim=1)
        expected = expected_outputs(example, args, model, x_BTD, documents)
        real = documents >= 0
        torch.testing.assert_close(y_BTD[real], expected[real], atol=1e-5, rtol=0)


@each_example
def test_costs_are_those_counted_by_hand(example):
    measures = measure(example.args)
    assert measures.num_parameters == example.num_parameters
    assert measures.state_per_row == example.state_per_row
    assert measures.state_per_token == example.state_per_token


@each_example
def test_no_gradient_reaches_a_later_token(example):
    args = replace(example.args, canon_set=example.canon_set)
    mixer = build_example(args).layers["0"].attention
    for t in (0, 15, 16, 29):
        (x_BTD,) = randoms((1, 36, D))
        x_BTD.requires_grad_()
        mixer(x_BTD)[0, t].sum().backward()
        reached = x_BTD.grad[0].abs().sum(dim=1)
        assert reached[t] > 0
        assert t == 0 or reached[0] > 0 or args.window
        assert not reached[t + 1 :].any()


@each_example
def test_training_steps_lower_the_loss(example):
    args = replace(example.args, canon_set=example.canon_set, document_mask=True)
    model = Transformer(args)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = random_tokens(args, 4, 33)
    losses = []
    for _ in range(6):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    assert losses[-1] < losses[0] - 0.3

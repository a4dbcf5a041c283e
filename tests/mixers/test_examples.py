"""The mixers of train_configs/mixers against the papers' recurrences and transformers' classes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV2Config, KimiLinearConfig, Qwen3NextConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from canon_pretrain.kernels.backends import canon_reference
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
        num_parameters=D * (D + H * TURNING)
        + D * (LATENT + TURNING)
        + LATENT * (2 * D + 1)
        + D * D,
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
        self.hook = model.layers["0"].attention.register_forward_hook(self._record)

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
    tokens = random_tokens(args, 2 if canon else 1, 35)
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
    for seed in range(2):
        recorder = Recorder(model)
        lengths = random.choice([1, 1, 2, 5, 16, 17, 23], size=3).tolist()
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
        recorder.hook.remove()

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


def float32_mixer(args: ModelArgs) -> torch.nn.Module:
    mixer = build_example(args).layers["0"].attention
    return mixer.float()


def deepseek_attention(ours, args):
    config = DeepseekV2Config(
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=K,
        qk_rope_head_dim=TURNING,
        v_head_dim=K,
        attention_bias=False,
    )
    config._attn_implementation = "eager"
    theirs = DeepseekV2Attention(config, 0)
    theirs.kv_a_layernorm.variance_epsilon = args.norm_eps
    w = ours.state_dict()
    by_head = [w[f"{name}.weight"].unflatten(0, (H, K)) for name in ("wk", "wv")]
    theirs.load_state_dict(
        {
            "q_proj.weight": w["wq.weight"],
            "kv_a_proj_with_mqa.weight": torch.cat((w["w_latent.weight"], w["w_rope.weight"])),
            "kv_a_layernorm.weight": w["latent_norm.weight"],
            "kv_b_proj.weight": torch.cat(by_head, dim=1).flatten(0, 1),
            "o_proj.weight": w["wo.weight"],
        }
    )

    def run(x_BTD):
        cos_TR, sin_TR = rope_tables(x_BTD.shape[1], TURNING, args.rope_theta)
        mask = torch.full((x_BTD.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        return theirs(x_BTD, mask, position_embeddings=torch.complex(cos_TR, sin_TR)[None])[0]

    return run


def qwen_attention(ours, args):
    """Its rotation is of halves, not of neighbors; its norm's gain is 1 + weight."""
    config = Qwen3NextConfig(
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=args.kv_heads,
        head_dim=K,
        rms_norm_eps=args.norm_eps,
    )
    config._attn_implementation = "eager"
    theirs = Qwen3NextAttention(config, 0)
    halves = torch.cat((torch.arange(0, K, 2), torch.arange(1, K, 2)))
    w = ours.state_dict()
    q, k = (w[f"attend.{name}.weight"].unflatten(0, (-1, K))[:, halves] for name in ("wq", "wk"))
    gate = w["wg.weight"].unflatten(0, (H, K))
    theirs.load_state_dict(
        {
            "q_proj.weight": torch.cat((q, gate), dim=1).flatten(0, 1),
            "k_proj.weight": k.flatten(0, 1),
            "v_proj.weight": w["attend.wv.weight"],
            "o_proj.weight": w["attend.wo.weight"],
            "q_norm.weight": w["attend.q_norm.weight"][halves] - 1,
            "k_norm.weight": w["attend.k_norm.weight"][halves] - 1,
        }
    )

    def run(x_BTD):
        tables = rope_tables(x_BTD.shape[1], K, args.rope_theta)
        cos, sin = (torch.cat((table, table), dim=1)[None] for table in tables)
        mask = torch.full((x_BTD.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        return theirs(x_BTD, (cos, sin), mask)[0]

    return run


def kimi_attention(ours, args):
    config = KimiLinearConfig(
        hidden_size=D,
        num_hidden_layers=1,
        linear_head_dim=K,
        linear_num_heads=H,
        linear_conv_kernel_dim=args.canon_kernel,
        rms_norm_eps=args.norm_eps,
        layer_types=["linear_attention"],
    )
    theirs = KimiLinearDeltaAttention(config, 0)
    names = {
        "wq": "q_proj",
        "wk": "k_proj",
        "wv": "v_proj",
        "wb": "b_proj",
        "wo": "o_proj",
        "conv1d": "conv1d",
        "decay_down": "forget_gate.f_a_proj",
        "decay_up": "forget_gate.f_b_proj",
        "gate_down": "g_a_proj",
        "gate_up": "g_b_proj",
        "o_norm": "o_norm",
    }
    w = ours.state_dict()
    weights = {f"{name}.weight": w[f"{own}.weight"] for own, name in names.items()}
    weights["forget_gate.A_log"] = w["A_log"].view(1, 1, H, 1)
    weights["forget_gate.dt_bias"] = w["dt_bias"]
    theirs.load_state_dict(weights)
    return theirs


@pytest.mark.parametrize("num_tokens", [1, 33, 70])
@pytest.mark.parametrize(
    ("name", "oracle", "changes"),
    [
        ("kimi_delta_attention conv", kimi_attention, {}),
        ("mla", deepseek_attention, {}),
        ("gated_attention", qwen_attention, {"qk_norm": "per_head"}),
    ],
)
def test_values_and_gradients_equal_transformers(name, oracle, changes, num_tokens):
    args = replace(EXAMPLES[name].args, **changes)
    ours = float32_mixer(args)
    theirs = oracle(ours, args)
    x_BTD, dy_BTD = randoms((2, num_tokens, D), (2, num_tokens, D), dtype=torch.float32)
    x_BTD.requires_grad_()
    y_BTD = ours(x_BTD)
    expected = theirs(x_BTD)
    assert expected.abs().mean() > 1e-2
    torch.testing.assert_close(y_BTD, expected, atol=1e-5, rtol=1e-5)

    (dx,) = torch.autograd.grad(y_BTD, x_BTD, dy_BTD)
    (expected_dx,) = torch.autograd.grad(expected, x_BTD, dy_BTD)
    torch.testing.assert_close(dx, expected_dx, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": "full", "canon_set": "ABCD", "bias": True}])
def test_gated_attention_is_an_option_of_the_product(changes):
    args = replace(EXAMPLES["gated_attention"].args, **changes)
    example = build_example(args)
    product = build_example(replace(args, mixer="attention", attention_gate="per_channel"))
    weights = {name.replace(".attend.", "."): w for name, w in example.state_dict().items()}
    product.load_state_dict(weights)
    tokens = random_tokens(args, 2, 40)
    with torch.no_grad():
        torch.testing.assert_close(product(tokens), example(tokens), rtol=0, atol=0)


@each_example
def test_bfloat16_is_close_to_float32_and_keeps_the_dtype(example):
    mixer = build_example(replace(example.args, canon_set=example.canon_set)).layers["0"].attention
    (x_BTD,) = randoms((2, 50, D), dtype=torch.bfloat16)
    with torch.no_grad():
        expected = mixer(x_BTD.double())
        y_BTD = mixer.bfloat16()(x_BTD)
    assert y_BTD.dtype == torch.bfloat16
    error = (y_BTD.double() - expected).square().mean().sqrt()
    assert error < 0.05 * expected.square().mean().sqrt()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@each_example
def test_one_graph_traces_a_mixer_with_documents(example):
    args = replace(example.args, canon_set=example.canon_set, document_mask=True)
    model = build_example(args)
    tokens = random_tokens(args, 2, 40)
    with torch.no_grad():
        expected = model(tokens)
        for block in model.layers.values():
            block.attention.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(model(tokens), expected)


class OneReaderKernels:
    """The fused norm and Canon-A of the GPU, in plain torch."""

    @staticmethod
    def norm_canon_stream_triton(h_BTD, gain_D, weight_D1K, *, eps, added_BTD, readers, **options):
        if added_BTD is not None:
            h_BTD = h_BTD + added_BTD
        x_BTD = torch.nn.functional.rms_norm(h_BTD, gain_D.shape, gain_D, eps)
        return h_BTD, *[canon_reference(x_BTD, weight_D1K, **options)] * readers


def test_a_fused_canon_a_passes_a_tensor(monkeypatch):
    args = replace(EXAMPLES["rwkv7"].args, canon_set="A")
    model = build_example(args)
    tokens = random_tokens(args, 2, 20)
    with torch.no_grad():
        expected = model(tokens)
        monkeypatch.setattr(
            "canon_pretrain.model.canon.triton_kernels", lambda *_: OneReaderKernels
        )
        torch.testing.assert_close(model(tokens), expected)

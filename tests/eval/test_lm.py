"""Requests, batches and their token budget; test_hf_equal.py compares numbers with lm_eval."""

from typing import Any

import pytest
import torch

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from eval.model.budget import FILE, MAX_TOKENS, find_largest, load_or_find
from eval.model.lm import CanonLM
from tests.scripted_lm import Bytes, LimitedMemory, requests
from tests.support import refused

ARGS = ModelArgs(
    vocab_size=257, num_layers=2, dim=32, num_heads=4, ffn_dim=48, max_seq_len=64, position="rope"
)
MAX_LENGTH = 40
TEXT = "Now is better than never; though never is often better than *right* now, as is well known."


@pytest.fixture(scope="module")
def model() -> Transformer:
    """A model with distinct logits, so that rounding changes no greedy answer; it writes text."""
    model = Transformer(ARGS)
    model.init_weights()
    assert model.output is not None
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 10 if weight.ndim == 2 else 1
        model.output.weight[[i for i in range(257) if not 32 < i < 127]] = 0.0
    return model.eval()


@pytest.fixture(scope="module")
def lm(model: Transformer) -> CanonLM:
    return CanonLM(model, Bytes(), max_length=MAX_LENGTH, batch_tokens=150)


def scored(lm: CanonLM, given: list[tuple[str, str]]) -> list[float]:
    return [score for score, _ in lm.loglikelihood(requests("loglikelihood", given))]


def generated(lm: CanonLM, given: list[tuple[str, dict]]) -> list[str]:
    return lm.generate_until(requests("generate_until", given))


def test_softmax_is_float32_for_a_bfloat16_model(model):
    half = Transformer(ARGS).eval()
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    row = list(range(30))
    ((score,),) = CanonLM(half, None, max_length=MAX_LENGTH).score_parts([row], [[20]])
    with torch.no_grad():
        logits = half(torch.tensor([row[:-1]]))[0].double()[-20:]
    exact = logits.log_softmax(-1)[torch.arange(20), torch.tensor(row[-20:])].sum().item()
    assert score == pytest.approx(exact, rel=1e-6)  # bfloat16 would be off by 1e-2


def test_impossible_requests_are_refused(lm):
    for code, options in (
        ("eval.not_greedy", {"do_sample": True, "temperature": 0.7}),
        ("eval.not_greedy", {"num_beams": 4}),
        ("eval.not_greedy", {"repetition_penalty": 1.2}),
        ("eval.max_length", {"max_gen_toks": MAX_LENGTH}),
    ):
        with refused(code):
            generated(lm, [("x", options)])
    with refused("eval.continuation", given=MAX_LENGTH + 1, expected=MAX_LENGTH):
        scored(lm, [("x", "y" * (MAX_LENGTH + 1))])
    for length in (0, 65):
        with refused("eval.max_length", given=length, expected=64):
            CanonLM(lm.model, Bytes(), max_length=length)


def test_out_of_memory_halves_the_budget(model):
    lines: list[str] = []
    limited: Any = LimitedMemory(model, 120)
    lm = CanonLM(limited, Bytes(), max_length=MAX_LENGTH, batch_tokens=2000, log=lines.append)
    reference = CanonLM(model, Bytes(), max_length=MAX_LENGTH)
    pairs = [(TEXT[n : n + 20], TEXT[n + 20 : n + k]) for n in range(40) for k in (22, 24)]
    assert scored(lm, pairs) == pytest.approx(scored(reference, pairs), abs=1e-4)
    assert len(lines) == 1 and lm.batch_tokens < 250
    prompts = [(TEXT[n : 2 * n], {"until": [], "max_gen_toks": 5}) for n in range(3, 30)]
    lm.batch_tokens = 2000
    assert generated(lm, prompts) == generated(reference, prompts)
    assert len(lines) == 2
    before = limited.refused
    generated(lm, prompts)  # the smaller budget is kept
    assert limited.refused == before
    too_small = CanonLM(LimitedMemory(model, 5), Bytes(), max_length=MAX_LENGTH, log=lines.append)
    with refused("eval.out_of_memory"):
        scored(too_small, [(TEXT[:20], "ab"), (TEXT[:20], "cd"), (TEXT[:3], "e")])


# ---- the token budget of a batch


def test_the_budget_is_found_once_per_model(tmp_path):
    lines: list[str] = []

    def found(key: str, tokens: int) -> int:
        lines.clear()
        return load_or_find(tmp_path / FILE, key, lambda: tokens, lines.append)

    assert found("a", 1000) == 1000
    assert found("b", 2000) == 2000 and str(tmp_path / FILE) in lines[0]
    assert found("a", 3000) == 1000 and not lines
    for damage in ("", '{"version": 2, "entries": []}', '{"a": -3}'):
        (tmp_path / FILE).write_text(damage)
        assert found("a", 1002) == found("a", 1003) == 1002


@pytest.mark.parametrize(
    ("memory", "start", "expected"),
    [
        (5000, 1.0, 4096),  # doubled until memory is full
        (1 << 40, 0.01, 16384),  # 8192 takes 0.092 s; doubling saves 6 % per token, the next 3 %
        (1 << 40, 1e6, MAX_TOKENS),
    ],
)
def test_a_gpu_budget_is_doubled(memory, start, expected):
    assert find_largest(lambda n: start + n / 1e5 if n <= memory else None) == expected
    with refused("eval.out_of_memory"):
        find_largest(lambda tokens: None)

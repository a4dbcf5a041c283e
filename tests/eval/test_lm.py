"""Requests become batches and answers; that the numbers are lm_eval's own is test_hf_equal.py's."""

from typing import Any

import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from eval.model.lm import CanonLM
from tests.scripted_lm import Bytes, Full, requests

ARGS = ModelArgs(
    vocab_size=257, num_layers=2, dim=32, num_heads=4, ffn_dim=48, max_seq_len=64, position="rope"
)
MAX_LENGTH = 40
TEXT = "Now is better than never; though never is often better than *right* now, as is well known."


@pytest.fixture(scope="module")
def model() -> Transformer:
    """A model with opinions, so that greedy answers do not hang on a rounding; it writes text."""
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


def scored(lm: CanonLM, asked: list[tuple[str, str]]) -> list[float]:
    return [score for score, _ in lm.loglikelihood(requests("loglikelihood", asked))]


def written(lm: CanonLM, asked: list[tuple[str, dict]]) -> list[str]:
    return lm.generate_until(requests("generate_until", asked))


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


def test_what_cannot_be_done_is_refused(lm):
    for options, named in (
        ({"do_sample": True, "temperature": 0.7}, "greedy"),
        ({"num_beams": 4}, "greedy"),
        ({"repetition_penalty": 1.2}, "greedy"),
        ({"max_gen_toks": MAX_LENGTH}, "--max_length"),
    ):
        with pytest.raises(UserError, match=named):
            written(lm, [("x", options)])
    with pytest.raises(UserError, match=f"{MAX_LENGTH + 1} tokens"):
        scored(lm, [("x", "y" * (MAX_LENGTH + 1))])
    for length in (0, 65):
        with pytest.raises(UserError, match=f"max_length {length}: .* 1 to 64"):
            CanonLM(lm.model, Bytes(), max_length=length)


def test_memory_that_runs_out_halves_the_budget(model):
    lines: list[str] = []
    full: Any = Full(model, 120)
    lm = CanonLM(full, Bytes(), max_length=MAX_LENGTH, batch_tokens=2000, log=lines.append)
    plenty = CanonLM(model, Bytes(), max_length=MAX_LENGTH)
    asked = [(TEXT[n : n + 20], TEXT[n + 20 : n + k]) for n in range(40) for k in (22, 24)]
    assert scored(lm, asked) == pytest.approx(scored(plenty, asked), abs=1e-4)
    assert len(lines) == 1 and "2000" in lines[0]
    assert lm.batch_tokens < 250
    prompts = [(TEXT[n : 2 * n], {"until": [], "max_gen_toks": 5}) for n in range(3, 30)]
    lm.batch_tokens = 2000
    assert written(lm, prompts) == written(plenty, prompts)
    assert len(lines) == 2
    before = full.refused
    written(lm, prompts)  # what fits is load_or_find
    assert full.refused == before


def test_what_does_not_fit_alone_is_refused(model):
    lm = CanonLM(Full(model, 5), Bytes(), max_length=MAX_LENGTH, log=lambda line: None)
    with pytest.raises(UserError, match="one item alone .* --max_length"):
        scored(lm, [(TEXT[:20], "ab"), (TEXT[:20], "cd"), (TEXT[:3], "e")])

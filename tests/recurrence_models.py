"""The Triton recurrences as a model's backend, in Triton's interpreter:
`python -m tests.recurrence_models OUT.json`, with TRITON_INTERPRET=1.
"""

import importlib
import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from canon_pretrain.kernels.recurrence_check import check_mixer
from canon_pretrain.kernels.recurrences import CHUNKED
from canon_pretrain.model.decode import generate
from tests.triton_cases import correct_bfloat16, quicken_interpreter
from tests.variants import build, random_tokens, variant

CPU = torch.device("cpu")
MODELS = {"gla": "gla ABCD documents", "mamba2": "mamba2 AB documents"}
MODELS |= {"gated_deltanet": "gdn conv documents"}


def forms():
    return importlib.import_module("canon_pretrain.kernels.triton.recurrence.forms")


def the_startup_check_passes_and_finds_faults(mixer):
    for value_dim in (12, 96):  # Mamba2 cuts the wide one into parts
        assert check_mixer("triton", mixer, 8, value_dim, torch.float32, CPU) is None
    right = forms().FORMS[mixer]

    def wrong(*heads, **past):
        o, state = right(*heads, **past)
        return 1.1 * o, state

    with mock.patch.dict(forms().FORMS, {mixer: wrong}):
        assert "result 0" in check_mixer("triton", mixer, 8, 12, torch.float32, CPU)


def a_token_in_place_equals_the_chunked_form(mixer):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    for rows, heads, key_dim, value_dim in ((2, 3, 8, 12), (1, 2, 24, 40), (3, 1, 40, 70)):
        shape = (rows, 1, heads)
        q, k = (F.normalize(normal(*shape, key_dim), dim=-1) for _ in range(2))
        v = normal(*shape, value_dim)
        log_decay = F.logsigmoid(normal(*shape, key_dim))
        gate = log_decay[..., 0]
        inputs = {
            "gla": (q, k, v, log_decay),
            "mamba2": (v, -gate, gate[0, 0], k[:, :, 0], q[:, :, 0], gate[0, 0]),
            "gated_deltanet": (q, k, v, gate, gate.exp()),
        }[mixer]
        options = {"scale": 0.3} if mixer == "gla" else {}
        state = normal(rows, heads, key_dim, value_dim)
        for starts in (None, torch.arange(rows)[:, None] == 0):
            ours = state.clone()
            o, last = forms().STEPS[mixer](*inputs, state=ours, starts_BT=starts, **options)
            exact_o, exact_state = CHUNKED[mixer](
                *(x.double() for x in inputs),
                state=state.double(),
                starts_BT=starts,
                **options,
            )
            assert last is ours
            torch.testing.assert_close(o.double(), exact_o, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours.double(), exact_state, rtol=1e-5, atol=1e-5)


def a_model_trains_and_decodes_as_in_chunks(mixer):
    args = replace(variant(MODELS[mixer]), max_seq_len=48)
    models = [build(args, mixer_backend=backend) for backend in ("chunked", "triton")]
    tokens = random_tokens(args, rows=2, num_tokens=21)
    results = []
    for model in models:
        logits = model(tokens)
        logits.square().mean().backward()
        results.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    for chunked, by_triton in zip(*results, strict=True):
        assert (chunked - by_triton).abs().max() < 1e-4 * chunked.abs().max().clamp(min=1e-3)

    steps = forms().STEPS
    with mock.patch.dict(steps, {mixer: mock.Mock(side_effect=steps[mixer])}):
        prompts = [row.tolist() for row in tokens[:, :9]]
        answers = [
            generate(model.eval(), prompts, max_new_tokens=4, eos_id=None) for model in models
        ]
        assert steps[mixer].call_count
    assert answers[0] == answers[1]


CASES = (
    the_startup_check_passes_and_finds_faults,
    a_token_in_place_equals_the_chunked_form,
    a_model_trains_and_decodes_as_in_chunks,
)


def main() -> None:
    """Write {case and mixer: error or ""} to argv[1]."""
    torch.set_num_threads(1)
    quicken_interpreter()
    correct_bfloat16()
    results = {}
    for case in CASES:
        for mixer in CHUNKED:
            name = f"{case.__name__} {mixer}"
            results[name] = ""
            try:
                case(mixer)
            except Exception:
                results[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

"""A single token of each recurrence: in place without gradients, with the same numbers."""

import pytest
import torch

from canon_pretrain.kernels.recurrences import CHUNKED
from tests.canon_inputs import randoms


def inputs_of(mixer):
    """Return what the recurrence reads of one token, its options, and a state."""
    keys = (3, 1, 2, 5)
    q, k, v, gate, state = randoms(
        keys, keys, (3, 1, 2, 4), keys, (3, 2, 5, 4), dtype=torch.float32
    )
    gate = gate.sigmoid()
    per_token = gate[..., 0]
    per_head = gate[0, 0, :, 1]
    inputs = {
        "gla": (q, k, v, -gate),
        "mamba2": (v, per_token, -per_head, k[:, :, 0], q[:, :, 0], per_head),
        "gated_deltanet": (q, k, v, -per_token, per_token),
    }[mixer]
    return inputs, {"scale": 0.3} if mixer == "gla" else {}, state


@pytest.mark.parametrize("mixer", CHUNKED)
@pytest.mark.parametrize("has_start", [False, True])
def test_a_state_is_overwritten_only_without_gradients(mixer, has_start):
    inputs, options, state = inputs_of(mixer)
    options["starts_BT"] = torch.tensor([[has_start], [False], [False]])
    before = state.clone()

    expected, expected_state = CHUNKED[mixer](*inputs, state=state, **options)
    assert torch.equal(state, before)

    with torch.no_grad():
        y, last_state = CHUNKED[mixer](*inputs, state=state, **options)

    assert last_state.data_ptr() == state.data_ptr()
    assert torch.equal(y, expected)
    assert torch.equal(last_state, expected_state)

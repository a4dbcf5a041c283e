"""A recurrence's state and one token: in place while decoding, which saves copies of the state.

Shapes: R rows (B H), K key width, V value width.
"""

import torch
from torch import Tensor


def decayed(state_RKV: Tensor, decay: Tensor) -> Tensor:
    """Return decay * state: the same tensor, unless autograd or a compiled graph needs the old."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return decay * state_RKV
    return state_RKV.mul_(decay)


def with_outer_product(state_RKV: Tensor, k_RK1: Tensor, v_R1V: Tensor) -> Tensor:
    """Return state + k v, in place as `decayed`; bitwise the same in all cases."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return state_RKV + k_RK1 * v_R1V
    return state_RKV.baddbmm_(k_RK1, v_R1V)

"""What the Triton kernels of recurrences launch, move and multiply, in closed form.

It needs no Triton: the dry run counts runs on GPUs from any machine.
"""

from canon_pretrain.kernels.work import Work


def triton_work(
    mixer: str, direction: str, num_heads: int, key_dim: int, value_dim: int, itemsize: int
) -> Work:
    """Return the work per token of a "forward" or "backward" pass of a recurrence."""
    raise NotImplementedError

"""A copy of the state in CPU memory, from which a save is written while training goes on."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.state_dict_saver import _stateful_to_state_dict
from torch.utils._pytree import tree_map


class Staging:
    """The buffers of one run, made at its first save and used again.

    On a GPU they are pinned, and the copies run on a stream of their own beside the next step's
    forward pass: `copied` is the event of their end, which the writing thread waits for, and
    `keep_order` keeps the optimizer from overtaking them.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._pending: torch.cuda.Event | None = None
        self.copied: torch.cuda.Event | None = None

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy `state` (names to tensors, numbers or Stateful objects); gives what to save."""
        state = _stateful_to_state_dict(state)
        cuda = torch.cuda.is_available()
        if self._buffers is None or self._buffers.keys() != state.keys():
            self._buffers = _create_cpu_state_dict(state, pin_memory=cuda)
            if cuda:  # torch leaves scalars pageable, and a copy to one waits for all before it
                self._buffers = tree_map(_pin_scalar, self._buffers)
        if not cuda:
            return _copy_state_dict(state, self._buffers, type_check=False)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            staged = _copy_state_dict(state, self._buffers, non_blocking=True, type_check=False)
            self.copied = self._pending = self._stream.record_event()
        return staged

    def keep_order(self) -> None:
        """Call before anything changes that is being copied; the host does not wait."""
        if self._pending is not None:
            torch.cuda.current_stream().wait_event(self._pending)
            self._pending = None


def _pin_scalar(value: Any) -> Any:
    return value.pin_memory() if isinstance(value, Tensor) and not value.ndim else value

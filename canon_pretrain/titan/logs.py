"""What of torchtitan's log a person sees, and how."""

import logging
import os
import warnings
from collections import deque

from canon_pretrain.run.background import Background

MAX_LINES = 10_000
"""That wait while stdout takes none: it may be a file on a disk that is away."""
PRINT_TIMEOUT_S = 0.2

# What torchtitan's log says that is no news (garbage collections, waits), does not hold here (a
# CPU's peak FLOP/s, autocast), or is said by our own lines
_NOISE = (
    "[GC]",
    "ENV[TORCH_",
    "Building canon",
    "Building device mesh",
    "Successfully created meshes",
    "Mixed precision training is handled by",
    "Error running lspci",
    "Peak flops undefined",
    "Peak FLOPS used",
    "Training starts at step",
    "Training completed",
    "Saving a full checkpoint",
    "Sleeping 2 seconds",
    "Destroying the purge thread",
    "Synchronizing and adjusting timeout",
)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of torchtitan's log tells its reader anything."""
    return not record.getMessage().startswith(_NOISE)


class _Printer(logging.Handler):
    """Prints to the present sys.stdout: a progress bar puts itself there, and stays below.

    A thread prints. A line is waited for, so that what follows it on stderr comes after it, but
    only for PRINT_TIMEOUT_S, and not at all while an earlier line is stuck.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._printing = Background(self._print, "print")

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < MAX_LINES:
            self._lines.append(self.format(record))
        else:
            self._dropped += 1
        if self._printing.request():
            self._printing.wait(PRINT_TIMEOUT_S)

    def close(self) -> None:
        self._printing.close()
        super().close()

    def _print(self) -> None:
        while self._lines:
            print(self._lines.popleft(), flush=True)
        dropped, self._dropped = self._dropped, 0
        if dropped:
            print(f"{dropped} lines are missing here: stdout took none for too long", flush=True)


def init_logging(rank: int) -> None:
    """Rank 0 tells the story on stdout, the other ranks only what went wrong."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        if isinstance(handler, _Printer):
            handler.close()
    handler = _Printer()
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_is_news)
    root.addHandler(handler)
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    os.environ["KINETO_LOG_LEVEL"] = "5"
    for known in (
        "DTensor random operators may not have",  # weights and data have their own generators
        "DTensor manual_seed",
        "Set timeout is now only supported",  # torchtitan sets it on its fake groups as well
        "In CPU autocast, but the target dtype",  # torchtitan enters it at one rank; we leave it
    ):
        warnings.filterwarnings("ignore", message=known)

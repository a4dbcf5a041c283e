"""What of torchtitan's log a person sees, and how."""

import logging
import os
import warnings

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
    """Prints to the present sys.stdout: a progress bar puts itself there, and stays below."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


def init_logging(rank: int) -> None:
    """Rank 0 tells the story on stdout, the other ranks only what went wrong."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
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

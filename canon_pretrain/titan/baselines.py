"""Losses of count models of the training text, which no step waits for."""

import logging
import threading

from canon_pretrain.data.count_models import CountLosses, count_losses
from canon_pretrain.data.mixture import Mixture

logger = logging.getLogger()


class Baselines:
    """Count the training text in a thread; a failure is a warning, since nothing depends on it."""

    def __init__(self, text: Mixture) -> None:
        self._text = text
        self._losses: CountLosses | None = None
        # a daemon, so that a hanging disk does not keep the process from exiting
        threading.Thread(target=self._count, name="count models", daemon=True).start()

    def take(self) -> CountLosses | None:
        """Return the losses once they are known, a single time; None before and after."""
        losses = self._losses
        if losses is not None:  # else the thread may store them now
            self._losses = None
        return losses

    def _count(self) -> None:
        try:
            self._losses = count_losses(self._text)
        except Exception as error:
            logger.warning(f"no bigram loss to compare with: {type(error).__name__}: {error}")

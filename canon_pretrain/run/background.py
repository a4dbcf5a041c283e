"""Work that a training step must not wait for, done by a thread of its own.

A shared file system may block every call on it for minutes (a Lustre failover). No torch here.
"""

import threading
from collections.abc import Callable


class Background:
    """Call `action` in a thread, once more after the latest `request`; one call at a time.

    `action` must not raise. The thread is a daemon: a disk that hangs keeps no process from ending.
    """

    def __init__(self, action: Callable[[], None], name: str) -> None:
        self._action, self._name = action, name
        self._requested = self._served = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def request(self) -> bool:
        """Request a call of `action`; return whether every earlier request has been served."""
        with self._changed:
            was_idle = self._served == self._requested
            self._requested += 1
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return was_idle

    def wait(self, timeout_s: float) -> bool:
        """Wait until all requests so far are served; return False if they are not."""
        with self._changed:
            last = self._requested
            self._changed.wait_for(lambda: self._is_closed or self._served >= last, timeout_s)
            return self._served >= last

    def close(self) -> None:
        """End the thread after its current call; later requests do nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._served < self._requested)
                if self._is_closed:
                    return
                last = self._requested
            self._action()
            with self._changed:
                self._served = last
                self._changed.notify_all()

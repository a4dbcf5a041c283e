"""What takes time to fetch, fetched by a thread of its own while the trainer computes.

The data loader (titan/data.py) reads its batches through it: a disk that is slow for a moment then
keeps no GPU waiting.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """What `read()` gives, call after call, at most `depth` of them ahead of who takes them.

    `read` is called by one thread, from now until `close` or its first error. That error is raised
    where it would have been without a thread: after all that was read before it was taken.
    """

    def __init__(self, read: Callable[[], T], depth: int) -> None:
        self._read, self._depth = read, depth
        self._items: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        # a daemon: a disk that hangs must not keep a process from ending
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """The next item, waiting for it if need be. Raises what `read` raised in its place."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed or self._error is not None)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise RuntimeError("nothing is read ahead any more: close() was called")

    def close(self, timeout_s: float | None = None) -> bool:
        """Let the thread end with what it is reading, and wait for that; whether it has ended."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
                if self._closed:
                    return
            try:
                item = self._read()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if not self._closed:
                    self._items.append(item)
                self._changed.notify_all()

"""Run the jobs of a build, in this process or in several, and show how far they are.

Between `build.py` and `units.py`. Worker processes are spawned and end with their parent; each
writes its unit's counts into slots of its own in a shared array, so that no kill can leave a lock
held.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from ctypes import Array, c_longlong
from multiprocessing.sharedctypes import RawArray
from typing import Any, Self

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Progress
from canon_pretrain.core.text import size
from data_prep.folder import say
from data_prep.units import Counts, UnitJob, build_unit

TICK_S = 0.5
WIDTH = len(Counts())
FEW_UNITS = 24
"""Up to so many units in a run, each has a line of its own."""


def end_with_parent() -> None:
    """Let this worker process end with its parent, and silently at Ctrl-C.

    Without it the workers of a killed run would wait for work, or continue theirs, for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def worker_killed() -> UserError:
    """The error for a BrokenProcessPool."""
    return UserError(
        "a worker process was killed (out of memory?); run the same command again, which "
        "continues, perhaps with fewer --workers"
    )


def run_jobs(
    jobs: Sequence[UnitJob],
    workers: int,
    tick: Callable[[Counts], None],
    wanted: Callable[[int], bool] = lambda unit: True,
) -> Iterator[int]:
    """Run the jobs in order, here or in `workers` processes; yields each unit once it is committed.

    `tick` is called now and then with how far the run is. `wanted(unit)` is asked right before a
    job starts; a job that is not wanted is left out.
    """
    counts = RawArray(c_longlong, WIDTH * len(jobs))

    def show() -> None:
        tick(Counts(*(sum(counts[at::WIDTH]) for at in range(WIDTH))))

    if workers == 1 or len(jobs) < 2:
        for slot, job in enumerate(jobs):
            if wanted(job.unit):
                build_unit(job, _reporter(counts, slot, show))
                yield job.unit
        return
    with ProcessPoolExecutor(
        min(workers, len(jobs)),
        # spawn: a fork would copy SentencePiece's and rich's threads in an unknown state
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(counts,),
    ) as pool:
        waiting = iter(enumerate(jobs))
        running: dict[Future[None], int] = {}
        try:
            while True:
                while len(running) < workers and (next_job := next(waiting, None)):
                    slot, job = next_job
                    if wanted(job.unit):
                        running[pool.submit(_run, job, slot)] = job.unit
                if not running:
                    return
                done = wait(running, TICK_S, FIRST_COMPLETED).done
                show()
                for future in done:
                    future.result()
                    yield running.pop(future)
        except (UserError, OSError) as error:
            if others := len(running) - 1:
                say(f"failed: {error}\nending once {others} other unit(s) in work are built")
            wait(running)  # shutdown does not, once it was told not to
            raise
        except BrokenProcessPool:
            raise worker_killed() from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _reporter(
    counts: "Array[c_longlong]", slot: int, after: Callable[[], None] = lambda: None
) -> Callable[[Counts], None]:
    """What `build_unit` reports to: it writes into the slot."""

    def report(so_far: Counts) -> None:
        counts[WIDTH * slot : WIDTH * (slot + 1)] = list(so_far)
        after()

    return report


# Set once at a worker's start: shared memory can only be handed over there.
_counts: "Array[c_longlong] | None" = None


def _start_worker(counts: "Array[c_longlong]") -> None:
    """A killed run's workers must not write beside the run that resumes it."""
    global _counts
    _counts = counts
    end_with_parent()


def _run(job: UnitJob, slot: int) -> None:
    assert _counts is not None
    build_unit(job, _reporter(_counts, slot))


class BuildProgress:
    """Progress over `num_units` units, of which `num_finished` were there before.

    `goal` is what this run has to do: bytes to read, and documents or tokens where a limit may end
    it sooner (0: none). Rates count what this run did. `clock` counts seconds.
    """

    def __init__(
        self,
        num_units: int,
        num_finished: int,
        goal: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_units = num_units
        self._finished = num_finished
        self._goal = goal
        self._few = num_units - num_finished <= FEW_UNITS
        self._clock = clock
        self._started = clock()
        self._progress = Progress(clock=clock)
        self.counts = Counts()

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def update(self, counts: Counts) -> None:
        """Show how far this run is in all."""
        self.counts = counts
        self._progress.update(self.share(), self._status())

    def unit_done(self, unit: int, documents: int, tokens: int) -> None:
        """Show one more unit, with the documents and tokens it has."""
        self._finished += 1
        line = f"unit {unit}: {documents:,} documents, {tokens:,} tokens; {self._status()}"
        self._progress.update(self.share(), line, final=self._few)

    def share(self) -> float:
        """How much of the run is done, in [0, 1]: the limit that ends it first counts."""
        pairs = zip(self.counts[:3], self._goal[:3], strict=True)
        return min(1.0, max((done / goal for done, goal in pairs if goal), default=0.0))

    def _status(self) -> str:
        seconds = max(self._clock() - self._started, 1e-9)
        documents, tokens, read, downloaded = self.counts
        fetched = f", {size(downloaded)} downloaded" if downloaded else ""
        return (
            f"{self._finished}/{self._num_units} units, {size(read)} of {size(self._goal.read)} "
            f"read{fetched}; {documents / seconds:,.0f} documents/s, {tokens / seconds:,.0f} "
            f"tokens/s, {size(read / seconds)}/s"
        )

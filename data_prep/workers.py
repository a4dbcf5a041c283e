"""Run the jobs of a build, in this process or in several, and tell how far they are.

Between `build.py` and `units.py`. Worker processes are spawned and end with their parent; each
writes its unit's counts into slots of its own in a shared array, so that no kill can leave a lock
held.
"""

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from ctypes import Array, c_longlong
from multiprocessing.sharedctypes import RawArray

from canon_pretrain.core.errors import UserError
from data_prep.processes import end_with_parent
from data_prep.progress import Counts, say
from data_prep.units import UnitJob, build_unit

TICK_S = 0.5
WIDTH = len(Counts())


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
    if workers == 1 or len(jobs) < 2:
        for slot, job in enumerate(jobs):
            if wanted(job.unit):
                build_unit(job, _reporter(counts, slot, lambda: tick(_totals(counts))))
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
                tick(_totals(counts))
                for future in done:
                    future.result()
                    yield running.pop(future)
        except (UserError, OSError) as error:
            if others := len(running) - 1:
                say(f"failed: {error}\nending once {others} other unit(s) in work are built")
            wait(running)  # shutdown does not, once it was told not to
            raise
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?); run the same command again, which "
                "continues, perhaps with fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _totals(counts: "Array[c_longlong]") -> Counts:
    return Counts(*(sum(counts[at::WIDTH]) for at in range(WIDTH)))


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

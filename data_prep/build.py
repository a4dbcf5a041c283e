"""Build token shards from a source: plan, tokenizer, units, manifests. Resumable at any point.

    python -m data_prep build --source stdlib --tokenizer train:2048 --out DATA

The order of writing is the way back from a kill: plan.json, the tokenizer, then each unit's parts
(each split's last commit mark commits the unit in it), the manifests last. A second run with the
same plan skips what is committed, builds the rest, and ends with the same bytes.
"""

import argparse
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from canon_pretrain.core.cli import positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Progress, duration, size
from canon_pretrain.data.hub import COMMIT
from canon_pretrain.data.shard_writer import drop_changed_marks, unit_marks
from canon_pretrain.data.shards import MANIFEST
from data_prep import folder as folders
from data_prep import sources
from data_prep.finish import is_finished, write_manifests
from data_prep.folder import SPLITS, TRAIN, is_complete, say, settling
from data_prep.plan import (
    MAX_LINE_BYTES,
    NO_LIMITS,
    PLAN,
    Limits,
    Options,
    Plan,
    hash_small,
    load_plan,
)
from data_prep.readers import SUFFIXES
from data_prep.settle import TokenizerRequest, settle_plan
from data_prep.units import UnitJob, new_counts, run_jobs


@dataclass(frozen=True)
class Shard:
    """--shard i/n: this run builds the units u with u % n == i - 1, and does not finish."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard {text!r}: expected i/n with 1 <= i <= n, such as 1/8 to 8/8")
        return cls(int(match[1]), int(match[2]))

    def units(self, num_units: int) -> range:
        return range(self.index - 1, num_units, self.count)


ALL_UNITS = Shard(1, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--source", required=True, metavar="NAME", help=", ".join(sources.SOURCES))
    mirror = f"files or folders: a mirror of the source, or what local reads ({' '.join(SUFFIXES)})"
    add("--files", nargs="+", type=Path, default=(), metavar="PATH", help=mirror)
    trained = "train a SentencePiece BPE model of N pieces on the source's training documents, or "
    trained += "use the SentencePiece tokenizer.model or HF tokenizer.json at PATH"
    add("--tokenizer", required=True, metavar="train:N|PATH", help=trained)
    add("--out", required=True, type=Path, metavar="DIR", help="a new folder, or one to continue")
    held_out = "share of the documents for validation, chosen by hash (default: %(default)s)"
    add("--holdout", type=float, default=0.02, metavar="FRACTION", help=held_out)
    folders.add_workers(parser, "processes; the result is the same for any number")
    add("--shard", metavar="I/N", help="build every N-th unit from the I-th on; then run `finish`")
    line = "refuse an input with a longer line of JSON (default: %(default)s)"
    add("--max-line-bytes", type=positive, default=MAX_LINE_BYTES, metavar="N", help=line)
    add("--revision", metavar="R", help="commit, tag or branch of a source that is downloaded")
    add("--text-field", metavar="F", help="the field with the text, in files of rows")
    add("--eos", metavar="TOKEN", help="the token that ends documents, where PATH leaves it open")
    add("--bos", action="store_true", help="put the BOS token before every document")
    folders.add_limits(parser)
    # of slurm/data_prep.sh, which so refuses a wrong option before it has waited in a queue
    add("--unbuilt-of", type=positive, metavar="N", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> None:
    limits = Limits(arguments.max_documents, arguments.max_tokens)
    if arguments.unbuilt_of:
        print_unbuilt(arguments, limits)
        return
    names = ("out", "source", "tokenizer", "workers", "files", "revision", "text_field", "eos")
    decisive = ("holdout", "bos", "max_line_bytes")
    build(
        **{name: getattr(arguments, name) for name in names},
        options=Options(**{name: getattr(arguments, name) for name in decisive}),
        limits=limits,
        shard=Shard.parse(arguments.shard) if arguments.shard else None,
    )


def print_unbuilt(arguments: argparse.Namespace, limits: Limits) -> None:
    """Print, each ended by a NUL byte: unbuilt shards as i,j,...; DATA; the arguments of finish."""
    if arguments.shard:
        raise UserError(f"--shard {arguments.shard}: each job is given its own; see --shards")
    left = unbuilt_shards(arguments.out, arguments.unbuilt_of, limits)
    words = [",".join(map(str, left)), str(arguments.out), str(arguments.out)]
    for name, limit in vars(limits).items():
        words += [f"--{name.replace('_', '-')}", str(limit)] if limit is not None else []
    sys.stdout.write("".join(f"{word}\0" for word in words))


def unbuilt_shards(out: Path, shards: int, limits: Limits = NO_LIMITS) -> list[int]:
    """Return the i of --shard i/`shards` that still have a unit to build; all without a plan."""
    if not (out / PLAN).exists():
        return list(range(1, shards + 1))
    stream = TrainingStream(out, load_plan(out), limits)
    return sorted({unit % shards + 1 for unit in stream.unbuilt()})


def build(
    out: Path,
    source: str,
    tokenizer: str,
    options: Options,
    workers: int,
    *,
    files: Sequence[Path] = (),
    revision: str | None = None,
    text_field: str | None = None,
    eos: str | None = None,
    limits: Limits = NO_LIMITS,
    shard: Shard | None = None,
) -> None:
    """Build (or finish building) the folder `out`, saying what happens. Raises UserError."""
    started = time.monotonic()
    _check_folder(out)
    request = TokenizerRequest.parse(tokenizer, eos)
    if revision is None and not files and source in sources.HUB_SOURCES and (out / PLAN).exists():
        old = load_plan(out)  # its commit, so that a branch that moved does not change it
        if old.source == source and COMMIT.fullmatch(old.source_version):
            revision = old.source_version
    selection = sources.select(source, files, revision=revision, text_field=text_field)
    if files or source not in sources.HUB_SOURCES:  # else files come later, with the hub's hashes
        selection = replace(selection, inputs=hash_small(selection.root, selection.inputs))
    with folders.disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with settling(out):
            plan, loaded = settle_plan(out, selection, request, options)
            if is_finished(out, plan, limits):
                return
            stream = TrainingStream(out, plan, limits)
            jobs = _jobs(stream, selection.root, shard or ALL_UNITS)
        say(f"tokenizer: {loaded.vocab_size:,} ids, encoded by {loaded.method}")
        _encode(stream, jobs, workers, shard or ALL_UNITS)
        if shard:
            way = f"when all {shard.count} are: python -m data_prep finish {out}"
            say(f"{out}: shard {shard.index}/{shard.count} is built; {way}")
            return
        with settling(out):
            write_manifests(out, plan, limits)
    say(f"{out}: finished in {duration(time.monotonic() - started)}")


def _check_folder(out: Path) -> None:
    """Refuse a folder that holds other things: nothing of anyone's is ever written over."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file, expected a folder; give a new one")
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    others = [name for name in names if not name.startswith((folders.LOCK, f"{PLAN}."))]
    # after the listing: another build writes its plan before anything else
    if others and not (out / PLAN).exists():
        raise UserError(
            f"--out {out}: holds other files ({others[0]}) and no {PLAN}; give a new or empty "
            "folder"
        )


class TrainingStream:
    """Which units of `out` a training stream with these limits needs, as far as is known by now."""

    def __init__(self, out: Path, plan: Plan, limits: Limits) -> None:
        self.out, self.plan, self.limits = out, plan, limits
        self._counts: dict[int, np.ndarray] = {}

    def unbuilt(self) -> list[int]:
        """The units that are not built, up to where the built ones reach a limit."""
        missing: list[int] = []
        counts = np.zeros(2, dtype=np.int64)
        for unit in range(len(self.plan.units)):
            if self.limits.reached(*counts):
                break
            if not is_complete(self.out, unit, self.plan.sha256):
                missing.append(unit)
            elif self.limits != NO_LIMITS:
                counts += self._count(unit)
        return missing

    def needs(self, unit: int) -> bool:
        """Whether the units before `unit` that are built by now may be too few."""
        earlier = range(unit if self.limits != NO_LIMITS else 0)
        counts = sum((self._count(one) for one in earlier), np.zeros(2, dtype=np.int64))
        return not self.limits.reached(*counts)

    def _count(self, unit: int) -> np.ndarray:
        if unit not in self._counts:
            marks = unit_marks(self.out / TRAIN, unit, self.plan.sha256)
            if marks is None:
                return np.zeros(2, dtype=np.int64)
            self._counts[unit] = np.sum([(mark.documents, mark.tokens) for mark in marks], axis=0)
        return self._counts[unit]


def _jobs(stream: TrainingStream, root: Path, shard: Shard) -> list[UnitJob]:
    """This run's units that are not built and may be needed."""
    out, plan = stream.out, stream.plan
    for split in SPLITS:
        (out / split).mkdir(exist_ok=True)
        drop_changed_marks(out / split)
    own = shard.units(len(plan.units))
    missing = [unit for unit in stream.unbuilt() if unit in own]
    # a manifest must never stand above parts that are being replaced
    for split in SPLITS if missing else ():
        (out / split / MANIFEST).unlink(missing_ok=True)
    return [UnitJob.of(out, root, plan, unit) for unit in missing]


def _encode(stream: TrainingStream, jobs: list[UnitJob], workers: int, shard: Shard) -> None:
    """Run the jobs, saying how far they are."""
    plan = stream.plan
    num_units = len(shard.units(len(plan.units)))
    say(
        f"{plan.source}: {len(plan.inputs):,} inputs, {size(sum(i.size for i in plan.inputs))}, "
        f"{num_units:,} of {len(plan.units):,} units; {workers} worker(s); "
        f"plan {plan.sha256[:12]}"
    )
    if before := num_units - len(jobs):
        say(f"resuming: {before:,} of {num_units:,} units are finished or not needed")
    started, counts = time.monotonic(), new_counts(len(plan.units))
    finished: list[int] = []

    def show() -> None:
        each = np.frombuffer(counts, dtype=np.int64).reshape(-1, 2)
        documents, tokens = each.sum(axis=0)
        per_unit = max(each[finished, 1].mean(), 1) if finished else np.inf
        speed = tokens / (time.monotonic() - started)
        progress.update(
            min(tokens / (per_unit * len(jobs)), 1.0),
            f"{before + len(finished)}/{num_units} units, {documents:,} documents, {tokens:,} "
            f"tokens, {speed:,.0f} tokens/s",
        )

    with Progress() as progress, _repeated(show):
        for unit in run_jobs(jobs, workers, stream.needs, counts):
            finished.append(unit)


@contextmanager
def _repeated(action: Callable[[], None], every_s: float = 1.0) -> Iterator[None]:
    """Call `action` again and again while the block runs: a unit may take many minutes."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

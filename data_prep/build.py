"""Build token shards from a source. Resumable at any point.

    canon data build --source stdlib --tokenizer train:2048 --out DATA

Written in this order: plan.json, the tokenizer, each input group's shards (the last commit record
of each split commits the group), the manifests. A second run with the same plan skips what is
committed, builds the rest, and ends with the same bytes.
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
from typing import Any

import numpy as np

from canon_pretrain.core.cli import command, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Progress, duration, size
from canon_pretrain.data.hub import COMMIT
from canon_pretrain.data.shard_writer import committed_records, remove_changed_records
from canon_pretrain.data.shards import MANIFEST
from data_prep import folder as folders
from data_prep import sources
from data_prep.finish import is_finished, write_manifests
from data_prep.folder import SPLITS, TRAIN, is_complete, log, plan_lock
from data_prep.formats import SUFFIXES
from data_prep.input_groups import InputGroupJob, new_counts, run_jobs
from data_prep.plan import (
    MAX_LINE_BYTES,
    NO_LIMITS,
    PLAN,
    Limits,
    Options,
    Plan,
    hash_small_inputs,
    load_plan,
)
from data_prep.planning import TokenizerRequest, prepare_plan


@dataclass(frozen=True)
class JobSlice:
    """--shard i/n: build the input groups g with g % n == i - 1, and write no manifest."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "JobSlice":
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(
                "option.invalid",
                f"--shard {text!r}: expected i/n with 1 <= i <= n, such as 1/8 to 8/8",
                option="--shard",
            )
        return cls(int(match[1]), int(match[2]))

    def input_groups(self, num_groups: int) -> range:
        return range(self.index - 1, num_groups, self.count)


ALL_GROUPS = JobSlice(1, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--source", required=True, metavar="NAME", help=", ".join(sources.SOURCES))
    files = f"files or folders: a copy of the source, or those of `local` ({' '.join(SUFFIXES)})"
    add("--files", nargs="+", type=Path, default=(), metavar="PATH", help=files)
    tokenizer = (
        "train a SentencePiece BPE tokenizer with vocab_size N on the training documents, "
        "or load the SentencePiece tokenizer.model or HF tokenizer.json at PATH"
    )
    add("--tokenizer", required=True, metavar="train:N|PATH", help=tokenizer)
    add("--out", required=True, type=Path, metavar="DIR", help="a new folder, or one to resume")
    held_out = "share of documents for validation, chosen by hash (default: %(default)s)"
    add("--holdout", type=float, default=0.02, metavar="FRACTION", help=held_out)
    folders.add_workers(parser, "processes; the result is the same for any number")
    folders.add_limits(parser)
    text = parser.add_argument_group("inputs and texts")
    text.add_argument(
        "--text-field", metavar="F", help="name of the text field, also a.b (source local)"
    )
    more = "read files of these suffixes as .txt too, such as .md .rst (source local)"
    text.add_argument("--text-suffixes", nargs="+", default=(), metavar=".S", help=more)
    cut = "cut longer documents, after a blank line or a line (default: never)"
    text.add_argument("--max-document-bytes", type=positive, metavar="N", help=cut)
    revision = "commit, tag or branch of a downloaded source"
    text.add_argument("--revision", metavar="R", help=revision)
    line = "stop at a longer line of JSON (default: %(default)s)"
    limit: dict[str, Any] = {"type": positive, "default": MAX_LINE_BYTES, "metavar": "N"}
    text.add_argument("--max-line-bytes", **limit, help=line)
    eos = "token that ends documents, if PATH does not determine it"
    text.add_argument("--eos", metavar="TOKEN", help=eos)
    text.add_argument("--bos", action="store_true", help="put BOS before each document")
    jobs = parser.add_argument_group("several jobs")
    shard = "build every N-th input group from the I-th on; `finish` writes the manifests"
    jobs.add_argument("--shard", metavar="I/N", help=shard)
    # for slurm/data_prep.sh, to check the options before a job waits in the queue
    add("--unbuilt-of", type=positive, metavar="N", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> None:
    limits = Limits(arguments.max_documents, arguments.max_tokens)
    if arguments.unbuilt_of:
        with command(prints=True):
            print_unbuilt(arguments, limits)
        return
    names = "out source tokenizer workers files revision text_field text_suffixes eos".split()
    decisive = ("holdout", "bos", "max_line_bytes", "max_document_bytes")
    build(
        **{name: getattr(arguments, name) for name in names},
        options=Options(**{name: getattr(arguments, name) for name in decisive}),
        limits=limits,
        job_slice=JobSlice.parse(arguments.shard) if arguments.shard else None,
    )


def print_unbuilt(arguments: argparse.Namespace, limits: Limits) -> None:
    """Print, NUL-terminated: the unbuilt i of --shard as i,j,...; DATA; the arguments of finish.

    Raises UserError for what a job would refuse first: options, folder, tokenizer, files.
    """
    if arguments.shard:
        raise UserError("option.conflict", "--shard: each job gets its own", option="--shard")
    _check_folder(arguments.out)
    Options(arguments.holdout, max_document_bytes=arguments.max_document_bytes)
    TokenizerRequest.parse(arguments.tokenizer, arguments.eos)
    names = ("files", "revision", "text_field", "text_suffixes")
    how = {name: getattr(arguments, name) for name in names}
    is_remote = arguments.source in sources.HUB_SOURCES and not arguments.files
    # jobs may have the network that this machine lacks
    (sources.check_options if is_remote else sources.select)(arguments.source, **how)
    left = unbuilt_slices(arguments.out, arguments.unbuilt_of, limits)
    words = [",".join(map(str, left)), str(arguments.out), str(arguments.out)]
    for name, limit in vars(limits).items():
        words += [f"--{name.replace('_', '-')}", str(limit)] if limit is not None else []
    sys.stdout.write("".join(f"{word}\0" for word in words))


def unbuilt_slices(out: Path, count: int, limits: Limits = NO_LIMITS) -> list[int]:
    """Return the i of --shard i/`count` with input groups left to build; all without a plan."""
    if not (out / PLAN).exists():
        return list(range(1, count + 1))
    required = RequiredGroups(out, load_plan(out), limits)
    return sorted({group % count + 1 for group in required.unbuilt()})


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
    text_suffixes: Sequence[str] = (),
    eos: str | None = None,
    limits: Limits = NO_LIMITS,
    job_slice: JobSlice | None = None,
) -> None:
    """Build or resume the folder `out`, printing progress. Raises UserError."""
    started = time.monotonic()
    _check_folder(out)
    request = TokenizerRequest.parse(tokenizer, eos)
    if revision is None and not files and source in sources.HUB_SOURCES and (out / PLAN).exists():
        old = load_plan(out)  # resume at its commit, even if the branch has moved
        if old.source == source and COMMIT.fullmatch(old.source_version):
            revision = old.source_version
    selection = sources.select(
        source, files, revision=revision, text_field=text_field, text_suffixes=text_suffixes
    )
    if files or source not in sources.HUB_SOURCES:  # else downloaded later, with the hub's hashes
        selection = replace(selection, inputs=hash_small_inputs(selection.root, selection.inputs))
    with folders.disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with plan_lock(out):
            plan, loaded = prepare_plan(out, selection, request, options)
            if is_finished(out, plan, limits):
                return
            required = RequiredGroups(out, plan, limits)
            jobs = _jobs(required, selection.root, job_slice or ALL_GROUPS)
        log(f"tokenizer: vocab_size {loaded.vocab_size:,}; {loaded.method}")
        _run(required, jobs, workers, job_slice or ALL_GROUPS)
        if job_slice:
            finish = f"after all {job_slice.count}: canon data finish {out}"
            log(f"{out}: built --shard {job_slice.index}/{job_slice.count}; {finish}")
            return
        with plan_lock(out):
            write_manifests(out, plan, limits)
    log(f"{out}: finished in {duration(time.monotonic() - started)}")


def _check_folder(out: Path) -> None:
    """Raise UserError if `out` has files other than a build's: nothing else is overwritten."""
    if out.exists() and not out.is_dir():
        raise UserError(
            "data.other_files", f"--out {out}: is a file; give a new or empty folder", path=out
        )
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    others = [name for name in names if not name.startswith((folders.LOCK, f"{PLAN}."))]
    # looked up after the listing: another build writes its plan before anything else
    if others and not (out / PLAN).exists():
        raise UserError(
            "data.other_files",
            f"--out {out}: has {others[0]} and no {PLAN}; give a new or empty folder",
            path=out / others[0],
        )


class RequiredGroups:
    """The input groups of `out` that a training stream with these limits needs."""

    def __init__(self, out: Path, plan: Plan, limits: Limits) -> None:
        self.out, self.plan, self.limits = out, plan, limits
        self._counts: dict[int, np.ndarray] = {}

    def unbuilt(self) -> list[int]:
        """Return the groups that are not built, until the built ones reach a limit."""
        missing: list[int] = []
        counts = np.zeros(2, dtype=np.int64)
        for group in range(len(self.plan.units)):
            if self.limits.reached(*counts):
                break
            if not is_complete(self.out, group, self.plan.sha256):
                missing.append(group)
            elif self.limits != NO_LIMITS:
                counts += self._count(group)
        return missing

    def needs(self, group: int) -> bool:
        """Return whether the groups built so far before `group` do not reach a limit."""
        earlier = range(group if self.limits != NO_LIMITS else 0)
        counts = sum((self._count(one) for one in earlier), np.zeros(2, dtype=np.int64))
        return not self.limits.reached(*counts)

    def _count(self, group: int) -> np.ndarray:
        if group not in self._counts:
            records = committed_records(self.out / TRAIN, group, self.plan.sha256)
            if records is None:
                return np.zeros(2, dtype=np.int64)
            self._counts[group] = np.sum([(r.documents, r.tokens) for r in records], axis=0)
        return self._counts[group]


def _jobs(required: RequiredGroups, root: Path, job_slice: JobSlice) -> list[InputGroupJob]:
    """Return jobs for this run's input groups that are not built and may be needed."""
    out, plan = required.out, required.plan
    for split in SPLITS:
        (out / split).mkdir(exist_ok=True)
        remove_changed_records(out / split)
    own = job_slice.input_groups(len(plan.units))
    missing = [group for group in required.unbuilt() if group in own]
    # a manifest must not list shards that are being replaced
    for split in SPLITS if missing else ():
        (out / split / MANIFEST).unlink(missing_ok=True)
    return [InputGroupJob.of(out, root, plan, group) for group in missing]


def _run(
    required: RequiredGroups, jobs: list[InputGroupJob], workers: int, job_slice: JobSlice
) -> None:
    """Run the jobs with a progress bar."""
    plan = required.plan
    num_groups = len(job_slice.input_groups(len(plan.units)))
    log(
        f"{plan.source}: {len(plan.inputs):,} inputs, {size(sum(i.size for i in plan.inputs))}, "
        f"{num_groups:,} of {len(plan.units):,} input groups; {workers} worker(s); "
        f"plan {plan.sha256[:12]}"
    )
    if before := num_groups - len(jobs):
        log(f"resuming: {before:,} of {num_groups:,} input groups are finished or not needed")
    started, counts = time.monotonic(), new_counts(len(plan.units))
    finished: list[int] = []

    def show() -> None:
        each = np.frombuffer(counts, dtype=np.int64).reshape(-1, 2)
        documents, tokens = each.sum(axis=0)
        per_group = max(each[finished, 1].mean(), 1) if finished else np.inf
        speed = tokens / (time.monotonic() - started)
        progress.update(
            min(tokens / (per_group * len(jobs)), 1.0),
            f"{before + len(finished)}/{num_groups} input groups, {documents:,} documents, "
            f"{tokens:,} tokens, {speed:,.0f} tokens/s",
        )

    with Progress() as progress, _repeated(show):
        for group in run_jobs(jobs, workers, required.needs, counts):
            finished.append(group)


@contextmanager
def _repeated(action: Callable[[], None], every_s: float = 1.0) -> Iterator[None]:
    """Call `action` periodically during the block, because an input group may take minutes."""
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

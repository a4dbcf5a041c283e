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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from canon_pretrain.core.cli import command, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Progress, duration, size
from canon_pretrain.data.hub import COMMIT
from canon_pretrain.data.shard_writer import committed_records, remove_changed_records
from data_prep import folder as folders
from data_prep import sources
from data_prep.finish import is_finished, remove_manifests, write_manifests
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
    total_size,
)
from data_prep.planning import TokenizerRequest, prepare_plan
from data_prep.sources import SourceOptions


@dataclass(frozen=True)
class JobSlice:
    """--shard i/n: build the input groups g with g % n == i - 1, and write no manifest."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "JobSlice":
        """Parse i/n. Raises UserError."""
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        index, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= index <= count:
            raise UserError(
                "option.invalid",
                f"--shard {text!r}: expected i/n with 1 <= i <= n, such as 1/8 to 8/8",
                option="--shard",
            )
        return cls(index, count)

    def input_groups(self, num_groups: int) -> range:
        return range(self.index - 1, num_groups, self.count)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # What to build, and where.
    add = parser.add_argument
    add("--source", required=True, metavar="NAME", help=", ".join(sources.SOURCES))
    add(
        "--files",
        nargs="+",
        type=Path,
        default=(),
        metavar="PATH",
        help=f"files or folders: a copy of the source, or those of `local` ({' '.join(SUFFIXES)})",
    )
    add(
        "--tokenizer",
        required=True,
        metavar="train:N|PATH",
        help="train a SentencePiece BPE tokenizer with vocab_size N on the training documents, "
        "or load the SentencePiece tokenizer.model or HF tokenizer.json at PATH",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="a new folder, or one to resume")

    # How to divide the documents and the work.
    add(
        "--holdout",
        type=float,
        default=0.02,
        metavar="FRACTION",
        help="share of documents for validation, chosen by hash (default: %(default)s)",
    )
    folders.add_workers(parser, "processes; the result is the same for any number")
    folders.add_limits(parser)

    add = parser.add_argument_group("inputs and texts").add_argument
    add("--text-field", metavar="F", help="name of the text field, also a.b (source local)")
    add(
        "--text-suffixes",
        nargs="+",
        default=(),
        metavar=".S",
        help="read files of these suffixes as .txt too, such as .md .rst (source local)",
    )
    add(
        "--max-document-bytes",
        type=positive,
        metavar="N",
        help="cut longer documents, after a blank line or a line (default: never)",
    )
    add("--revision", metavar="R", help="commit, tag or branch of a downloaded source")
    add(
        "--max-line-bytes",
        type=positive,
        default=MAX_LINE_BYTES,
        metavar="N",
        help="stop at a longer line of JSON (default: %(default)s)",
    )
    add("--eos", metavar="TOKEN", help="token that ends documents, if PATH does not determine it")
    add("--bos", action="store_true", help="put BOS before each document")

    parser.add_argument_group("several jobs").add_argument(
        "--shard",
        metavar="I/N",
        help="build every N-th input group from the I-th on; `finish` writes the manifests",
    )
    # for slurm/data_prep.sh, to check the options before a job waits in the queue
    parser.add_argument("--unbuilt-of", type=positive, metavar="N", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> None:
    source = SourceOptions(
        source=arguments.source,
        files=arguments.files,
        revision=arguments.revision,
        text_field=arguments.text_field,
        text_suffixes=arguments.text_suffixes,
    )
    limits = Limits(arguments.max_documents, arguments.max_tokens)
    if arguments.unbuilt_of:
        # For slurm/data_prep.sh. Stdout is the result: if it cannot be written, the command fails.
        with command(prints=True):
            print_unbuilt(arguments, source, limits)
        return

    build(
        arguments.out,
        source,
        arguments.tokenizer,
        Options(
            holdout=arguments.holdout,
            bos=arguments.bos,
            max_line_bytes=arguments.max_line_bytes,
            max_document_bytes=arguments.max_document_bytes,
        ),
        arguments.workers,
        eos=arguments.eos,
        limits=limits,
        job_slice=JobSlice.parse(arguments.shard) if arguments.shard else None,
    )


def print_unbuilt(arguments: argparse.Namespace, source: SourceOptions, limits: Limits) -> None:
    """Print, NUL-terminated: the unbuilt i of --shard as i,j,...; DATA; the arguments of finish.

    Raises UserError for what a job would refuse first: options, folder, tokenizer, files.
    """
    out = arguments.out
    if arguments.shard:
        raise UserError("option.conflict", "--shard: each job gets its own", option="--shard")
    _check_folder(out)
    Options(arguments.holdout, max_document_bytes=arguments.max_document_bytes)
    TokenizerRequest.parse(arguments.tokenizer, arguments.eos)
    if source.is_download:
        # jobs may have the network that this machine lacks
        sources.check_options(source)
    else:
        sources.select(source)

    slices = unbuilt_slices(out, arguments.unbuilt_of, limits)
    fields = [",".join(map(str, slices)), out, out]  # DATA is the first argument of finish too
    for name, limit in vars(limits).items():
        if limit is not None:
            fields += [f"--{name.replace('_', '-')}", limit]
    sys.stdout.writelines(f"{value}\0" for value in fields)


def unbuilt_slices(out: Path, count: int, limits: Limits = NO_LIMITS) -> list[int]:
    """Return the i of --shard i/`count` with input groups left to build; all without a plan."""
    if not (out / PLAN).exists():
        return list(range(1, count + 1))
    required = RequiredGroups(out, load_plan(out), limits)
    return sorted({group % count + 1 for group in required.unbuilt()})


def build(
    out: Path,
    source: SourceOptions,
    tokenizer: str,
    options: Options,
    workers: int,
    *,
    eos: str | None = None,
    limits: Limits = NO_LIMITS,
    job_slice: JobSlice | None = None,
) -> None:
    """Build or resume the folder `out`, printing progress. Raises UserError.

    With a `job_slice`, build only its input groups, and no manifest.
    """
    start = time.monotonic()
    _check_folder(out)
    request = TokenizerRequest.parse(tokenizer, eos)

    # The inputs. A download resumes at its commit, even if the branch has moved.
    if source.is_download and source.revision is None and (out / PLAN).exists():
        old_plan = load_plan(out)
        if old_plan.source == source.source and COMMIT.fullmatch(old_plan.source_version):
            source = replace(source, revision=old_plan.source_version)
    selection = sources.select(source)
    # The hub lists hashes of its files, which are not on disk yet.
    if not source.is_download:
        selection = replace(selection, inputs=hash_small_inputs(selection.root, selection.inputs))

    with folders.disk_errors(out):
        # The plan and the tokenizer, for one process at a time.
        out.mkdir(parents=True, exist_ok=True)
        with plan_lock(out):
            plan, loaded_tokenizer = prepare_plan(out, selection, request, options)
            if is_finished(out, plan, limits):
                return
            num_groups = len(plan.units)
            groups = job_slice.input_groups(num_groups) if job_slice else range(num_groups)
            required = RequiredGroups(out, plan, limits)
            jobs = _jobs(required, selection.root, groups)
        log(f"tokenizer: vocab_size {loaded_tokenizer.vocab_size:,}; {loaded_tokenizer.method}")

        # The shards, and the manifests if no other job builds shards.
        _run(required, jobs, workers, len(groups))
        if job_slice:
            log(
                f"{out}: built --shard {job_slice.index}/{job_slice.count}; "
                f"after all {job_slice.count}: canon data finish {out}"
            )
            return
        with plan_lock(out):
            write_manifests(out, plan, limits)
    log(f"{out}: finished in {duration(time.monotonic() - start)}")


def _check_folder(out: Path) -> None:
    """Raise UserError if `out` has files other than a build's: nothing else is overwritten."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(
            "data.other_files", f"--out {out}: is a file; pass a new or empty folder", path=out
        )

    # A build that begins in another process has its lock, and perhaps the plan's temporary file.
    # The plan is looked up after the listing, because it is written before any other file.
    names = [path.name for path in out.iterdir()]
    other_names = [name for name in names if not name.startswith((folders.LOCK, f"{PLAN}."))]
    if other_names and not (out / PLAN).exists():
        other_name = min(other_names)
        raise UserError(
            "data.other_files",
            f"--out {out}: has {other_name} and no {PLAN}; pass a new or empty folder",
            path=out / other_name,
        )


class RequiredGroups:
    """The input groups of `out` that a training stream with these limits needs."""

    def __init__(self, out: Path, plan: Plan, limits: Limits) -> None:
        self.out = out
        self.plan = plan
        self.limits = limits
        self._counts: dict[int, np.ndarray] = {}

    def unbuilt(self) -> list[int]:
        """Return the groups that are not built, until the built ones reach a limit."""
        unbuilt: list[int] = []
        counts = np.zeros(2, dtype=np.int64)
        for group in range(len(self.plan.units)):
            if self.limits.reached(*counts):
                break
            if not is_complete(self.out, group, self.plan.sha256):
                unbuilt.append(group)
            elif self.limits != NO_LIMITS:  # counting reads a file a shard
                counts += self._count(group)
        return unbuilt

    def needs(self, group: int) -> bool:
        """Return whether the groups built so far before `group` do not reach a limit."""
        if self.limits == NO_LIMITS:
            return True
        counts = sum(map(self._count, range(group)), np.zeros(2, dtype=np.int64))
        return not self.limits.reached(*counts)

    def _count(self, group: int) -> np.ndarray:
        """Return documents and tokens for training of a group, zeros if it is not built."""
        if group not in self._counts:
            records = committed_records(self.out / TRAIN, group, self.plan.sha256)
            if records is None:
                return np.zeros(2, dtype=np.int64)
            counts = [(record.documents, record.tokens) for record in records]
            self._counts[group] = np.sum(counts, axis=0)
        return self._counts[group]


def _jobs(required: RequiredGroups, root: Path, groups: range) -> list[InputGroupJob]:
    """Return jobs for those of `groups` that are not built and may be needed."""
    out = required.out
    for split in SPLITS:
        (out / split).mkdir(exist_ok=True)
        remove_changed_records(out / split)
    unbuilt = [group for group in required.unbuilt() if group in groups]

    # a manifest must not list shards that are being replaced
    if unbuilt:
        remove_manifests(out)
    return [InputGroupJob.of(out, root, required.plan, group) for group in unbuilt]


def _run(
    required: RequiredGroups, jobs: list[InputGroupJob], workers: int, num_groups: int
) -> None:
    """Run the jobs, those of `num_groups` that are left to build, with a progress bar."""
    # What there is to do.
    plan = required.plan
    log(
        f"{plan.source}: {len(plan.inputs):,} inputs, {size(total_size(plan.inputs))}, "
        f"{num_groups:,} of {len(plan.units):,} input groups; {workers} worker(s); "
        f"plan {plan.sha256[:12]}"
    )
    num_skipped = num_groups - len(jobs)
    if num_skipped:
        log(f"resuming: {num_skipped:,} of {num_groups:,} input groups are finished or not needed")

    start = time.monotonic()
    counts = new_counts(len(plan.units))
    finished_groups: list[int] = []

    def show_progress() -> None:
        # The workers add up documents and tokens by input group in this shared memory.
        group_counts = np.frombuffer(counts, dtype=np.int64).reshape(-1, 2)
        documents, tokens = group_counts.sum(axis=0)

        # The share of the tokens, if all groups have as many as the finished ones.
        share_done = 0.0
        if finished_groups:
            tokens_per_group = max(group_counts[finished_groups, 1].mean(), 1)
            share_done = min(tokens / (tokens_per_group * len(jobs)), 1.0)
        tokens_per_s = tokens / (time.monotonic() - start)
        progress.update(
            share_done,
            f"{num_skipped + len(finished_groups)}/{num_groups} input groups, "
            f"{documents:,} documents, {tokens:,} tokens, {tokens_per_s:,.0f} tokens/s",
        )

    with Progress() as progress, _repeated(show_progress):
        for group in run_jobs(jobs, workers, required.needs, counts):
            finished_groups.append(group)


@contextmanager
def _repeated(action: Callable[[], None], every_s: float = 1.0) -> Iterator[None]:
    """Call `action` periodically during the block, because an input group may take minutes."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()

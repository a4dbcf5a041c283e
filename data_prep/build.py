"""Build token shards from a source: plan, tokenizer, units, manifests. Resumable at any point.

    python -m data_prep build --source stdlib --tokenizer train:2048 --out DATA

The order of writing is the way back from a kill: plan.json, the tokenizer, then each unit's parts
(each split's last commit mark commits the unit in it), the manifests last. A second run with the
same plan skips what is committed, builds the rest, and ends with the same bytes. Several runs share
a folder: `--shard i/n` builds every n-th unit, and `finish` ends the folder when all are there.
"""

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes
from canon_pretrain.core.text import duration, size
from canon_pretrain.data.hub import COMMIT
from canon_pretrain.data.shard_writer import drop_changed_marks, unit_marks
from canon_pretrain.data.shards import MANIFEST, CommitMark, dtype_for
from data_prep import sources
from data_prep.finish import is_finished, write_manifests
from data_prep.folder import (
    LOCK,
    SPLITS,
    TRAIN,
    add_limits,
    disk_errors,
    is_complete,
    limits_of,
    say,
    settling,
)
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
from data_prep.settle import TokenizerRequest, settle_plan
from data_prep.units import BuildProgress, Counts, UnitJob, run_jobs


@dataclass(frozen=True)
class Shard:
    """--shard i/n: this run builds the units u with u % n == i - 1, and does not finish."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Raises UserError for anything but i/n with 1 <= i <= n."""
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard {text!r}: expected i/n with 1 <= i <= n, such as 1/8 to 8/8")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def units(self, num_units: int) -> range:
        """This run's units."""
        return range(self.index - 1, num_units, self.count)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `build`."""
    add = parser.add_argument
    add("--source", required=True, metavar="NAME", help=", ".join(sources.SOURCES))
    add(
        "--files",
        nargs="+",
        type=Path,
        default=(),
        metavar="PATH",
        help="files or folders on disk: a mirror of the source, or what `local` reads "
        "(.jsonl, .jsonl.zst, .jsonl.gz, .parquet, .txt)",
    )
    add(
        "--tokenizer",
        required=True,
        metavar="train:N|PATH",
        help="train a SentencePiece BPE model of N pieces on the source's training documents, or "
        "use the SentencePiece model (Llama-2's tokenizer.model) or HF tokenizer.json at PATH",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="a new folder, or one to continue")
    add(
        "--holdout",
        type=float,
        default=0.02,
        metavar="FRACTION",
        help="share of the documents for validation, chosen by their hash (default: 0.02)",
    )
    add(
        "--workers",
        type=int,
        default=available_cores(),
        metavar="N",
        help="processes; the result is the same for any number (default: the cores, %(default)s)",
    )
    add(
        "--shard",
        metavar="I/N",
        help="build every N-th unit only, from the I-th on: N jobs, on as many machines, share the "
        "folder; then run `finish`",
    )
    add(
        "--max-line-bytes",
        type=int,
        default=MAX_LINE_BYTES,
        metavar="N",
        help="refuse an input with a longer line of JSON (default: %(default)s)",
    )
    add("--revision", metavar="R", help="commit, tag or branch of a source that is downloaded")
    add("--text-field", metavar="F", help="the field with the text, in files of rows")
    add("--eos", metavar="TOKEN", help="the token that ends documents, where PATH leaves it open")
    add("--bos", action="store_true", help="put the BOS token before every document")
    add_limits(parser)


def run(arguments: argparse.Namespace) -> None:
    """Build as the command line says. Raises UserError."""
    build(
        out=arguments.out,
        source=arguments.source,
        tokenizer=arguments.tokenizer,
        options=Options(
            holdout=arguments.holdout, bos=arguments.bos, max_line_bytes=arguments.max_line_bytes
        ),
        workers=arguments.workers,
        files=arguments.files,
        revision=arguments.revision,
        text_field=arguments.text_field,
        eos=arguments.eos,
        limits=limits_of(arguments),
        shard=Shard.parse(arguments.shard) if arguments.shard else None,
    )


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
    """Build (or finish building) the folder `out`, saying what happens on stdout.

    `tokenizer` is "train:N" or a path, `files` a mirror on disk. The bytes written do not depend on
    `workers`, the number of processes, nor on `shard`. `limits` say how much of the plan the
    manifests list, and units beyond are not built. Raises UserError.
    """
    started = time.monotonic()
    if workers < 1:
        raise UserError(f"--workers is {workers}, expected at least 1")
    _check_folder(out)
    request = TokenizerRequest.parse(tokenizer, eos)
    if revision is None and not files:
        revision = _planned_commit(out, source)
    selection = sources.select(source, files, revision=revision, text_field=text_field)
    if files or source not in sources.HUB_SOURCES:  # else files come later, with the hub's hashes
        selection = replace(selection, inputs=hash_small(selection.root, selection.inputs))
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with settling(out):
            plan, loaded = settle_plan(out, selection, request, options)
            if is_finished(out, plan, limits):
                return
            needed = _Needed(out, plan, limits)
            jobs = _jobs(out, selection.root, plan, shard, needed)
        say(f"tokenizer: {loaded.vocab_size:,} ids, encoded by {loaded.method}")
        _encode(out, plan, jobs, workers, shard, needed)
        if shard:
            say(
                f"{out}: shard {shard} is built in {duration(time.monotonic() - started)}; when "
                f"all {shard.count} are: python -m data_prep finish {out}"
            )
            return
        with settling(out):
            write_manifests(out, plan, limits)
    say(f"{out}: finished in {duration(time.monotonic() - started)}")


def _check_folder(out: Path) -> None:
    """Refuse a folder that holds other things: nothing of anyone's is ever written over."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file, expected a folder; give a new one")
    if out.is_dir() and not (out / PLAN).exists():
        names = sorted(path.name for path in out.iterdir())
        ours = (f"{LOCK}*", f"{PLAN}.*tmp")
        foreign = [name for name in names if not any(fnmatch(name, known) for known in ours)]
        if foreign:
            raise UserError(
                f"--out {out}: holds other files ({', '.join(foreign[:3])}) and no {PLAN}; "
                f"give a new or empty folder"
            )


def _planned_commit(out: Path, source: str) -> str | None:
    """The commit that the folder's plan has, so that a branch that moved does not change it."""
    if source not in sources.HUB_SOURCES or not (out / PLAN).exists():
        return None
    plan = load_plan(out)
    is_commit = plan.source == source and COMMIT.fullmatch(plan.source_version)
    return plan.source_version if is_commit else None


class _Needed:
    """Which units a limited training stream needs, as far as the units built so far tell."""

    def __init__(self, out: Path, plan: Plan, limits: Limits) -> None:
        self.limits = limits
        self._folder = out / TRAIN
        self._plan_sha256 = plan.sha256
        self._counts: dict[int, tuple[int, int]] = {}

    def __call__(self, unit: int) -> bool:
        """Whether the units before `unit` may be too few."""
        return not self.limits.reached(*self.before(unit))

    def before(self, unit: int) -> tuple[int, int]:
        """The training documents and tokens of the units before `unit` that are built by now.

        Nothing where there is no limit: it would cost a look at each of them.
        """
        if self.limits == NO_LIMITS:
            return 0, 0
        for earlier in range(unit):
            if earlier not in self._counts:
                marks = unit_marks(self._folder, earlier, self._plan_sha256)
                if marks is not None:
                    self._counts[earlier] = _count(marks)
        known = [self._counts[earlier] for earlier in range(unit) if earlier in self._counts]
        return sum(documents for documents, _ in known), sum(tokens for _, tokens in known)


def _count(marks: Sequence[CommitMark]) -> tuple[int, int]:
    return sum(mark.documents for mark in marks), sum(mark.tokens for mark in marks)


def _jobs(out: Path, root: Path, plan: Plan, shard: Shard | None, needed: _Needed) -> list[UnitJob]:
    """The units of this run that are not complete in both splits and may be needed."""
    for split in SPLITS:
        (out / split).mkdir(exist_ok=True)
        drop_changed_marks(out / split)
    own = shard.units(len(plan.units)) if shard else range(len(plan.units))
    missing = [unit for unit in own if not is_complete(out, unit, plan.sha256) and needed(unit)]
    # a manifest must never stand above parts that are being replaced
    for split in SPLITS if missing else ():
        (out / split / MANIFEST).unlink(missing_ok=True)
    return [UnitJob.of(out, root, plan, unit) for unit in missing]


def _encode(
    out: Path,
    plan: Plan,
    jobs: list[UnitJob],
    workers: int,
    shard: Shard | None,
    needed: _Needed,
) -> None:
    """Run the jobs, saying how far they are and, once, that the disk will not hold the rest."""
    num_units = len(shard.units(len(plan.units))) if shard else len(plan.units)
    say(
        f"{plan.source}: {len(plan.inputs):,} inputs, {size(sum(i.size for i in plan.inputs))}, "
        f"{len(plan.units):,} units{f', shard {shard}: {num_units:,}' if shard else ''}; "
        f"{workers} worker(s); plan {plan.sha256[:12]}"
    )
    finished = num_units - len(jobs)
    if finished:
        say(f"resuming: {finished:,} of {num_units:,} units are finished or not needed")
    # what the limits still leave for this run's share
    documents, tokens = needed.before(len(plan.units))
    shards, limits = shard.count if shard else 1, needed.limits
    goal = Counts(
        documents=max(0, (limits.max_documents or 0) - documents) // shards,
        tokens=max(0, (limits.max_tokens or 0) - tokens) // shards,
        read=sum(job.size for job in jobs),
    )
    width = dtype_for(plan.tokenizer.vocab_size).itemsize
    warned = False
    with BuildProgress(num_units, finished, goal) as progress:
        for unit in run_jobs(jobs, workers, progress.update, needed):
            marks = [m for s in SPLITS for m in unit_marks(out / s, unit, plan.sha256) or []]
            progress.unit_done(unit, *_count(marks))
            share = progress.share()
            still = progress.counts.tokens * width * (1 / share - 1) if share else 0
            if not warned and still > (free := free_bytes(out)):
                warned = True
                say(
                    f"warning: {out} will need about {size(still)} more, {size(free)} are free; "
                    f"a run that fills the disk can be continued"
                )

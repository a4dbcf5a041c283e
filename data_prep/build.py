"""Build token shards from a source: tokenizer, plan, units, manifests. Resumable at any point.

    python -m data_prep build --source stdlib --tokenizer train:2048 --out DATA

The order of writing is the way back from a kill: plan.json, tokenizer.model, then each unit's
parts (each split's last commit mark commits the unit in it), the manifests last. A second run with
the same plan skips what is committed, rebuilds the rest, and ends with the same bytes.
"""

import hashlib
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from canon_pretrain.data.shard_writer import (
    drop_changed_marks,
    unit_marks,
    write_manifest,
)
from canon_pretrain.data.shards import MANIFEST, ShardError, TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.errors import UserError
from canon_pretrain.files import write_atomic
from data_prep import sources
from data_prep.lock import locked
from data_prep.plan import (
    PLAN,
    Input,
    Options,
    Plan,
    TokenizerRecord,
    cut_units,
    hash_inputs,
    is_held_out,
    load_plan,
    read_input,
    refuse_changes,
    save_plan,
)
from data_prep.progress import BuildProgress, say
from data_prep.sources import Document
from data_prep.train_tokenizer import train_tokenizer
from data_prep.units import (
    SPLITS,
    TOKENIZER,
    TRAIN,
    UNIT_LOCKS,
    VALIDATION,
    UnitJob,
    is_complete,
    load_tokenizer,
    run_jobs,
)

LOCK = "build.lock"


def build(out: Path, source: str, tokenizer: str, options: Options, workers: int) -> None:
    """Build (or finish building) the folder `out`, saying what happens on stdout.

    `tokenizer` is "train:N" or the path of a SentencePiece model. The bytes written do not depend
    on `workers`, the number of processes. Raises UserError.
    """
    started = time.monotonic()
    root = sources.source_root(source)
    request = _TokenizerRequest.parse(tokenizer)
    if workers < 1:
        raise UserError(f"--workers is {workers}, expected at least 1")
    _check_folder(out)
    inputs = hash_inputs(root, sources.list_inputs(root))
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK, str(out)):
        plan = _settle_plan(out, root, source, request, options, inputs)
        if _say_finished(out):
            return
        size = sum(known.size for known in inputs)
        say(
            f"{source}: {len(inputs):,} inputs, {size / 1e6:.1f} MB, {len(plan.units)} units; "
            f"{workers} worker(s); plan {plan.sha256[:12]}"
        )
        _encode(out, root, plan, workers)
        _finish(out, plan)
        say(f"{out}: finished in {time.monotonic() - started:.1f} s")


@dataclass(frozen=True)
class _TokenizerRequest:
    """--tokenizer: a loaded model, or the vocabulary size to train one with."""

    name: str
    vocab_size: int = 0
    given: Tokenizer | None = None

    @classmethod
    def parse(cls, text: str) -> "_TokenizerRequest":
        if not text.startswith("train:"):
            return cls("file", given=Tokenizer.load(Path(text)))
        try:
            return cls(text, vocab_size=int(text.removeprefix("train:")))
        except ValueError:
            raise UserError(
                f"--tokenizer {text!r}: expected train:N with a number N, such as train:2048, or "
                f"the path of a SentencePiece tokenizer.model"
            ) from None


def _check_folder(out: Path) -> None:
    """Refuse a folder that holds other things: nothing of anyone's is ever written over."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file, expected a folder; give a new one")
    if out.is_dir() and not (out / PLAN).exists():
        foreign = sorted(path.name for path in out.iterdir() if path.name not in (LOCK, _PLAN_TMP))
        if foreign:
            raise UserError(
                f"--out {out}: holds other files ({', '.join(foreign[:3])}) and no {PLAN}; "
                f"give a new or empty folder"
            )


_PLAN_TMP = PLAN + ".tmp"


def _settle_plan(
    out: Path,
    root: Path,
    source: str,
    request: _TokenizerRequest,
    options: Options,
    inputs: tuple[Input, ...],
) -> Plan:
    """The plan of `out`, made or compared with the one there, with tokenizer.model in place."""
    old = load_plan(out) if (out / PLAN).exists() else None
    model: bytes | None = None
    if request.given:
        model = request.given.model
        record = _record("file", request.given)
    elif old:
        # trained once: what was asked for is compared, the result is the plan's
        record = replace(old.tokenizer, requested=request.name)
    else:
        model = _train(root, inputs, options, request.vocab_size)
        record = _record(request.name, Tokenizer(model, request.name))
    plan = Plan(
        source=source,
        source_version=sources.source_version(),
        options=options,
        tokenizer=record,
        units=cut_units(inputs, options.unit_bytes),
        inputs=inputs,
    )
    if old:
        refuse_changes(out, old, plan)
    else:
        save_plan(out, plan)
    if not (out / TOKENIZER).exists():
        model = model or _train(root, inputs, options, request.vocab_size)
        if hashlib.sha256(model).hexdigest() != record.sha256:
            raise UserError(
                f"{out / TOKENIZER}: is missing, and training again gives another model than the "
                f"plan's (another version of sentencepiece?); build into a new folder"
            )
        write_atomic(out / TOKENIZER, model)
    load_tokenizer(out, record)
    return plan


def _record(requested: str, tokenizer: Tokenizer) -> TokenizerRecord:
    return TokenizerRecord(
        requested=requested,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        probe_ids=tokenizer.probe_ids(),
    )


def _train(root: Path, inputs: tuple[Input, ...], options: Options, vocab_size: int) -> bytes:
    """Train on the documents that are not held out: validation must not shape the vocabulary."""
    say(f"tokenizer: training {vocab_size:,} pieces")
    started = time.monotonic()
    texts = (
        row.text
        for known in inputs
        for row in sources.read_documents(known.path, read_input(root, known))
        if isinstance(row, Document) and not is_held_out(row.utf8, options.holdout)
    )
    model = train_tokenizer(texts, vocab_size)
    say(f"tokenizer: trained in {time.monotonic() - started:.1f} s")
    return model


def _say_finished(out: Path) -> bool:
    """Whether both splits are finished and whole as far as sizes and marks tell; says so."""
    if not all((out / split / MANIFEST).exists() for split in SPLITS):
        return False
    try:
        with TokenShards.open(out / TRAIN) as train, TokenShards.open(out / VALIDATION) as held_out:
            say(
                f"{out}: finished before with this plan ({train.num_tokens:,} training and "
                f"{held_out.num_tokens:,} validation tokens); nothing to do"
            )
    except ShardError as error:
        say(f"damaged since it was finished, rebuilding: {str(error).partition('; ')[0]}")
        return False
    return True


def _encode(out: Path, root: Path, plan: Plan, workers: int) -> None:
    """Build every unit that is not complete in both splits."""
    for folder in (*SPLITS, UNIT_LOCKS):
        (out / folder).mkdir(exist_ok=True)
    for split in SPLITS:
        drop_changed_marks(out / split)
    jobs = [
        UnitJob(out, root, unit, plan.inputs[first:end], plan.sha256, plan.tokenizer, plan.options)
        for unit, (first, end) in enumerate(plan.units)
        if not is_complete(out, unit, plan.sha256)
    ]
    # a manifest must never stand above parts that are being replaced
    for split in SPLITS:
        (out / split / MANIFEST).unlink(missing_ok=True)
    finished = len(plan.units) - len(jobs)
    if finished:
        say(f"resuming: {finished} of {len(plan.units)} units are finished")
    with BuildProgress(len(plan.units), finished) as progress:
        for unit in run_jobs(jobs, workers):
            marks = [m for s in SPLITS for m in unit_marks(out / s, unit, plan.sha256) or []]
            progress.unit_done(
                sum(mark["documents"] for mark in marks), sum(mark["tokens"] for mark in marks)
            )


def _finish(out: Path, plan: Plan) -> None:
    """Write both manifests and say what there is now."""
    skipped: Counter[str] = Counter()
    for split in SPLITS:
        manifest = write_manifest(
            out / split,
            len(plan.units),
            vocab_size=plan.tokenizer.vocab_size,
            eos_id=plan.tokenizer.eos_id,
            tokenizer_sha256=plan.tokenizer.sha256,
            plan_sha256=plan.sha256,
        )
        documents, tokens = manifest["num_documents"], manifest["num_tokens"]
        say(
            f"{split}: {documents:,} documents, {tokens:,} tokens, {manifest['num_bytes']:,} bytes "
            f"({manifest['num_bytes'] / max(tokens, 1):.3f} bytes/token), "
            f"fingerprint {manifest['fingerprint'][:12]}"
        )
        for unit in range(len(plan.units)):
            for mark in unit_marks(out / split, unit, plan.sha256) or []:
                skipped.update(mark["skipped"])
    if skipped:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
        say(f"skipped: {counts}")
    for path in (out / UNIT_LOCKS).iterdir():
        path.unlink()
    (out / UNIT_LOCKS).rmdir()

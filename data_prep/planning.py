"""Prepare a build: make its plan or compare it with the folder's, train or load its tokenizer."""

import io
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import sentencepiece

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import duration
from canon_pretrain.data.shards import VERSION
from canon_pretrain.data.tokenizer import FILE_NAMES, Tokenizer
from data_prep import plan as plans
from data_prep import sources
from data_prep.folder import load_tokenizer, log
from data_prep.plan import Options, Plan, TokenizerRecord, is_held_out
from data_prep.readers import Document, InputReader, cut_documents

# SentencePiece keeps its training text in memory several times; more text changes few tokens.
TRAIN_BYTES = 100_000_000
TRAIN_INPUTS = 16
MAX_LINE_BYTES = 1 << 16
MAX_CHARACTER_BYTES = 4
SPECIAL_TOKENS = 3 + 256
"""Ids of a tokenizer that are no text: unknown, beginning, end, and the bytes."""

# Stored in the model file, so it must not depend on the machine.
NUM_THREADS = 2


@dataclass(frozen=True)
class TokenizerRequest:
    """--tokenizer: a loaded tokenizer, or the vocabulary size to train one with."""

    name: str
    vocab_size: int = 0
    loaded: Tokenizer | None = None

    @classmethod
    def parse(cls, text: str, eos: str | None) -> "TokenizerRequest":
        """Parse --tokenizer, loading the file if it names one. Raises UserError."""
        if not text.startswith("train:"):
            return cls("file", loaded=Tokenizer.load(Path(text), eos=eos))

        if eos is not None:
            raise UserError(
                "option.conflict",
                f"--eos {eos!r}: a trained tokenizer has its own; leave out --eos",
                option="--eos",
            )
        try:
            return cls(text, vocab_size=int(text.removeprefix("train:")))
        except ValueError:
            raise UserError(
                "option.invalid",
                f"--tokenizer {text!r}: expected train:N, such as train:2048, or a path",
                option="--tokenizer",
            ) from None


def prepare_plan(
    out: Path, selection: sources.Selection, request: TokenizerRequest, options: Options
) -> tuple[Plan, Tokenizer]:
    """Write the plan of `out` or check it against the one there; return it and its tokenizer."""
    old_plan = plans.load_plan(out) if (out / plans.PLAN).exists() else None

    # The tokenizer is trained once: with an old plan, only the request is compared.
    tokenizer = request.loaded
    if old_plan and not tokenizer:
        record = replace(old_plan.tokenizer, requested=request.name)
    else:
        if not old_plan:
            sources.check_formats(selection)
        tokenizer = tokenizer or _train_on(selection, options, request)
        record = record_of(tokenizer, request.name)

    # The plan. Without an option, the source determines the size of input groups.
    if options.bos and record.bos_id < 0:
        raise UserError("option.conflict", "--bos: the tokenizer has no BOS token", option="--bos")

    if options.unit_files is None and options.unit_bytes is None:
        options = replace(options, unit_files=selection.unit_files, unit_bytes=selection.unit_bytes)
    plan = Plan(
        source=selection.source,
        source_version=selection.version,
        text_field=selection.text_field,
        group_field=selection.group_field,
        options=options,
        tokenizer=record,
        units=plans.make_input_groups(selection.inputs, options),
        inputs=selection.inputs,
        root=str(selection.root),
        version=old_plan.version if old_plan else VERSION,
    )
    if old_plan:
        plans.check_same_plan(out, old_plan, plan)
    else:
        plans.save_plan(out, plan)

    # A killed run may have written the plan and not the tokenizer.
    if not any((out / name).exists() for name in FILE_NAMES):
        tokenizer = tokenizer or _train_on(selection, plan.options, request)
        path = out / tokenizer.file_name
        if tokenizer.sha256 != plan.tokenizer.sha256:
            raise UserError(
                "tokenizer.other_version",
                f"{path}: is missing, and training does not reproduce the plan's (another "
                "version of sentencepiece?); build into a new folder",
            )
        write_atomic(path, tokenizer.model)
    return plan, load_tokenizer(out, plan.tokenizer)


def record_of(tokenizer: Tokenizer, requested: str) -> TokenizerRecord:
    return TokenizerRecord(
        requested=requested,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        probe_ids=tokenizer.probe_ids(),
    )


def _train_on(
    selection: sources.Selection, options: Options, request: TokenizerRequest
) -> Tokenizer:
    """Train the tokenizer of `request` on the training documents."""
    start = time.monotonic()
    model = train_tokenizer(training_texts(selection, options), request.vocab_size)
    elapsed = duration(time.monotonic() - start)
    log(f"tokenizer: trained with vocab_size {request.vocab_size:,} in {elapsed}")
    return Tokenizer(model, request.name)


def training_texts(selection: sources.Selection, options: Options) -> Iterator[str]:
    """Yield about TRAIN_BYTES of training documents from inputs spread over the source."""
    inputs = selection.inputs
    if plans.total_size(inputs) > TRAIN_BYTES:
        count = min(TRAIN_INPUTS, len(inputs))
        indices = [k * len(inputs) // count for k in range(count)]
        inputs = tuple(inputs[index] for index in indices)

    total_bytes = plans.total_size(inputs)
    num_held_out = 0
    num_texts = 0
    for source_input in inputs:
        sources.fetch(selection.source, selection.version, selection.root, [source_input])
        reader = InputReader(
            selection.root,
            source_input,
            selection.text_field,
            selection.group_field,
            options.max_line_bytes,
        )

        # Each input has a share of TRAIN_BYTES that is proportional to its size.
        bytes_left = TRAIN_BYTES * source_input.size // max(total_bytes, 1)
        for row in cut_documents(reader.rows(), options.max_document_bytes):
            if isinstance(row, Document):
                if is_held_out(row.utf8, options.holdout):
                    num_held_out += 1
                else:
                    num_texts += 1
                    yield row.text
                    bytes_left -= len(row.utf8)
            if bytes_left <= 0:
                break

    if num_held_out and not num_texts:
        raise plans.all_held_out("--tokenizer train: ", num_held_out, options.holdout)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a SentencePiece BPE with Llama-2's settings, deterministically; return its .model.

    If the vocabulary is too small for the characters of the texts, half of its pieces that are not
    bytes are the most frequent ones, and the others are encoded as bytes. Raises UserError if the
    texts do not allow the vocab_size.
    """
    # With all characters.
    lines = list(_lines(texts))
    try:
        return _train(lines, vocab_size)
    except RuntimeError as error:
        cause = error

    # Leave out rare characters. A vocabulary that is too large has a piece for all of them.
    rare = rare_characters(lines, vocab_size)
    if rare:
        try:
            return _train(_without(lines, rare), vocab_size)
        except RuntimeError as error:
            cause = error

    # "INTERNAL: src/file.cc(12) [(condition)] The reason."
    reason = str(cause).rpartition("] ")[2].strip() or "there is no text to train on"
    raise UserError(
        "tokenizer.training",
        f"--tokenizer train:{vocab_size}: cannot be trained on this source: {reason}",
        reason=reason,
    )


def _without(lines: Iterable[str], characters: Iterable[str]) -> Iterator[str]:
    """Yield the parts of lines between `characters`."""
    to_breaks = dict.fromkeys(map(ord, characters), "\n")
    for line in lines:
        yield from filter(None, line.translate(to_breaks).split("\n"))


def rare_characters(texts: Iterable[str], vocab_size: int) -> Counter[str]:
    """Count the rarest characters: those that do not fit in half of the pieces but the bytes."""
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    del counts["\n"]  # texts are trained on line by line

    # Of equally frequent characters, the choice must not depend on their order in the texts.
    by_frequency = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    num_kept = max(1, (vocab_size - SPECIAL_TOKENS) // 2)
    return Counter(dict(by_frequency[num_kept:]))


def _train(lines: Iterable[str], vocab_size: int) -> bytes:
    """Train on lines. Raises RuntimeError."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        # Llama-2's settings
        model_type="bpe",
        character_coverage=0.99995,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        # ours: see `_lines` and NUM_THREADS
        max_sentence_length=MAX_LINE_BYTES,
        num_threads=NUM_THREADS,
        minloglevel=2,
    )
    return model.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts' lines, and lines that SentencePiece would skip in slices."""
    slice_length = MAX_LINE_BYTES // MAX_CHARACTER_BYTES
    for text in texts:
        for line in text.split("\n"):
            # A line of few characters is not too long in bytes: it need not be encoded.
            if len(line) > slice_length and len(line.encode()) > MAX_LINE_BYTES:
                for start in range(0, len(line), slice_length):
                    yield line[start : start + slice_length]
            elif line:
                yield line

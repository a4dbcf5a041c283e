"""Train a SentencePiece BPE tokenizer on the texts of a source, with Llama-2's settings.

Used by the build for `--tokenizer train:N`, before the plan is fixed, on the training documents
alone. The same texts and N give the same bytes.
"""

import io
from collections.abc import Iterable, Iterator

import sentencepiece

from canon_pretrain.core.errors import UserError

# 256 bytes and <unk>, <s>, </s>
MIN_VOCAB_SIZE = 259
MAX_LINE_BYTES = 1 << 16
MAX_CHARACTER_BYTES = 4
# Written into the model file: a number taken from the machine would change its hash.
NUM_THREADS = 2


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """The content of a SentencePiece .model with `vocab_size` pieces: BPE, byte fallback.

    Trained on lines (SentencePiece's sentences; a line end itself becomes the byte piece <0x0A>,
    as in Llama-2). Raises UserError for a vocabulary that these texts cannot give.
    """
    asked = f"--tokenizer train:{vocab_size}"
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"{asked}: too small: the byte and control pieces alone are {MIN_VOCAB_SIZE}; "
            f"try train:2048"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            vocab_size=vocab_size,
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
            max_sentence_length=MAX_LINE_BYTES,
            num_threads=NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        # "INTERNAL: src/file.cc(12) [(condition)] The reason."
        reason = str(error).rpartition("] ")[2].strip() or "there is no text to train on"
        raise UserError(f"{asked}: cannot be trained on this source: {reason}") from None
    return model.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """The texts' lines; those that SentencePiece would skip for their length, in pieces."""
    piece = MAX_LINE_BYTES // MAX_CHARACTER_BYTES
    for text in texts:
        for line in text.split("\n"):
            if len(line) > piece and len(line.encode()) > MAX_LINE_BYTES:
                yield from (line[at : at + piece] for at in range(0, len(line), piece))
            elif line:
                yield line

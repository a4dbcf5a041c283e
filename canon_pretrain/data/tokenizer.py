"""Text to token ids and back, with a SentencePiece model such as Llama-2's.

Used by data_prep to write shards. BOS and EOS are the caller's, `encode` adds neither.
"""

import hashlib
from pathlib import Path
from typing import Self

import numpy as np
import sentencepiece

from canon_pretrain.errors import UserError

# Mistral-v1 and Llama-2 share vocabulary size, bos and eos, and differ in the first of these.
PROBES = ("Hello world.", "    return x[10:]\n", "</s>", "Zürich 2024 \U0001f642")


class Tokenizer:
    """A loaded SentencePiece model: `vocab_size`, `bos_id`, `eos_id` and `sha256` of its file.

    A literal `</s>` in a text is text, never the EOS id. `decode(encode(text)) == text` for every
    text of valid Unicode without U+2581, which the format itself reads as a space.
    """

    def __init__(self, model: bytes, name: str) -> None:
        if not model:
            raise UserError(f"tokenizer {name}: the file is empty; give a SentencePiece .model")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(
                f"tokenizer {name}: not a readable SentencePiece model ({len(model)} bytes); give "
                f"the file tokenizer.model, not tokenizer.json"
            ) from error
        self.model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise UserError(
                f"tokenizer {name}: the model has no EOS piece, and documents are separated by "
                f"it; give a model trained with an eos_id"
            )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the SentencePiece model at `path`. Raises UserError if missing or unreadable."""
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise UserError(
                f"tokenizer {path}: cannot be read: {error.strerror}; give the path of a "
                f"SentencePiece tokenizer.model"
            ) from None
        return cls(model, str(path))

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` without BOS and EOS, int64 [tokens]."""
        return np.array(self._processor.encode(text), dtype=np.int64)

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """The text of `ids` (int [tokens]); control ids such as EOS give nothing."""
        return str(self._processor.decode([int(i) for i in ids]))

    def probe_ids(self) -> dict[str, list[int]]:
        """The ids of a few fixed strings: tells apart models that differ in nothing else."""
        return {text: self.encode(text).tolist() for text in PROBES}

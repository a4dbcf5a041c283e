"""Text to token ids and back, with a SentencePiece model (Llama-2's) or an HF tokenizer.json.

`encode` adds neither BOS nor EOS. The ids of a SentencePiece model are always
those of `SentencePieceProcessor.encode(text)`, found faster where the model allows it
(`cached_encoder.py`). `hf_tokenizer.py` reads a tokenizer.json, `id_tokenizer.py` that of ids.
"""

import hashlib
from pathlib import Path
from typing import Self

import numpy as np
import sentencepiece

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.cached_encoder import PROBE_TEXT, CachedEncoder, SentencePieceInfo
from canon_pretrain.data.hf_tokenizer import HFTokenizer
from canon_pretrain.data.id_tokenizer import IdTokenizer, is_id_tokenizer

SENTENCEPIECE_FILE = "tokenizer.model"
HF_FILE = "tokenizer.json"
FILE_NAMES = (SENTENCEPIECE_FILE, HF_FILE)
HF_CONFIG_FILE = "tokenizer_config.json"

# Mistral-v1 and Llama-2 have the same vocab_size, BOS and EOS; the first of these tells them apart.
PROBES = ("Hello world.", "    return x[10:]\n", "</s>", "Zürich 2024 \U0001f642")

# normalizer_spec.add_dummy_prefix = false, which protobuf merges into the message before it
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceModel:
    """Encoder of a SentencePiece .model. Raises UserError, also if `eos` is not the model's."""

    def __init__(self, model: bytes, name: str, eos: str | int | None = None) -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(
                "tokenizer.unreadable",
                f"tokenizer {name}: neither a SentencePiece tokenizer.model nor JSON",
            ) from error
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise UserError(
                "tokenizer.eos",
                f"tokenizer {name}: has no EOS; pass a model trained with an eos_id",
                found=0,
            )
        self.eos_token: str = self._processor.id_to_piece(self.eos_id)
        if eos not in (None, self.eos_id, self.eos_token):
            raise UserError(
                "tokenizer.eos",
                f"tokenizer {name}: EOS is {self.eos_token} (id {self.eos_id}), not {eos!r}; "
                "do not pass it",
                found=1,
            )

        # Slices, if they have the ids of the whole text here.
        self._encoder = None
        info = SentencePieceInfo.read(model)
        reason = info.whole_text_reason()
        if not reason:
            unprefixed = sentencepiece.SentencePieceProcessor(model_proto=model + _NO_DUMMY_PREFIX)
            prefix = " " if info.dummy_prefix else ""
            encoder = CachedEncoder(unprefixed.encode, info.tokens, prefix)
            whole_ids = self._processor.encode(PROBE_TEXT)
            if np.array_equal(encoder.encode(PROBE_TEXT), whole_ids):
                self._encoder = encoder
            else:
                reason = "this sentencepiece encodes a text to other ids than its slices"
        method = self._encoder.method if self._encoder else f"whole texts: {reason}"
        self.method = f"sentencepiece, {method}"

    def encode(self, text: str) -> np.ndarray:
        if self._encoder is not None:
            return self._encoder.encode(text)
        return np.array(self._processor.encode(text), dtype=np.int64)

    def decode(self, ids: list[int]) -> str:
        return str(self._processor.decode(ids))


class Tokenizer:
    """A loaded tokenizer: `vocab_size`, `bos_id` (-1 if none), `eos_id`, `eos_token`.

    `model` is the file's content, `sha256` its hash, `file_name` its name in data folders, `method`
    a short description of how texts are encoded. `eos` is the token (text or id) that ends a
    document, if the file does not determine it.

    A literal `</s>` in a text is text, never the EOS id. With a SentencePiece model,
    `decode(encode(text)) == text` for all valid Unicode without U+2581. Raises UserError.
    """

    def __init__(self, model: bytes, name: str, *, eos: str | int | None = None) -> None:
        if not model:
            raise UserError(
                "tokenizer.unreadable",
                f"tokenizer {name}: the file is empty; pass a {' or '.join(FILE_NAMES)}",
            )

        # the first byte of a SentencePiece model is 10, the tag of its first token
        is_json = model[:1] == b"{"
        self.file_name = HF_FILE if is_json else SENTENCEPIECE_FILE
        reader: SentencePieceModel | HFTokenizer | IdTokenizer
        if is_id_tokenizer(model):
            reader = IdTokenizer(model, name)
        elif is_json:
            reader = HFTokenizer(model, name, eos)
        else:
            reader = SentencePieceModel(model, name, eos)

        self._reader = reader
        self.model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size = reader.vocab_size
        self.method = reader.method
        self.bos_id = reader.bos_id
        self.eos_id = reader.eos_id
        self.eos_token = reader.eos_token

    @classmethod
    def load(cls, path: Path, *, eos: str | int | None = None) -> Self:
        """Load the tokenizer file at `path`. Raises UserError if missing or unreadable."""
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise UserError(
                "tokenizer.unreadable",
                f"tokenizer {path}: {error.strerror}; pass the path of "
                f"a SentencePiece {SENTENCEPIECE_FILE} or an HF {HF_FILE}",
            ) from None
        return cls(model, str(path), eos=eos)

    @classmethod
    def find(cls, folder: Path, *, eos: str | int | None = None) -> Self:
        """Load the tokenizer of a data folder or an export; `eos` is its shards'.

        An export may have a SentencePiece model and its conversion: then it is the model. Raises
        UserError.
        """
        candidates = [Path(folder) / name for name in FILE_NAMES]
        paths = [path for path in candidates if path.is_file()]
        is_export = (Path(folder) / HF_CONFIG_FILE).is_file()
        if is_export:
            paths = paths[:1]  # FILE_NAMES begins with the model

        if len(paths) != 1:
            names = " and ".join(path.name for path in paths) or "no tokenizer"
            raise UserError(
                "tokenizer.not_one",
                f"{folder}: has {names}, expected one of {' and '.join(FILE_NAMES)}",
                found=len(paths),
            )
        return cls.load(paths[0], eos=eos)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text` without BOS and EOS, int64 [tokens]."""
        return self._reader.encode(text)

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """Return the text of `ids`, int [tokens]; control ids such as EOS are dropped."""
        return self._reader.decode([int(i) for i in ids])

    def probe_ids(self) -> dict[str, list[int]]:
        """Return the ids of a few fixed strings, which tell apart otherwise equal models."""
        return {text: self.encode(text).tolist() for text in PROBES}


def load_tokenizer(path: Path, *, eos: str | int | None = None) -> Tokenizer:
    """Load a tokenizer file, or the one in a data folder. Raises UserError."""
    load = Tokenizer.find if Path(path).is_dir() else Tokenizer.load
    return load(Path(path), eos=eos)

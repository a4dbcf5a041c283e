"""A SentencePiece model such as Llama-2's; one of `Tokenizer`'s two formats.

The ids are always those of `SentencePieceProcessor.encode(text)`. Where the model allows it
(`piece_bounds.py`), they are found faster: giant texts in slices, and words through a cache.
"""

import numpy as np
import sentencepiece

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.piece_bounds import ModelFacts
from canon_pretrain.data.piece_encoder import CHECK, PieceEncoder

# normalizer_spec.add_dummy_prefix = false, which protobuf merges into the message before it.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceModel:
    """The model in `model`, the bytes of a tokenizer.model; `name` is for messages.

    EOS is the model's own; an `eos` (a piece or id) that is another one is refused. `method` says
    how texts are encoded, and where they are encoded whole, why. Raises UserError.
    """

    def __init__(self, model: bytes, name: str, eos: str | int | None = None) -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(
                f"tokenizer {name}: not a readable SentencePiece model ({len(model)} bytes) and "
                f"not the JSON of an HF tokenizer; give a tokenizer.model or a tokenizer.json"
            ) from error
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise UserError(
                f"tokenizer {name}: the model has no EOS piece, and documents are separated by "
                f"it; give a model trained with an eos_id"
            )
        self.eos_token: str = self._processor.id_to_piece(self.eos_id)
        if eos not in (None, self.eos_id, self.eos_token):
            raise UserError(
                f"tokenizer {name}: EOS {eos!r} was asked for, the model's own is "
                f"{self.eos_token} (id {self.eos_id}); leave it out"
            )
        found = self._faster(model)
        self._encoder = found if isinstance(found, PieceEncoder) else None
        how = found.method if isinstance(found, PieceEncoder) else f"documents whole: {found}"
        self.method = f"sentencepiece, {how}"

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` without BOS and EOS, int64 [tokens]."""
        return self._whole(text) if self._encoder is None else self._encoder.encode(text)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; control ids give nothing."""
        return str(self._processor.decode(ids))

    def _whole(self, text: str) -> np.ndarray:
        return np.array(self._processor.encode(text), dtype=np.int64)

    def _faster(self, model: bytes) -> PieceEncoder | str:
        """An encoder of slices and words, or why it would not be exact."""
        facts = ModelFacts.read(model)
        if reason := facts.refusal():
            return reason
        processor = sentencepiece.SentencePieceProcessor(model_proto=model + _NO_DUMMY_PREFIX)
        encoder = PieceEncoder(processor.encode, facts.pieces, " " if facts.dummy_prefix else "")
        if not np.array_equal(encoder.encode(CHECK), self._whole(CHECK)):
            return "this version of sentencepiece encodes a text otherwise than its slices"
        return encoder

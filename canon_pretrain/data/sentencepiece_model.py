"""A SentencePiece model such as Llama-2's; one of `Tokenizer`'s two formats."""

import numpy as np
import sentencepiece

from canon_pretrain.errors import UserError


class SentencePieceModel:
    """The model in `model`, the bytes of a tokenizer.model; `name` is for messages.

    EOS is the model's own; an `eos` (a piece or id) that is another one is refused. Raises
    UserError.
    """

    method = "sentencepiece"

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
        if eos not in (None, self.eos_id, self._processor.id_to_piece(self.eos_id)):
            raise UserError(
                f"tokenizer {name}: EOS {eos!r} was asked for, the model's own is "
                f"{self._processor.id_to_piece(self.eos_id)} (id {self.eos_id}); leave it out"
            )

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` without BOS and EOS, int64 [tokens]."""
        return np.array(self._processor.encode(text), dtype=np.int64)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; control ids give nothing."""
        return str(self._processor.decode(ids))

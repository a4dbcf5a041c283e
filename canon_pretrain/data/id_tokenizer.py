"""Token ids as text, such as "12 45 53": the tokenizer of models that learn a synthetic task."""

import contextlib
import json

import numpy as np

from canon_pretrain.core.errors import UserError

EOS_TOKEN = "</s>"
"""The text of id 0, which no task uses; lm_eval stops at this text, so it must not be a number."""


def id_tokenizer(vocab_size: int) -> bytes:
    """Return the tokenizer.json of `vocab_size` ids."""
    eos = {
        "id": 0,
        "content": EOS_TOKEN,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    # Words are split at spaces; each is an id.
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "added_tokens": [eos],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": _vocab(vocab_size), "unk_token": EOS_TOKEN},
    }
    return json.dumps(content).encode()


def is_id_tokenizer(model: bytes) -> bool:
    """Return whether `model` is such a tokenizer.json."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if b'"WordLevel"' in model:
            vocab = json.loads(model)["model"]["vocab"]
            return bool(vocab == _vocab(len(vocab)))
    return False


def _vocab(size: int) -> dict[str, int]:
    return {EOS_TOKEN: 0} | {str(i): i for i in range(1, size)}


class IdTokenizer:
    """Reader of such a tokenizer.json. Unlike `tokenizers`, it refuses other words."""

    method = "decimal ids"
    bos_id = -1
    eos_id = 0
    eos_token = EOS_TOKEN

    def __init__(self, model: bytes, name: str) -> None:
        self._name = name
        self.vocab_size = len(json.loads(model)["model"]["vocab"])

    def encode(self, text: str) -> np.ndarray:
        numbers = text.split()
        is_id = [number.isdecimal() and 0 < int(number) < self.vocab_size for number in numbers]
        if not all(is_id):
            raise UserError(
                "tokenizer.not_ids",
                f"tokenizer {self._name}: {text[:40]!r} is not a text of ids from 1 to "
                f"{self.vocab_size - 1}: this model knows no words",
            )
        return np.array([int(number) for number in numbers], dtype=np.int64)

    def decode(self, ids: list[int]) -> str:
        return " ".join(str(i) for i in ids if i != self.eos_id)

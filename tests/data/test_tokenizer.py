"""The tokenizer: round trips, control pieces in text, and files that are no model."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.train_tokenizer import train_tokenizer

TEXTS = ["def f(x):\n    return x + 1\n", "the cat sat on the mat, the end\n" * 3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer(TEXTS, 320))
    return path


def test_facts_of_the_model(path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (320, 1, 2)
    assert tokenizer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text, ids in tokenizer.probe_ids().items():
        assert ids == reference.encode(text)


@pytest.mark.parametrize(
    "text",
    ["", " ", "  two", "tab\tand\r\nline\n\n", "a\x00b", "héllo 🙂 漢字", "\ufeffmark",
     "<0x0A> 123", *TEXTS],
)  # fmt: skip
def test_round_trip(path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.append(ids, tokenizer.eos_id)) == text


def test_control_pieces_in_a_text_are_text(path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    text = "a</s><s><unk></s>"
    ids = tokenizer.encode(text)
    assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())
    assert tokenizer.decode(ids) == text


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.model: cannot be read: No such file"):
        Tokenizer.load(tmp_path / "none.model")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        Tokenizer.load(tmp_path)
    for content, message in [(b"", "is empty"), (b"\x0a\xff", "not a readable Sentence")]:
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(UserError, match=message):
            Tokenizer.load(tmp_path / "bad")

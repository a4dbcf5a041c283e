"""Training a tokenizer: Llama-2's settings, the same bytes each time, readable refusals."""

import pytest
import sentencepiece

from canon_pretrain.core.errors import UserError
from data_prep.settle import train_tokenizer

TEXTS = ["def f(x):\n    return x + 2024\n", "the cat sat on the mat, then the end\n" * 5]


def test_settings_and_determinism(capfd: pytest.CaptureFixture[str]) -> None:
    model = train_tokenizer(TEXTS, 330)
    assert model == train_tokenizer(iter(TEXTS), 330)
    assert capfd.readouterr().err == ""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert [processor.id_to_piece(i) for i in range(4)] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert processor.encode("\n", out_type=str) == ["▁", "<0x0A>"]
    assert processor.encode("2024", out_type=str) == ["▁", "2", "0", "2", "4"]
    pieces = {processor.id_to_piece(i) for i in range(330)}
    assert "▁▁" in pieces and "▁the" in pieces


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (TEXTS, 100, "train:100: too small: .* 259"),
        (TEXTS, 260, "smaller than required_chars"),
        (TEXTS, 10**6, "too high .* <= [0-9]+"),
        ([], 300, "there is no text to train on"),
    ],
)
def test_impossible_vocabularies(texts: list[str], vocab_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_tokenizer(texts, vocab_size)

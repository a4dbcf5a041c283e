"""show: the stored documents and windows, without control characters."""

import re
from pathlib import Path

import numpy as np
import pytest

from canon_pretrain.core.terminal import printable
from canon_pretrain.data.loader import BatchLoader
from canon_pretrain.data.shards import TokenShards
from data_prep.show import show_document, show_window
from tests.data_folders import make_data_folder, sentence, tokenizer
from tests.support import refused

EVIL = "red \x1b[31mtext\x1b[0m, bell \x07, CR\rLF\r\n, C1 \x9b31m, \u202eesrever\u202c\u200b\ttab"
LINES = "first line\n\n== end of the document\nlast line\n"
UNITS = [[sentence(1, 30), EVIL, LINES, ""], [sentence(k, 40) for k in range(2, 12)]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show") / "data"
    make_data_folder(folder, UNITS, [sentence(50, 10)], max_part_tokens=200)
    return folder


def text_of(shown: str) -> str:
    """Return the document's text from the lines that show it."""
    lines = [line.removeprefix("│ ") for line in shown.splitlines() if line.startswith("│ ")]
    return "\n".join(lines)


def ids_of(shown: str) -> list[int]:
    """Return the ids that were printed."""
    lines = [line for line in shown.splitlines() if re.match(r"(ids:|    ) \d", line)]
    return [int(word) for line in lines for word in line.removeprefix("ids:").split()]


def test_documents_are_shown_as_written(data):
    documents = [text for unit in UNITS for text in unit]
    for number, text in enumerate(documents):
        shown = show_document(data, number, ids=True)
        assert text_of(shown) == printable(text, keep="\n\t")
        assert ids_of(shown) == [*tokenizer().encode(text).tolist(), tokenizer().eos_id]
        assert f" {number}: {len(ids_of(shown)):,} tokens" in shown and "-- EOS (2)" in shown
    shown = show_document(data, 0, split="validation")
    assert text_of(shown) == sentence(50, 10)
    with refused("option.invalid", option="--document"):
        show_document(data, len(documents))


@pytest.mark.parametrize("order", ["random", "permute"])
def test_windows_are_those_of_the_loader(data, order):
    sizes = {"seq_len": 60, "global_batch_size": 1, "local_batch_size": 1}
    with TokenShards.open(data / "train") as shards:
        loader = BatchLoader(shards, data_seed=7, order=order, **sizes)
        ends = shards.document_ends()
        for sample in range(30):
            (expected,) = loader.next_batch()
            shown = show_window(data, sample, 7, seq_len=60, order=order, ids=True)
            assert ids_of(shown) == expected.tolist()
            match = re.search(r"tokens ([\d,]+) to ([\d,]+) ", shown)
            assert match
            first, last = (int(group.replace(",", "")) for group in match.groups())
            assert last - first == 60
            numbers = [int(n) for n in re.findall(r"^== document (\d+):", shown, re.MULTILINE)]
            inside = np.searchsorted(ends, [first, last], side="right")
            assert numbers == list(range(inside[0], inside[1] + 1))
            assert shown.count("-- EOS (2)") == expected.tolist().count(2)

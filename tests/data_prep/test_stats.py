"""stats: every number against a count by hand; show: the stored documents and windows."""

import re
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from canon_pretrain.core.terminal import printable
from canon_pretrain.data.loader import BatchLoader
from canon_pretrain.data.shards import TokenShards
from data_prep import stats
from data_prep.show import show_document, show_window
from tests.browser import DESKTOP, PHONE
from tests.data_folders import make_data_folder, sentence, tokenizer
from tests.support import refused

EVIL = "</script><img src=x onerror=alert(1)>[red]%{y}\x1b]0;gone\x07"
COPIED = sentence(7, 30)
CONTROL = "red \x1b[31mtext\x1b[0m, bell \x07, CR\rLF\r\n, C1 \x9b31m, \u202eesrever\u202c\u200b\t"
LINES = "first line\n\n== end of the document\nlast line\n"


def texts():
    """Return two input groups; one document occurs four times, another twice."""
    first = [sentence(k, 1 + k * 20) for k in range(30)]
    second = [sentence(1000 + k, 50) for k in range(20)]
    first += [COPIED, COPIED, sentence(3, 61), CONTROL, LINES]
    return [first, [*second, COPIED, "", COPIED, EVIL]]


VALIDATION = [sentence(5000, 40), COPIED, sentence(5001, 5)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stats") / "data"
    groups = ("RedPajamaBook", EVIL, "arXiv")
    make_data_folder(folder, texts(), VALIDATION, groups=groups, max_part_tokens=3000)
    return folder


def tokens_of(text):
    return [*tokenizer().encode(text).tolist(), tokenizer().eos_id]


def test_every_number_equals_a_count_by_hand(data, monkeypatch):
    monkeypatch.setattr(stats, "CHUNK_TOKENS", 17)
    documents = [tokens_of(text) for group in texts() for text in group]
    id_counts = Counter(token for document in documents for token in document)
    lengths = sorted(len(document) for document in documents)

    train, validation = asdict(stats.stats(data))["splits"]

    assert train["parts"] > 4
    assert (train["documents"], train["tokens"]) == (len(documents), sum(lengths))
    assert train["bytes"] == sum(len(text.encode()) for group in texts() for text in group)
    assert train["skipped"] == {"empty": 3}

    # ids
    assert train["top_tokens"][0]["count"] == max(id_counts.values())
    assert {row["id"]: row["count"] for row in train["top_tokens"]}.items() <= id_counts.items()
    assert train["unused_ids"] == tokenizer().vocab_size - len(id_counts)
    assert train["frequencies"]["counts"][0] == max(id_counts.values())

    # lengths
    summary = train["lengths"]
    assert summary["longest"] == lengths[-1]
    assert len(documents[summary["longest_document"]]) == lengths[-1]
    assert summary["quantiles"][1] == lengths[(len(lengths) + 1) // 2 - 1]
    for row in summary["bins"]:
        inside = [length for length in lengths if row["first"] <= length <= row["last"]]
        assert (row["documents"], row["tokens"]) == (len(inside), sum(inside))
    assert sum(row["documents"] for row in summary["bins"]) == len(documents)

    # duplicates
    copies = train["duplicates"]
    assert copies["copies"] == 4
    assert copies["copied_tokens"] == 3 * len(tokens_of(COPIED)) + len(tokens_of(sentence(3, 61)))
    assert [row["count"] for row in copies["most_copied"]] == [4, 2]
    assert copies["most_copied"][0]["first"] == documents.index(tokens_of(COPIED))
    assert copies["elsewhere"] == 4
    assert validation["duplicates"]["elsewhere"] == 1
    assert validation["duplicates"]["copies"] == 0


@pytest.mark.system
def test_workers_change_nothing(data):
    assert stats.stats(data, workers=2) == stats.stats(data)


def test_empty_splits(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.finish.check_documents", lambda *_: None)  # as earlier versions
    make_data_folder(tmp_path / "data", [[]])
    content = asdict(stats.stats(tmp_path / "data", tmp_path / "page.html"))
    assert content["splits"][0]["documents"] == 0
    assert content["splits"][0]["lengths"]["bins"] == []


@pytest.mark.system
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_draws_its_plots_and_requests_nothing(browser, data, tmp_path, size):
    page = tmp_path / "page.html"
    content = asdict(stats.stats(data, page))
    num_bins = sum(len(split["lengths"]["bins"]) for split in content["splits"])

    # nothing of the data is markup, and nothing may be requested
    html = page.read_text()
    assert "<img src=x" not in html
    assert "\x1b" not in html
    policy = html.split('Content-Security-Policy" content="')[1].split('"')[0]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]

    browser.open(page, *size)
    browser.assert_fits(page, size[0])
    for selector, count in {
        "#plot-documents .bars .point": num_bins,
        "#plot-tokens .bars .point": num_bins,
        "#plot-frequencies .scatterlayer .trace": 2,
        "#plot-groups .barlayer .trace": 2,
        "img": 0,
    }.items():
        script = "return document.querySelectorAll(arguments[0]).length"
        assert browser.run(script, selector) == count, selector


# ---- show


def text_of(shown):
    """Return the text of a document that is shown."""
    lines = [line.removeprefix("│ ") for line in shown.splitlines() if line.startswith("│ ")]
    return "\n".join(lines)


def ids_of(shown):
    """Return the ids of what is shown."""
    ids = []
    for line in shown.splitlines():
        if re.match(r"(ids:|    ) \d", line):
            ids += [int(number) for number in line.removeprefix("ids:").split()]
    return ids


def test_documents_are_shown_as_written(data):
    documents = [text for group in texts() for text in group]
    for number, text in enumerate(documents):
        shown = show_document(data, number, ids=True)

        ids = tokens_of(text)
        assert text_of(shown) == printable(text, keep="\n\t")
        assert ids_of(shown) == ids
        assert f" {number}: {len(ids):,} tokens" in shown
        assert "-- EOS (2)" in shown

    shown = show_document(data, 0, split="validation")
    assert text_of(shown) == VALIDATION[0]
    with refused("option.invalid", option="--document"):
        show_document(data, len(documents))


@pytest.mark.parametrize("order", ["random", "permute", "documents"])
def test_windows_are_those_of_the_loader(data, order):
    with TokenShards.open(data / "train") as shards:
        loader = BatchLoader(
            shards, data_seed=7, order=order, seq_len=60, global_batch_size=1, local_batch_size=1
        )
        windows = [loader.next_batch()[0].tolist() for _ in range(30)]
        ends = shards.document_ends()

    for sample, window in enumerate(windows):
        shown = show_window(data, sample, 7, seq_len=60, order=order, ids=True)

        window = [token for token in window if token >= 0]  # without padding
        assert ids_of(shown) == window
        assert shown.count("-- EOS (2)") == window.count(2)
        match = re.search(r"tokens ([\d,]+) to ([\d,]+) ", shown)
        assert match
        first, last = (int(number.replace(",", "")) for number in match.groups())
        assert last - first + 1 == len(window)
        assert order == "documents" or len(window) == 61
        first_document, last_document = np.searchsorted(ends, [first, last], side="right")
        numbers = [int(n) for n in re.findall(r"^== document (\d+):", shown, re.MULTILINE)]
        assert numbers == list(range(first_document, last_document + 1))

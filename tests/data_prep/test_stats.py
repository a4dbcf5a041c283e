"""stats: every number against a count by hand, at any number of chunks, shards and workers."""

from collections import Counter
from pathlib import Path

import pytest

from data_prep import stats
from tests.browser import DESKTOP, PHONE
from tests.data_folders import make_data_folder, sentence, tokenizer

EVIL = "</script><img src=x onerror=alert(1)>[red]%{y}\x1b]0;gone\x07"
COPIED = sentence(7, 30)


def texts() -> list[list[str]]:
    """Return two input groups; one document occurs four times, another twice."""
    first = [sentence(k, 1 + k * 20) for k in range(30)]
    second = [sentence(1000 + k, 50) for k in range(20)]
    return [[*first, COPIED, COPIED, sentence(3, 61)], [*second, COPIED, "", COPIED, EVIL]]


VALIDATION = [sentence(5000, 40), COPIED, sentence(5001, 5)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    groups = ("RedPajamaBook", EVIL, "arXiv")
    make_data_folder(tmp_path / "data", texts(), VALIDATION, groups=groups, max_part_tokens=3000)
    return tmp_path / "data"


def tokens_of(text: str) -> list[int]:
    return [*tokenizer().encode(text).tolist(), tokenizer().eos_id]


def test_every_number_equals_a_count_by_hand(data, monkeypatch):
    monkeypatch.setattr(stats, "CHUNK_TOKENS", 17)
    content = stats.stats(data)
    train, validation = content["splits"]
    documents = [tokens_of(text) for unit in texts() for text in unit]
    ids = Counter(i for document in documents for i in document)
    lengths = sorted(len(document) for document in documents)
    assert train["parts"] > 4
    assert (train["documents"], train["tokens"]) == (len(documents), sum(lengths))
    assert train["bytes"] == sum(len(text.encode()) for unit in texts() for text in unit)
    assert train["top_tokens"][0]["count"] == max(ids.values())
    assert {row["id"]: row["count"] for row in train["top_tokens"]}.items() <= ids.items()
    assert train["unused_ids"] == tokenizer().vocab_size - len(ids)
    assert train["frequencies"]["counts"][0] == max(ids.values())
    found = train["lengths"]
    assert found["longest"] == lengths[-1]
    assert len(documents[found["longest_document"]]) == lengths[-1]
    assert found["quantiles"][1] == lengths[(len(lengths) + 1) // 2 - 1]
    for entry in found["bins"]:
        inside = [n for n in lengths if entry["from"] <= n <= entry["to"]]
        assert (entry["documents"], entry["tokens"]) == (len(inside), sum(inside))
    assert sum(entry["documents"] for entry in found["bins"]) == len(documents)
    assert train["skipped"] == {"empty": 3}

    copies = train["duplicates"]
    assert copies["copies"] == 4
    assert copies["copied_tokens"] == 3 * len(tokens_of(COPIED)) + len(tokens_of(sentence(3, 61)))
    assert [row["count"] for row in copies["most_copied"]] == [4, 2]
    first = documents.index(tokens_of(COPIED))
    assert copies["most_copied"][0]["first"] == first
    assert copies["elsewhere"] == 4
    assert validation["duplicates"]["elsewhere"] == 1
    assert validation["duplicates"]["copies"] == 0


@pytest.mark.system
def test_workers_change_nothing(data):
    assert stats.stats(data, workers=2) == stats.stats(data)


def test_empty_splits(tmp_path):
    make_data_folder(tmp_path / "data", [[]])
    content = stats.stats(tmp_path / "data", tmp_path / "page.html")
    assert content["splits"][0]["documents"] == 0
    assert content["splits"][0]["lengths"]["bins"] == []


@pytest.mark.system
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_draws_its_plots_and_requests_nothing(browser, data, tmp_path, size):
    page = tmp_path / "page.html"
    content = stats.stats(data, page)
    html = page.read_text()
    assert "<img src=x" not in html and "\x1b" not in html
    policy = html.split('Content-Security-Policy" content="')[1].split('"')[0]
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.split("style-src")[0]
    browser.open(page, *size)
    browser.assert_fits(page, size[0])
    bins = sum(len(split["lengths"]["bins"]) for split in content["splits"])
    for selector, count in {
        "#plot-documents .bars .point": bins,
        "#plot-tokens .bars .point": bins,
        "#plot-frequencies .scatterlayer .trace": 2,
        "#plot-groups .barlayer .trace": 2,
        "img": 0,
    }.items():
        found = "return document.querySelectorAll(arguments[0]).length"
        assert browser.run(found, selector) == count, selector

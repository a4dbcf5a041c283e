"""Durations, sizes, records and progress: by hand-computed values and real files."""

import io
from dataclasses import dataclass
from pathlib import Path

import pytest

from canon_pretrain.core.files import UnreadableFile, read_record
from canon_pretrain.core.terminal import Console, Progress
from canon_pretrain.core.text import duration, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (99, "99 s"),
        (100, "2 min"),
        (6000, "1.7 h"),
        (259_200, "3.0 d"),
        (1e9, "11,574.1 d"),
    ],
)
def test_durations_and_sizes(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert [size(n) for n in (999, 1250, 15.36e9)] == ["999 B", "1.25 kB", "15.36 GB"]


@dataclass(frozen=True)
class Inner:
    at: int
    where: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Record:
    name: str
    inner: Inner | None = None


def test_a_record_is_read_with_its_nested_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"name": "x", "inner": {"at": 3, "where": ["/a"]}, "unknown": 1}')
    assert read_record(path, Record) == Record("x", Inner(3, (Path("/a"),)))


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ('{"inner": null}', "name"),
        ('{"name": 3}', "name"),
        ('{"name": "x", "inner": {"at": "3"}}', "inner.at"),
        ('{"name": "x", "inner": {"at": true}}', "inner.at"),
        ("[1]", "object"),
        ('{"name": "x", "inner": {"at": 1e999}}', "finite"),
        ("{", ""),
    ],
)
def test_a_damaged_record_names_file_and_field(tmp_path: Path, content: str, field: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UnreadableFile) as caught:
        read_record(path, Record)
    assert str(path) in str(caught.value) and field in str(caught.value)


def test_progress_prints_few_lines_where_there_is_no_terminal() -> None:
    now, file = [0.0], io.StringIO()
    with Progress(Console(file=file), clock=lambda: now[0]) as progress:
        for second in range(1, 121):
            now[0] = second
            progress.update(second / 120, "work", final=second == 120)
    lines = file.getvalue().splitlines()
    assert len(lines) == 11 + 2 + 1 and lines[-1] == "work"
    assert lines[0] == "work, about 2 min left"

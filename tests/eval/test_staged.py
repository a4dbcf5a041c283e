"""Staged data sets: they come back as written, and damaged ones are refused."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.core.errors import UserError
from eval.stage import parse_pins, read_pins, select_data_sets
from eval.staged import CATALOGUE, load_staged, write_staged
from tests.checkpoint_folders import small_disk
from tests.eval_fixtures import fixture, rows_of, stage_fixtures
from tests.support import refused

SPLIT = CATALOGUE["boolq"].split
PARQUET = f"{SPLIT}.parquet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stage_fixtures(tmp_path, ["boolq"])


@pytest.mark.system
def test_every_data_set_comes_back_as_it_was(tmp_path):
    stage_fixtures(tmp_path)
    for key, data in CATALOGUE.items():
        rows = load_staged(key, tmp_path)
        assert rows.to_list() == rows_of(key) and rows.features == fixture(key).features
        assert set(data.columns) <= set(rows.column_names)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGES: list[tuple[str, str, Callable[[Path], Any]]] = [
    ("stage.damaged", PARQUET, lambda f: flip(f / PARQUET)),
    ("stage.damaged", PARQUET, lambda f: (f / PARQUET).unlink()),
    ("stage.missing", "manifest.json", lambda f: (f / "manifest.json").unlink()),
    ("stage.damaged", "manifest.json", lambda f: edit(f, lambda m: m["splits"][SPLIT].pop("file"))),
    ("stage.damaged", "manifest.json", lambda f: edit(f, lambda m: m.update(path="google/boolq"))),
    ("stage.damaged", "manifest.json", lambda f: edit(f, lambda m: m.update(version=2))),
]


@pytest.mark.parametrize(("code", "file", "damage"), DAMAGES)
def test_damage_is_refused(folder, code, file, damage):
    assert len(load_staged("boolq", folder)) == 12
    damage(folder / "boolq")
    with refused(code, path=folder / "boolq" / file) as caught:
        load_staged("boolq", folder)
    assert f"--only boolq --to {folder}" in str(caught.value)


def test_options_of_eval_stage(tmp_path):
    assert [data.key for data in select_data_sets("jrt", ["jrt_fda"])] == ["jrt_fda"]
    with refused("stage.only", key="piqa"):
        select_data_sets("jrt", ["piqa"])
    for pins in (["piqa=main"], [f"jrt_fda={'a' * 40}", f"jrt_fda={'b' * 40}"]):
        with refused("stage.pin", given=pins[-1]):
            parse_pins(pins)
    (tmp_path / "pins.json").write_text("{")
    with refused("stage.pins"):
        read_pins(tmp_path)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    with small_disk(tmp_path / "disk", "size=64k") as folder:
        stage_fixtures(folder, ["boolq"])
        large = [row | {"passage": str(os.urandom(40_000))} for row in rows_of("boolq")]
        with pytest.raises(OSError, match="No space left"):
            write_staged(folder, "boolq", large, revision="0" * 40)
        assert load_staged("boolq", folder).to_list() == rows_of("boolq")
        assert not list(folder.rglob("*.tmp"))


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_kill_at_any_step_leaves_old_new_or_missing(folder, monkeypatch):
    old, new = rows_of("boolq"), rows_of("boolq")[:5]
    seen, steps = set(), 0

    def counted(real: Callable[..., Any], fatal: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == fatal:
                raise Killed
            return real(*arguments, **options)

        return call

    for fatal in range(1, 100):
        write_staged(folder, "boolq", old, revision="0" * 40)
        steps = 0
        with monkeypatch.context() as patch, suppress(Killed):
            for name in ("fsync", "rename", "unlink", "open"):
                patch.setattr(os, name, counted(getattr(os, name), fatal))
            write_staged(folder, "boolq", new, revision="1" * 40)
        try:
            rows = load_staged("boolq", folder).to_list()
            assert rows in (old, new)
            seen.add("old" if rows == old else "new")
        except UserError as error:
            seen.add(error.code)
        if steps < fatal:  # the write was complete
            assert rows == new
            break
    assert seen == {"old", "stage.missing", "new"} and steps > 8

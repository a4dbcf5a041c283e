"""Staged data as the tasks read it: what was written comes back, and nothing else is taken."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.core.errors import UserError
from eval.staged import CATALOGUE, load_staged, write_staged
from tests.checkpoint_folders import small_disk
from tests.eval_fixtures import fixture, rows_of, stage_fixtures

SPLIT = CATALOGUE["boolq"].split
WAY_OUT = "python -m eval stage --suite discriminative --only boolq --to {}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every data set of the catalogue, staged."""
    return stage_fixtures(tmp_path_factory.mktemp("staged"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """BoolQ alone, to be damaged."""
    shutil.copytree(whole / "boolq", tmp_path / "boolq")
    return tmp_path


# ---- what was written comes back


@pytest.mark.parametrize("key", CATALOGUE)
def test_every_data_set_comes_back_as_it_was(whole, key):
    rows = load_staged(key, whole)
    assert rows.to_list() == rows_of(key) and rows.features == fixture(key).features
    assert set(CATALOGUE[key].columns) <= set(rows.column_names)


# ---- what is not whole is not taken


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


PARQUET = f"{SPLIT}.parquet"
DAMAGES: list[tuple[str, Callable[[Path], Any]]] = [
    ("was changed after it was staged", lambda f: flip(f / PARQUET)),
    (f"{PARQUET}: cannot be read: No such", lambda f: (f / PARQUET).unlink()),
    ("boolq: not staged", lambda f: (f / "manifest.json").unlink()),
    ("is damaged", lambda f: edit(f, lambda m: m["splits"][SPLIT].pop("sha256"))),
    ("expected .*aps/super_glue", lambda f: edit(f, lambda m: m.update(path="google/boolq"))),
    ("'version': 2.*'version': 1", lambda f: edit(f, lambda m: m.update(version=2))),
]


@pytest.mark.parametrize(("message", "harm"), DAMAGES)
def test_damage_is_seen_and_the_way_out_told(folder, message, harm):
    assert len(load_staged("boolq", folder)) == 12
    harm(folder / "boolq")
    with pytest.raises(UserError, match=message) as caught:
        load_staged("boolq", folder)
    assert WAY_OUT.format(folder) in str(caught.value)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    with small_disk(tmp_path / "disk", "size=64k") as folder:
        stage_fixtures(folder, ["boolq"])
        large = [row | {"passage": str(os.urandom(40_000))} for row in rows_of("boolq")]
        with pytest.raises(OSError, match="No space left"):
            write_staged(folder, "boolq", large, revision="0" * 40)
        assert load_staged("boolq", folder).to_list() == rows_of("boolq")
        assert not list(folder.rglob("*.tmp"))


class Killed(BaseException):
    """Ends the process, as far as its code can tell."""


def test_killed_anywhere_it_is_the_old_the_new_or_not_staged(folder, monkeypatch):
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
            assert "not staged" in str(error)
            seen.add("not staged")
        if steps < fatal:  # it has ended
            assert rows == new
            break
    assert seen == {"old", "not staged", "new"} and steps > 8

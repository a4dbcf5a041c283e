"""Staged data sets: they come back as written, and damaged ones are refused."""

import os
from contextlib import suppress

import pytest

from canon_pretrain.core.errors import UserError
from eval.stage import parse_pins, read_pins, select_data_sets
from eval.staged import CATALOGUE, load_staged, write_staged
from tests.checkpoint_folders import small_disk
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.support import refused

PARQUET = f"{CATALOGUE['boolq'].split}.parquet"
MANIFEST = "manifest.json"


@pytest.fixture
def folder(tmp_path):
    """A folder with staged rows of BoolQ."""
    return stage_fixtures(tmp_path, ["boolq"])


@pytest.mark.parametrize(
    ("code", "file", "old", "new"),
    [
        ("stage.damaged", PARQUET, b"lamp", b"lump"),
        ("stage.damaged", PARQUET, b"", None),
        ("stage.missing", MANIFEST, b"", None),
        ("stage.damaged", MANIFEST, b'"file"', b'"fil"'),
        ("stage.damaged", MANIFEST, b"super_glue", b"boolq"),
        ("stage.damaged", MANIFEST, b'"version": 1', b'"version": 2'),
    ],
)
def test_damage_is_refused(folder, code, file, old, new):
    """`old` is replaced by `new` in the file; None: the file is removed."""
    assert len(load_staged("boolq", folder)) == 12
    path = folder / "boolq" / file
    content = path.read_bytes()
    path.unlink()
    if new is not None:
        assert old in content
        path.write_bytes(content.replace(old, new))

    with refused(code, path=path) as caught:
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


class Killer:
    """Replaces functions of `os`; the call with the number `fatal` raises Killed."""

    def __init__(self, fatal):
        self.fatal = fatal
        self.num_calls = 0

    def patch(self, patch, *names):
        """Count the calls of these functions."""
        for name in names:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function):
        def call(*arguments, **options):
            self.num_calls += 1
            if self.num_calls == self.fatal:
                raise Killed
            return function(*arguments, **options)

        return call


def test_a_kill_at_any_step_leaves_old_new_or_missing(folder, monkeypatch):
    old = rows_of("boolq")
    new = old[:5]

    outcomes = set()
    for fatal in range(1, 100):
        write_staged(folder, "boolq", old, revision="0" * 40)
        killer = Killer(fatal)
        with monkeypatch.context() as patch, suppress(Killed):
            killer.patch(patch, "fsync", "rename", "unlink", "open")
            write_staged(folder, "boolq", new, revision="1" * 40)

        try:
            rows = load_staged("boolq", folder).to_list()
            assert rows in (old, new)
            outcomes.add("old" if rows == old else "new")
        except UserError as error:
            outcomes.add(error.code)
        if killer.num_calls < fatal:  # the write was complete
            assert rows == new
            break

    assert outcomes == {"old", "stage.missing", "new"}
    assert killer.num_calls > 8

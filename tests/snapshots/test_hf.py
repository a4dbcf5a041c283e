"""What export and import print, and the README of an export."""

from pathlib import Path

import pytest

from tests.hf_exports import plant_run
from tests.support import canon_stage
from tests.variants import build, variant

main = canon_stage("hf")


@pytest.mark.parametrize("name", ["nope ABCD", "rope", "gla AC conv", "mamba2 conv"])
def test_output(name, tmp_path, capsys, monkeypatch, snapshot):
    monkeypatch.chdir(tmp_path)
    plant_run(Path("run"), build(variant(name)))
    main(["export", "run", "out", "--no-tokenizer"])
    main(["import", "out", "imported"])
    readme = Path("out", "README.md").read_text()
    assert capsys.readouterr().out + readme == snapshot

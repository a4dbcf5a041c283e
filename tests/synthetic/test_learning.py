"""A small model learns a small setting of each synthetic task; minutes each on one core."""

import pytest

from canon_pretrain.run.results import read_results
from eval.__main__ import main
from tests.support import ROOT, train

FOLDER = ROOT / "train_configs" / "playground" / "tiny"


@pytest.mark.learning
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.toml")))
def test_a_small_model_solves(name, tmp_path):
    train("--config", FOLDER / f"{name}.toml", "--job.dump_folder", tmp_path, timeout=900)
    main(["run", "--checkpoint", str(tmp_path), "--suite", "playground"])
    (path,) = (tmp_path / "evals").rglob("results.json")
    results = read_results(path)
    (score,) = results.asked["tasks"]["playground"]["primary"]
    assert results.scores["playground"][score].value > 0.95

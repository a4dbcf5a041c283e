"""The quickstart's recipe and its experiment must name the same run."""

import tomllib

from tests.support import ROOT


def test_the_recipe_names_the_steps_and_folders_of_its_toml():
    lines = (ROOT / "Makefile").read_text().splitlines()
    values = dict(line.split(" := ", 1) for line in lines if " := " in line)
    with open(ROOT / "train_configs" / "quickstart.toml", "rb") as file:
        job = tomllib.load(file)
    assert job["training"]["steps"] == int(values["STEPS"])
    assert 0 < int(values["STOP_AT"]) < int(values["STEPS"])
    assert job["job"]["dump_folder"] == f"{values['RUN']}/run"
    assert job["data"]["path"] == f"{values['RUN']}/data"

"""make install, constraints.txt and the containers, which can't be built in these tests."""

import os
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# answers the check of the version, makes .venv/bin/python of itself, and fails at the step FAILS
PYTHON = """#!/bin/sh
case "$*" in
-c*) exit 0 ;;
"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
esac
for number in $(seq 40); do echo "noise $number of $*"; done
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in found}


def test_constraints_pin_each_dependency_within_its_range():
    given = map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])
    allowed = {canonicalize_name(each.name): each.specifier for each in given}
    # TORCH pins torch, which pins triton
    assert {"torch", "triton"} & set(pins()) == set()
    assert set(allowed) - {"torch", "triton"} <= set(pins())
    for name, pin in pins().items():
        (version,) = (spec.version for spec in pin.specifier)
        assert str(pin.specifier) == f"=={version}" and "+" not in version
        assert name not in allowed or version in allowed[name]
        # such as nvidia-cudnn-cu13: a CPU's torch has none
        assert not name.startswith(("nvidia-", "cuda-"))


def install(folder, fails, *words):
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).write_text((ROOT / name).read_text())
    kept = {"capture_output": True, "text": True, "cwd": folder}
    command = ["make", "install", f"PYTHON={folder}/python", *words]
    # of the make that runs the tests
    own = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    return subprocess.run(command, env=own | {"FAILS": fails}, **kept)


@pytest.mark.parametrize(
    "words, used", [((), "--constraint constraints.txt"), (("CONSTRAINTS=",), "off torch")]
)
def test_an_install_prints_a_line_per_step(tmp_path, words, used):
    done = install(tmp_path, "nothing", "TORCH=torch", *words)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3
    assert all(re.fullmatch(r"install: .+ \.\.\. \d+ s", line) for line in lines)
    log = (tmp_path / ".venv/install.log").read_text()
    assert log.count("noise 40") == 3 and used in log
    assert (tmp_path / ".venv/.installed").exists()


def test_a_failed_install_prints_the_end_of_its_log(tmp_path):
    done = install(tmp_path, "torch==")
    assert done.returncode == 2 and not (tmp_path / ".venv/.installed").exists()
    assert done.stdout.count("noise") == 20 and ".venv/install.log" in done.stdout
    assert {f"{name}=" for name in ("CONSTRAINTS", "TORCH", "PYTHON")} <= set(done.stdout.split())


def test_the_containers_have_the_cuda_of_the_install():
    """Both copy what `make install` reads, and constraints.txt with it."""
    pin = re.search(r"^TORCH \?= torch==(\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    cuda = re.search(r"torch wheel \(CUDA (\d+\.\d+)\)", (ROOT / "README.md").read_text())
    images = set()
    for name in ("Dockerfile", "canon.def"):
        text = (ROOT / "containers" / name).read_text()
        assert f"torch {pin[1]}:" in text and f"CUDA {cuda[1]}," in text
        image = re.search(r"^(?:FROM|From:) (nvidia/cuda:(\d+\.\d+)\S*)$", text, re.MULTILINE)
        python = re.search(r"make install PYTHON=(python3\.\d+)$", text, re.MULTILINE)[1]
        assert image[2] == cuda[1] and f"{python}-venv" in text
        assert python.removeprefix("python") in {"3.11", "3.12", "3.13"}
        images.add(image[1])
        assert "constraints.txt" in text
    assert len(images) == 1

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


def requirements(lines):
    """Return the requirements by their canonical names."""
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def pins():
    """Return the requirements of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return requirements(line for line in lines if not line.startswith("#"))


def test_constraints_pin_each_dependency_within_its_range():
    declared = requirements(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])

    # TORCH pins torch, which pins triton
    assert {"torch", "triton"} & set(pins()) == set()
    assert set(declared) - {"torch", "triton"} <= set(pins())
    for name, pin in pins().items():
        (version,) = (spec.version for spec in pin.specifier)
        assert str(pin.specifier) == f"=={version}"
        assert "+" not in version
        assert name not in declared or version in declared[name].specifier
        # such as nvidia-cudnn-cu13: a CPU's torch has none
        assert not name.startswith(("nvidia-", "cuda-"))


def install(folder, failing_step, *words):
    """Run `make install` in a folder with PYTHON as its interpreter."""
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).write_text((ROOT / name).read_text())

    # without the variables of the make that runs the tests
    environ = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    return subprocess.run(
        ["make", "install", f"PYTHON={folder}/python", *words],
        env=environ | {"FAILS": failing_step},
        capture_output=True,
        text=True,
        cwd=folder,
    )


@pytest.mark.parametrize(
    "words, used", [((), "--constraint constraints.txt"), (("CONSTRAINTS=",), "off torch")]
)
def test_an_install_prints_a_line_per_step(tmp_path, words, used):
    done = install(tmp_path, "nothing", "TORCH=torch", *words)

    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"install: .+ \.\.\. \d+ s", line) for line in lines)

    log = (tmp_path / ".venv/install.log").read_text()
    assert log.count("noise 40") == 3
    assert used in log
    assert (tmp_path / ".venv/.installed").exists()


def test_a_failed_install_prints_the_end_of_its_log(tmp_path):
    done = install(tmp_path, "torch==")

    assert done.returncode == 2
    assert not (tmp_path / ".venv/.installed").exists()
    assert done.stdout.count("noise") == 20
    assert ".venv/install.log" in done.stdout
    assert {"CONSTRAINTS=", "TORCH=", "PYTHON="} <= set(done.stdout.split())


def search(pattern, *path):
    """Search lines of a file of the repository."""
    return re.search(pattern, ROOT.joinpath(*path).read_text(), re.MULTILINE)


def test_the_containers_have_the_cuda_of_the_install():
    """Both copy what `make install` reads, and constraints.txt with it."""
    torch_version = search(r"^TORCH \?= torch==(\d+\.\d+)", "Makefile")[1]
    cuda_version = search(r"torch wheel \(CUDA (\d+\.\d+)\)", "README.md")[1]

    images = set()
    for name in ("Dockerfile", "canon.def"):
        image, image_cuda = search(
            r"^(?:FROM|From:) (nvidia/cuda:(\d+\.\d+)\S*)$", "containers", name
        ).groups()
        assert image_cuda == cuda_version
        images.add(image)

        text = (ROOT / "containers" / name).read_text()
        assert f"torch {torch_version}:" in text
        assert f"CUDA {cuda_version}," in text
        assert "constraints.txt" in text

        python = search(r"make install PYTHON=(python3\.\d+)$", "containers", name)[1]
        assert f"{python}-venv" in text
        assert python.removeprefix("python") in {"3.11", "3.12", "3.13"}
    assert len(images) == 1

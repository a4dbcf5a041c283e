"""transformers' own tests of models on exports of five kinds: all pass but for those listed."""

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import transformers

SUITE = Path(__file__).with_name("transformers_suite.py")
CLASSES = [
    "AttentionCanonTest",
    "GatedDeltaNetTest",
    "MoECapacityTest",
    # half a minute each
    pytest.param("GLATest", marks=pytest.mark.long),
    pytest.param("Mamba2CanonTest", marks=pytest.mark.long),
]
ACCEPTED = {
    "test_generation_tester_mixin_inheritance": (
        "transformers' generation tests are not in its sdist; generation is tested by "
        "test_modeling.py and test_base_model.py"
    ),
}
"""Tests that fail for each kind, and why a user accepts it."""
# what test_modeling_common.py imports and the sdist lacks
MISSING = {
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
}
SETTINGS = """\
[pytest]
markers =
    generate
    slow
    accelerate_tests
"""


def pip(*arguments):
    """Run pip, or skip the tests if it fails, as without a network."""
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"pip {arguments[0]} failed: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="module")
def downloaded(request):
    """The folder of transformers' tests of the installed version, as a package."""
    version = transformers.__version__
    folder = request.config.cache.mkdir(f"transformers-{version}")
    package = folder / "transformers_tests"
    if (package / "complete").is_file():
        return folder

    options = ("--no-deps", "--no-build-isolation", "--no-binary", "transformers")
    pip("download", f"transformers=={version}", *options, "-d", str(folder))
    pip("install", "--no-deps", "--target", str(folder), "parameterized")

    # The sdist has the tests of all models, not those of each.
    (sdist,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            path = Path(member.name)
            if path.parts[1:2] == ("tests",) and len(path.parts) == 3 and path.suffix == ".py":
                file = archive.extractfile(member)
                assert file is not None
                package.mkdir(exist_ok=True)
                (package / path.name).write_bytes(file.read())
    for name, text in MISSING.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).parent.joinpath("__init__.py").touch()
        (package / name).write_text(text)
    (package / "__init__.py").touch()
    (package / "complete").touch()
    return folder


def outcomes_of(kind, downloaded, folder):
    """Run the tests of a kind; return the outcome of each: passed, skipped or a message."""
    (folder / "pytest.ini").write_text(SETTINGS)
    report = folder / "report.xml"
    options = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--noconftest"]
    options += ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore", "-k", kind]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": f"{SUITE.parents[2]}{os.pathsep}{downloaded}"}

    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(SUITE), *options, f"--junitxml={report}"],
        env=os.environ | offline | paths,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=590,
    )

    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name", "")
        problems = [*case.iter("failure"), *case.iter("error")]
        if problems:
            # a subtest that fails is a case of its own, of the same name
            outcomes[name] = problems[0].get("message", "")
        else:
            skipped = case.find("skipped") is not None
            outcomes.setdefault(name, "skipped" if skipped else "passed")
    return outcomes


@pytest.mark.system  # half a minute for each kind
@pytest.mark.parametrize("kind", CLASSES)
def test_transformers_tests_pass_but_for_those_listed(kind, downloaded, tmp_path):
    outcomes = outcomes_of(kind, downloaded, tmp_path)

    passed = [name for name, outcome in outcomes.items() if outcome == "passed"]
    failed = {name: text for name, text in outcomes.items() if text not in ("passed", "skipped")}
    assert failed.keys() == ACCEPTED.keys(), failed
    assert len(passed) > 60

"""The manifest of a checkpoint, and every way in which a folder can differ from it."""

import os
from pathlib import Path

import pytest

from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from tests.checkpoint_folders import flip_byte, make_step, set_manifest
from tests.support import refused

FILE = "__0_0.distcp"


def make(folder: Path) -> Path:
    """Two files of 5,000 bytes and their manifest."""
    return make_step(folder, 7, num_bytes=5000)


@pytest.mark.parametrize(
    ("harm", "name", "seen_by_size"),
    [
        (lambda p: flip_byte(p / FILE), "__0_0.distcp", False),
        (lambda p: os.truncate(p / FILE, 4999), "__0_0.distcp", True),
        (lambda p: (p / FILE).unlink(), "__0_0.distcp", True),
        (lambda p: (p / "__2_0.distcp").touch(), "__2_0.distcp", True),
        (lambda p: p.rename(p.with_name("step-8")), "step", True),
    ],
)
def test_every_difference_is_named(tmp_path, harm, name, seen_by_size):
    path = make(tmp_path)
    harm(path)
    path = next(tmp_path.iterdir())
    for hashes in (True, False):
        if not hashes and not seen_by_size:
            verify(path, hashes=False)
            continue
        with refused("checkpoint.damaged", kind=DamagedCheckpoint, path=path) as caught:
            verify(path, hashes=hashes)
        (fault,) = caught.value.fields["faults"]
        assert name in fault


def of_file(name: str) -> dict[str, object]:
    return {"files": {name: {"bytes": 1, "sha256": "0"}}}


@pytest.mark.parametrize(
    "change", [{"version": 99}, of_file("/etc/passwd"), of_file("a/../../b")], ids=str
)
def test_another_version_or_a_file_outside_is_refused(tmp_path, change):
    path = make(tmp_path)
    set_manifest(path, **change)
    with refused("checkpoint.damaged", kind=DamagedCheckpoint, path=path):
        Manifest.read(path)

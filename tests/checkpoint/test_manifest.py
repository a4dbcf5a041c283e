"""The manifest of a checkpoint, and every way in which a folder can differ from it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from tests.checkpoint_folders import flip_byte, make_step, set_manifest
from tests.support import refused

FILE = "__0_0.distcp"


def of_file(name: str) -> Callable[[Path], object]:
    return lambda step: set_manifest(step, files={name: {"bytes": 1, "sha256": "0"}})


def make_fifo(step: Path) -> None:
    (step / "manifest.json").unlink()
    os.mkfifo(step / "manifest.json")


FOLDER_HARMS: dict[str, Callable[[Path], object]] = {
    FILE: lambda step: os.truncate(step / FILE, 4999),
    "__1_0.distcp": lambda step: (step / "more" / "__1_0.distcp").unlink(),
    "__2_0.distcp": lambda step: (step / "__2_0.distcp").touch(),
    "step": lambda step: step.rename(step.with_name("step-8")),
}
MANIFEST_HARMS: dict[str, Callable[[Path], object]] = {
    "version": lambda step: set_manifest(step, version=99),
    "infinity": lambda step: set_manifest(step, step=float("inf")),
    "nul": of_file("a\0b"),
    "long name": of_file("x" * 300),
    "absolute": of_file("/etc/passwd"),
    "outside": of_file("a/../../b"),
    "deep": lambda step: (step / "manifest.json").write_bytes(b"[" * 100_000),
    "fifo": make_fifo,
}


@pytest.mark.parametrize("name", FOLDER_HARMS)
def test_every_difference_is_named(tmp_path, name):
    FOLDER_HARMS[name](make_step(tmp_path, 7, num_bytes=5000))
    path = next(tmp_path.iterdir())
    for hashes in (True, False):
        with refused("checkpoint.damaged", kind=DamagedCheckpoint, path=path) as caught:
            verify(path, hashes=hashes)
        (fault,) = caught.value.fields["faults"]
        assert name in fault


def test_only_hashes_find_a_flipped_byte(tmp_path):
    flip_byte((path := make_step(tmp_path, 7)) / FILE)
    verify(path, hashes=False)
    with refused("checkpoint.damaged", kind=DamagedCheckpoint, path=path) as caught:
        verify(path)
    assert [FILE in fault for fault in caught.value.fields["faults"]] == [True]


@pytest.mark.parametrize("name", MANIFEST_HARMS)
def test_a_damaged_manifest_is_refused(tmp_path, name):
    MANIFEST_HARMS[name](path := make_step(tmp_path, 7))
    read = Manifest.read if name in ("version", "absolute", "outside") else verify
    with refused("checkpoint.damaged", kind=DamagedCheckpoint, path=path):
        read(path)

"""RUN/code: what is copied, when a link of a chain uses it, and what counts as damage."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import canon_pretrain
from canon_pretrain import chain
from canon_pretrain.core.errors import UserError
from canon_pretrain.run.config import read_experiment
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.source import (
    check_snapshot,
    code_hashes,
    differences,
    look_at_source,
    newest_snapshot,
    take_snapshot,
)
from tests.support import ROOT

CONFIG = ROOT / "train_configs" / "debug.toml"
FILE = "canon_pretrain/core/files.py"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def changed_program(tmp_path: Path) -> Path:
    """A copy of the package, in which the loss is another: the program as a git pull leaves it."""
    package = tmp_path / "pulled" / "canon_pretrain"
    shutil.copytree(
        Path(canon_pretrain.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "pulled" / "slurm").mkdir()
    shutil.copy(ROOT / "slurm" / "lib.sh", tmp_path / "pulled" / "slurm")
    loss = package / "titan" / "spec.py"
    loss.write_text(loss.read_text() + "\nSCALE = 1.7\n")

    return package


def test_a_snapshot_is_a_program_of_its_own(run: RunFolder) -> None:
    """Python runs it from anywhere, also from a folder with another canon_pretrain in it."""
    snapshot = take_snapshot(run)
    assert snapshot == run.code / "001" == newest_snapshot(run) == take_snapshot(run)
    check_snapshot(snapshot)
    assert differences(snapshot) == []
    assert code_hashes(snapshot / "canon_pretrain") == code_hashes()
    assert (snapshot / "slurm/lib.sh").read_bytes() == (ROOT / "slurm/lib.sh").read_bytes()
    kinds = {path.suffix for path in snapshot.rglob("*") if path.is_file()}
    assert kinds == {".py", ".sh", ".json"}
    modes = {path.stat().st_mode & 0o077 for path in snapshot.rglob("*") if path.is_file()}
    assert modes == {0} and snapshot.stat().st_mode & 0o777 == 0o700
    # the commit that it is from is known though git tracks no run folder
    init = snapshot / "canon_pretrain" / "__init__.py"
    assert look_at_source(init) == look_at_source(Path(canon_pretrain.__file__).resolve())

    words = "import canon_pretrain.chain as chain; print(chain.__file__)"
    environ = os.environ | {"PYTHONPATH": str(snapshot), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", words]
    shown = subprocess.check_output(command, env=environ, cwd=ROOT, text=True)
    assert shown.strip() == str(snapshot / "canon_pretrain/chain.py")
    check_snapshot(snapshot)  # Python's compiled files are no damage


def flip(snapshot: Path) -> None:
    path = snapshot / "canon_pretrain/titan/spec.py"
    path.write_bytes(path.read_bytes().replace(b"return", b"retur\xcf", 1))


def link_file(snapshot: Path) -> None:
    path = snapshot / FILE
    path.unlink()
    path.symlink_to(Path(canon_pretrain.__file__).parent / "core/files.py")


def link_itself(snapshot: Path) -> None:
    snapshot.rename(snapshot.with_name("there"))
    snapshot.symlink_to(snapshot.with_name("there"))


HARMS: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "lose": lambda snapshot: (snapshot / FILE).unlink(),
    "a module before torch's own": lambda snapshot: (snapshot / "torch.py").touch(),
    "link a file": link_file,
    "link a folder": lambda snapshot: (snapshot / "tyro").symlink_to("/tmp"),
    "link itself": link_itself,
    "tear": lambda snapshot: (snapshot / "manifest.json").write_text("{"),
}


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return take_snapshot(RunFolder(tmp_path_factory.mktemp("taken")))


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_damage_is_refused_with_the_way_out(
    taken: Path, run: RunFolder, harm: Callable[[Path], object]
) -> None:
    shutil.copytree(taken, snapshot := run.code / "001")
    check_snapshot(snapshot)
    harm(snapshot)
    with pytest.raises(UserError, match="--run.allow_changes code"):
        check_snapshot(snapshot)


def test_the_way_out_is_the_same_code_again(run: RunFolder) -> None:
    flip(take_snapshot(run))
    assert take_snapshot(run) == run.code / "002"
    check_snapshot(run.code / "002")


def test_another_users_folder_is_no_snapshot(taken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(UserError, match="no folder of yours"):
        check_snapshot(taken)


def words(run: RunFolder, *more: str) -> list[str]:
    return ["--config", str(CONFIG), "--job.dump-folder", str(run.path), *more]


def code_of(job: str, arguments: list[str]) -> Path | None:
    return chain.code_of(job, arguments)[0]


def test_a_chain_stays_with_its_code(
    run: RunFolder, changed_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run's first checkpoint at the latest; a restart of a job earlier, and whatever the
    options that it repeats."""
    first, second = run.code / "001", run.code / "002"
    allow = ("--run.allow_changes", "optimizer.lr", "code")
    assert code_of("1", words(run)) is None, "a new run"
    assert chain.begin(run, "1", take_code=True) is None and newest_snapshot(run) == first
    monkeypatch.setattr(canon_pretrain, "__file__", str(changed_program / "__init__.py"))
    assert differences(first) == ["canon_pretrain/titan/spec.py"]
    assert code_of("1", words(run)) == first, "a restart before the first checkpoint"
    assert code_of("2", words(run)) is None, "another job would begin at step 1"
    (run.path / "checkpoint" / "step-4").mkdir(parents=True)
    for options in ((), ("--run.allow_changes=optimizer.lr",), ("--checkpoint.no-fresh",)):
        assert code_of("2", words(run, *options)) == first
    for options in (allow, ("--run.allow-changes=optimizer.lr,code",), ("--checkpoint.fresh",)):
        assert code_of("2", words(run, *options)) is None
    own = tmp_path / "own.toml"
    own.write_text(f'[job]\ndump_folder = "{run.path}"\n[run]\nallow_changes = ["code"]\n')
    assert code_of("2", ["--config", str(own)]) is None

    # it takes the new code, once
    assert chain.begin(run, "2", take_code=True) is None and newest_snapshot(run) == second
    assert code_of("2", words(run, *allow)) == second
    assert code_of("3", words(run)) == second
    assert "SCALE" in (second / "canon_pretrain/titan/spec.py").read_text()
    assert "SCALE" not in (first / "canon_pretrain/titan/spec.py").read_text()
    flip(second)
    with pytest.raises(UserError, match="titan/spec.py"):
        code_of("3", words(run))
    assert code_of("3", ["--config", "/no/such.toml"]) is None, "the job's check says so"


def test_a_folder_that_takes_no_code_is_an_error(run: RunFolder) -> None:
    run.path.mkdir()
    run.code.write_text("a file where code goes")
    with pytest.raises(UserError, match="can't be kept"):
        chain.begin(run, "1", take_code=True)
    assert not chain.restarts_file(run).exists(), "the link has not begun"


def test_a_chain_stays_with_its_config(run: RunFolder, tmp_path: Path) -> None:
    """Its restarts do; who submits again means the file as it is then."""
    own = tmp_path / "own.toml"
    own.write_text(f'extends = "{CONFIG}"\n[job]\ndump_folder = "{run.path}"\n')
    begun = read_experiment(own)
    (run.path / "checkpoint" / "step-4").mkdir(parents=True)
    chain.begin(run, "1", take_code=True, config=own)
    own.write_text(own.read_text() + "[optimizer]\nlr = 1\n")
    edited = read_experiment(own)
    chain.begin(run, "1", config=own)
    snapshot, config = chain.code_of("1", ["--config", str(own)])
    assert snapshot == run.code / "001" and config == chain.config_file(run)
    assert read_experiment(config) == begun != edited
    assert chain.code_of("2", ["--config", str(own)]) == (snapshot, None)
    chain.begin(run, "2", config=own)
    assert read_experiment(config) == edited

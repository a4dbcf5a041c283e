"""Snapshots of the program's source, their use by job chains, and git state."""

import grp
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import canon_pretrain
from canon_pretrain.cluster import chain
from canon_pretrain.run.config import read_experiment
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.source import (
    SourceTree,
    check_snapshot,
    code_hashes,
    differences,
    newest_snapshot,
    read_source_tree,
    take_snapshot,
)
from tests.support import ROOT, error_codes, refused

DEBUG = str(ROOT / "train_configs" / "debug.toml")

CONFIG = ROOT / "train_configs" / "debug.toml"
FILE, LOSS = "canon_pretrain/core/files.py", "titan/spec.py"


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def test_a_snapshot_is_a_program_of_its_own(run):
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
    assert read_source_tree(init) == read_source_tree(Path(canon_pretrain.__file__).resolve())

    program = "import canon_pretrain.cluster.chain as chain; print(chain.__file__)"
    environ = os.environ | {"PYTHONPATH": str(snapshot), "PYTHONSAFEPATH": "1"}
    shown = subprocess.check_output(
        [sys.executable, "-c", program], env=environ, cwd=ROOT, text=True
    )
    assert shown.strip() == str(snapshot / "canon_pretrain/cluster/chain.py")
    check_snapshot(snapshot)  # Python's compiled files are no damage

    # it has what a command line needs before torch is imported
    command = [sys.executable, "-m", "canon_pretrain.train", "--config", DEBUG, "--typo"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert error_codes(done.stderr) == ["config.unknown_key"], done.stderr


def link(path, there):
    path.symlink_to(path.rename(there))


HARMS = {
    "flip": lambda snapshot: (snapshot / "canon_pretrain" / LOSS).write_bytes(b"retur\xcf"),
    "lose": lambda snapshot: (snapshot / FILE).unlink(),
    "a module that hides torch": lambda snapshot: (snapshot / "torch.py").touch(),
    "link a file": lambda snapshot: link(snapshot / FILE, snapshot.parent / "there"),
    "link itself": lambda snapshot: link(snapshot, snapshot.parent / "there"),
    "truncate": lambda snapshot: (snapshot / "manifest.json").write_text("{"),
}


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    return take_snapshot(RunFolder(tmp_path_factory.mktemp("taken")))


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_snapshot_is_refused_and_replaced(taken, run, harm, monkeypatch):
    shutil.copytree(taken, snapshot := run.code / "001")
    check_snapshot(snapshot)
    with monkeypatch.context() as patch, refused("run.code_damaged"):
        patch.setattr(os, "geteuid", lambda: -1)  # another user's
        check_snapshot(snapshot)
    harm(snapshot)
    with refused("run.code_damaged"):
        check_snapshot(snapshot)
    assert take_snapshot(run) == run.code / "002"
    check_snapshot(run.code / "002")


@pytest.mark.parametrize("name", ["path", "code"])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o702])
def test_a_run_that_others_may_write_is_refused(run, name, mode, monkeypatch):
    """By its first launch, by restarts and before they are queued, also with the current code."""
    monkeypatch.setattr("grp.getgrgid", lambda gid: grp.struct_group(("staff", "", gid, [])))
    arguments = ["--config", str(CONFIG), "--job.dump-folder", str(run.path)]
    assert chain.launch_code("1", arguments)[0] is None, "a new run"
    take_snapshot(run)
    path = getattr(run, name)
    path.chmod(mode)
    for refuses in (
        lambda: take_snapshot(run),
        lambda: chain.launch_code("1", arguments),
        lambda: chain.launch_code("1", [*arguments, "--run.allow_changes", "code"]),
    ):
        with refused("run.others_write", path=path):
            refuses()
    path.chmod(mode & ~0o022)
    take_snapshot(run)


def test_which_groups_are_others(run, monkeypatch):
    """Not a user's own group without other members or access lists, as umask 002 is made for."""
    user = pwd.getpwuid(os.geteuid())
    take_snapshot(run)
    run.path.chmod(0o775)
    group = ("grp.getgrgid", lambda gid: grp.struct_group((user.pw_name, "", user.pw_gid, [])))
    monkeypatch.setattr(*group)
    take_snapshot(run)
    monkeypatch.setattr("os.listxattr", lambda path: ["system.posix_acl_access"])
    with refused("run.others_write"):
        take_snapshot(run)
    monkeypatch.setattr("os.listxattr", lambda path: [])
    members = [user.pw_name, "another"]
    monkeypatch.setattr(
        "grp.getgrgid", lambda gid: grp.struct_group((user.pw_name, "", user.pw_gid, members))
    )
    with refused("run.others_write"):
        take_snapshot(run)
    monkeypatch.setattr(*group)
    if os.geteuid() == 0:
        os.chown(run.path, 12345, -1)
        with refused("run.others_write"):
            take_snapshot(run)


def test_a_chain_stays_with_its_code(run, tmp_path, monkeypatch):
    """From the run's first checkpoint on; restarts of a job from its start, with any options."""
    first, second = run.code / "001", run.code / "002"
    # a copy with another loss, as a git pull leaves the program
    package, without = tmp_path / "pulled" / "canon_pretrain", shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(canon_pretrain.__file__).parent, package, ignore=without)
    (tmp_path / "pulled" / "slurm").mkdir()
    shutil.copy(ROOT / "slurm" / "lib.sh", tmp_path / "pulled" / "slurm")
    with open(package / LOSS, "a") as file:
        file.write("\nSCALE = 1.7\n")
    config_file = tmp_path / "own.toml"
    config_file.write_text(f'[job]\ndump_folder = "{run.path}"\n[run]\nallow_changes = ["code"]\n')

    def launch_code(job, *more, config=CONFIG):
        arguments = ["--config", str(config), "--job.dump-folder", str(run.path), *more]
        return chain.launch_code(job, arguments)[0]

    allow = ("--run.allow_changes", "optimizer.lr", "code")
    assert launch_code("1") is None, "a new run"
    assert chain.begin(run, "1", take_code=True) is None and newest_snapshot(run) == first
    monkeypatch.setattr(canon_pretrain, "__file__", str(package / "__init__.py"))
    assert differences(first) == [f"canon_pretrain/{LOSS}"]
    assert launch_code("1") == first, "a restart before the first checkpoint"
    assert launch_code("2") is None, "another job would begin at step 1"
    (run.path / "checkpoint" / "step-4").mkdir(parents=True)
    for options in ((), ("--run.allow_changes=optimizer.lr",), ("--checkpoint.no-fresh",)):
        assert launch_code("2", *options) == first
    for options in (allow, ("--run.allow-changes=optimizer.lr,code",), ("--checkpoint.fresh",)):
        assert launch_code("2", *options) is None
    assert chain.launch_code("2", ["--config", str(config_file)])[0] is None

    # it takes the new code, once
    assert chain.begin(run, "2", take_code=True) is None and newest_snapshot(run) == second
    assert launch_code("2", *allow) == second
    assert launch_code("3") == second
    scaled = ["SCALE" in (path / "canon_pretrain" / LOSS).read_text() for path in (first, second)]
    assert scaled == [False, True]
    HARMS["flip"](second)
    with refused("run.code_damaged"):
        launch_code("3")
    gone = chain.launch_code("3", ["--config", "/no/such.toml"])
    assert gone[0] is None, "the job's check says so"


def test_a_chain_stays_with_its_config(run, tmp_path):
    """Its restarts do; who submits again means the file as it is then."""
    config_file = tmp_path / "own.toml"
    config_file.write_text(f'extends = "{CONFIG}"\n[job]\ndump_folder = "{run.path}"\n')
    begun = read_experiment(config_file)
    (run.path / "checkpoint" / "step-4").mkdir(parents=True)
    chain.begin(run, "1", take_code=True, config=config_file)
    config_file.write_text(config_file.read_text() + "[optimizer]\nlr = 1\n")
    edited = read_experiment(config_file)
    chain.begin(run, "1", config=config_file)
    snapshot, config = chain.launch_code("1", ["--config", str(config_file)])
    assert snapshot == run.code / "001" and config == chain.restarts_file(run, ".toml")
    assert read_experiment(config) == begun != edited
    assert chain.launch_code("2", ["--config", str(config_file)]) == (snapshot, None)
    chain.begin(run, "2", config=config_file)
    assert read_experiment(config) == edited


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit: package/__init__.py, package/code.py, a .env; data/ ignored."""
    root = tmp_path / "source tree"
    (root / "package").mkdir(parents=True)
    (root / "package" / "__init__.py").touch()
    (root / "package" / "code.py").write_text("one = 1\ntwo = 2\n")
    (root / ".env").write_text("A=1\n")
    (root / ".gitignore").write_text("data/\n")
    git(root, "init", "-q", "-b", "work")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def plant(root, name):
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text("planted = 1\n")


def git(root, *arguments):
    command = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    return subprocess.check_output([*command, *arguments], text=True).strip()


def test_commit_and_patch_restore_the_code_without_secrets(repository, tmp_path, monkeypatch):
    """Issue 17, item 20: no key, netrc, YAML or script of the same repository is copied."""
    init, code = repository / "package" / "__init__.py", repository / "package" / "code.py"
    git(repository, "remote", "add", "origin", "https://me:planted@host:8080/x.git")
    for name in ("data/ignored.py", "notes.txt"):
        plant(repository, name)
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # git is asked about this tree all the same
    folder, origin = str(repository), "https://host:8080/x.git"
    clean = SourceTree(folder, read_source_tree(init).commit, origin=origin, dirty=False)
    assert read_source_tree(init) == clean
    monkeypatch.delenv("GIT_DIR")
    assert clean.commit == git(repository, "rev-parse", "HEAD")

    code.write_text("one = 1\ntwo = 'zwei \u00fc'\n")
    others = ["id_rsa", ".netrc", "notes.py", "scripts/x.py", "package/db.yaml"]
    for name in (*others, "package/staged.py", "eval/task.py"):
        plant(repository, name)
        git(repository, "add", name)
    for name in ("package/un tracked.py", "my.toml"):
        plant(repository, name)
    (repository / ".env").write_text("A=planted\n")
    tree = read_source_tree(init)
    assert (tree.dirty, tree.patch_cut, tree.problem) == (True, False, None)
    assert tree.untracked == ["my.toml", "package/un tracked.py"]
    assert sorted(tree.left_out) == sorted([".env", *others])
    assert tree.patch.count(b"planted") == 2
    cut = read_source_tree(init, patch_bytes=200)
    assert cut.patch_cut and len(cut.patch) <= 200 and tree.patch.startswith(cut.patch)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    (tmp_path / "source.patch").write_bytes(tree.patch)
    git(clone, "checkout", "-q", str(tree.commit))
    git(clone, "apply", str(tmp_path / "source.patch"))
    for name in ("package/code.py", "package/staged.py", "package/__init__.py", "eval/task.py"):
        assert (clone / name).read_bytes() == (repository / name).read_bytes(), name


def test_trees_without_a_commit_or_a_repository(repository, tmp_path):
    for folder in (repository / "data" / "site-packages", tmp_path / "plain", tmp_path / "empty"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("x = 1\n")
        tree = read_source_tree(folder / "__init__.py")  # in an ignored folder, and in none
        assert (tree.folder, tree.commit, tree.dirty, tree.patch) == (None, None, None, b"")
        assert tree.problem
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    tree = read_source_tree(folder / "__init__.py")
    assert (tree.commit, tree.dirty, tree.problem) == (None, True, None)
    assert b"+x = 1" in tree.patch


@pytest.mark.parametrize("script", [None, "exit 128", "while :; do :; done"])
def test_a_broken_git_is_a_problem_not_an_error(script, repository, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    tree = read_source_tree(repository / "package" / "__init__.py", timeout_s=0.3)
    assert tree.problem and tree.commit is None

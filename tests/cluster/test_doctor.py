"""The doctor finds what is broken: packages, disks, locks, hub, Slurm, GPU, compiler, training."""

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from canon_pretrain.checkpoint import manifest
from canon_pretrain.cluster import doctor, preflight
from canon_pretrain.core import holder, lock
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels import backends
from canon_pretrain.machine import hardware
from canon_pretrain.model import attend
from canon_pretrain.run.folder import RunFolder
from tests.fake_hub import FakeHub
from tests.fake_slurm import FakeSlurm
from tests.flash_packages import flash_impl
from tests.support import ROOT, canon_stage

NOWHERE = Path("/proc/1")  # which root cannot write either
QUIET = Console(quiet=True)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(doctor, "WRITE_BYTES", 2 << 20)


def by_name(findings):
    return {finding.what: finding for finding in findings}


def states(findings):
    return {finding.what: finding.state for finding in findings}


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# -- machine


def test_packages_outside_their_bounds(tmp_path, monkeypatch):
    assert not {"numpy", "isal", "pytest"} & {*by_name(doctor.check_machine(tmp_path))}
    for name, version in (("numpy", "1.0"), ("isal", "not a version"), ("pytest", "1.0")):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    findings = by_name(doctor.check_machine(tmp_path))
    assert (findings["numpy"].state, findings["isal"].state) == ("broken", "broken")
    assert findings["pytest"].state == "note", "nothing trains with it"
    assert findings["numpy"].facts == {"version": "1.0", "expected": "<3,>=2.0"}
    assert findings["packages"].state == "ok"


def test_a_missing_package_and_an_old_python(tmp_path, monkeypatch):
    lines = ["[project]", 'requires-python = ">=4"', 'dependencies = ["no-such-package>=1"]']
    lines += ["[project.optional-dependencies]", 'dev = ["not-there"]', "cuda = []"]
    (tmp_path / "pyproject.toml").write_text("\n".join(lines))
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    findings = by_name(doctor.check_machine(tmp_path))
    assert findings["python"].state == findings["no-such-package"].state == "broken"
    assert findings["no-such-package"].facts["version"] is None
    assert "pip" not in findings["python"].remedy, "pip has no Python"
    assert "not-there" not in findings


# -- disk


def test_a_sound_disk_and_one_that_cannot_be_written(tmp_path, monkeypatch):
    findings = by_name(doctor.check_disk(tmp_path))
    assert findings["disk speed"].facts["bytes_per_s"] > 0
    assert abs(findings["clock"].facts["s"]) < 2
    assert {finding.state for finding in findings.values()} <= {"ok", "note"}
    assert not [*tmp_path.iterdir()]
    assert by_name(doctor.check_disk(NOWHERE))["disk"].state == "broken"
    (finding,) = doctor.check_training(NOWHERE, 0, QUIET)
    assert (finding.what, finding.state) == ("training", "broken")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4\nauto {tmp_path} autofs\nhost:/a {tmp_path} nfs4\n")
    monkeypatch.setattr(doctor, "MOUNTS", mounts)
    assert by_name(doctor.check_disk(tmp_path))["file locks"].state == "note", "autofs is below it"


def test_a_folder_that_does_not_exist(tmp_path):
    folder = tmp_path / "no thing"
    (finding,) = doctor.check_disk(folder)
    assert (finding.what, finding.state) == ("disk", "broken")
    subprocess.run(finding.remedy, shell=True, check=True)
    assert folder.is_dir()
    (finding,) = doctor.check_training(tmp_path / "other", 0, QUIET)
    assert (finding.state, finding.remedy) == ("note", ""), "one remedy is enough"


def test_a_slow_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "SLOW_DISK", float("inf"))
    finding = by_name(doctor.check_disk(tmp_path))["disk speed"]
    assert (finding.state, finding.facts["bytes_per_s"] > 0) == ("note", True)
    assert doctor.duration(doctor.CHECKPOINT_BYTES / finding.facts["bytes_per_s"]) in finding.found


def test_locks_that_keep_nobody_out(tmp_path, monkeypatch):
    def refuse(file, kind):
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:  # Lustre without -o flock: links do
        patch.setattr(fcntl, "flock", refuse)
        assert doctor._lock_problem(tmp_path) is None
        patch.setattr(lock, "link", lambda temporary, name: bool(temporary.replace(name)))
        patch.setattr(lock, "read_lock", lambda path: None)
        assert doctor._lock_problem(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda file, kind: None)
        assert doctor._lock_problem(tmp_path)
        assert states(doctor.check_disk(tmp_path))["file locks"] == "broken"
    assert not [*tmp_path.iterdir()]


# -- network and Slurm


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(doctor, "HUB_TIMEOUT_S", 0.2)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", closed)
        finding = by_name(doctor.check_network(tmp_path))["hub"]
        assert finding.state == "note" and "urlopen" not in finding.found
        assert finding.remedy.endswith(": canon eval stage --suite all --to outputs/eval_data")
        silent.listen()  # and never answers
        assert states(doctor.check_network(tmp_path))["hub"] == "note"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as client:
                client.recv(1 << 16)
                client.sendall(b"no HTTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert states(doctor.check_network(tmp_path))["hub"] == "note"
        thread.join()
    monkeypatch.setattr(constants, "ENDPOINT", "no address")
    assert states(doctor.check_network(tmp_path))["hub"] == "note"
    hub = FakeHub({})
    monkeypatch.setattr(doctor, "HUB_TIMEOUT_S", 5)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    hub_states = states(doctor.check_network(tmp_path))
    hub.shutdown()
    hub.server_close()
    assert (hub_states["hub"], hub_states["hub cache"]) == ("ok", "ok"), "it answers, with 404"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HOME", str(NOWHERE / "home"))
    findings = by_name(doctor.check_network(tmp_path))
    assert (findings["hub"].state, findings["hub cache"].state) == ("note", "broken")
    assert findings["hub"].remedy.startswith("unset HF_HUB_OFFLINE")


def test_logins(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("WANDB_API_KEY", "HF_TOKEN", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert states(doctor.check_network(tmp_path))["wandb"] == "missing"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    findings = by_name(doctor.check_network(tmp_path))
    assert findings["wandb"].state == findings["hub token"].state == "ok"
    assert "secret" not in str(findings)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert states(doctor.check_network(tmp_path))["wandb"] == "missing"


def test_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states(doctor.check_slurm(tmp_path)) == {"Slurm": "missing"}
    slurm = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(slurm.folder))
    file = tmp_path / "cluster.env"
    monkeypatch.setenv("CANON_CLUSTER_ENV", str(file))
    assert states(doctor.check_slurm(tmp_path)) == {"Slurm": "ok", "cluster.env": "missing"}
    file.write_text("")
    finding = by_name(doctor.check_slurm(tmp_path))["cluster.env"]
    assert finding.state == "missing" and "exist" not in finding.found, "it is there, and empty"
    file.write_text((ROOT / "slurm" / "cluster.env.example").read_text())
    assert states(doctor.check_slurm(tmp_path))["cluster.env"] == "missing", "comments only"
    file.write_text("export SBATCH_PARTITION=gpu\n")
    assert states(doctor.check_slurm(tmp_path))["cluster.env"] == "ok"
    slurm.break_down("scontrol")
    finding = by_name(doctor.check_slurm(tmp_path))["Slurm"]
    assert finding.state == "missing" and "SLURM_CONF" in finding.remedy
    assert finding.found.endswith(": error: Unable to contact controller")


# -- GPU, kernels, compiler


@no_gpu
def test_a_gpu_that_torch_cannot_use(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "nvidia-smi"
    write_program(program, "[ $1 = -L ] && echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = next(doctor.check_gpu(tmp_path))
    assert (finding.what, finding.state, finding.facts["gpus"]) == ("GPU", "broken", 0)
    assert "H100" in finding.facts["evidence"] and finding.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert next(doctor.check_gpu(tmp_path)).state == "note"


@no_gpu
def test_the_reason_of_torch_is_not_a_remedy(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("Found no driver. Please check that you have one")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "find_gpu", lambda: "/dev/nvidia0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    finding = next(doctor.check_gpu(tmp_path))
    assert "Please check" in finding.found and "Please check" not in finding.remedy
    assert doctor.INSTALL_CU126 in finding.remedy


@no_gpu
@pytest.mark.parametrize("has_nccl", [False, True])
def test_a_gpu_without_nvidia_smi(tmp_path, monkeypatch, has_nccl):
    place = types.SimpleNamespace(name="H100", major=9, minor=0, total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: place)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 99, 1))
    available = lambda name: has_nccl or name == "gloo"  # noqa: E731
    monkeypatch.setattr(torch.distributed, "is_backend_available", available)
    monkeypatch.setattr(hardware, "query_gpu", lambda gpu: None)
    monkeypatch.setattr(doctor, "check_kernels", lambda device_type: iter(()))
    findings = by_name(doctor.check_gpu(tmp_path))
    assert findings["GPU"].state == "ok" and "driver" not in findings["GPU"].found
    assert findings["nccl"].state == ("ok" if has_nccl else "broken")
    assert findings["nccl"].found.startswith("2.99.1 ") == has_nccl
    readme = " ".join((ROOT / "README.md").read_text().split())
    remedy = findings["nccl"].remedy
    assert has_nccl or (remedy.startswith("TORCH=") and remedy in readme)


@no_gpu
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # torch 2.11
def test_kernels_by_device():
    assert set(states(doctor.check_kernels("cpu")).values()) == {"ok"}
    with flash_impl("fa3"):  # a GPU of capability 9.0, with one package
        findings = by_name(doctor.check_kernels("cuda"))
    assert findings["attention fa3"].state == findings["canon triton"].state == "ok"
    absent = {name for name, finding in findings.items() if finding.state == "missing"}
    expected = {"canon causal_conv1d", "canon fla", "mixer fla", "attention flash_attn"}
    assert absent == expected | {"attention fa4"}
    assert all(findings[name].remedy.startswith("pip install") for name in absent)


@no_gpu
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # torch 2.11
def test_remedies_of_kernels(monkeypatch):
    def fail():
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(
        backends, "backend_problem", lambda *arguments: "no import: OSError: lib: gone"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn" or None)
    monkeypatch.setattr(attend, "_flash_attn_func", fail)
    with flash_impl("fa3", capability=(8, 0)):
        findings = by_name(doctor.check_kernels("cuda"))
    triton, flash = findings["canon triton"], findings["attention flash_attn"]
    assert (triton.found, triton.remedy) == ("no import: OSError: lib: gone", "")
    assert "libcudart.so.12: cannot open" in flash.found
    assert flash.remedy.startswith("pip install")
    for name in ("fa3", "fa4"):  # a package does not help this GPU
        finding = findings[f"attention {name}"]
        assert (finding.state, finding.remedy) == ("missing", "") and "sm_80" in finding.found


@pytest.mark.system
def test_compilers(tmp_path, monkeypatch):
    assert doctor._check_compiler().state == "ok"
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._check_compiler().state == "missing", "none"
    write_program(
        tmp_path / "g++", '[ "$1" = --version ] || { echo "error: no Python.h" >&2; false; }'
    )
    finding = doctor._check_compiler()
    assert finding.state == "missing" and "Python.h" in finding.found


# -- the report


def test_groups_that_hang_and_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "GROUPS", {"disk": None, "network": None})
    monkeypatch.setattr(doctor, "GROUP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(doctor, "CHILD", "import time; time.sleep(60)")
    groups = dict(doctor.run_groups(tmp_path))
    assert [states(findings) for findings in groups.values()] == [
        {name: "broken"} for name in groups
    ]
    monkeypatch.setattr(doctor, "GROUP_TIMEOUT_S", 60)
    good = json.dumps(doctor.asdict(doctor.judge("first", "", None, "")))
    monkeypatch.setattr(
        doctor, "CHILD", f"import os; print('noise', '{good}', sep='\\n', flush=True); os.abort()"
    )
    groups = dict(doctor.run_groups(tmp_path))
    assert states(groups["disk"]) == {"first": "ok", "disk": "broken"}


def test_a_check_that_raises(tmp_path, monkeypatch, capsys):
    def fail(folder):
        yield doctor.judge("first", "", None, "")
        raise ImportError("no libcudnn")

    monkeypatch.setitem(doctor.GROUPS, "disk", fail)
    doctor.print_group("disk", str(tmp_path))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["state"] for line in lines] == ["ok", "broken"]


@pytest.mark.parametrize("state", ["ok", "note", "missing", "broken"])
def test_exit_code_and_json(state, monkeypatch, capsys):
    finding = doctor.judge("thing", "", "a problem", "", "", state)
    monkeypatch.setattr(doctor, "run_groups", lambda folder: [("disk", [finding])])
    monkeypatch.setattr(
        doctor, "check_training", lambda *arguments: [doctor.judge("t", "", None, "")]
    )
    for options in (["--json"], ["--json", "--no_train"], []):
        with pytest.raises(SystemExit) if state == "broken" else nullcontext() as ended:
            canon_stage("doctor")(options)
        assert state != "broken" or ended.value.code == 1
        if options:
            report = json.loads(capsys.readouterr().out)
            assert report["works"] == (state != "broken")
            assert len(report["findings"]) == 3 - len(options)


# -- the training check

RANK = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def test_a_hanging_launch_ends_with_its_ranks(tmp_path, monkeypatch):
    output = tmp_path / "out"

    def interrupt():
        if output.read_text().endswith("\n"):
            raise KeyboardInterrupt

    launcher = f"subprocess.run([sys.executable, '-c', {RANK!r}], start_new_session=True)"
    with pytest.raises(KeyboardInterrupt):
        doctor._run(["-c", f"import subprocess, sys; {launcher}"], output, interrupt)
    rank = output.read_text().strip()
    monkeypatch.setattr(doctor, "START_TIMEOUT_S", 0.3)
    assert doctor._run(["-c", "import time; time.sleep(60)"], output, int)
    status = Path(f"/proc/{rank}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"{rank} runs")


def test_the_timeout_restarts_at_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "START_TIMEOUT_S", 60)
    monkeypatch.setattr(doctor, "STEP_TIMEOUT_S", 0.5)
    calls = iter(range(1000))
    step = lambda: min(next(calls), 10)  # noqa: E731  # hangs at step 10, after a second
    begin = time.monotonic()
    problem = doctor._run(["-c", "import time; time.sleep(60)"], tmp_path / "out", step)
    assert problem and 1.4 < time.monotonic() - begin < 30


def test_an_ended_process_is_not_killed(tmp_path, monkeypatch):
    """Its number may already be another's."""
    killed = []
    monkeypatch.setattr(doctor, "kill_tree", killed.append)
    assert doctor._run(["-c", ""], tmp_path / "out", int) is None
    assert not killed


def test_a_failed_launch_says_its_reason(tmp_path):
    script = "import sys; print('[rank1]: error[a.b]: why'); print('banner\\n' * 20); sys.exit(1)"
    assert doctor._run(["-c", script], tmp_path / "out", int).splitlines()[1:] == [
        "error[a.b]: why"
    ]


def test_what_a_killed_doctor_left_is_removed(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        taken = {"id": "a", "host": holder.host_name(), "job_id": None, "restart_count": 0}
        taken |= {"taken": holder.utc_now()}
        folders = {}
        for name, pid in (("killed", child.pid), ("living", os.getpid())):
            folders[name] = tmp_path / f"{doctor.SCRATCH}{name}"
            folders[name].mkdir()
            owner = holder.Holder(pid=pid, boot=holder.boot_of(pid), **taken)
            (folders[name] / doctor.OWNER).write_bytes(holder.content_of(owner))
        (tmp_path / f"{doctor.SCRATCH}file").touch()
    monkeypatch.setattr(doctor, "_run", lambda *arguments: "not trained")
    list(doctor.check_training(tmp_path, 1, QUIET))
    names = {path.name.removeprefix(doctor.SCRATCH) for path in tmp_path.iterdir()}
    assert names == {"living", "file"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_doctor_leaves_nothing(number, tmp_path, monkeypatch):
    before = signal.signal(number, signal.SIG_DFL)
    monkeypatch.setattr(doctor, "_run", lambda *arguments: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        list(doctor.check_training(tmp_path, 1, QUIET))
    assert ended.value.code == 128 + number and not [*tmp_path.iterdir()]
    assert signal.getsignal(number) is signal.SIG_DFL
    signal.signal(number, before)


@pytest.mark.parametrize("loss, state", [(2.5, "ok"), ("nan", "broken")])
def test_the_loss_of_one_gpu(tmp_path, monkeypatch, loss, state):
    def run(arguments, output, watch):
        if "canon_pretrain.cluster.preflight" in arguments:
            report = preflight.Report(speeds={"cuda:0": {preflight.MATMUL: 1e12}})
            path = output.parent / f"{holder.host_name()}.rank0.json"
            path.write_text(json.dumps(doctor.asdict(report)))
            return
        folder = RunFolder(Path(arguments[-1]))
        folder.log_file.parent.mkdir(parents=True)
        lines = [
            {
                "event": "step",
                "time": f"2026-01-01T00:00:0{k}+00:00",
                "step": 5 * k,
                "loss": logged_loss,
            }
            for k, logged_loss in ((1, 3.5), (2, loss))
        ]
        folder.log_file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(doctor, "_run", run)
    monkeypatch.setattr(manifest, "verify", lambda path: None)
    findings = by_name(doctor.check_training(tmp_path, 1, QUIET))
    assert (findings["all-reduce"].state, findings["training"].state) == ("ok", state)
    assert findings["training"].facts["steps_per_s"] == 5
    assert "B/s" not in findings["all-reduce"].found, "one rank sends nothing"


def test_the_progress_counts_from_the_first_step(tmp_path, monkeypatch):
    shown, steps = [], []

    class Progress(contextlib.ExitStack):
        def __init__(self, console):
            super().__init__()

        def update(self, share, text):
            shown.append((self, share, "starting" in text))

    def run(arguments, output, watch):
        if "canon_pretrain.cluster.preflight" in arguments:
            return
        file = RunFolder(Path(arguments[-1])).log_file
        steps.append(watch())
        file.parent.mkdir(parents=True)
        with file.open("a", buffering=1) as log:
            for step in (5, 10, 40):
                event = {"event": "step", "time": f"2026-01-01T00:00:{step:02}+00:00", "loss": 1}
                log.write(json.dumps(event | {"step": step}) + "\n")
                steps.append(watch())

    monkeypatch.setattr(doctor, "_run", run)
    monkeypatch.setattr(doctor, "Progress", Progress)
    list(doctor.check_training(tmp_path, 0, QUIET))
    assert steps == [0, 5, 10, 40]
    bars, shares, is_starting = zip(*shown[1:5], strict=True)
    assert is_starting == (True, False, False, False)
    assert shares == (0, 0, 1 / 7, 1)
    assert bars[0] is not bars[1] and bars[1] is bars[2] is bars[3]


@pytest.mark.parametrize(
    ("report", "state", "remedy"),
    [
        ("full", "note", "CUDA_VISIBLE_DEVICES"),
        (preflight.Report(["cuda:0: a product of ones is wrong"]), "broken", ""),
        (preflight.Report(left_alone="a collective failed: no route"), "broken", "_SOCKET_IFNAME"),
    ],
)
def test_remedies_of_the_all_reduce(tmp_path, monkeypatch, report, state, remedy):
    if report == "full":
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 << 30, 80 << 30))
        report = preflight.Report(preflight.check_device(torch.device("cuda:0"))[0])

    def run(arguments, output, watch):
        path = output.parent / f"{holder.host_name()}.rank0.json"
        path.write_text(json.dumps(doctor.asdict(report)))
        return "not trained" if "canon_pretrain.train" in arguments else None

    monkeypatch.setattr(doctor, "_run", run)
    finding = next(doctor.check_training(tmp_path, 1, QUIET))
    assert (finding.what, finding.state) == ("all-reduce", state)
    assert remedy in finding.remedy and bool(remedy) == bool(finding.remedy)


@pytest.mark.system
def test_the_training_check(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "START_TIMEOUT_S", 300)  # on a busy machine
    run = lambda: by_name(doctor.check_training(tmp_path, 0, QUIET))  # noqa: E731
    findings = run()
    assert states(findings.values()) == {"all-reduce": "ok", "training": "ok"}
    facts_of_training = findings["training"].facts
    assert facts_of_training["ranks"] == 2 and facts_of_training["steps_per_s"] > 0
    bad = tmp_path / "bad.toml"
    bad.write_text(doctor.CONFIG.read_text().replace("dim = 32", "dim = 33"))
    bad.write_text(bad.read_text().replace('"../base', f'"{doctor.CONFIG.parents[1]}/base'))
    monkeypatch.setattr(doctor, "CONFIG", bad)
    finding = run()["training"]
    assert finding.state == "broken" and "error[" in finding.found
    assert [*tmp_path.iterdir()] == [bad]


@no_gpu
@pytest.mark.system
def test_the_command_without_a_compiler(tmp_path):
    program = tmp_path / "bin" / "nvidia-smi"
    write_program(program, "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    environ = os.environ | {"PATH": str(program.parent), "PYTHONPATH": str(ROOT)}
    environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "CXX": "g++", "HF_HOME": str(tmp_path / "hf")}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "canon_pretrain", "doctor", "--no_train", "--json"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, timeout=200)
    findings = json.loads(done.stdout)["findings"]
    states_of = {finding["what"]: finding["state"] for finding in findings}
    assert done.returncode == 1
    assert (states_of["GPU"], states_of["C++ compiler"]) == ("broken", "missing")
    assert (states_of["hub"], states_of["Slurm"], states_of["gloo"]) == ("note", "missing", "ok")

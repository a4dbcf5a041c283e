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
from tests.support import HANGS_AFTER_S, ROOT, canon_stage

NOWHERE = Path("/proc/1")  # which root cannot write either
QUIET = Console(quiet=True)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(doctor, "WRITE_BYTES", 2 << 20)


def by_name(findings):
    """Return findings by what they are about."""
    return {finding.what: finding for finding in findings}


def states(findings):
    """Return the states of findings by what they are about."""
    return {finding.what: finding.state for finding in findings}


def write_program(path, text):
    """Write a shell script that can be executed."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# -- machine


def test_packages_outside_their_bounds(tmp_path, monkeypatch):
    assert not {"numpy", "isal", "pytest"} & {*by_name(doctor.check_machine(tmp_path))}
    for name, version in (("numpy", "1.0"), ("isal", "not a version"), ("pytest", "1.0")):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)

    findings = by_name(doctor.check_machine(tmp_path))

    assert findings["numpy"].state == "broken"
    assert findings["numpy"].facts == {"version": "1.0", "expected": "<3,>=2.0"}
    assert findings["isal"].state == "broken"
    assert findings["pytest"].state == "note", "nothing trains with it"
    assert findings["packages"].state == "ok"


OTHER_PROJECT = """
[project]
requires-python = ">=4"
dependencies = ["no-such-package>=1"]
[project.optional-dependencies]
dev = ["not-there"]
cuda = []
"""


def test_a_missing_package_and_an_old_python(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(OTHER_PROJECT)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)

    findings = by_name(doctor.check_machine(tmp_path))

    assert findings["python"].state == "broken"
    assert "pip" not in findings["python"].remedy, "pip has no Python"
    assert findings["no-such-package"].state == "broken"
    assert findings["no-such-package"].facts["version"] is None
    assert "not-there" not in findings


# -- disk


def test_a_sound_disk(tmp_path):
    findings = by_name(doctor.check_disk(tmp_path))

    assert findings["disk speed"].facts["bytes_per_s"] > 0
    assert abs(findings["clock"].facts["s"]) < 2
    assert {finding.state for finding in findings.values()} <= {"ok", "note"}
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_cannot_be_written():
    assert states(doctor.check_disk(NOWHERE))["disk"] == "broken"
    assert states(doctor.check_training(NOWHERE, 0, QUIET)) == {"training": "broken"}


def test_locks_of_a_network_file_system_are_a_note(tmp_path, monkeypatch):
    """Also if an autofs is below it."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4\nauto {tmp_path} autofs\nhost:/a {tmp_path} nfs4\n")
    monkeypatch.setattr(doctor, "MOUNTS", mounts)

    assert states(doctor.check_disk(tmp_path))["file locks"] == "note"


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

    assert finding.state == "note"
    bytes_per_s = finding.facts["bytes_per_s"]
    assert bytes_per_s > 0
    assert doctor.duration(doctor.CHECKPOINT_BYTES / bytes_per_s) in finding.found


def test_locks_that_keep_nobody_out(tmp_path, monkeypatch):
    def refuse(file, kind):
        raise OSError(errno.ENOLCK, "no locks")

    # Lustre without -o flock: links do
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        assert doctor._lock_problem(tmp_path) is None

        patch.setattr(lock, "link", lambda temporary, name: bool(temporary.replace(name)))
        patch.setattr(lock, "read_lock", lambda path: None)
        assert doctor._lock_problem(tmp_path)

    # flock succeeds for everyone
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda file, kind: None)
        assert doctor._lock_problem(tmp_path)
        assert states(doctor.check_disk(tmp_path))["file locks"] == "broken"
    assert not [*tmp_path.iterdir()]


# -- network and Slurm


@pytest.fixture
def hub_at(tmp_path, monkeypatch):
    """Return a function that lets huggingface_hub use an address, which it waits 0.2 s for."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(doctor, "HUB_TIMEOUT_S", 0.2)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    return lambda address: monkeypatch.setattr(constants, "ENDPOINT", address)


def address_of(server):
    """Return the URL of a local socket."""
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_cannot_be_reached(hub_at, tmp_path):
    hub_at("no address")
    assert states(doctor.check_network(tmp_path))["hub"] == "note"

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        hub_at(address_of(silent))
        finding = by_name(doctor.check_network(tmp_path))["hub"]
        assert finding.state == "note"
        assert "urlopen" not in finding.found
        assert finding.remedy.endswith(": canon eval stage --suite all --to outputs/eval_data")

        silent.listen()  # and never answers
        assert states(doctor.check_network(tmp_path))["hub"] == "note"


def test_a_hub_that_does_not_speak_http(hub_at, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as client:
                client.recv(1 << 16)
                client.sendall(b"no HTTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        hub_at(address_of(server))

        assert states(doctor.check_network(tmp_path))["hub"] == "note"
        thread.join()


def test_a_hub_that_answers(hub_at, tmp_path, monkeypatch):
    """With 404."""
    monkeypatch.setattr(doctor, "HUB_TIMEOUT_S", 5)
    hub = FakeHub({})
    hub_at(hub.url)

    state = states(doctor.check_network(tmp_path))
    hub.shutdown()
    hub.server_close()

    assert (state["hub"], state["hub cache"]) == ("ok", "ok")


@pytest.mark.usefixtures("hub_at")
def test_a_hub_that_is_switched_off(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HOME", str(NOWHERE / "home"))

    findings = by_name(doctor.check_network(tmp_path))

    assert findings["hub"].state == "note"
    assert findings["hub"].remedy.startswith("unset HF_HUB_OFFLINE")
    assert findings["hub cache"].state == "broken"


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
    assert findings["wandb"].state == "ok"
    assert findings["hub token"].state == "ok"
    assert "secret" not in str(findings)

    # the login is for another server
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert states(doctor.check_network(tmp_path))["wandb"] == "missing"


def test_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states(doctor.check_slurm(tmp_path)) == {"Slurm": "missing"}

    slurm = FakeSlurm(tmp_path / "slurm")
    settings = tmp_path / "cluster.env"
    monkeypatch.setenv("PATH", str(slurm.folder))
    monkeypatch.setenv("CANON_CLUSTER_ENV", str(settings))
    assert states(doctor.check_slurm(tmp_path)) == {"Slurm": "ok", "cluster.env": "missing"}

    settings.write_text("")
    finding = by_name(doctor.check_slurm(tmp_path))["cluster.env"]
    assert finding.state == "missing" and "exist" not in finding.found, "it is there, and empty"

    settings.write_text((ROOT / "slurm" / "cluster.env.example").read_text())
    assert states(doctor.check_slurm(tmp_path))["cluster.env"] == "missing", "comments only"
    settings.write_text("export SBATCH_PARTITION=gpu\n")
    assert states(doctor.check_slurm(tmp_path))["cluster.env"] == "ok"

    slurm.break_down("scontrol")
    finding = by_name(doctor.check_slurm(tmp_path))["Slurm"]
    assert finding.state == "missing"
    assert "SLURM_CONF" in finding.remedy
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
    assert "H100" in finding.facts["evidence"]
    assert finding.remedy

    # hidden on purpose
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

    assert "Please check" in finding.found
    assert "Please check" not in finding.remedy
    assert doctor.INSTALL_CU126 in finding.remedy


@no_gpu
@pytest.mark.parametrize("has_nccl", [False, True])
def test_a_gpu_without_nvidia_smi(tmp_path, monkeypatch, has_nccl):
    def is_backend_available(name):
        return has_nccl or name == "gloo"

    h100 = types.SimpleNamespace(name="H100", major=9, minor=0, total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: h100)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 99, 1))
    monkeypatch.setattr(torch.distributed, "is_backend_available", is_backend_available)
    monkeypatch.setattr(hardware, "query_gpu", lambda gpu: None)
    monkeypatch.setattr(doctor, "check_kernels", lambda device_type: iter(()))

    findings = by_name(doctor.check_gpu(tmp_path))

    assert findings["GPU"].state == "ok"
    assert "driver" not in findings["GPU"].found
    nccl = findings["nccl"]
    assert nccl.found.startswith("2.99.1 ") == has_nccl
    if has_nccl:
        assert nccl.state == "ok"
    else:
        assert nccl.state == "broken"
        assert nccl.remedy.startswith("TORCH=")
        assert nccl.remedy in " ".join((ROOT / "README.md").read_text().split())


@no_gpu
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # torch 2.11
def test_kernels_by_device():
    assert set(states(doctor.check_kernels("cpu")).values()) == {"ok"}

    with flash_impl("fa3"):  # a GPU of capability 9.0, with one package
        findings = by_name(doctor.check_kernels("cuda"))

    assert findings["attention fa3"].state == "ok"
    assert findings["canon triton"].state == "ok"
    missing = {name for name, finding in findings.items() if finding.state == "missing"}
    assert missing == {
        "canon causal_conv1d",
        "canon fla",
        "mixer fla",
        "attention flash_attn",
        "attention fa4",
    }
    for name in missing:
        assert findings[name].remedy.startswith("pip install")


@no_gpu
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # torch 2.11
def test_remedies_of_kernels(monkeypatch):
    def fail():
        raise ImportError("libcudart.so.12: cannot open shared object file")

    problem = "no import: OSError: lib: gone"
    monkeypatch.setattr(backends, "backend_problem", lambda *arguments: problem)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn" or None)
    monkeypatch.setattr(attend, "_flash_attn_func", fail)

    with flash_impl("fa3", capability=(8, 0)):
        findings = by_name(doctor.check_kernels("cuda"))

    triton = findings["canon triton"]
    assert (triton.found, triton.remedy) == (problem, "")
    flash = findings["attention flash_attn"]
    assert "libcudart.so.12: cannot open" in flash.found
    assert flash.remedy.startswith("pip install")
    for name in ("attention fa3", "attention fa4"):  # a package does not help this GPU
        assert (findings[name].state, findings[name].remedy) == ("missing", "")
        assert "sm_80" in findings[name].found


@pytest.mark.system
def test_compilers(tmp_path, monkeypatch):
    assert doctor._check_compiler().state == "ok"

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._check_compiler().state == "missing", "none"

    without_headers = '[ "$1" = --version ] || { echo "error: no Python.h" >&2; false; }'
    write_program(tmp_path / "g++", without_headers)
    finding = doctor._check_compiler()
    assert finding.state == "missing"
    assert "Python.h" in finding.found


# -- the report


def test_groups_that_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "GROUPS", {"disk": None, "network": None})
    monkeypatch.setattr(doctor, "GROUP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(doctor, "CHILD", "import time; time.sleep(60)")

    groups = {name: states(findings) for name, findings in doctor.run_groups(tmp_path)}

    assert groups == {"disk": {"disk": "broken"}, "network": {"network": "broken"}}


def test_groups_that_crash_keep_their_findings(tmp_path, monkeypatch):
    good = json.dumps(doctor.asdict(doctor.judge("first", "", None, "")))
    code = f"import os; print('noise', '{good}', sep='\\n', flush=True); os.abort()"
    monkeypatch.setattr(doctor, "GROUPS", {"disk": None, "network": None})
    monkeypatch.setattr(doctor, "GROUP_TIMEOUT_S", 60)
    monkeypatch.setattr(doctor, "CHILD", code)

    groups = dict(doctor.run_groups(tmp_path))

    assert states(groups["disk"]) == {"first": "ok", "disk": "broken"}


def test_a_check_that_raises(tmp_path, monkeypatch, capsys):
    def fail(folder):
        yield doctor.judge("first", "", None, "")
        raise ImportError("no libcudnn")

    monkeypatch.setitem(doctor.GROUPS, "disk", fail)
    doctor.print_group("disk", str(tmp_path))

    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [finding["state"] for finding in findings] == ["ok", "broken"]


def exit_code_of_doctor(*options):
    """Run `canon doctor`."""
    try:
        canon_stage("doctor")(options)
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.parametrize("state", ["ok", "note", "missing", "broken"])
def test_exit_code_and_json(state, monkeypatch, capsys):
    finding = doctor.judge("thing", "", "a problem", "", "", state)
    training = doctor.judge("t", "", None, "")
    monkeypatch.setattr(doctor, "run_groups", lambda folder: [("disk", [finding])])
    monkeypatch.setattr(doctor, "check_training", lambda *arguments: [training])
    exit_code = 1 if state == "broken" else 0

    assert exit_code_of_doctor() == exit_code
    capsys.readouterr()

    for options, num_findings in ((["--json"], 2), (["--json", "--no_train"], 1)):
        assert exit_code_of_doctor(*options) == exit_code
        report = json.loads(capsys.readouterr().out)
        assert report["works"] == (state != "broken")
        assert len(report["findings"]) == num_findings


# -- the training check

RANK = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def test_an_interrupted_launch_ends_with_its_ranks(tmp_path):
    output = tmp_path / "out"

    def interrupt():
        if output.read_text().endswith("\n"):
            raise KeyboardInterrupt

    launcher = f"subprocess.run([sys.executable, '-c', {RANK!r}], start_new_session=True)"
    with pytest.raises(KeyboardInterrupt):
        doctor._run(["-c", f"import subprocess, sys; {launcher}"], output, interrupt)

    rank = output.read_text().strip()
    status = Path(f"/proc/{rank}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"{rank} runs")


HANG = ["-c", "import time; time.sleep(60)"]


def test_a_hanging_launch_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "START_TIMEOUT_S", 0.3)
    assert doctor._run(HANG, tmp_path / "out", int)


def test_the_timeout_restarts_at_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "START_TIMEOUT_S", 60)
    monkeypatch.setattr(doctor, "STEP_TIMEOUT_S", 0.5)
    calls = iter(range(1000))

    def step():
        return min(next(calls), 10)  # hangs at step 10, after a second

    begin = time.monotonic()
    problem = doctor._run(HANG, tmp_path / "out", step)

    assert problem
    assert 1.4 < time.monotonic() - begin < 30


def test_an_ended_process_is_not_killed(tmp_path, monkeypatch):
    """Its number may already be another's."""
    killed = []
    monkeypatch.setattr(doctor, "kill_tree", killed.append)
    assert doctor._run(["-c", ""], tmp_path / "out", int) is None
    assert not killed


def test_a_failed_launch_says_its_reason(tmp_path):
    script = "import sys; print('[rank1]: error[a.b]: why'); print('banner\\n' * 20); sys.exit(1)"
    problem = doctor._run(["-c", script], tmp_path / "out", int)
    assert problem.splitlines()[1:] == ["error[a.b]: why"]


def write_scratch_folder(folder, pid):
    """Make a folder as a doctor with this pid does."""
    owner = holder.Holder(
        id="a",
        host=holder.host_name(),
        pid=pid,
        boot=holder.boot_of(pid),
        job_id=None,
        restart_count=0,
        taken=holder.utc_now(),
    )
    folder.mkdir()
    (folder / doctor.OWNER).write_bytes(holder.content_of(owner))


def test_what_a_killed_doctor_left_is_removed(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        write_scratch_folder(tmp_path / f"{doctor.SCRATCH}killed", child.pid)
    write_scratch_folder(tmp_path / f"{doctor.SCRATCH}living", os.getpid())
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

    assert ended.value.code == 128 + number
    assert not [*tmp_path.iterdir()]
    assert signal.getsignal(number) is signal.SIG_DFL
    signal.signal(number, before)


def step_line(step, second, loss):
    """Return a line of a run's log."""
    time_of_step = f"2026-01-01T00:00:{second:02}+00:00"
    event = {"event": "step", "time": time_of_step, "step": step, "loss": loss}
    return json.dumps(event) + "\n"


def write_report(report, output):
    """Write the report of a rank next to the output of the preflight."""
    path = output.parent / f"{holder.host_name()}.rank0.json"
    path.write_text(json.dumps(doctor.asdict(report)))


@pytest.mark.parametrize("loss, state", [(2.5, "ok"), ("nan", "broken")])
def test_the_loss_of_one_gpu(tmp_path, monkeypatch, loss, state):
    def run(words, output, watch):
        if "canon_pretrain.cluster.preflight" in words:
            write_report(preflight.Report(speeds={"cuda:0": {preflight.MATMUL: 1e12}}), output)
            return
        log = RunFolder(Path(words[-1])).log_file
        log.parent.mkdir(parents=True)
        log.write_text(step_line(5, 1, 3.5) + step_line(10, 2, loss))

    monkeypatch.setattr(doctor, "_run", run)
    monkeypatch.setattr(manifest, "verify", lambda path: None)

    findings = by_name(doctor.check_training(tmp_path, 1, QUIET))

    assert findings["training"].state == state
    assert findings["training"].facts["steps_per_s"] == 5
    assert findings["all-reduce"].state == "ok"
    assert "B/s" not in findings["all-reduce"].found, "one rank sends nothing"


def test_the_progress_counts_from_the_first_step(tmp_path, monkeypatch):
    shown = []
    steps = []

    class Progress(contextlib.ExitStack):
        def __init__(self, console):
            super().__init__()

        def update(self, share, text):
            shown.append((self, share, "starting" in text))

    def run(words, output, watch):
        if "canon_pretrain.cluster.preflight" in words:
            return
        file = RunFolder(Path(words[-1])).log_file
        steps.append(watch())
        file.parent.mkdir(parents=True)
        with file.open("a", buffering=1) as log:
            for step in (5, 10, 40):
                log.write(step_line(step, second=step, loss=1))
                steps.append(watch())

    monkeypatch.setattr(doctor, "_run", run)
    monkeypatch.setattr(doctor, "Progress", Progress)

    list(doctor.check_training(tmp_path, 0, QUIET))

    assert steps == [0, 5, 10, 40]
    bars, shares, is_starting = zip(*shown[1:5], strict=True)
    assert is_starting == (True, False, False, False)
    assert shares == (0, 0, 1 / 7, 1)
    assert bars[0] is not bars[1]
    assert bars[1] is bars[2] is bars[3]


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

    def run(words, output, watch):
        write_report(report, output)
        return "not trained" if "canon_pretrain.train" in words else None

    monkeypatch.setattr(doctor, "_run", run)

    finding = next(doctor.check_training(tmp_path, 1, QUIET))

    assert (finding.what, finding.state) == ("all-reduce", state)
    if remedy:
        assert remedy in finding.remedy
    else:
        assert finding.remedy == ""


@pytest.mark.system
def test_the_training_check(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "START_TIMEOUT_S", 300)  # on a busy machine

    findings = by_name(doctor.check_training(tmp_path, 0, QUIET))

    assert states(findings.values()) == {"all-reduce": "ok", "training": "ok"}
    assert findings["training"].facts["ranks"] == 2
    assert findings["training"].facts["steps_per_s"] > 0

    # a trainer that refuses its config
    bad = tmp_path / "bad.toml"
    text = doctor.CONFIG.read_text().replace('"../base', f'"{doctor.CONFIG.parents[1]}/base')
    bad.write_text(text.replace("dim = 32", "dim = 33"))
    monkeypatch.setattr(doctor, "CONFIG", bad)
    finding = by_name(doctor.check_training(tmp_path, 0, QUIET))["training"]
    assert finding.state == "broken"
    assert "error[" in finding.found
    assert [*tmp_path.iterdir()] == [bad]


@no_gpu
@pytest.mark.system
def test_the_command_without_a_compiler(tmp_path):
    program = tmp_path / "bin" / "nvidia-smi"
    write_program(program, "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    environ = os.environ | {
        "CXX": "g++",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hf"),
        "PATH": str(program.parent),
        "PYTHONPATH": str(ROOT),
    }
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "canon_pretrain", "doctor", "--no_train", "--json"]

    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, timeout=HANGS_AFTER_S
    )

    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    state = {finding["what"]: finding["state"] for finding in findings}
    assert (state["GPU"], state["C++ compiler"]) == ("broken", "missing")
    assert (state["hub"], state["Slurm"], state["gloo"]) == ("note", "missing", "ok")

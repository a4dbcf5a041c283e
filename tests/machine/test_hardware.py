"""An unusable GPU is an error; NUMA cores, available memory, nvidia-smi."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from canon_pretrain import train
from canon_pretrain.machine import device as device_module
from canon_pretrain.machine import gpus, hardware, memory
from eval.__main__ import main as eval_main
from tests.bench.limits import Machine
from tests.support import debug_run, error_codes, refused

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def broken_gpu(tmp_path, monkeypatch):
    file = write(tmp_path / "dev" / "nvidia0", "")
    write(file.parent / "nvidia-uvm", "")
    monkeypatch.setattr(hardware, "DEVICE_FILES", str(file.parent / "nvidia[0-9]*"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return file


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    program = write(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


def test_an_unusable_gpu_is_refused_unless_hidden(broken_gpu, nvidia_smi, monkeypatch):
    for value in (None, "0", "", "-1", " "):
        if value is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        error = refused("gpu.unusable", evidence=str(broken_gpu))
        with error if value in (None, "0") else contextlib.nullcontext():
            device_module.check_cuda()
    broken_gpu.unlink()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    device_module.check_cuda()
    assert hardware.find_gpu() is None  # nvidia-uvm is not a GPU, and nvidia-smi fails
    nvidia_smi.write_text("#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")
    assert "NVIDIA H100" in (hardware.find_gpu() or "")
    monkeypatch.setenv("PATH", str(nvidia_smi.parent / "nothing"))
    assert hardware.find_gpu() is None


DEVICES = [
    (
        312,
        "NVIDIA A100-SXM4-40GB; A100-SXM4-80GB; NVIDIA A100 80GB PCIe; NVIDIA A100-PCIE-40GB",
    ),
    (312, "NVIDIA A800-SXM4-80GB; NVIDIA A800 80GB PCIe"),
    (989, "NVIDIA H100 80GB HBM3; NVIDIA H100 SXM5 80GB; NVIDIA H800; NVIDIA H200"),
    (989, "NVIDIA GH200 120GB; NVIDIA GH200 480GB; NVIDIA GH200 144G HBM3e"),
    (756, "NVIDIA H100 PCIe; NVIDIA H800 PCIe"),
    (835, "NVIDIA H100 NVL; NVIDIA H200 NVL"),
    (148, "NVIDIA H20; NVIDIA H20-3e"),
    (2250, "NVIDIA B200"),
    (2500, "NVIDIA GB200; AMD Instinct MI355X"),
    (362, "NVIDIA L40S"),
    (1307, "AMD Instinct MI300X; AMD Instinct MI325X"),
    (191.5, "AMD Instinct MI250X"),
    (None, "NVIDIA A100-SXM-64GB; NVIDIA A100X; NVIDIA H20Z; NVIDIA H100 64GB HBM2e"),
    (None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb; NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
    (None, "NVIDIA L4; NVIDIA L40; NVIDIA B300 SXM6 AC; NVIDIA GeForce RTX 4090; ; x86_64"),
    (None, "Tesla V100-SXM2-32GB; NVIDIA RTX 6000 Ada Generation; NVIDIA RTX A6000; GH100"),
]
"""Peaks in TFLOP/s, and names as torch returns them."""


@pytest.mark.parametrize(("tflops", "names"), DEVICES)
def test_a_devices_peak_is_its_own_or_unknown(tflops, names):
    for name in names.split("; "):
        assert gpus.peak_flops(name) == (tflops and tflops * 1e12), name


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 1)])
def test_tensors_go_to_a_gpu_from_pinned_memory(device, monkeypatch):
    pinned, copies = torch.ones(2), []

    def copy(tensor, *arguments, **options):
        copies.append((tensor is pinned, arguments, options))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    device_module.to_device(torch.zeros(2), device)
    device_module.to_device(torch.zeros(2), "cpu")
    expected = {"non_blocking": True}
    assert copies == [(True, (device,), expected), (False, ("cpu",), expected)]


@pytest.mark.system
def test_commands_refuse_an_unusable_gpu(broken_gpu, data_folder, tmp_path, capsys):
    suite = ["run", "--checkpoint", tmp_path, "--suite", "validation"]
    command = list(map(str, debug_run(data_folder, tmp_path / "run")))
    for main, arguments in ((train.main, command), (eval_main, suite)):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        assert ended.value.code == 2
        assert error_codes(capsys.readouterr().err) == ["gpu.unusable"]
    assert not (tmp_path / "run").exists()
    with refused("gpu.unusable"):
        Machine.here()
    train.main([*command, "--dry_run"])


def test_numa_cores_of_a_gpu(tmp_path, monkeypatch):
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {2: place}.get)
    assert device_module.numa_cores(2, tmp_path) == set()
    device, node_1 = "sys/bus/pci/devices/0000:dc:01.0", "sys/devices/system/node/node1"
    cases = ("1", "48-50,144\n", {48, 49, 50, 144}), ("-1", "0-3", set()), ("1", "", set())
    for node, cores, expected in cases:
        write(tmp_path / device / "numa_node", f"{node}\n")
        write(tmp_path / node_1 / "cpulist", cores)
        assert device_module.numa_cores(2, tmp_path) == expected


def test_available_memory_is_limited_by_cgroups(tmp_path):
    total = memory.available_memory(tmp_path)  # nothing to read
    assert 0 < memory.available_memory() <= total
    write(tmp_path / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:   {total // 2048} kB\n")
    assert memory.available_memory(tmp_path) == total // 2048 * 1024
    version_1 = "3:cpu,cpuacct:/job/step\n5:memory:/job/step\n"
    write(tmp_path / "proc/self/cgroup", f"{version_1}0::/slice/job\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "slice/job/memory.max", "max\n")
    write(groups / "memory/job/step/memory.limit_in_bytes", "9223372036854771712\n")
    write(groups / "cpu,cpuacct/job/step/memory.max", "1\n")
    assert memory.available_memory(tmp_path) == total // 2048 * 1024
    write(groups / "slice/memory.max", "200000000\n")
    assert memory.available_memory(tmp_path) == 200_000_000
    write(groups / "memory/memory.limit_in_bytes", "100000000\n")
    assert memory.available_memory(tmp_path) == 100_000_000


SMI = """#!/bin/sh
case "$*" in
    --id=GPU-7*) echo '580.65.06, 1410, 1980, 2619, 693.25, 700.00, 64, 0x0000000000000024' ;;
    --id=GPU-8*) echo '535.1, [N/A], 1980, 2619, 80, [N/A], 30, Not Active' ;;
    *) echo No devices were found ;;
esac
"""


def test_query_gpu(nvidia_smi):
    assert hardware.query_gpu("0") is None
    nvidia_smi.write_text(SMI)
    reasons = ["software power cap", "software thermal slowdown"]
    expected = ["580.65.06", 1410, 1980, 2619, 693.25, 700, 64, reasons]
    assert hardware.query_gpu("GPU-7") == dict(zip(hardware.GPU_FIELDS, expected, strict=True))
    other = hardware.query_gpu("GPU-8")
    assert other["power_limit_w"] is None and other["throttled_by"] == []
    assert hardware.query_gpu("0") is None

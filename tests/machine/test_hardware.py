"""An unusable GPU is an error; NUMA cores, available memory, nvidia-smi."""

from types import SimpleNamespace

import pytest
import torch

from canon_pretrain import train
from canon_pretrain.machine import device as device_module
from canon_pretrain.machine import gpus, hardware, memory
from eval.__main__ import main as eval_main
from tests.bench.limits import Machine
from tests.support import command_error, debug_run, refused

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def write(path, text):
    """Write a file in folders that need not exist, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def broken_gpu(tmp_path, monkeypatch):
    """A device file of a GPU that torch does not see."""
    file = write(tmp_path / "dev" / "nvidia0", "")
    write(file.parent / "nvidia-uvm", "")
    monkeypatch.setattr(hardware, "DEVICE_FILES", str(file.parent / "nvidia[0-9]*"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return file


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A program nvidia-smi that fails."""
    program = write(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize("visible", [None, "0"])
def test_an_unusable_gpu_is_refused(visible, broken_gpu, monkeypatch):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    with refused("gpu.unusable", evidence=str(broken_gpu)):
        device_module.check_cuda()


@pytest.mark.usefixtures("nvidia_smi", "broken_gpu")
@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_an_unusable_gpu_that_is_hidden_is_accepted(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device_module.check_cuda()


def test_a_machine_without_device_files_has_no_gpu(broken_gpu, nvidia_smi, monkeypatch):
    """Unless nvidia-smi lists one."""
    broken_gpu.unlink()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    device_module.check_cuda()
    assert hardware.find_gpu() is None  # nvidia-uvm is not a GPU, and nvidia-smi fails

    nvidia_smi.write_text("#!/bin/sh\n[ $1 = -L ] && echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")
    assert "NVIDIA H100" in (hardware.find_gpu() or "")

    monkeypatch.setenv("PATH", str(nvidia_smi.parent / "nothing"))
    assert hardware.find_gpu() is None


DEVICES = [
    (312, "NVIDIA A100-SXM4-40GB; A100-SXM4-80GB; NVIDIA A100 80GB PCIe"),
    (312, "NVIDIA A100-PCIE-40GB; NVIDIA A800-SXM4-80GB; NVIDIA A800 80GB PCIe"),
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
    expected = None if tflops is None else tflops * 1e12
    for name in names.split("; "):
        assert gpus.peak_flops(name) == expected, name


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 1)])
def test_tensors_go_to_a_gpu_from_pinned_memory(device, monkeypatch):
    pinned = torch.ones(2)
    copies = []

    def copy(tensor, *arguments, **options):
        copies.append((tensor is pinned, arguments, options))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned)
    monkeypatch.setattr(torch.Tensor, "to", copy)

    device_module.to_device(torch.zeros(2), device)
    device_module.to_device(torch.zeros(2), "cpu")

    assert copies == [
        (True, (device,), {"non_blocking": True}),
        (False, ("cpu",), {"non_blocking": True}),
    ]


@pytest.mark.system
def test_commands_refuse_an_unusable_gpu(broken_gpu, data_folder, tmp_path, capsys):
    training = [str(word) for word in debug_run(data_folder, tmp_path / "run")]
    evaluation = ["run", "--checkpoint", str(tmp_path), "--suite", "validation"]

    for main, arguments in ((train.main, training), (eval_main, evaluation)):
        assert command_error(capsys, main, arguments) == "gpu.unusable"
    assert not (tmp_path / "run").exists()

    with refused("gpu.unusable"):
        Machine.here()
    train.main([*training, "--dry_run"])


@pytest.fixture
def gpu_2(monkeypatch):
    """GPU 2 of this machine has the PCI address 0000:dc:01.0."""
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {2: properties}.get)


@pytest.mark.usefixtures("gpu_2")
@pytest.mark.parametrize(
    ("node", "cores", "expected"),
    [("1", "48-50,144\n", {48, 49, 50, 144}), ("-1", "0-3", set()), ("1", "", set())],
    ids=["two ranges", "no node", "no cores"],
)
def test_numa_cores_of_a_gpu(node, cores, expected, tmp_path):
    write(tmp_path / "sys/bus/pci/devices/0000:dc:01.0/numa_node", f"{node}\n")
    write(tmp_path / "sys/devices/system/node/node1/cpulist", cores)

    assert device_module.numa_cores(2, tmp_path) == expected


@pytest.mark.usefixtures("gpu_2")
def test_a_machine_that_does_not_tell_has_no_numa_cores(tmp_path):
    assert device_module.numa_cores(2, tmp_path) == set()


def test_available_memory_is_limited_by_cgroups(tmp_path):
    total = memory.available_memory(tmp_path)  # nothing to read
    assert 0 < memory.available_memory() <= total

    half_kib = total // 2048
    write(tmp_path / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:   {half_kib} kB\n")
    assert memory.available_memory(tmp_path) == half_kib * 1024

    # groups of both versions, without a limit on memory
    version_1 = "3:cpu,cpuacct:/job/step\n5:memory:/job/step\n"
    version_2 = "0::/slice/job\n"
    write(tmp_path / "proc/self/cgroup", version_1 + version_2)
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "slice/job/memory.max", "max\n")
    write(groups / "memory/job/step/memory.limit_in_bytes", "9223372036854771712\n")
    write(groups / "cpu,cpuacct/job/step/memory.max", "1\n")
    assert memory.available_memory(tmp_path) == half_kib * 1024

    # limits of the groups above
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
    assert hardware.query_gpu("0") is None  # the program fails

    nvidia_smi.write_text(SMI)
    reasons = ["software power cap", "software thermal slowdown"]
    values = ["580.65.06", 1410, 1980, 2619, 693.25, 700, 64, reasons]
    assert hardware.query_gpu("GPU-7") == dict(zip(hardware.GPU_FIELDS, values, strict=True))

    without_limit = hardware.query_gpu("GPU-8")
    assert without_limit["power_limit_w"] is None
    assert without_limit["throttled_by"] == []

    assert hardware.query_gpu("0") is None  # no such GPU

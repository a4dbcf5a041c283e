"""Compile hooks.cpp once per torch version, and load it before torch is imported.

The folder is `~/.cache/canon_pretrain/fake_gpu` (or below XDG_CACHE_HOME).
"""

import ctypes
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from canon_pretrain.core.errors import UserError

SOURCE = Path(__file__).with_name("hooks.cpp")
COMPILE_TIMEOUT_S = 300.0
SHOWN_CHARACTERS = 2000  # of the end of a compiler's messages
LIBRARIES = ("libc10.so", "libtorch_cpu.so")
GPU_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so")


def torch_folder() -> Path:
    """Return the folder of the package torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def build() -> Path:
    """Return the compiled hooks, from the cache if they are there. Raises UserError."""
    torch = torch_folder()
    torch_version = version("torch")
    if any((torch / "lib" / name).exists() for name in GPU_LIBRARIES):
        raise UserError(
            "fake_gpu.torch",
            f"fake GPUs need a torch built for CPUs, but torch {torch_version} is built for GPUs. "
            "In another environment: pip install torch==2.13.0 "
            "--index-url https://download.pytorch.org/whl/cpu",
            torch=torch_version,
        )

    # One build per source and torch version.
    content = SOURCE.read_bytes() + torch_version.encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    library = cache / "canon_pretrain" / "fake_gpu" / f"hooks-{digest}.so"
    if library.exists():
        return library

    # renamed when complete: other processes may build it at the same time
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        unfinished = Path(scratch) / library.name
        _compile(torch, unfinished)
        os.replace(unfinished, library)
    return library


def _compile(torch: Path, library: Path) -> None:
    """Compile hooks.cpp into `library`. Raises UserError."""
    compiler = os.environ.get("CXX", "c++")
    include = torch / "include"
    command = [
        *shlex.split(compiler),  # may be two words, such as ccache g++
        "-O1",
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-I{include}",
        f"-I{include / 'torch/csrc/api/include'}",
        str(SOURCE),
        "-o",
        str(library),
        f"-L{torch / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            "fake_gpu.compiler",
            f"the C++ compiler {compiler} did not run ({error}): fake GPUs need one. Install g++ "
            "(Debian: apt-get install g++), or set CXX",
            compiler=compiler,
        ) from None

    if done.returncode:
        raise UserError(
            "fake_gpu.compiler",
            f"{compiler} cannot compile {SOURCE}:\n{done.stderr[-SHOWN_CHARACTERS:]}",
            compiler=compiler,
        )


def load(library: Path) -> None:
    """Load compiled hooks: torch looks for them once, when it is first asked for CUDA."""
    assert "torch" not in sys.modules, "load hooks before torch is imported"
    # the loader does not search torch's folder
    for name in LIBRARIES:
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

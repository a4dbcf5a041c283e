"""Run cases of the recurrences' kernels with a fault in their source, interpreted.

`python -m tests.recurrence_faults OUT.json` writes {fault: error}. Each fault runs in a forked
process, which imports a copy of the kernels with one replacement.
"""

import json
import multiprocessing
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch._dynamo  # imported by custom operators: once, before the forks
import triton.runtime.interpreter  # noqa: F401

from canon_pretrain.kernels import triton as kernels
from tests.recurrence_cases import FP32, Case, check
from tests.triton_cases import correct_bfloat16, quicken_interpreter

GLA = Case("gla", FP32, 35, 1, 2, 8, 12, "usual", 11, True, 16)
SSD = GLA._replace(form="ssd")
# fault: file, text, its replacement, and the case that finds it
FAULTS: dict[str, tuple[str, str, str, Case]] = {
    "none": ("chunks.py", "", "", GLA),
    "start not cut": (
        "chunks.py", "is_start[:, None], CUT, log_CX", "is_start[:, None], log_CX, log_CX", GLA,
    ),
    "own decay until the end": (
        "gla.py", "is_later_CC = place[None, :] > place", "is_later_CC = place[None, :] >= place",
        GLA,
    ),
    "block before": (
        "chunks.py", "block_C[:, None] == block_C[None, :] + 1",
        "block_C[:, None] >= block_C[None, :] + 1", GLA,
    ),
    "own decay in the second block": (
        "chunks.py", "is_earlier = place_C[None, :] <= place_C",
        "is_earlier = place_C[None, :] < place_C", GLA,
    ),
    "lost digits of log decays": (
        "chunks.py", "total_CK = tl.dot(ones_CC, middle_CK, acc=total_CK)", "pass", GLA,
    ),
    "decay of the first chunk": (
        "gla.py", "decay += step * key_dim", "decay += 0", GLA._replace(starts_every=0),
    ),
    "scores not transposed": (
        "gla.py", "scores_CC = tl.trans(scores_CC)", "scores_CC = scores_CC", GLA,
    ),
    "diagonal left out": ("gla.py", "dk_CK = diagonal_C1 * q_CK", "dk_CK = 0.0 * q_CK", GLA),
    "no scale": ("gla.py", "dq_CK += scale * dq_pair_CK", "dq_CK += dq_pair_CK", GLA),
    "decay of the chunk": (
        "gla.py", "dlog_CK += (tl.exp(chunks.last_row", "dlog_CK += 0.0 * (tl.exp(chunks.last_row",
        GLA._replace(starts_every=0),
    ),
    "state of the next head": (
        "ssd.py", "x_head = first_head + x // width", "x_head = first_head + (x + 1) // width",
        SSD._replace(value_dim=16),
    ),
    "float32 sums": (
        "chunks.py", "(low_C[:, None] - low_C[None, :])", "0.0",
        SSD._replace(decays="extreme", chunk=32),
    ),
    "step size left out": (
        "ssd.py", "factor_LG = dt_LG * chunks.decay_until", "factor_LG = chunks.decay_until", SSD,
    ),
    "token's own decay": (
        "ssd.py", "is_earlier_LL = place[:, None] < place[None, :]",
        "is_earlier_LL = place[:, None] <= place[None, :]", SSD,
    ),
    "groups of heads": (
        "ssd.py", "for g in range(num_groups)", "for g in range(1)", SSD._replace(heads=3),
    ),
    "D in its gradient": ("ssd.py", "dx_LP += tl.load(D + head)", "dx_LP += 0.0", SSD),
}  # fmt: skip


def main() -> None:
    """Check every fault."""
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        results = pool.map(_check, FAULTS, chunksize=1)
    Path(sys.argv[1]).write_text(json.dumps(dict(zip(FAULTS, results, strict=True))))


def _check(fault: str) -> str:
    name, text, instead, case = FAULTS[fault]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "triton"
        shutil.copytree(Path(kernels.__path__[0]), copy)
        source = (copy / "recurrence" / name).read_text()
        assert text in source, (fault, text)
        faulty = source.replace(text, instead) if text else source
        (copy / "recurrence" / name).write_text(faulty)
        kernels.__path__ = [str(copy)]
        quicken_interpreter()
        correct_bfloat16()
        try:
            check(case)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()

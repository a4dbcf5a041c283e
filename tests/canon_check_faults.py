"""Run the start-up check of Canon on our Triton kernels with a fault in their source, interpreted.

`python -m tests.canon_check_faults` prints {fault: problem} as JSON. Each fault runs in
a forked process, which imports a copy of the kernels with one replacement.
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
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.canon_check import training_problem

RUN = "-first_token, num_tokens - first_token"
RUN_OF_GATE = "low, high, length = window.own_run(num_tokens, run, taps)"
SMALL = {"dim": 12, "num_heads": 2, "ffn_dim": 14, "vocab_size": 32, "num_layers": 1}
# fault: file, text, its replacement; the options of the model
FAULTS: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "none": ("window.py", "", "", {"canon_set": "ABCD", "document_mask": True}),
    "wrong tap": ("window.py", "(taps - 1 - j)", "j", {"canon_set": "D"}),
    "wrong tap in the gradient": (
        "rows.py", "mix(d3, d2, d1, d0, w0, w1", "mix(d3, d2, d1, d0, w1, w0", {"canon_set": "A"},
    ),
    "no halo": ("window.py", RUN, "0, num_tokens - first_token", {"canon_set": "A"}),
    "first tokens": (
        "gate.py", RUN_OF_GATE,
        f"{RUN_OF_GATE}\n    low -= 3 * tl.minimum(tl.program_id(2), 1).to(tl.int32)",
        {"canon_set": "D"},
    ),
    "document border": (
        "window.py", "s1 += x * own(d1, g0, g1, seg)", "s1 += x * d1",
        {"canon_set": "B", "position": "nope", "document_mask": True},
    ),
    "no gradient": (
        "fused.py", "dh_BTC, dh_BTC, dweight, dgain)", "dh_BTC, dh_BTC, None, dgain)",
        {"canon_set": "C"},
    ),
    "not a number": ("rows.py", "/ width + eps", "/ width - 9.0", {"canon_set": "A"}),
    "does not compile": ("rows.py", "= rotate(", "= tl.no_such_thing(", {"canon_set": "B"}),
}  # fmt: skip


def main() -> None:
    """Check every fault, or those named."""
    torch.set_num_threads(1)
    faults = sys.argv[1:] or list(FAULTS)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        results = pool.map(_check, faults, chunksize=1)
    print(json.dumps(dict(zip(faults, results, strict=True))))


def _check(fault: str) -> str | None:
    from tests.triton_cases import quicken_interpreter, small_blocks

    name, text, instead, options = FAULTS[fault]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "triton"
        shutil.copytree(Path(kernels.__path__[0]), copy)
        source = (copy / name).read_text()
        assert text in source, (fault, text)
        (copy / name).write_text(source.replace(text, instead) if text else source)
        kernels.__path__ = [str(copy)]
        quicken_interpreter()
        args = ModelArgs(**SMALL, max_seq_len=7, **options)  # type: ignore[arg-type]
        with small_blocks(block=8, run=4):
            return training_problem(args, "triton", (2, 7), torch.float32, torch.device("cpu"))


if __name__ == "__main__":
    main()

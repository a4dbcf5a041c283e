"""What `eval bench` measures: both sides over one export, case by case, turn by turn.

bench.py prints it, bench_model.py makes what is measured. Time is CPU time of the process where one
thread computes, which a busy machine does not change, and else the clock's.
"""

import contextlib
import io
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.core.terminal import Console
from canon_pretrain.hf.export import export
from canon_pretrain.kernels.hardware import check_cuda
from canon_pretrain.model.args import num_parameters
from eval.bench.cases import CASES, GENERATION, MAX_LENGTH, Case, make_cases
from eval.bench.model import describe, load_theirs, parse_model, write_random_export
from eval.model.budget import batch_tokens_for
from eval.model.lm import CanonLM
from eval.model.load import dtype_for
from eval.model.subject import Subject

TOLERANCE = 1e-3
"""Nats that log-likelihoods of the two may be apart in float32: sums of rounding."""
HF_BATCH_SIZES = {"cpu": (1, 4, 16), "cuda": (8, 32, 128)}
"""The best of these is theirs; `auto` is not among them: it tries the largest on 2,048 tokens,
which on a CPU is beyond its memory, and on a GPU costs passes of its own."""
Clocks = dict[str, float]


@dataclass
class Sides:
    """The two, over one export."""

    ours: CanonLM
    hf: Any

    def answer(self, side: str, case: Case, requests: Sequence[Any]) -> tuple[list[Any], Clocks]:
        """What one of them answers, and the seconds of it by both clocks."""
        method = getattr(self.ours if side == "ours" else self.hf, case.kind)
        _synchronize()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        with contextlib.redirect_stderr(io.StringIO()):  # their bars
            answers = method(list(requests), disable_tqdm=True)
        _synchronize()
        clocks = {"clock": time.perf_counter() - begin, "CPU": time.process_time() - begin_cpu}
        return answers, clocks


def measure(
    model: str | None,
    checkpoint: Path | None,
    *,
    dtype: str,
    repeats: int,
    scale: float | None,
    only: list[str] | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The figures of one run, as JSON can hold them; seconds. Raises UserError."""
    names = _chosen(only)
    check_cuda()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    weights = dtype_for(dtype, device)
    with tempfile.TemporaryDirectory(prefix="canon-eval-bench-") as scratch:
        folder = Path(scratch)
        if checkpoint is not None:
            export(checkpoint, folder / "out", dtype=str(weights).removeprefix("torch."))
            title = str(checkpoint)
        else:
            args = parse_model(model or ("1b3" if on_gpu else "8L512D"))
            title = f"random weights, {describe(args)}"
            write_random_export(args, folder, weights)
        subject = Subject.open(folder / "out", None)
        ours = CanonLM(
            subject.load(device, weights, MAX_LENGTH), subject.tokenizer, max_length=MAX_LENGTH
        )
        ours.batch_tokens = batch_tokens_for(ours, folder, Console(quiet=True))
        sides = Sides(ours, load_theirs(folder / "out", device, weights, folder))
        cases = make_cases(subject.tokenizer, names, scale or (16.0 if on_gpu else 1.0))
        ratio_of = "CPU" if not on_gpu and torch.get_num_threads() == 1 else "clock"
        found = []
        for case in cases:
            found.append(measure_case(sides, case, repeats, ratio_of))
            say(f"{case.name}: {found[-1]['ratio']:.2f}x")
    return {
        "bench": "eval",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else _cpu(),
        "versions": {name: version(name) for name in ("torch", "transformers", "lm_eval")},
        "model": title,
        "args": asdict(ours.model.args),
        "num_parameters": num_parameters(ours.model.args),
        "dtype": str(weights).removeprefix("torch."),
        "batch_tokens": ours.batch_tokens,
        "max_length": MAX_LENGTH,
        "repeats": repeats,
        "ratio_of": ratio_of,
        "cases": found,
        "groups": _groups(found),
    }


def measure_case(sides: Sides, case: Case, repeats: int, ratio_of: str) -> dict[str, Any]:
    """Both sides `repeats` times in turn; raises UserError where they do not agree in float32."""
    batch_size = best_batch_size(sides, case, ratio_of)
    sides.hf.batch_size_per_gpu = batch_size
    sides.answer("ours", case, case.requests[:1])
    times: dict[str, list[Clocks]] = {"ours": [], "hf": []}
    answers: dict[str, list[Any]] = {}
    for turn in range(repeats):
        for side in ("ours", "hf") if turn % 2 == 0 else ("hf", "ours"):
            answers[side], clocks = sides.answer(side, case, case.requests)
            times[side].append(clocks)
    pairs = zip(times["hf"], times["ours"], strict=True)
    ratios = sorted(theirs[ratio_of] / own[ratio_of] for theirs, own in pairs)
    dtype = next(sides.ours.model.parameters()).dtype
    return {
        "case": case.name,
        "group": case.group,
        "requests": len(case.requests),
        "tokens": case.tokens,
        "ours": _medians(times["ours"]),
        "hf": {"batch_size": batch_size, **_medians(times["hf"])},
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
        "target": None if sides.ours.model.tok_embeddings.weight.is_cuda else case.target,
        "agreement": agreement(case, answers["ours"], answers["hf"], dtype),
    }


def best_batch_size(sides: Sides, case: Case, ratio_of: str) -> int:
    """The batch size with which theirs answer the requests the fastest, by the clock `ratio_of`.

    Larger ones are tried until one is slower, or does not fit in memory.
    """
    best, fastest = 1, math.inf
    for size in HF_BATCH_SIZES[sides.hf.device.type]:
        sides.hf.batch_size_per_gpu = size
        try:
            if fastest == math.inf:
                sides.answer("hf", case, case.requests[:1])  # the first call warms up
            took = sides.answer("hf", case, case.requests)[1][ratio_of]
        except torch.OutOfMemoryError:
            break
        if took >= fastest:
            break
        best, fastest = size, took
    return best


def agreement(case: Case, ours: list[Any], theirs: list[Any], dtype: torch.dtype) -> str:
    """In which way the answers are the same; UserError where they are not, in float32.

    In bfloat16 what is nearly a tie falls either way.
    """
    if case.group == GENERATION:
        same = [_is_same(own, text) for own, text in zip(ours, theirs, strict=True)]
        words, agrees = f"{sum(same)} of {len(same)} texts", all(same)
    else:
        scores = [[a if isinstance(a, float) else a[0] for a in side] for side in (ours, theirs)]
        apart = [abs(own - other) for own, other in zip(*scores, strict=True)]
        words = f"to {max(apart):.0e} nat"
        # rounding adds up over the thousands of tokens of a document
        near = [
            gap <= TOLERANCE * max(1, abs(score) / 100)
            for gap, score in zip(apart, scores[0], strict=True)
        ]
        greedy = [[a for a in side if not isinstance(a, float)] for side in (ours, theirs)]
        agrees = all(near) and [g for _, g in greedy[0]] == [g for _, g in greedy[1]]
    if not agrees and dtype == torch.float32:
        raise UserError(
            f"{case.name}: the two sides answer differently ({words}), so their times can't be "
            "compared"
        )
    return words


def _is_same(ours: str, theirs: str) -> bool:
    """Whether two texts are of the same tokens.

    Theirs lack the space before the first word (SentencePiece drops it where nothing stands
    before), and bytes that are no text, as of a character cut off, which are U+FFFD in ours.
    """
    text, cut, _ = ours.removeprefix(" ").partition("\ufffd")
    return theirs.startswith(text) if cut else theirs == text


def _medians(times: list[Clocks]) -> Clocks:
    return {clock: statistics.median(t[clock] for t in times) for clock in times[0]}


def _groups(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault(case["group"], []).append(case)
    return [
        {
            "group": group,
            "ratio": statistics.geometric_mean([case["ratio"] for case in members]),
            "target": members[0]["target"],
        }
        for group, members in groups.items()
    ]


def _chosen(only: list[str] | None) -> list[str]:
    for name in only or ():
        if name not in CASES:
            near = nearest(name, CASES)
            raise UserError(
                f"--cases {name}: expected some of {', '.join(CASES)}"
                + (f"; did you mean {near}?" if near else "")
            )
    return [name for name in CASES if not only or name in only]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cpu() -> str:
    name = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            (x.partition(":")[2].strip() for x in lines if x.startswith("model name")), name
        )
    return f"{name}, {torch.get_num_threads()} threads"

"""The first minutes of this project on a GPU: stages in order of value; see first.sh.

A stage is a process with a limit of its own, so that one that fails or hangs costs no other. It
writes its rows as they come, and OUT/results.json is written after each stage. Stages for which too
little time is left are skipped.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from canon_pretrain.core.files import write_json

VOCAB_SIZE = 32_000
RESERVE_S = 3.0
"""Kept for the end of a stage that was stopped."""
CPU_PATIENCE = 6.0
"""How many times as long as on a GPU a stage with tiny models may take."""
PACKAGES = ("torch", "triton", "torchtitan", "datasets", "numpy", "fla-core", "flash-attn-4")
CHECKED = ("nope_canon", "rope_canon", "released_1b", "gla_canon", "mamba2_canon")
LINEAR = ("gla", "mamba2", "gated_deltanet")
TINY = """
    --model.num_layers 2 --model.dim 64 --model.num_heads 4 --model.ffn_dim 128
    --training.seq_len 128 --training.mixed_precision_param float32 --compile.no_enable
""".split()
GPU_TESTS = """
    tests/kernels/test_triton_gpu.py tests/model/test_gpu.py tests/titan/test_staging.py
    tests/kernels/test_linear_cross_entropy.py tests/kernels/test_fla_mixers.py
    tests/kernels/test_packages.py tests/hf/test_modeling.py
""".split()


# -- rows of results


@dataclass(frozen=True)
class Facts:
    """The machine, and rates in FLOP/s and bytes per second."""

    python: str
    gpu: str | None
    memory_gib: float | None
    cores: int
    cuda: str | None
    packages: dict[str, str | None]
    rates: dict[str, float]


@dataclass(frozen=True)
class Check:
    """The startup check of a Canon backend: why a run must not use it, or None."""

    backend: str
    problem: str | None
    seconds: float


@dataclass(frozen=True)
class Step:
    """A logged training step."""

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    seconds_per_step: float
    memory_gib: float
    mfu: float | None = None


@dataclass(frozen=True)
class Training:
    """A run of the trainer; the medians are of the steps after the first four, if there are any."""

    exit_code: int
    seconds: float
    steps: list[Step]
    seconds_per_step: float | None
    mfu: float | None
    memory_gib: float | None


@dataclass(frozen=True)
class BlockTime:
    """Forward and backward of a compiled block."""

    ms: float
    us_per_token: float
    compile_s: float
    is_finite: bool
    peak_gib: float | None


@dataclass(frozen=True)
class Tests:
    exit_code: int
    summary: str
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: "ok", "failed", "stopped" at its limit, or "skipped"."""

    status: str
    seconds: float
    exit_code: int | None = None
    rows: dict[str, Any] = field(default_factory=dict)
    tail: str = ""


# -- what a stage knows


@dataclass(frozen=True)
class Place:
    """Where a stage runs and writes. `deadline`: of time.monotonic(), which all processes share."""

    out: Path
    work: Path
    is_cpu: bool
    deadline: float

    @property
    def data(self) -> Path:
        return self.work / "data"

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu") if self.is_cpu else torch.device("cuda", 0)

    def rows_file(self, stage: str) -> Path:
        return self.out / f"{stage}.json"

    def log_file(self, stage: str) -> Path:
        return self.out / f"{stage}.txt"


class Rows:
    """The rows of a stage by name, on the disk after each; `failed`: the names of bad ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Any] = {}
        self.failed: list[str] = []

    def add(self, name: str, row: Any, *, is_good: bool = True) -> None:
        if not is_good:
            self.failed.append(name)
        self._rows[name] = asdict(row) if dataclasses.is_dataclass(row) else row  # type: ignore[arg-type]
        write_json(self._path, self._rows)
        print(f"{name}: {json.dumps(self._rows[name])[:300]}", flush=True)

    def add_failure(self, name: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {str(error)[:400]}"
        self.add(name, {"error": text}, is_good=False)

    def add_run(self, name: str, run: "Training | Tests") -> None:
        self.add(name, run, is_good=run.exit_code == 0)


# -- stages


def find_facts(place: Place, rows: Rows) -> None:
    """The versions, and what matrix products and copies reach."""
    import torch

    from canon_pretrain.machine.timing import copy_bandwidth, matmul_flops

    size, seconds, num_bytes = (256, 0.05, 1 << 22) if place.is_cpu else (8192, 1.0, 1 << 32)
    rates: dict[str, float] = {}
    for name, dtype, precision in (
        ("bfloat16", torch.bfloat16, "highest"),
        ("float32", torch.float32, "highest"),
        ("float32 by TF32", torch.float32, "high"),
    ):
        torch.set_float32_matmul_precision(precision)
        rates[name] = matmul_flops(place.device, dtype, size=size, seconds=seconds)
    torch.set_float32_matmul_precision("highest")
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=place.device)
    rates["copy"] = copy_bandwidth(source, torch.empty_like(source), seconds=seconds)

    properties = None if place.is_cpu else torch.cuda.get_device_properties(0)
    facts = Facts(
        python=sys.version.split()[0],
        gpu=properties.name if properties else None,
        memory_gib=properties.total_memory / 2**30 if properties else None,
        cores=len(os.sched_getaffinity(0)),
        cuda=torch.version.cuda,
        packages={name: installed_version(name) for name in PACKAGES},
        rates=rates,
    )
    rows.add("machine", facts)


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_data(place: Place, rows: Rows) -> None:
    """Shards of random ids, not uniform ones, so that the loss falls."""
    import numpy as np

    from canon_pretrain.data.shard_writer import write_shards

    random = np.random.default_rng(0)
    for split, count in (("train", 60 if place.is_cpu else 1000), ("validation", 20)):
        ids = 3 + np.minimum(random.geometric(0.002, (count, 2000)), VOCAB_SIZE - 4)
        write_shards(
            place.data / split,
            [np.append(row, 2) for row in ids],
            vocab_size=VOCAB_SIZE,
            eos_id=2,
            num_bytes=[8000] * count,
            tokenizer_sha256="0" * 64,
        )
        rows.add(split, {"tokens": ids.size + count})


def check_kernels(place: Place, rows: Rows) -> None:
    """The trainer's startup check of Canon, on the shapes of the 1.3B models."""
    import torch

    from canon_pretrain.model import canon_check

    if place.is_cpu:
        backend = "compiled"
        dtype = torch.float32
        jobs = {"debug": ["--config", "train_configs/debug.toml", "--model.vocab_size", "512"]}
    else:
        backend = "triton"
        dtype = torch.bfloat16
        jobs = {name: ["--config", f"train_configs/{name}.toml"] for name in CHECKED}
        documents = ["--model.document_mask", "true", "--model.eos_id", "2"]
        jobs["documents"] = [*jobs["nope_canon"], *documents]

    for name, options in jobs.items():
        job = parse(options)
        begin = time.monotonic()
        problem = canon_check.training_problem(
            job.model_args, backend, (2, job.training.seq_len), dtype, place.device
        )
        check = Check(backend, problem, time.monotonic() - begin)
        rows.add(name, check, is_good=problem is None)


def compare_resumed(place: Place, rows: Rows) -> None:
    """12 steps, and 6 with a resume, by deterministic kernels: bitwise equal losses and norms."""
    options = one_batch(place, 6, 3)
    options += ["--checkpoint.interval", "6", "--debug.deterministic"]
    if not place.is_cpu:
        options += ["--model.num_layers", "4"]

    straight = train(place, "straight", [*options, "--run.stop_at", "12"])
    rows.add_run("straight", straight)
    rows.add_run("first part", train(place, "resumed", [*options, "--run.stop_at", "6"]))
    resumed = train(place, "resumed", [*options, "--run.stop_at", "12"])
    rows.add_run("second part", resumed)

    resumed_curve = loss_curve(resumed)
    equal_steps = [
        step for step, values in loss_curve(straight).items() if resumed_curve.get(step) == values
    ]
    is_equal = len(equal_steps) == 12
    rows.add("bitwise", {"is_equal": is_equal, "equal_steps": equal_steps}, is_good=is_equal)


def loss_curve(run: "Training") -> dict[int, tuple[float, float]]:
    """Return the loss and gradient norm of each step."""
    return {step.step: (step.loss, step.grad_norm) for step in run.steps}


def measure_mfu(place: Place, rows: Rows) -> None:
    """Whole steps of 1.3B, micro-batch 6: Canon by the chosen kernels, none, by torch.compile."""
    options = one_batch(place, 6, 6)
    options += ["--checkpoint.interval", "100000", "--run.stop_at", "9"]
    rows.add_run("nope_canon", train(place, "nope_canon", options))
    if place.is_cpu:
        return
    rows.add_run("nope", train(place, "nope", options, config="nope"))
    compiled = [*options, "--model.canon_backend", "compiled"]
    rows.add_run("nope_canon compiled", train(place, "compiled", compiled))


def time_blocks(place: Place, rows: Rows) -> None:
    """A 1.3B block without Canon, with it, and with each recurrence by its backends."""
    from canon_pretrain.kernels.backends import RECURRENCES, mixer_problem
    from canon_pretrain.model.args import flavor

    base = flavor("debug" if place.is_cpu else "1b3")
    plain = dataclasses.replace(base, position="nope", canon_set="")
    full = dataclasses.replace(plain, canon_set="ABCD")
    cases: list[tuple[str, Any, str, str]] = [
        ("none", plain, "compiled", "chunked"),
        ("ABCD compiled", full, "compiled", "chunked"),
    ]
    if not place.is_cpu:
        cases.insert(1, ("ABCD triton", full, "triton", "chunked"))
        for name in LINEAR:
            args = parse(["--config", f"train_configs/{name}.toml"]).model_args
            cases.append((f"{name} chunked", args, "compiled", "chunked"))
            for backend in RECURRENCES:
                cases.append((f"{name} {backend}", args, "compiled", backend))

    for name, args, canon, mixer in cases:
        problem = mixer_problem(args.mixer, args.key_dim, mixer)
        try:
            rows.add(name, problem or time_block(place, args, canon, mixer))
        except Exception as error:  # the other blocks still count
            rows.add_failure(name, error)


def time_block(place: Place, args: Any, canon: str, mixer: str) -> BlockTime:
    """Time a compiled block with these backends of Canon and of the mixer."""
    import torch

    from canon_pretrain.kernels.backends import compile_options
    from canon_pretrain.model.attend import Attend
    from canon_pretrain.model.attention import Rope
    from canon_pretrain.model.transformer import TransformerBlock

    device = place.device
    on_gpu = not place.is_cpu
    num_rows, num_tokens = (6, 4096) if on_gpu else (1, 64)

    # A block with random weights.
    torch.compiler.reset()
    rope = Rope(args) if args.rope_dim else None
    attend = Attend(args) if args.mixer == "attention" else None
    with torch.device("meta"):
        block = TransformerBlock(args, rope, attend, canon, mixer)
    block = block.to(torch.bfloat16 if on_gpu else torch.float32).to_empty(device=device)
    if rope is not None:
        rope.reset(device)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    forward: Any = torch.compile(
        block,
        fullgraph=True,
        backend="inductor" if on_gpu else "eager",
        options=compile_options(device.type, canon) if on_gpu else None,
    )

    # Its input, and the gradient of its output.
    dtype = next(block.parameters()).dtype
    h_BTD = torch.randn(num_rows, num_tokens, args.dim, device=device, dtype=dtype)
    h_BTD.requires_grad_()
    grad_BTD = torch.randn_like(h_BTD)

    def seconds() -> float:
        block.zero_grad()
        h_BTD.grad = None
        begin = time.perf_counter()
        forward(h_BTD).backward(grad_BTD)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    # Compile, warm up, measure.
    compile_s = seconds()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds()
    median = statistics.median(seconds() for _ in range(9 if on_gpu else 2))
    assert h_BTD.grad is not None
    return BlockTime(
        ms=1e3 * median,
        us_per_token=1e6 * median / num_rows / num_tokens,
        compile_s=compile_s,
        is_finite=bool(torch.isfinite(h_BTD.grad).all()),
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    )


def time_decoding(place: Place, rows: Rows) -> None:
    """Seconds to the first token and per later one, with and without Canon, by batch size."""
    import torch

    from canon_pretrain.model.args import flavor
    from canon_pretrain.titan.spec import random_model
    from tests.bench.generate import time_generation
    from tests.bench.variants import with_canon

    base = dataclasses.replace(flavor("debug" if place.is_cpu else "1b3"), position="nope")
    dtype = torch.float32 if place.is_cpu else torch.bfloat16
    num_new = 8 if place.is_cpu else 64
    for canon_set in ("", "ABCD"):
        model = random_model(with_canon(base, canon_set), place.device, dtype)
        for batch in (1, 32):
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(3, base.vocab_size, (batch, 32), generator=generator)
            time_generation(model, ids.tolist(), num_new)  # warm up
            times = time_generation(model, ids.tolist(), num_new)
            rows.add(f"{canon_set or 'none'}, batch {batch}", times)


def run_kernel_tests(place: Place, rows: Rows) -> None:
    """The tests that are marked `gpu`, kernels first."""
    arguments = ["-m", "gpu", "-n", "6", "--maxfail", "20", *GPU_TESTS]
    if place.is_cpu:
        arguments = ["-n", "0", "tests/machine/test_hardware.py", "-k", "peak"]
    rows.add_run("gpu", pytest(arguments))


def run_trainer_tests(place: Place, rows: Rows) -> None:
    """The trainer's tests that are marked `gpu`."""
    arguments = ["-m", "gpu", "-n", "0", "tests/titan/test_train.py"]
    if place.is_cpu:
        arguments = ["-n", "0", "tests/titan/test_staging.py"]
    rows.add_run("gpu", pytest(arguments))


# -- programs


def parse(arguments: Sequence[str]) -> Any:
    """Return the job of a command line."""
    from canon_pretrain.titan import device

    device.prepare_process()
    device.prepare_device()
    from canon_pretrain.titan.command_line import parse_job

    return parse_job(arguments, quiet=True)


def one_batch(place: Place, global_batch: int, micro_batch: int) -> list[str]:
    """Return the options of a run on this stage's data."""
    options = [
        *("--training.global_batch_size", str(global_batch)),
        *("--training.local_batch_size", str(micro_batch)),
        *("--metrics.log_freq", "1"),
        *("--validation.enable", "False"),
        *("--data.path", str(place.data)),
        "--force",
    ]
    if place.is_cpu:
        options += TINY
    return options


def train(place: Place, name: str, options: Sequence[str], config: str = "nope_canon") -> Training:
    """Train into the folder of runs `name`, resuming what is there; return the steps it took."""
    from canon_pretrain.run.folder import RunFolder
    from canon_pretrain.run.log import read_log

    folder = place.work / "runs" / name
    command = [
        *(sys.executable, "-m", "canon_pretrain.train"),
        *("--config", f"train_configs/{config}.toml"),
        *("--job.dump_folder", str(folder)),
        *options,
    ]
    begin = time.monotonic()
    code = subprocess.run(command).returncode
    seconds = time.monotonic() - begin

    log = RunFolder(folder).log_file
    events = read_log(log) if log.exists() else []
    names = [field.name for field in dataclasses.fields(Step)]
    steps = []
    for event in events:
        if event["event"] == "step":
            steps.append(Step(**{name: event.get(name) for name in names}))

    late = steps[4:] or steps
    step_seconds = [step.seconds_per_step for step in late]
    mfus = [step.mfu for step in late if step.mfu is not None]
    return Training(
        exit_code=code,
        seconds=seconds,
        steps=steps,
        seconds_per_step=statistics.median(step_seconds) if step_seconds else None,
        mfu=statistics.median(mfus) if mfus else None,
        memory_gib=max((step.memory_gib for step in late), default=None),
    )


def pytest(arguments: Sequence[str]) -> Tests:
    """Run tests; return how many passed, and the first lines of those that did not."""
    program = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run([*program, *arguments], stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    lines = done.stdout.splitlines() or [""]
    failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Tests(done.returncode, lines[-1].strip(), failed)


# -- the order of stages


@dataclass(frozen=True)
class Stage:
    """`least_s`: with less time left it is skipped; `most_s`: then it is stopped."""

    name: str
    run: Callable[[Place, Rows], None]
    least_s: float
    most_s: float


STAGES = (
    Stage("facts", find_facts, 10, 40),
    Stage("data", write_data, 3, 30),
    Stage("check", check_kernels, 20, 70),
    Stage("resume", compare_resumed, 40, 120),
    Stage("mfu", measure_mfu, 40, 150),
    Stage("block", time_blocks, 30, 130),
    Stage("decode", time_decoding, 15, 40),
    Stage("tests", run_kernel_tests, 30, 150),
    Stage("trainer_tests", run_trainer_tests, 40, 100),
)


def run_stage(
    stage: Stage, place: Place, limit_s: float, environment: Mapping[str, str]
) -> Outcome:
    """Run a stage in a process of its own; stop it, and what it has started, at its limit."""
    command = [
        *(sys.executable, "-m", "tests.gpu.first"),
        *("--stage", stage.name),
        *("--out", str(place.out)),
        *("--work", str(place.work)),
        *("--limit", str(limit_s)),
    ]
    if place.is_cpu:
        command.append("--cpu")
    rows_file = place.rows_file(stage.name)
    rows_file.unlink(missing_ok=True)

    begin = time.monotonic()
    with open(place.log_file(stage.name), "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
            status = "failed" if code else "ok"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            status = "stopped"
    return Outcome(
        status=status,
        seconds=time.monotonic() - begin,
        exit_code=code,
        rows=json.loads(rows_file.read_text()) if rows_file.exists() else {},
        tail=place.log_file(stage.name).read_text(errors="replace")[-1500:],
    )


def run_all(place: Place, only: Sequence[str]) -> dict[str, Outcome]:
    """Run the stages that fit; write results.json after each."""
    begin = time.monotonic()
    patience = CPU_PATIENCE if place.is_cpu else 1.0
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(place.work / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(place.work / "inductor"),
        "TRITON_CACHE_DIR": str(place.work / "triton"),
    }
    if place.is_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""

    outcomes: dict[str, Outcome] = {}
    for stage in STAGES:
        if only and stage.name not in (*only, "data"):  # which the others read
            continue
        left_s = place.deadline - time.monotonic() - RESERVE_S
        if left_s < stage.least_s:
            outcomes[stage.name] = Outcome("skipped", 0.0, tail=f"{left_s:.0f} s left")
        else:
            limit_s = min(patience * stage.most_s, left_s)
            outcomes[stage.name] = run_stage(stage, place, limit_s, environment)

        results = {
            "is_cpu": place.is_cpu,
            "seconds": time.monotonic() - begin,
            "stages": {name: asdict(outcome) for name, outcome in outcomes.items()},
        }
        write_json(place.out / "results.json", results)
        outcome = outcomes[stage.name]
        print(f"{stage.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages, or the one of this process; return 1 if any did not end well."""
    parser = argparse.ArgumentParser(prog="bash tests/gpu/first.sh")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--cpu", action="store_true", help="tiny models, to test the logic")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds (default: 540)")
    parser.add_argument("--only", nargs="+", choices=names, default=[])
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "outputs/first_gpu"))
    )
    parser.add_argument(
        "--work", type=Path, help="data and runs, emptied first (default: OUT/work)"
    )
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    out = options.out.absolute()
    work = (options.work or out / "work").absolute()
    place = Place(out, work, options.cpu, time.monotonic() + options.limit)

    # This process is that of a stage.
    if options.stage is not None:
        stage = next(stage for stage in STAGES if stage.name == options.stage)
        rows = Rows(place.rows_file(stage.name))
        stage.run(place, rows)
        return int(bool(rows.failed))

    # This process runs all stages.
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    outcomes = run_all(place, options.only)
    print(f"results: {out / 'results.json'}")
    return int(any(outcome.status != "ok" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Run the trainer on fake GPUs: `canon_pretrain.train.main` as rank 0 of a world, a few steps.

Everything is the real program but the GPU, the other ranks, and the data, which are random tokens.
"""

import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from canon_pretrain.fake_gpu import device, world
from canon_pretrain.fake_gpu.graphs import GraphCompiler
from canon_pretrain.fake_gpu.record import STEP_NAMES, Options, Report
from canon_pretrain.fake_gpu.tracker import Answer, Tracker, calling_line, filled
from canon_pretrain.machine.gpus import GPUS, GPUS_PER_NODE

NUM_DOCUMENTS = 120
DOCUMENT_TOKENS = 2500
BYTES_PER_TOKEN = 4  # of the text that the random tokens stand for
TRACEBACK_CHARACTERS = 6000


class FakeNode:
    """A process that takes its GPUs for real ones; creating it cannot be undone.

    The hooks must have been loaded. A process runs one job; forks of it may run one each.
    """

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self.tracker = Tracker()
        self.compiler = GraphCompiler(self.tracker)
        device.install(GPUS[gpu], GPUS_PER_NODE, self.tracker)
        self.compiler.install()
        world.install()
        # torchtitan looks for a GPU when it is imported, and finds one from here on
        from canon_pretrain import train  # noqa: F401
        from canon_pretrain.titan import dry_run, trainer, validation  # noqa: F401

    def run(self, arguments: Sequence[str], options: Options) -> Report:
        """Train with the arguments of `canon train`. Raises UserError for bad arguments.

        Other errors are part of the report.
        """
        started = time.monotonic()
        report = Report(
            arguments=list(arguments),
            gpu=self.gpu,
            world_size=options.world_size,
            memory_bytes=GPUS[self.gpu].memory_bytes,
        )
        world.set_environment(options.world_size)
        _observe_trainer(self.tracker, options, report)
        with tempfile.TemporaryDirectory(prefix="fake_gpu.") as folder:
            _train(_complete(arguments, options, Path(folder)), report)
        self.tracker.end()

        report.phases = self.tracker.phases
        report.step_seconds = _step_seconds(report)
        report.seconds = time.monotonic() - started
        return report


def _step_seconds(report: Report) -> list[float]:
    """Return the computed seconds of a quiet step: slow, likely, fast; [] if there was none."""
    from canon_pretrain.titan.step_time import StepCounts, step_seconds

    if "quiet step" not in (phase.name for phase in report.phases):
        return []
    quiet = report.phase("quiet step")

    # FSDP2 exchanges over all ranks: within one node, or else at the network's speed
    num_bytes = quiet.collective_bytes.total()
    is_one_node = report.world_size <= GPUS_PER_NODE
    counts = StepCounts(
        work=quiet.work(),
        node_bytes=num_bytes if is_one_node else 0,
        network_bytes=0 if is_one_node else num_bytes,
        num_blocks=report.num_blocks,
    )
    return [*step_seconds(counts, GPUS[report.gpu])]


def _complete(arguments: Sequence[str], options: Options, folder: Path) -> list[str]:
    """Add random data, a temporary run folder and the end of the run to `arguments`."""
    from canon_pretrain.titan.command_line import parse_job

    job = parse_job(arguments, quiet=True)
    num_steps = str(len(STEP_NAMES))
    completed = [
        *arguments,
        "--force",
        *("--job.dump_folder", str(folder / "run")),
        *("--run.stop_at", num_steps),
        *("--metrics.log_freq", num_steps),
        *("--checkpoint.interval", "1000000"),  # saves are phases of their own
        *("--validation.windows", str(options.world_size)),  # one pass
        "--metrics.no-enable_wandb",
        "--metrics.no-enable_trackio",
        "--metrics.no-enable_tensorboard",
    ]
    if job.task is None:
        write_random_shards(folder / "data", job.model_args.vocab_size)
        completed += ["--data.path", str(folder / "data")]
    if job.model_args.mixer != "attention":
        completed += ["--model.mixer_backend", "chunked"]  # kernels would be compared with it
    if job.samples.interval:
        completed += ["--samples.interval", "0"]  # random tokens have no tokenizer
    return completed


def write_random_shards(folder: Path, vocab_size: int) -> None:
    """Write a training and a held-out split of random documents."""
    from canon_pretrain.data.shard_writer import write_shards

    random = np.random.default_rng(0)
    eos_id = min(2, vocab_size - 1)
    for split in ("train", "validation"):
        documents = [
            np.append(random.integers(0, vocab_size, DOCUMENT_TOKENS), eos_id)
            for _ in range(NUM_DOCUMENTS)
        ]
        write_shards(
            folder / split,
            documents,
            vocab_size=vocab_size,
            eos_id=eos_id,
            num_bytes=[BYTES_PER_TOKEN * DOCUMENT_TOKENS] * NUM_DOCUMENTS,
            tokenizer_sha256="0" * 64,
        )


def _train(arguments: list[str], report: Report) -> None:
    """Run the training command, and report why it failed, if it did."""
    from canon_pretrain import train

    try:
        train.main(arguments)
    except SystemExit as error:
        if error.code:
            report.error = f"exit code {error.code}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        report.error = f"{type(error).__name__}: {error}"
        report.error_line = calling_line(frames)
        report.traceback = traceback.format_exc()[-TRACEBACK_CHARACTERS:]


# -- the trainer, observed from outside


def _observe_trainer(tracker: Tracker, options: Options, report: Report) -> None:
    """Replace what needs a real GPU, and begin a phase wherever the trainer begins one."""
    import torchtitan.train

    from canon_pretrain.titan import (
        backend_choice,
        checkpoint,
        launch,
        parallelize,
        spec,
        trainer,
        validation,
    )

    # Kernels are not run, so they are not compared either; weights have no values.
    backend_choice._check_canon = _check_canon  # type: ignore[assignment]
    spec.write_shard = lambda parameter, value: None
    checkpoint.CanonCheckpointManager.check_room = lambda self: None  # type: ignore[method-assign]
    launch.check_room = lambda *args, **kwargs: None
    # Values for what the host reads from fake tensors, which have none.
    tracker.answers += [_validation_answer(tracker), EqualLoad(parallelize.ExpertExchange)]

    # Phases: each step, each save, validation.
    _fake_tensors_from_the_mesh_on(torchtitan.train.Trainer, tracker)
    trainer_class = trainer.CanonTrainer
    advance = trainer_class.advance
    step_names = iter(STEP_NAMES)

    def advance_as_phase(self: Any, data: Any) -> Any:
        report.micro_batch = self.job_config.training.local_batch_size
        report.seq_len = self.job_config.training.seq_len
        # The blocks of a step, for the host's time.
        num_layers = len(self.model_parts[0].layers)
        report.num_blocks = num_layers * self.gradient_accumulation_steps
        _label_state(tracker, self)
        with tracker.within(next(step_names)):
            return advance(self, data)

    def save_as_phase(self: Any) -> None:
        if not options.saves:
            return
        # The first save allocates the host's buffers; all later ones are as the second.
        for name in ("first save", "second save"):
            with tracker.within(name):
                self.checkpointer.staging.copy(
                    self.checkpointer.states | self.checkpointer._model.state_dict()
                )

    trainer_class.advance = advance_as_phase  # type: ignore[method-assign]
    trainer_class._save_last = save_as_phase  # type: ignore[method-assign]
    validator_class = validation.CanonValidator
    validate_as_phase = tracker.within("validation")(validator_class.validate)
    validator_class.validate = validate_as_phase  # type: ignore[method-assign]


def _fake_tensors_from_the_mesh_on(titan_trainer: Any, tracker: Tracker) -> None:
    """Make all tensors fake once the trainer has its mesh, which is made of real ones."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    init_distributed = titan_trainer.init_distributed

    def init_and_fake(self: Any) -> Any:
        dims = init_distributed(self)
        dims.build_mesh()
        # the process ends within both modes
        fake.__enter__()
        tracker.__enter__()
        return dims

    titan_trainer.init_distributed = init_and_fake


def _label_state(tracker: Tracker, trainer: Any) -> None:
    """Tell the tracker which storages are the weights and the optimizer's moments."""
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    moments = [
        value
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    tracker.label("weights", parameters)
    tracker.label("optimizer (moments)", moments)


def _check_canon(job: Any, backend: str, *details: Any) -> Any:
    """Answer for `backend_choice._check_canon`: our Triton kernels pass, packages do not."""
    from canon_pretrain.titan.backend_choice import CheckResult

    problem = None
    if backend != "triton":
        problem = f"{backend} is refused on a fake GPU"
    return CheckResult(problem, "fake GPU")


def _validation_answer(tracker: Tracker) -> Answer:
    """Answer 1.0 for sums of validation, by which it divides."""

    def answer(tensor: Tensor, question: str) -> Any:
        if tracker.phase.name != "validation" or tensor.dtype != torch.float64:
            return None
        return filled(tensor.shape, 1.0)

    return answer


class EqualLoad:
    """Answer what ranks with experts ask each other: all experts have equally many tokens."""

    def __init__(self, exchange: type) -> None:
        self._num_rows = 0
        self._num_ranks = 0
        dispatch = exchange._token_dispatch  # type: ignore[attr-defined]

        def observed_dispatch(exchange: Any, module: Any, inputs: Any, mesh: Any) -> Any:
            self._num_rows = len(inputs[0])
            self._num_ranks = mesh.size()
            return dispatch(exchange, module, inputs, mesh)

        exchange._token_dispatch = observed_dispatch  # type: ignore[attr-defined]

    def __call__(self, tensor: Tensor, question: str) -> Any:
        if not self._num_ranks:  # no experts, or none yet
            return None
        if question == "repeat_interleave":
            return self._num_rows
        # the numbers of tokens that this rank sends to each rank, or receives: int64 [.., ranks]
        has_ranks = tensor.shape[-1:] == (self._num_ranks,)
        is_split = tensor.dtype == torch.int64 and has_ranks
        if question == "tolist" and is_split and tensor.device.type == "cuda":
            return filled(tensor.shape, self._num_rows // self._num_ranks)
        return None

"""torchtitan's Trainer with our own loop, in which the host does not wait for the running step.

Each step checks loss and gradient norm, reduces stop requests, and polls the last checkpoint.
"""

import contextlib
import faulthandler
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torchtitan.train
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.machine.device import to_device
from canon_pretrain.run.launches import LaunchRecord
from canon_pretrain.run.sections import Guards
from canon_pretrain.run.session import LOST_LOCK, REASONS, Session, describe
from canon_pretrain.titan import data as titan_data
from canon_pretrain.titan.backend_choice import choose_canon, choose_mixer
from canon_pretrain.titan.checkpoint import CanonCheckpointManager
from canon_pretrain.titan.console import is_terminal
from canon_pretrain.titan.data import CanonDataLoader, OpenedData
from canon_pretrain.titan.job_config import HELD_OUT, CanonJobConfig, micro_batch_size
from canon_pretrain.titan.launch import Comparison, compare, record_launch
from canon_pretrain.titan.metrics import CanonMetrics, named_data, profiling
from canon_pretrain.titan.optimizers import Optimizers
from canon_pretrain.titan.parallelize import clip_gradients
from canon_pretrain.titan.spec import use_train_spec
from canon_pretrain.titan.validation import CanonValidator, logged_at

if TYPE_CHECKING:
    from canon_pretrain.titan.samples import TextSamples

SKIPPED, OUTLIERS, IN_A_ROW, HALTED, SEEN = range(5)
"""Indices in `StepGuards.counters`: bad steps and outliers, outliers, consecutive bad steps,
whether the run must end, norms seen."""
NUM_LOSSES = 2
"""Cross-entropy and objective, the first values that ranks add up."""
NUM_SUMS = NUM_LOSSES + len(REASONS)
"""The losses, and the ranks that were asked to stop for each reason."""
MAX_WINDOW = 1024
"""Norms that are always kept, because guards.outlier_window may change between launches."""


class StepGuards(Stateful):
    """Decide which steps to skip; the state is on `device` and in every checkpoint.

    `counters`, float64 [5]: see SKIPPED ... SEEN; `norms`, float32 [MAX_WINDOW]: a ring buffer.
    """

    def __init__(self, config: Guards, device: torch.device) -> None:
        self.config = config
        self.counters = torch.zeros(SEEN + 1, dtype=torch.float64, device=device)
        self.norms = torch.zeros(MAX_WINDOW, dtype=torch.float32, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1 if this step must be skipped, else 0, as a float32 scalar on the device."""
        counters = self.counters
        is_bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))

        # Enough bad steps in a row halt the run; the host notices Readback.LAG steps later.
        was_halted = counters[HALTED] > 0
        previous = counters[IN_A_ROW]
        in_a_row = torch.where(was_halted, previous, (previous + 1) * is_bad)
        is_halted = was_halted | (in_a_row >= self.config.max_bad_steps)
        is_outlier = self._is_outlier(grad_norm, ~is_bad & ~is_halted)

        # Once halted nothing is counted: the state stays that of the last bad step.
        is_skipped = is_bad | is_outlier
        counters[SKIPPED] += is_skipped & ~was_halted
        counters[OUTLIERS] += is_outlier
        counters[IN_A_ROW] = in_a_row
        counters[HALTED] = is_halted
        return (is_skipped | is_halted).float()

    def _is_outlier(self, grad_norm: Tensor, counts: Tensor) -> Tensor:
        """Return whether a norm exceeds mean + sigma * std of the window of previous norms.

        If it `counts`, it then enters the window.
        """
        if self.config.outlier_sigma is None:
            return torch.zeros_like(counts)

        # The window holds the newest norms: those of age 0, 1, ... in the ring buffer.
        window = self.config.outlier_window
        num_seen = self.counters[SEEN].clone()
        slots = torch.arange(MAX_WINDOW, device=self.norms.device)
        ages = (num_seen - 1 - slots) % MAX_WINDOW
        in_window = ages < num_seen.clamp(max=window)

        num_norms = in_window.sum().clamp(min=1)
        mean = (self.norms * in_window).sum() / num_norms
        deviations = (self.norms - mean) * in_window
        variance = (deviations**2).sum() / num_norms
        limit = mean + self.config.outlier_sigma * variance.sqrt()
        # a window that is less than half full says too little
        is_half_full = num_seen >= window / 2
        is_outlier = counts & is_half_full & (grad_norm > limit)

        # Outliers enter as well: the window adapts to a lasting change of scale.
        index = (num_seen % MAX_WINDOW).long()[None]
        norm = torch.where(counts, grad_norm, self.norms[index])
        self.norms.scatter_(0, index, norm)
        self.counters[SEEN] += counts
        return is_outlier

    def counters_before_bad_steps(self) -> Tensor:
        """Return the counters from before the consecutive bad steps that end the run."""
        counters = self.counters.clone()
        counters[SKIPPED] -= counters[IN_A_ROW]
        counters[IN_A_ROW] = counters[HALTED] = 0
        return counters

    def state_dict(self) -> dict[str, Any]:
        return {"counters": self.counters, "norms": self.norms}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counters.copy_(state_dict["counters"])
        # in a new launch, the next good step resets the count, and the next bad one ends the run
        self.counters[HALTED] = 0
        self.norms.copy_(state_dict["norms"])


class Readback:
    """Asynchronous copies of small tensors to the host, read LAG steps later without waiting."""

    LAG = 2

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._queue: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, step: int, values: Tensor) -> None:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pinned)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.current_stream().record_event() if self._pinned else None
        self._queue.append((step, host, event))

    def pop(self, *, last: bool = False) -> list[tuple[int, list[float]]]:
        """Return (step, values) pushed at least LAG pushes ago (`last`: all), oldest first."""
        ready = []
        min_length = 1 if last else self.LAG
        while len(self._queue) >= min_length:
            step, host, event = self._queue.popleft()
            if event is not None:
                event.synchronize()
            ready.append((step, host.tolist()))
        return ready


def expert_statistics(load_LE: Tensor) -> dict[str, list[float]]:
    """Return by layer the largest load over the mean, and the dropped fraction, if it has experts.

    `load_LE`: number of tokens of each expert, and in the last column of dropped tokens.
    """
    if not len(load_LE):
        return {}
    dropped_L = load_LE[:, -1].double()
    load_LE = load_LE[:, :-1].double()
    largest_L = load_LE.amax(dim=1) / load_LE.mean(dim=1)
    dropped_fraction_L = dropped_L / load_LE.sum(dim=1)
    return {
        "expert_load_max": largest_L.tolist(),
        "expert_dropped": dropped_fraction_L.tolist(),
    }


class StepTotals(NamedTuple):
    """A step's results, summed over ranks."""

    loss: Tensor
    """Mean cross-entropy over the labels of the global batch."""
    objective: Tensor
    """What the gradients are of: the loss and, if configured, auxiliary losses."""
    load_LE: Tensor
    """See `expert_statistics`."""


class CanonTrainer(torchtitan.train.Trainer):
    """Train a job from its newest complete checkpoint or from its seeds.

    `data` is None except on the first rank of each node, `record` except on global rank 0.
    """

    job_config: CanonJobConfig
    metrics_processor: CanonMetrics
    checkpointer: CanonCheckpointManager
    optimizers: Optimizers
    dataloader: CanonDataLoader
    validator: CanonValidator  # only if validation.enable
    data: OpenedData
    compared: Comparison

    def __init__(
        self,
        job: CanonJobConfig,
        *,
        world_size: int,
        data: OpenedData | None,
        session: Session,
        record: LaunchRecord | None = None,
    ) -> None:
        job.training.local_batch_size = micro_batch_size(job, world_size)
        self.session = session
        self.folder = session.folder
        self._record = record

        # What this rank knows of the data; init_distributed() gets the rest from rank 0.
        self._local_data = data
        self._local_comparison: Comparison | None = None
        if data is not None and os.environ["RANK"] == "0":
            self._local_comparison = compare(job, self.folder, data)

        self.tokens = 0
        self.tokens_per_step = job.tokens_per_step
        # Whether a step was skipped is known on the host Readback.LAG steps later: not counted yet.
        self.skipped_steps = 0
        self._is_last = False
        # host states of the last steps, restored when consecutive bad steps end the run
        self._host_states: deque[tuple[int, list[dict[str, Any]]]] = deque(
            maxlen=job.guards.max_bad_steps + Readback.LAG + 1
        )

        # the live view shows text only: torchtitan's color codes would appear as characters
        self._color = is_terminal() and not job.metrics.disable_color_printing
        job.metrics.disable_color_printing = True
        with use_train_spec(
            self._build_checkpointer,
            build_dataloader_fn=self._build_dataloader,
            build_metrics_processor_fn=self._build_metrics,
            build_validator_fn=lambda *, dp_rank, dp_world_size, **_: CanonValidator(
                job, self.data.held_out, dp_rank, dp_world_size
            ),
        ):
            super().__init__(job)

        self.samples: TextSamples | None = None
        if job.samples.interval and isinstance(self.data.training, Mixture):
            from canon_pretrain.titan import samples  # only runs with samples need a tokenizer

            self.samples = samples.TextSamples(job, self.data.training, self.data.prompts)
        session.handle_sigterm()  # now that there is a state to save
        # FSDP2 casts at every world size; torchtitan's autocast on one rank would change numerics
        self.maybe_enable_amp = contextlib.nullcontext()

    def init_distributed(self) -> ParallelDims:
        """Create the process group, receive rank 0's data, and choose Canon's backend.

        torchtitan calls it first in its constructor: what the builders below need is set here.
        """
        dims = super().init_distributed()
        job = self.job_config
        self.data, self.compared = titan_data.broadcast_data(
            job, self._local_data, self._local_comparison
        )
        self.session.connected()

        # Backends, before the model is built: rank 0 checks them, and all ranks take its choice.
        self.canon = choose_canon(job, self.device, self.compared.code)
        if self.canon is not None:
            job.model.canon_backend = self.canon.backend
        self.mixer = choose_mixer(job, self.device, self.compared.code)
        if self.mixer is not None:
            job.model.mixer_backend = self.mixer.backend

        # Tensors on the device that steps use: guards, number of labels, load of experts.
        self.guards = StepGuards(job.guards, self.device)
        self.readback = Readback(self.device)
        self._num_labels = torch.tensor(float(self.tokens_per_step), device=self.device)
        args = job.model_args
        has_experts = args.num_expert_layers > 0
        shape = (0, 1)
        if has_experts:
            shape = (args.num_expert_layers, args.num_experts + 1)
        self._expert_load_LE = torch.zeros(shape, dtype=torch.int64, device=self.device)

        # Whether the gradients are of more than the cross-entropy.
        is_balanced_by_loss = has_experts and args.moe_balance == "loss"
        self._has_objective = job.loss.z_loss or job.loss.squared_loss or is_balanced_by_loss
        return dims

    def _build_dataloader(self, **options: Any) -> CanonDataLoader:
        # these were compared with the run's identity
        may_change = () if self.compared.is_new else titan_data.IDENTITY_FIELDS
        return titan_data.build_dataloader(
            **options, data=self.data.training, may_change=may_change
        )

    def _build_metrics(
        self, job_config: CanonJobConfig, parallel_dims: ParallelDims, model_args: Any
    ) -> CanonMetrics:
        # a count model is compared on the held-out splits of the training text, if it has any
        text = None
        if isinstance(self.data.training, Mixture) and not job_config.validation.path:
            text = self.data.training
        return CanonMetrics(
            job_config,
            parallel_dims,
            dataloader=self.dataloader,
            may_write=self.session.may_write,
            text=text,
            color=self._color,
        )

    def _build_checkpointer(self, **parts: Any) -> CanonCheckpointManager:
        parts["states"]["guards"] = self.guards
        launch = None
        if self._record is not None:
            launch = self._record.run
        return CanonCheckpointManager(
            **parts,
            session=self.session,
            metrics=self.metrics_processor,
            launch=launch,
        )

    def close(self) -> None:
        self.dataloader.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.tokens = state_dict["tokens"]

    def _apply_hyperparameters(self) -> None:
        """Replace the checkpoint's hyperparameters by this job's (checked: run.allow_changes)."""
        factor = self._learning_rate_factor()
        for optimizer, schedule, groups in zip(
            self.optimizers,
            self.lr_schedulers.schedulers,
            self.optimizers.hyperparameters,
            strict=True,
        ):
            # A schedule computes rates from its base rates when it steps: set this step's as well.
            schedule.base_lrs = [values["lr"] for values in groups]
            rates = [base_lr * factor for base_lr in schedule.base_lrs]
            for group, values, rate in zip(optimizer.param_groups, groups, rates, strict=True):
                group.update(values | {"initial_lr": values["lr"], "lr": rate})
            schedule._last_lr = rates

    def _learning_rate_factor(self) -> float:
        """Return this step's learning rate over the base rate, the same in all groups."""
        schedule = self.lr_schedulers.schedulers[0]
        return schedule.lr_lambdas[0](schedule.last_epoch)

    def train(self) -> None:
        """Train to the last step of this launch or a stop request, and save a checkpoint."""
        job = self.job_config

        # Resume. A launch without steps left only validates what an earlier one missed.
        self.session.progress(self.step, "loading")
        self.checkpointer.load(step=job.checkpoint.load_step)
        if self.step:  # also if loaded from checkpoint.initial_load_path
            self._apply_hyperparameters()
        self.metrics_processor.set_position(self.step, self.tokens)
        self.skipped_steps = int(self.guards.counters[SKIPPED])
        if self.step >= job.last_step:
            self._validate(if_missed=True)
            logger.info(f"nothing to do: {self.folder.path} is at step {self.step}")
            self._end("nothing to do")
            return

        # Record the launch: from here on it changes the run.
        self.checkpointer.begin()
        record_launch(
            self.step,
            self.folder,
            self.compared,
            canon=self.canon,
            mixer=self.mixer,
            record=self._record,
            metrics=self.metrics_processor,
            rank_zero=self.checkpointer.rank_zero,
        )
        self._log_start()

        # Train. Without the lock the checkpoints belong to another launch.
        self.metrics_processor.begin(self.step)
        self._validate(if_missed=True)
        stop = self._loop()
        if stop and LOST_LOCK in stop:
            raise UserError(
                "lock.lost",
                f"stopped after step {self.step} without saving: {stop}",
                shared=True,
                step=self.step,
            )

        # Save before validation: a stop signal may leave time for only one.
        self._save_last()
        self._validate()
        self.checkpointer.finish_retention()
        self._finish(stop)

    def _log_start(self) -> None:
        """Log which steps this launch trains, and with which backends."""
        job = self.job_config
        mixers = []
        for name, layer in job.model_args.kinds.items():
            attend = self.model_parts[0].attends.get(name)
            backend = attend.describe(self.device.type) if attend else self.mixer
            mixers.append(f"{layer.mixer}: {backend}")
        backends = ", ".join(dict.fromkeys(mixers))
        if self.canon is not None:
            backends = f"{backends}, Canon: {self.canon}"
        action = "resuming" if self.step else "starting"
        logger.info(
            f"{action} at step {self.step + 1} of {job.training.steps}, "
            f"to step {job.last_step}, in {self.folder.path}; {backends}"
        )

    def _finish(self, stop: str | None) -> None:
        """Write the final events, status and, of a finished run, DONE; `stop` is the reason."""
        step = self.step
        num_steps = self.job_config.training.steps
        metrics = self.metrics_processor
        fields = {
            "skipped_steps": self.skipped_steps,
            # user and system time, of this process and of its children
            "cpu_seconds": sum(os.times()[:4]),
        }

        if step == num_steps:
            reason = f"step {num_steps} is reached"
            metrics.event("done", step=step, **fields)
            text = f"finished: step {step} of {self.folder.path}"
        else:
            reason = stop or "run.stop_at"
            metrics.event("stop", step=step, reason=reason, **fields)
            command = "the same command"
            if not stop:
                command = "the same command without --run.stop_at"
            text = f"stopped at step {step} of {num_steps} by {reason}; {command} resumes from here"

        # The log must be on disk before the status says that the run has ended.
        metrics.flush()
        self._end(reason)
        logger.info(text)
        self.session.stop.remove_stop_file()

    def _end(self, reason: str) -> None:
        """Write the launch's final status and, of a finished run, DONE."""
        is_done = self.step >= self.job_config.training.steps
        if is_done and dist.get_rank() == 0 and self.session.is_owner():
            try:
                self.folder.write_done(self.step)
            except OSError as error:  # the same command writes it once there is room
                logger.warning(f"cannot write {self.folder.done_file}: {error.strerror}")
        self.session.end("done" if is_done else "stopped", reason, self.step)

    def _save_last(self) -> None:
        """Save the current state; three attempts. Raises UserError if all fail."""
        self.session.progress(self.step, "saving")

        # a full disk may have room again, and a network disk be back
        for pause_s in (0, 1, 10):
            time.sleep(pause_s)
            self.checkpointer.save(self.step, last_step=True)
            if not self.checkpointer.enable or self.checkpointer.saved_step == self.step:
                return
        raise UserError(
            "checkpoint.not_saved",
            f"step {self.step}, the last, could not be saved; the newest checkpoint is step "
            f"{self.checkpointer.saved_step}. Free disk space and restart",
            shared=True,
            step=self.step,
        )

    def _validate(self, *, if_missed: bool = False) -> bool:
        """Validate and write samples, each if due after this step; return whether any was.

        `if_missed`: only what the log does not have yet, at the beginning of a launch.
        """
        step = self.step
        due = set[str]()
        if self.job_config.validation.enable and self.validator.should_validate(step):
            due.add("validation")
        if self.samples is not None and self.samples.is_due(step):
            due.add("samples")
        if if_missed and due:
            log_file = self.folder.log_file
            due -= self.checkpointer.rank_zero.run(lambda: logged_at(log_file, step))

        # Write it to the log; training time does not include it.
        if "validation" in due:
            self.session.progress(step, "validating")
            fields = self.validator.validate(self.model_parts, step)
            fields["tokens"] = self.tokens
            fields[HELD_OUT] = self.compared.identity.get(HELD_OUT)
            self.metrics_processor.interlude("validation", step, fields)
        if self.samples is not None and "samples" in due:
            self.session.progress(step, "sampling")
            fields = self.samples.write(self.model_parts[0], step)
            self.metrics_processor.interlude("samples", step, fields)
        return bool(due)

    def _loop(self) -> str | None:
        """Train until this launch's last step; return the reason to stop earlier, if any."""
        job = self.job_config
        with (
            profiling(job, self.model_parts[0], step=self.step) as profilers,
            self._hang_watchdog() as restart_watchdog,
        ):
            data = named_data(self.batch_generator(self.dataloader))
            stop: str | None = None
            start_step = self.step
            begin = time.monotonic()
            while self.step < job.last_step and stop is None:
                stop = self.advance(data)
                self.metrics_processor.set_position(self.step, self.tokens)
                for profiler in profilers:
                    profiler.step()

                # The first step initializes and compiles: the shorter timeout, and the pace that
                # the status shows, begin after it.
                num_timed = self.step - start_step - 1
                if num_timed == 0:
                    limit = timedelta(seconds=job.comm.train_timeout_seconds)
                    dist_utils.set_pg_timeouts(timeout=limit, parallel_dims=self.parallel_dims)
                    begin = time.monotonic()

                # After the last step, or a stop, `train` saves first and then validates.
                restart_watchdog()
                if stop is None and self.step < job.last_step and self._validate():
                    restart_watchdog()
                step_s = None
                if num_timed:
                    step_s = (time.monotonic() - begin) / num_timed
                self.session.progress(self.step, "training", step_s)
            return self._process_step_reports(last=True) or stop

    def advance(self, data: Iterator[tuple[dict[str, Tensor], Tensor]]) -> str | None:
        """Train one step and save if due; return the reason to stop after it, if any."""
        stop = self._process_step_reports()
        states = [part.state_dict() for part in self._host_parts]
        self._host_states.append((self.step, states))

        self.step += 1
        self.tokens += self.tokens_per_step
        self._is_last = stop is not None or self.step == self.job_config.last_step
        self.gc_handler.run(self.step)
        self.train_step(data)

        self.checkpointer.save(self.step)
        self.checkpointer.poll()
        return stop

    @property
    def _host_parts(self) -> tuple[Stateful, ...]:
        """The objects that a step changes on the host; their states are a few numbers each."""
        return self, self.lr_schedulers, self.dataloader

    def should_log(self) -> bool:
        """Return whether this step is logged; saved steps always are, for their data digests."""
        is_saved = self._is_last or self.checkpointer.is_due(self.step)
        return is_saved or self.metrics_processor.should_log(self.step)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Take an optimizer step on a global batch, unless the guards skip it."""
        self.optimizers.zero_grad()
        self._expert_load_LE.zero_()
        lr = self.job_config.optimizer.lr * self._learning_rate_factor()

        # The loss is a mean over the labels of the global batch. Their number is known, unless
        # the task masks some: then all micro-batches are read first, and their labels counted.
        micro_batches: Iterable[tuple[dict[str, Tensor], Tensor]]
        micro_batches = itertools.islice(data_iterator, self.gradient_accumulation_steps)
        num_labels = self._num_labels
        labels_ratio: Tensor | int = dist.get_world_size()
        if self.dataloader.is_masked:
            micro_batches = list(micro_batches)
            all_labels = [labels for _, labels in micro_batches]
            num_labels, labels_ratio = self._count_labels(all_labels)

        # Forward and backward of each micro-batch; gradients add up, and so do the shares of
        # the loss. One batch at a time is on the device.
        losses = []
        for inputs, labels in micro_batches:
            inputs = {name: to_device(tensor, self.device) for name, tensor in inputs.items()}
            loss = self.forward_backward_step(
                input_dict=inputs,
                labels=to_device(labels, self.device),
                global_valid_tokens=num_labels,
            )
            losses.append(loss)
        local_losses = torch.stack(losses).sum(dim=0)

        # Clip, then let all ranks decide whether this step is taken.
        parameters = list(self.model_parts[0].parameters())
        grad_norm = clip_gradients(parameters, self.job_config.training.max_norm)
        totals = self._reduce_and_step(local_losses, grad_norm)
        self.lr_schedulers.step()
        if not self.should_log():
            return

        # Only logged steps read values from the device, for which the host waits. A rank's own mean
        # loss is its share of the global mean, scaled from the global number of labels to its own.
        max_loss = local_losses[0] * labels_ratio
        dist.all_reduce(max_loss, op=dist.ReduceOp.MAX)
        fields: dict[str, Any] = {
            "loss": totals.loss.item(),
            "max_loss": max_loss.item(),
            "grad_norm": grad_norm.item(),
            "tokens": self.tokens,
            "lr": lr,
            "skipped_steps": self.skipped_steps,
        }
        if self._has_objective:
            fields["objective"] = totals.objective.item()
        fields |= expert_statistics(totals.load_LE)
        self.metrics_processor.log(self.step, fields)

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """Accumulate a micro-batch's gradients; return its cross-entropy and objective, [2].

        Both are shares of the global batch's mean: sums over tokens / `global_valid_tokens`.
        """
        with self.train_context():
            nats_BT, objective = self.model_parts[0](
                input_dict["input"],
                labels_BT=labels,
                loss=self.loss_fn,
                expert_load_LE=self._expert_load_LE,
            )
            objective = objective / global_valid_tokens
            objective.backward()
        return torch.stack([nats_BT.sum() / global_valid_tokens, objective.detach()])

    def _count_labels(self, labels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the number of unmasked labels in a global batch, and its ratio to this rank's."""
        num_local = (torch.cat(labels) != IGNORE_INDEX).sum()
        num_local = to_device(num_local.float(), self.device)
        num_global = num_local.clone()
        dist.all_reduce(num_global)
        return num_global.clamp(min=1), num_global / num_local.clamp(min=1)

    def _reduce_and_step(self, local_losses: Tensor, grad_norm: Tensor) -> StepTotals:
        """Reduce losses, loads and stop requests over ranks; take the step unless skipped."""
        # One all-reduce for all that ranks add up: loss and objective, requests, expert loads.
        requests = torch.tensor(self.session.stop.poll(), dtype=torch.float32)
        requests = to_device(requests, self.device)
        local_load_LE = self._expert_load_LE.float()  # exact up to 2**24 tokens per expert
        sums = torch.cat([local_losses.float(), requests, local_load_LE.flatten()])
        dist.all_reduce(sums)
        losses_and_requests, load = sums.tensor_split([NUM_SUMS])
        load_LE = load.view_as(local_load_LE)
        loss, objective = losses_and_requests[:NUM_LOSSES]

        # The same sums on all ranks: they reach the same verdict. A checkpoint that is being
        # copied reads the guards' counters as well as the weights.
        self.checkpointer.staging.wait_on_stream()
        skip = self.guards.judge(loss, grad_norm)

        # Only fused kernels skip on the device (found_inf); for others the host waits here.
        if self.job_config.optimizer.implementation == "fused":
            for optimizer in self.optimizers:
                optimizer.grad_scale = None
                optimizer.found_inf = skip
            self.optimizers.step()
        elif not skip.item():
            self.optimizers.step()
        is_taken = 1 - skip
        self.model_parts[0].balance_experts(load_LE[:, :-1], is_taken)

        # The host reads the report when the device has finished: see _process_step_reports.
        verdict = torch.stack([grad_norm, skip])
        report = torch.cat([losses_and_requests, verdict, self.guards.counters])
        self.readback.push(self.step, report)
        return StepTotals(loss, objective, load_LE)

    def _process_step_reports(self, *, last: bool = False) -> str | None:
        """Log skipped steps; return the reason to stop, if any. Raises UserError if guards halt.

        Values come in the order in which `_reduce_and_step` pushes them; `last`: all that are left.
        """
        stop: str | None = None
        for step, values in self.readback.pop(last=last):
            # Any rank may have been asked to stop.
            loss = values[0]
            requests = values[NUM_LOSSES:NUM_SUMS]
            if any(requests):
                stop = describe([num_ranks > 0 for num_ranks in requests])

            # The guards' verdict.
            grad_norm, skip, *counters = values[NUM_SUMS:]
            self.skipped_steps = int(counters[SKIPPED])

            if skip:
                fields = {
                    "reason": "outlier" if math.isfinite(loss + grad_norm) else "not finite",
                    "loss": loss,
                    "grad_norm": grad_norm,
                    "in_a_row": int(counters[IN_A_ROW]),
                }
                self.metrics_processor.event("skip", step=step, **fields)
                self.session.note(skipped_steps=self.skipped_steps)
                logger.warning(f"skipped step {step}: {fields}")
            if counters[HALTED]:
                self._stop_on_bad_steps(step, int(counters[IN_A_ROW]))
        return stop

    def _stop_on_bad_steps(self, step: int, in_a_row: int) -> None:
        """Save the state from before the `in_a_row` bad steps, then raise UserError."""
        # a launch that resumed between bad steps has no earlier state
        oldest_step, _ = self._host_states[0]
        good_step = max(step - in_a_row, oldest_step)
        self.checkpointer.roll_back(good_step)

        # Skipped steps left model and optimizer as they were: restore the rest.
        states = dict(self._host_states)[good_step]
        for part, state in zip(self._host_parts, states, strict=True):
            part.load_state_dict(state)
        self._apply_hyperparameters()
        self.guards.counters.copy_(self.guards.counters_before_bad_steps())
        if good_step:
            self._save_last()

        # The bad steps are not counted as skipped: the next launch retries them.
        self.skipped_steps = int(self.guards.counters[SKIPPED])
        self.metrics_processor.event(
            "halt", step=step, good_step=good_step, skipped_steps=self.skipped_steps
        )
        raise UserError(
            "train.not_finite",
            f"loss or gradient norm not finite in {in_a_row} consecutive steps, "
            f"the last {step} (guards.max_bad_steps); last good state: step {good_step}. Check "
            "their data and the learning rate; the same command retries them",
            shared=True,
            step=step,
            good_step=good_step,
        )

    @contextlib.contextmanager
    def _hang_watchdog(self) -> Iterator[Callable[[], None]]:
        """Yield a function to call after each step; dump all stacks if the next call is late."""
        comm = self.job_config.comm
        traces = self.folder.path / comm.save_traces_folder
        path = traces / f"rank_{dist.get_rank()}.stacks.txt"
        try:
            traces.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a replaced launch may still have it open
            file = open(path, "w")
        except OSError as error:
            logger.warning(f"no stack dumps of hangs: {path}: {error.strerror}")
            yield lambda: None
            return

        limit_s = 0.8 * comm.train_timeout_seconds  # earlier than the collectives' timeout
        try:
            yield lambda: faulthandler.dump_traceback_later(limit_s, file=file)
        finally:
            faulthandler.cancel_dump_traceback_later()
            # an empty file would look like a hang
            with contextlib.suppress(OSError), file:
                num_bytes = os.fstat(file.fileno()).st_size
                if not num_bytes and self.session.is_owner():
                    path.unlink()

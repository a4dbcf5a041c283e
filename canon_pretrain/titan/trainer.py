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
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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
from canon_pretrain.titan.checkpoint import CanonCheckpointManager
from canon_pretrain.titan.console import is_terminal
from canon_pretrain.titan.data import CanonDataLoader, OpenedData
from canon_pretrain.titan.job_config import HELD_OUT, CanonJobConfig, micro_batch_size
from canon_pretrain.titan.launch import Comparison, compare, record_launch
from canon_pretrain.titan.metrics import CanonMetrics, named_data, profiling
from canon_pretrain.titan.parallelize import choose_canon, choose_mixer, clip_gradients
from canon_pretrain.titan.spec import use_train_spec
from canon_pretrain.titan.validation import CanonValidator, logged_at

if TYPE_CHECKING:
    from canon_pretrain.titan.samples import TextSamples

SKIPPED, OUTLIERS, IN_A_ROW, HALTED, SEEN = range(5)
"""Indices in `StepGuards.counters`: bad steps and outliers, outliers, consecutive bad steps,
whether the run must end, norms seen."""
MAX_WINDOW = 1024
"""Norms that are always kept, because guards.outlier_window may change between launches."""


class StepGuards(Stateful):
    """Decide which steps to skip; the state is on `device` and in every checkpoint.

    `counters`, float64 [5]: see SKIPPED ... SEEN; `norms`, float32 [MAX_WINDOW]: a ring buffer.
    """

    def __init__(self, config: Guards, device: torch.device) -> None:
        self.config = config
        self.counters = torch.zeros(5, dtype=torch.float64, device=device)
        self.norms = torch.zeros(MAX_WINDOW, dtype=torch.float32, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1 if this step must be skipped, else 0, as a float32 scalar on the device."""
        count = self.counters
        bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        halted = was_halted = count[HALTED] > 0
        in_a_row = torch.where(halted, count[IN_A_ROW], (count[IN_A_ROW] + 1) * bad)
        halted = halted | (in_a_row >= self.config.max_bad_steps)
        outlier = self._is_outlier(grad_norm, ~bad & ~halted)
        # once halted nothing is counted: the state stays that of the last bad step
        count[SKIPPED] += (bad | outlier) & ~was_halted
        count[OUTLIERS] += outlier
        count[IN_A_ROW] = in_a_row
        count[HALTED] = halted
        return (bad | outlier | halted).float()

    def _is_outlier(self, grad_norm: Tensor, counts: Tensor) -> Tensor:
        """Return whether a norm is an outlier of the window, which it enters if it `counts`."""
        window = self.config.outlier_window
        if self.config.outlier_sigma is None:
            return torch.zeros_like(counts)
        seen = self.counters[SEEN].clone()
        age = (seen - 1 - torch.arange(MAX_WINDOW, device=self.norms.device)) % MAX_WINDOW
        known = age < seen.clamp(max=window)
        number = known.sum().clamp(min=1)
        mean = (self.norms * known).sum() / number
        variance = (((self.norms - mean) * known) ** 2).sum() / number
        limit = mean + self.config.outlier_sigma * variance.sqrt()
        outlier = counts & (seen >= window / 2) & (grad_norm > limit)
        # outliers enter as well: the window adapts to a lasting change of scale
        index = (seen % MAX_WINDOW).long()[None]
        self.norms.scatter_(0, index, torch.where(counts, grad_norm, self.norms[index][0])[None])
        self.counters[SEEN] += counts
        return outlier

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
        while self._queue and (last or len(self._queue) >= self.LAG):
            step, host, event = self._queue.popleft()
            if event is not None:
                event.synchronize()
            ready.append((step, host.tolist()))
        return ready


def expert_statistics(load_LE: Tensor) -> dict[str, list[float]]:
    """Return by layer the largest load over the mean, and the dropped fraction, if it has experts.

    `load_LE`: each expert's tokens, and the number of those that were dropped, as the last.
    """
    if not len(load_LE):
        return {}
    load_LE, dropped_L = load_LE[:, :-1].double(), load_LE[:, -1].double()
    largest_L = load_LE.amax(dim=1) / load_LE.mean(dim=1)
    fields = {"expert_load_max": largest_L, "expert_dropped": dropped_L / load_LE.sum(dim=1)}
    return {name: values_L.tolist() for name, values_L in fields.items()}


class CanonTrainer(torchtitan.train.Trainer):
    """Train a job from its newest complete checkpoint or from its seeds.

    `data` is None except on the first rank of each node, `record` except on global rank 0.
    """

    job_config: CanonJobConfig
    metrics_processor: CanonMetrics
    checkpointer: CanonCheckpointManager
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
        self.session, self.folder, self._record = session, session.folder, record
        self._own: tuple[OpenedData | None, Comparison | None] = (data, None)
        if data is not None and os.environ["RANK"] == "0":
            self._own = (data, compare(job, self.folder, data))
        self.tokens = 0
        self.skipped_steps = 0  # in the run, without the last Readback.LAG steps
        self.tokens_per_step = job.training.global_batch_size * job.training.seq_len
        self._is_last = False
        # host states of the last steps, restored when consecutive bad steps end the run
        most = job.guards.max_bad_steps + Readback.LAG + 1
        self._host_states: deque[tuple[int, list[dict[str, Any]]]] = deque(maxlen=most)
        # the live view shows text only: torchtitan's color codes would appear as characters
        self._colour = is_terminal() and not job.metrics.disable_color_printing
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
        session.handle_sigterm()
        # FSDP2 casts at every world size; torchtitan's autocast on one rank would change numerics
        self.maybe_enable_amp = contextlib.nullcontext()

    def init_distributed(self) -> ParallelDims:
        """Create the process group, receive rank 0's data, and choose Canon's backend."""
        dims, job = super().init_distributed(), self.job_config
        self.data, self.compared = titan_data.broadcast_data(job, *self._own)
        self.session.connected()
        self.canon = choose_canon(job, self.device, self.compared.code)
        if self.canon is not None:
            job.model.canon_backend = self.canon.backend
        self.mixer = choose_mixer(job, self.device)
        if self.mixer is not None:
            job.model.mixer_backend = self.mixer.backend
        self.guards, self.readback = StepGuards(job.guards, self.device), Readback(self.device)
        # the divisor of the loss, which all ranks know unless labels are masked
        self._num_labels = torch.tensor(float(self.tokens_per_step), device=self.device)
        # of each layer: each expert's tokens of a step, and those that were dropped
        args = job.model_args
        shape = (args.num_layers, args.num_experts + 1) if args.ffn == "moe" else (0, 1)
        self._expert_load_LE = torch.zeros(shape, dtype=torch.int64, device=self.device)
        is_balanced_by_loss = args.ffn == "moe" and args.moe_balance == "loss"
        self._has_objective = job.loss.z_loss or job.loss.squared_loss or is_balanced_by_loss
        return dims

    def _build_dataloader(self, **options: Any) -> CanonDataLoader:
        # these were compared with the run's identity
        may_change = () if self.compared.is_new else titan_data.IDENTITY_FIELDS
        data = self.data.training
        return titan_data.build_dataloader(**options, data=data, may_change=may_change)

    def _build_metrics(
        self, job_config: CanonJobConfig, parallel_dims: ParallelDims, model_args: Any
    ) -> CanonMetrics:
        # a count model is compared on the held-out splits of the training text, if it has any
        text = None
        if isinstance(self.data.training, Mixture) and not job_config.validation.path:
            text = self.data.training
        loader, may_write = self.dataloader, self.session.may_write
        return CanonMetrics(job_config, parallel_dims, loader, may_write, text, colour=self._colour)

    def _build_checkpointer(self, **parts: Any) -> CanonCheckpointManager:
        return CanonCheckpointManager(
            **parts | {"states": parts["states"] | {"guards": self.guards}},
            session=self.session,
            metrics=self.metrics_processor,
            launch=self._record.facts if self._record is not None else None,
        )

    def close(self) -> None:
        if isinstance(data := getattr(self, "dataloader", None), CanonDataLoader):
            data.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.tokens = state_dict["step"], state_dict["tokens"]

    def _apply_hyperparameters(self) -> None:
        """Replace the checkpoint's hyperparameters by this job's (checked: run.allow_changes)."""
        asked = self.job_config.optimizer
        fields = {"weight_decay": asked.weight_decay, "betas": (asked.beta1, asked.beta2)}
        fields |= {"eps": asked.eps, "initial_lr": asked.lr}
        fields |= {name: asked.implementation == name for name in ("fused", "foreach")}
        for optimizer, schedule in zip(self.optimizers, self.lr_schedulers.schedulers, strict=True):
            schedule.base_lrs = [asked.lr] * len(optimizer.param_groups)
            rates = [asked.lr * factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group.update(fields | {"lr": rate})
            schedule._last_lr = rates

    def train(self) -> None:
        """Train to the last step of this launch or a stop request, and save a checkpoint."""
        job, session = self.job_config, self.session
        session.progress(self.step, "loading")
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
        self.checkpointer.begin()
        rank_zero, metrics = self.checkpointer.rank_zero, self.metrics_processor
        record_launch(
            self.step,
            self.folder,
            self.compared,
            self.canon,
            self.mixer,
            self._record,
            metrics,
            rank_zero,
        )
        attend = self.model_parts[0].attend
        way = attend.describe(self.device.type) if attend else self.mixer
        logger.info(
            f"{'resuming' if self.step else 'starting'} at step {self.step + 1} of "
            f"{job.training.steps}, to step {job.last_step}, in {self.folder.path}; "
            f"{job.model_args.mixer}: {way}"
            f"{f', Canon: {self.canon}' if self.canon else ''}"
        )
        metrics.begin(self.step)
        self._validate(if_missed=True)
        stop = self._loop()
        if stop and LOST_LOCK in stop:
            raise UserError(
                "lock.lost",
                f"stopped after step {self.step} without saving: {stop}",
                shared=True,
                step=self.step,
            )
        self._save_last()
        self._validate()  # after the save: a stop signal may leave time for only one
        self.checkpointer.finish_retention()
        self._finish(stop)

    def _finish(self, stop: str | None) -> None:
        """Write the final events, status and, of a finished run, DONE; `stop` is the reason."""
        step, total, metrics = self.step, self.job_config.training.steps, self.metrics_processor
        fields = {"skipped_steps": self.skipped_steps, "cpu_seconds": sum(os.times()[:4])}
        if step == total:
            reason = f"step {total} is reached"
            metrics.event("done", step=step, **fields)
            text = f"finished: step {step} of {self.folder.path}"
        else:
            reason = stop or "run.stop_at"
            metrics.event("stop", step=step, reason=reason, **fields)
            again = "the same command" if stop else "the same command without --run.stop_at"
            text = f"stopped at step {step} of {total} by {reason}; {again} resumes from here"
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
        """Validate and write samples, each if due after this step; return whether any was."""
        step, log_file, due = self.step, self.folder.log_file, set[str]()
        if self.job_config.validation.enable and self.validator.should_validate(step):
            due.add("validation")
        if self.samples is not None and self.samples.is_due(step):
            due.add("samples")
        if if_missed and due:
            due -= self.checkpointer.rank_zero.run(lambda: logged_at(log_file, step))
        if "validation" in due:
            self.session.progress(step, "validating")
            fields = self.validator.validate(self.model_parts, step)
            fields |= {"tokens": self.tokens, HELD_OUT: self.compared.identity.get(HELD_OUT)}
            self.metrics_processor.interlude("validation", step, fields)
        if self.samples is not None and "samples" in due:
            self.session.progress(step, "sampling")
            fields = self.samples.write(self.model_parts[0], step)
            self.metrics_processor.interlude("samples", step, fields)
        return bool(due)

    def _loop(self) -> str | None:
        """Train until this launch's last step; return the reason to stop earlier, if any."""
        job, model = self.job_config, self.model_parts[0]
        stop: str | None = None
        with profiling(job, model, step=self.step) as tools, self._hang_watchdog() as arm:
            data = named_data(self.batch_generator(self.dataloader))
            begin, first = time.monotonic(), self.step
            while self.step < job.last_step and stop is None:
                stop = self.advance(data)
                self.metrics_processor.set_position(self.step, self.tokens)
                for tool in tools:
                    tool.step()
                if self.step == first + 1:  # after lazy initialization and compilation
                    limit = timedelta(seconds=job.comm.train_timeout_seconds)
                    dist_utils.set_pg_timeouts(timeout=limit, parallel_dims=self.parallel_dims)
                    begin = time.monotonic()
                arm()
                if stop is None and self.step < job.last_step and self._validate():
                    arm()
                paced = self.step - first - 1
                pace = (time.monotonic() - begin) / paced if paced else None
                self.session.progress(self.step, "training", pace)
            return self._process_step_reports(self.readback.pop(last=True)) or stop

    def advance(self, data: Iterator[tuple[dict[str, Tensor], Tensor]]) -> str | None:
        """Train one step and save if due; return the reason to stop after it, if any."""
        stop = self._process_step_reports(self.readback.pop())
        # a step's non-tensor state: a few numbers
        parts = (self, self.lr_schedulers, self.dataloader)
        self._host_states.append((self.step, [part.state_dict() for part in parts]))
        self.step += 1
        self.tokens += self.tokens_per_step
        self._is_last = stop is not None or self.step == self.job_config.last_step
        self.gc_handler.run(self.step)
        self.train_step(data)
        self.checkpointer.save(self.step)
        self.checkpointer.poll()
        return stop

    def should_log(self) -> bool:
        """Return whether this step is logged; saved steps always are, for their data digests."""
        is_kept = self._is_last or self.checkpointer.is_due(self.step)
        return is_kept or self.metrics_processor.should_log(self.step)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Take an optimizer step on a global batch, unless the guards skip it."""
        self.optimizers.zero_grad()
        self._expert_load_LE.zero_()
        rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        batches: Iterable[tuple[dict[str, Tensor], Tensor]]
        batches = itertools.islice(data_iterator, self.gradient_accumulation_steps)
        num_labels = self._num_labels
        ratio: Tensor | int = dist.get_world_size()
        if self.dataloader.is_masked:
            batches = list(batches)
            num_labels, ratio = self._count_labels([labels for _, labels in batches])
        losses = []
        for inputs, labels in batches:
            inputs = {name: to_device(tensor, self.device) for name, tensor in inputs.items()}
            loss = self.forward_backward_step(
                input_dict=inputs,
                labels=to_device(labels, self.device),
                global_valid_tokens=num_labels,
            )
            losses.append(loss)
        own_losses = torch.stack(losses).sum(dim=0)
        parameters = [p for part in self.model_parts for p in part.parameters()]
        grad_norm = clip_gradients(parameters, self.job_config.training.max_norm)
        (loss, objective), load_LE = self._reduce_and_step(own_losses, grad_norm)
        self.lr_schedulers.step()
        if self.should_log():
            largest = own_losses[0] * ratio
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            measured = {"loss": loss, "max_loss": largest, "grad_norm": grad_norm}
            fields = {name: value.item() for name, value in measured.items()}
            fields |= {"tokens": self.tokens, "lr": rate, "skipped_steps": self.skipped_steps}
            if self._has_objective:
                fields["objective"] = objective.item()
            fields |= expert_statistics(load_LE)
            self.metrics_processor.log(self.step, fields)

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """Accumulate a micro-batch's gradients; return its cross-entropy and objective, [2]."""
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
        """Return the labels that count in a global batch, and their ratio to this rank's."""
        own = torch.stack([(each != IGNORE_INDEX).sum() for each in labels]).sum()
        own = to_device(own.float(), self.device)
        total = own.clone()
        dist.all_reduce(total)
        return total.clamp(min=1), total / own.clamp(min=1)

    def _reduce_and_step(self, own_losses: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce losses, loads and stop requests over ranks; take the step unless skipped."""
        requests = torch.tensor(self.session.stop.poll(), dtype=torch.float32)
        own_load = self._expert_load_LE.float()  # exact up to 2**24 tokens per expert
        requests = to_device(requests, self.device)
        shared = torch.cat([own_losses.float(), requests, own_load.flatten()])
        dist.all_reduce(shared)
        shared, load = shared.tensor_split([len(shared) - own_load.numel()])
        load_LE = load.view_as(own_load)
        self.checkpointer.staging.wait_on_stream()  # it also copies the guards' counters
        skip = self.guards.judge(shared[0], grad_norm)
        if self.job_config.optimizer.implementation == "fused":
            for optimizer in self.optimizers:
                optimizer.grad_scale, optimizer.found_inf = None, skip
            self.optimizers.step()
        elif not skip.item():  # only fused kernels know found_inf, so the host must wait here
            self.optimizers.step()
        self.model_parts[0].balance_experts(load_LE[:, :-1], 1 - skip)
        verdict = torch.stack([grad_norm, skip])
        self.readback.push(self.step, torch.cat([shared, verdict, self.guards.counters]))
        return shared[:2], load_LE

    def _process_step_reports(self, reports: list[tuple[int, list[float]]]) -> str | None:
        """Log skipped steps; return the reason to stop, if any. Raises UserError if guards halt."""
        stop: str | None = None
        for step, values in reports:
            loss, _, *rest = values
            asked, (grad_norm, skip, *counters) = rest[: len(REASONS)], rest[len(REASONS) :]
            self.skipped_steps = int(counters[SKIPPED])
            if any(asked):
                stop = describe([value > 0 for value in asked])
            if skip:
                why = "outlier" if math.isfinite(loss + grad_norm) else "not finite"
                facts = {"reason": why, "loss": loss, "grad_norm": grad_norm}
                facts |= {"in_a_row": int(counters[IN_A_ROW])}
                self.metrics_processor.event("skip", step=step, **facts)
                self.session.note(skipped_steps=self.skipped_steps)
                logger.warning(f"skipped step {step}: {facts}")
            if counters[HALTED]:
                self._stop_on_bad_steps(step, counters)
        return stop

    def _stop_on_bad_steps(self, step: int, counters: list[float]) -> None:
        """Save the state from before the consecutive bad steps, then raise UserError."""
        # a launch that resumed between bad steps has no earlier state
        good = max(step - int(counters[IN_A_ROW]), self._host_states[0][0])
        self.checkpointer.roll_back(good)
        parts = (self, self.lr_schedulers, self.dataloader)
        for part, state in zip(parts, dict(self._host_states)[good], strict=True):
            part.load_state_dict(state)
        self._apply_hyperparameters()
        self.guards.counters.copy_(self.guards.counters_before_bad_steps())
        if good:
            self._save_last()
        # without the bad steps, which the next launch retries
        self.skipped_steps = skipped = int(self.guards.counters[SKIPPED])
        self.metrics_processor.event("halt", step=step, good_step=good, skipped_steps=skipped)
        raise UserError(
            "train.not_finite",
            f"loss or gradient norm not finite in {int(counters[IN_A_ROW])} consecutive steps, "
            f"the last {step} (guards.max_bad_steps); last good state: step {good}. Check "
            "their data and the learning rate; the same command retries them",
            shared=True,
            step=step,
            good_step=good,
        )

    @contextlib.contextmanager
    def _hang_watchdog(self) -> Iterator[Any]:
        """Yield a function to call after each step; dump all stacks if the next call is late."""
        comm = self.job_config.comm
        path = self.folder.path / comm.save_traces_folder / f"rank_{dist.get_rank()}.stacks.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
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
            with contextlib.suppress(OSError), file:
                if not os.fstat(file.fileno()).st_size and self.session.is_owner():
                    path.unlink()

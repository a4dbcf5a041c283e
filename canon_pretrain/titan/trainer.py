"""torchtitan's Trainer as a run of ours: one folder, counted tokens, and no end that loses it.

torchtitan builds the parts (mesh, model, optimizer, schedule, data, metrics); the loop is here,
since each step also judges its gradient, asks all ranks whether to stop, and hears how the last
checkpoint went. None of this makes the host wait for a running step.
"""

import contextlib
import faulthandler
import os
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
import torchtitan.train
from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.launches import FRESH, was_obeyed
from canon_pretrain.run.provenance import LaunchRecord
from canon_pretrain.run.session import Session
from canon_pretrain.run.source import code_hashes
from canon_pretrain.run.stop import LOST_LOCK, REASONS, describe
from canon_pretrain.titan import launch
from canon_pretrain.titan.canon_choice import choose_canon
from canon_pretrain.titan.checkpoint import CanonCheckpointManager
from canon_pretrain.titan.console import is_terminal
from canon_pretrain.titan.data import STATE_FIELDS, CanonDataLoader, absolute_folders
from canon_pretrain.titan.guards import HALTED, IN_A_ROW, SKIPPED, Readback, StepGuards
from canon_pretrain.titan.identity import HELD_OUT, Comparison, compare, run_identity
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size
from canon_pretrain.titan.metrics import CanonMetrics
from canon_pretrain.titan.opened import OpenedData, share
from canon_pretrain.titan.parallelize import clip_gradients
from canon_pretrain.titan.profiling import named_data, profiling
from canon_pretrain.titan.spec import register
from canon_pretrain.titan.validation import CanonValidator, knows_validation

# the Trainer makes the manager that this name stands for
torchtitan.train.CheckpointManager = CanonCheckpointManager


class CanonTrainer(torchtitan.train.Trainer):
    """Trains one CanonJobConfig from its newest whole checkpoint, or from its seeds.

    `world_size` is fixed before the process group stands, so that a batch that can't be shared is
    refused first. `data` is None but on the first rank of each node. `session` holds the run
    folder, `record` is what rank 0 writes down about this launch; None on other ranks and in
    benches. Raises UserError, before anything is trained, for a run that would change.
    """

    job_config: CanonJobConfig
    metrics_processor: CanonMetrics
    checkpointer: CanonCheckpointManager
    validator: CanonValidator  # where validation.enable is true
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
        asked = job.training.local_batch_size
        job.training.local_batch_size = micro_batch_size(job, world_size)
        self.session = session
        self.launch_record = record
        self.folder = session.folder
        self.config = job.to_dict()
        # whoever reads the run may stand in another folder
        self.config["data"] |= absolute_folders(job.data)
        if job.validation.path:
            self.config["validation"]["path"] = str(Path(job.validation.path).resolve())
        self._own = data, self._compare(job, data) if os.environ["RANK"] == "0" else None
        job.metrics.disable_color_printing |= not is_terminal()
        super().__init__(job)
        session.ranks_have_met()
        # FSDP2 stands at every world size and does the casting: autocast on top of it at one rank
        # would give that rank other numerics than many have
        self.maybe_enable_amp = contextlib.nullcontext()
        self.metrics_processor.dataloader = cast(CanonDataLoader, self.dataloader)
        if not self.compared.is_new:
            self.metrics_processor.dataloader.allow_changes(STATE_FIELDS)
        self.tokens_per_step = job.training.global_batch_size * job.training.seq_len
        # every label counts, so the number that a loss is divided by is known to all ranks
        self._labels_per_step = torch.tensor(float(self.tokens_per_step), device=self.device)
        self._has_objective = bool(job.loss.z_loss or job.loss.squared_loss)
        self.tokens = 0
        self.guards = StepGuards(job.guards, self.device)
        self.readback = Readback(self.device)
        self.checkpointer.attach(
            event=self.metrics_processor.event,
            note=session.note,
            still_ours=session.still_ours,
            flush=self.metrics_processor.flush,
            launch=record.facts if record is not None else None,
            guards=self.guards,
        )
        self.metrics_processor.may_write = session.may_write
        # host states of the last steps, to go back to when bad steps in a row end the run
        self._before: deque[tuple[int, dict[str, Any]]] = deque(
            maxlen=job.guards.max_bad_steps + Readback.LAG + 1
        )
        if job.training.local_batch_size != asked:
            logger.info(
                f"training.local_batch_size is {job.training.local_batch_size} (at most {asked} "
                f"was asked for): {self.gradient_accumulation_steps} micro-batches a step on each "
                f"of {world_size} ranks make the global batch of {job.training.global_batch_size}"
            )

    def _compare(self, job: CanonJobConfig, data: OpenedData | None) -> Comparison:
        """Compare this launch with the run folder; rank 0 only. Raises UserError."""
        assert data is not None, "rank 0 is the first of its node"
        # a restarted job repeats --checkpoint.fresh, and is not obeyed: it goes on with a run
        fresh = job.checkpoint.fresh and not was_obeyed(self.folder.obeyed_file, FRESH)
        identity = run_identity(job, data.training.fingerprint, data.identity)
        return compare(
            job, self.folder, identity=identity, config=self.config, code=code_hashes(), fresh=fresh
        )

    def init_distributed(self) -> ParallelDims:
        """Meet the other ranks, take over what rank 0 has read, and decide who computes Canon."""
        dims = super().init_distributed()
        data, self.compared = share(self.job_config, *self._own)
        register(data)
        self.canon = choose_canon(self.job_config, self.device, self.compared.code)
        if self.canon is not None:
            self.job_config.model.canon_backend = self.canon.backend  # type: ignore[assignment]
        return dims

    def close(self) -> None:
        """End what runs beside the steps; called however the run ends."""
        if isinstance(data := getattr(self, "dataloader", None), CanonDataLoader):
            data.close()
        super().close()

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.tokens = state_dict["step"], state_dict["tokens"]

    def _host_state(self) -> dict[str, Any]:
        """What a step changes besides tensors; a few numbers."""
        assert self.dataloader is not None
        return {
            "trainer": self.state_dict(),
            "schedule": self.lr_schedulers.state_dict(),
            "data": self.dataloader.state_dict(),
        }

    def _impose_hyperparameters(self) -> None:
        """Give the optimizer and the schedule this job's numbers, not those of the checkpoint.

        They differ only where `run.allow_changes` let them; else this writes what is there.
        """
        asked = self.job_config.optimizer
        fields = {"weight_decay": asked.weight_decay, "betas": (asked.beta1, asked.beta2)}
        fields |= {"eps": asked.eps, "initial_lr": asked.lr}
        fields |= {name: asked.implementation == name for name in ("fused", "foreach")}
        for optimizer, schedule in zip(self.optimizers, self.lr_schedulers.schedulers, strict=True):
            schedule.base_lrs = [asked.lr] * len(optimizer.param_groups)
            factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
            rates = [asked.lr * factor for factor in factors]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group.update(fields | {"lr": rate})
            schedule._last_lr = rates

    # -- the launch --------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the last step of this launch, or until asked to stop; leave a checkpoint."""
        job, session = self.job_config, self.session
        session.progress(self.step, "loading")
        self.checkpointer.load(step=job.checkpoint.load_step)
        if self.step:  # also where the state came from checkpoint.initial_load_path
            self._impose_hyperparameters()
        self.metrics_processor.stands_at(self.step, self.tokens)
        self.metrics_processor.skipped_steps = int(self.guards.counters[SKIPPED])
        first = self.step
        if first >= job.last_step:
            self._validate(if_missed=True)
            launch.nothing_to_do(self)
            return
        self.checkpointer.begin()
        launch.announce(self)
        logger.info(f"attention by {self.model_parts[0].attend.describe(self.device.type)}")
        if self.canon is not None:
            logger.info(f"Canon by {self.canon}")
        self._validate(if_missed=True)
        stop = self._loop()
        if stop and LOST_LOCK in stop:
            raise UserError(f"stopped after step {self.step} without saving: {stop}", shared=True)
        self._save_last()
        self._validate()  # whoever asked to stop may not wait for more than the checkpoint
        self.checkpointer.settle()
        launch.finish(self, stop)

    def _save_last(self) -> None:
        """Save what stands now; raises UserError where the disk will not have it."""
        self.session.progress(self.step, "saving")
        for pause_s in (0, 1, 10):
            time.sleep(pause_s)
            self.checkpointer.save(self.step, last_step=True)
            if not self.checkpointer.enable or self.checkpointer.saved_step == self.step:
                return
        raise UserError(
            f"the last checkpoint, of step {self.step}, could not be saved (see the lines above); "
            f"the newest one is of step {self.checkpointer.saved_step}. Make room and start again",
            shared=True,
        )

    def _validate(self, *, if_missed: bool = False) -> bool:
        """Score the held-out part, if that is due after this step; gives whether it was.

        With `if_missed`, unless the log has it: a launch may have ended before it could.
        """
        if not self.job_config.validation.enable or not self.validator.should_validate(self.step):
            return False
        if if_missed and knows_validation(self.folder.log_file, self.step):
            return False
        self.session.progress(self.step, "validating")
        fields = self.validator.validate(self.model_parts, self.step)
        text = {HELD_OUT: self.compared.identity.get(HELD_OUT)}
        self.metrics_processor.validation(self.step, {"tokens": self.tokens, **fields, **text})
        return True

    # -- the loop ----------------------------------------------------------------------------

    def _loop(self) -> str | None:
        """Steps until this launch's last one; gives what asked to stop, if anything did."""
        job = self.job_config
        stop: str | None = None
        with profiling(job, self.model_parts, step=self.step) as tools, self._hang_watch() as arm:
            data = named_data(self.batch_generator(self.dataloader))
            begin, first = time.monotonic(), self.step
            while self.step < job.last_step and stop is None:
                stop = self.advance(data)
                self.metrics_processor.stands_at(self.step, self.tokens)
                for tool in tools:
                    tool.step()
                if self.step == first + 1:
                    # lazy initialisation and compilation are over, on a resumed run as well
                    limit = timedelta(seconds=job.comm.train_timeout_seconds)
                    dist_utils.set_pg_timeouts(timeout=limit, parallel_dims=self.parallel_dims)
                    begin = time.monotonic()
                arm()
                if stop is None and self.step < job.last_step and self._validate():
                    arm()
                paced = self.step - first - 1
                pace = (time.monotonic() - begin) / paced if paced else None
                self.session.progress(self.step, "training", pace)
            # nobody waits for a step that was the last anyway; a lost lock must be heard of
            stop = self._hear(self.readback.pop(last=True)) or stop
        return stop

    def advance(self, data: Iterator[tuple[dict[str, Tensor], Tensor]]) -> str | None:
        """Take the next step, and save it if that is due; gives what asks to stop after it."""
        stop = self._hear(self.readback.pop())
        self._before.append((self.step, self._host_state()))
        self.step += 1
        self.tokens += self.tokens_per_step
        is_last = stop is not None or self.step == self.job_config.last_step
        self.metrics_processor.must_log = is_last or self.checkpointer.is_due(self.step)
        self.gc_handler.run(self.step)
        self.train_step(data)
        self.checkpointer.save(self.step)
        self.checkpointer.poll()
        return stop

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """One optimizer step on one global batch, or none where the guards skip it."""
        self.optimizers.zero_grad()
        rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        losses = []
        for _ in range(self.gradient_accumulation_steps):
            inputs, labels = next(data_iterator)
            inputs = {name: self._to_device(tensor) for name, tensor in inputs.items()}
            losses.append(
                self.forward_backward_step(
                    input_dict=inputs,
                    labels=self._to_device(labels),
                    global_valid_tokens=self._labels_per_step,
                )
            )
        own_losses = torch.stack(losses).sum(dim=0)
        grad_norm = clip_gradients(
            [p for part in self.model_parts for p in part.parameters()],
            self.job_config.training.max_norm,
        )
        loss, objective = self._share(own_losses, grad_norm)
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            largest = own_losses[0] * dist.get_world_size()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            extra = {"n_tokens_seen": self.tokens, "lr": rate}
            if self._has_objective:
                extra["objective"] = objective.item()
            self.metrics_processor.log(
                self.step, loss.item(), largest.item(), grad_norm.item(), extra_metrics=extra
            )

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """Add a micro-batch's gradients; gives its cross-entropy and what is minimised, [2].

        In the place of torchtitan's, which knows one loss only.
        """
        with self.train_context():
            nats_BT, objective = self.model_parts[0](
                input_dict["input"], labels_BT=labels, loss=self.loss_fn
            )
            objective = objective / global_valid_tokens
            objective.backward()
        return torch.stack([nats_BT.sum() / global_valid_tokens, objective.detach()])

    def _to_device(self, tensor: Tensor) -> Tensor:
        """A copy that the host does not wait for: out of pinned memory, where there is a GPU."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _share(self, own_losses: Tensor, grad_norm: Tensor) -> Tensor:
        """Add up losses and requests to stop over the ranks, judge the step, and take it or not.

        Gives the global batch's cross-entropy, which is judged, and what was minimised; [2]. What
        the host should know of the step is sent to it.
        """
        requests = torch.tensor(self.session.stop.poll(), dtype=torch.float32)
        shared = torch.cat([own_losses.float(), self._to_device(requests)])
        dist.all_reduce(shared)
        self.checkpointer.maybe_wait_for_staging()  # the guards' counters are being copied too
        skip = self.guards.judge(shared[0], grad_norm)
        self._step_unless(skip)
        report = [shared.double(), grad_norm.double()[None], skip.double()[None]]
        self.readback.push(self.step, torch.cat([*report, self.guards.counters]))
        return shared[:2]

    def _step_unless(self, skip: Tensor) -> None:
        """The optimizers' step, which changes nothing where `skip` is 1."""
        if self.job_config.optimizer.implementation != "fused":
            if not skip.item():  # only the fused kernels know found_inf: here the host has to wait
                self.optimizers.step()
            return
        for optimizer in self.optimizers:
            optimizer.grad_scale, optimizer.found_inf = None, skip
        self.optimizers.step()

    def _hear(self, reports: list[tuple[int, list[float]]]) -> str | None:
        """Take note of past steps; gives what asks to stop. Raises UserError when guards halt."""
        stop: str | None = None
        for step, values in reports:
            loss, _, *rest = values
            asked, (grad_norm, skip, *counters) = rest[: len(REASONS)], rest[len(REASONS) :]
            self.metrics_processor.skipped_steps = int(counters[SKIPPED])
            if any(asked):
                stop = describe([value > 0 for value in asked])
            if skip:
                self._tell_skip(step, loss, grad_norm, counters)
            if counters[HALTED]:
                self._halt(step, counters)
        return stop

    def _tell_skip(self, step: int, loss: float, grad_norm: float, counters: list[float]) -> None:
        finite = bool(torch.isfinite(torch.tensor([loss, grad_norm])).all())
        why = "outlier" if finite else "not finite"
        in_a_row = int(counters[IN_A_ROW])
        self.metrics_processor.event(
            "skip", step=step, reason=why, loss=loss, grad_norm=grad_norm, in_a_row=in_a_row
        )
        self.session.note(skipped_steps=int(counters[SKIPPED]))
        text = f"step {step} is skipped ({why}): loss {loss:.4g}, grad_norm {grad_norm:.4g}"
        logger.warning(f"{text}; {in_a_row} of {self.guards.config.max_bad_steps} in a row")

    def _halt(self, step: int, counters: list[float]) -> None:
        """End the run on the weights from before the bad steps in a row; raises UserError.

        The weights still are those: every step since was skipped. What the host counts goes back
        to that step, so that the checkpoint is the one that this step would have left.
        """
        # a launch that began between bad steps knows none from before itself
        good = max(step - int(counters[IN_A_ROW]), self._before[0][0])
        state = next(state for number, state in self._before if number == good)
        assert self.dataloader is not None
        self.checkpointer.go_back(good)
        self.load_state_dict(state["trainer"])
        self.lr_schedulers.load_state_dict(state["schedule"])
        self.dataloader.load_state_dict(state["data"])
        self._impose_hyperparameters()
        self.guards.counters.copy_(self.guards.before_the_streak())
        if good:
            self._save_last()
        skipped = int(self.guards.counters[SKIPPED])  # those of the streak are taken anew
        self.metrics_processor.event("halt", step=step, good_step=good, skipped_steps=skipped)
        raise UserError(
            f"the loss or gradient of {int(counters[IN_A_ROW])} steps in a row, the last of them "
            f"step {step}, was not finite (guards.max_bad_steps = "
            f"{self.guards.config.max_bad_steps}). None of them changed the weights; "
            + (
                f"the state from before them is checkpoint/step-{good}"
                if good
                else "nothing of the run is good: it was so from its first step"
            )
            + ". Look at those steps' data and learning rate; the same command tries them again",
            shared=True,
        )

    @contextlib.contextmanager
    def _hang_watch(self) -> Iterator[Any]:
        """Gives a function to call after each step: where none follows in time, all threads' stacks
        go to RUN/comm_traces/rank_K.stacks.txt, before the collective timeout ends the process."""
        comm = self.job_config.comm
        path = self.folder.path / comm.save_traces_folder / f"rank_{dist.get_rank()}.stacks.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a launch that this one replaces may still have it open
            file = open(path, "w")  # noqa: SIM115 - as long as the loop
        except OSError as error:
            logger.warning(f"stacks of a hang would not be written: {path}: {error.strerror}")
            yield lambda: None
            return
        try:
            yield lambda: _dump_stacks_later(0.8 * comm.train_timeout_seconds, file)
        finally:
            faulthandler.cancel_dump_traceback_later()
            # a launch that has taken the folder has the same name: what it writes is not ours
            with contextlib.suppress(OSError), file:
                own, there = os.fstat(file.fileno()), path.stat()
                if not own.st_size and own.st_ino == there.st_ino:
                    path.unlink()


def _dump_stacks_later(seconds: float, file: TextIO) -> None:
    faulthandler.dump_traceback_later(seconds, file=file)

"""torchtitan's Trainer as a run of ours: one folder, counted tokens, a stop that can be resumed."""

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torchtitan
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from canon_pretrain.errors import UserError
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.titan.data import CanonDataLoader
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size
from canon_pretrain.titan.metrics import CanonMetrics


class CanonTrainer(Trainer):
    """Trains one CanonJobConfig from its newest checkpoint, or from its seeds.

    `world_size` is fixed before the process group stands, so that a batch that can't be shared is
    refused first. The shards' `fingerprint` is part of what the run is.
    """

    job_config: CanonJobConfig
    metrics_processor: CanonMetrics

    def __init__(self, job: CanonJobConfig, *, world_size: int, fingerprint: str) -> None:
        asked = job.training.local_batch_size
        job.training.local_batch_size = micro_batch_size(job, world_size)
        self.folder = RunFolder(Path(job.job.dump_folder))
        self.identity = run_identity(job, fingerprint)
        self.folder.check_identity(self.identity)
        job.metrics.disable_color_printing |= not sys.stdout.isatty()
        super().__init__(job)
        # FSDP2 stands at every world size and does the casting: autocast on top of it at one rank
        # would give that rank other numerics than many have
        self.maybe_enable_amp = contextlib.nullcontext()
        self.metrics_processor.dataloader = cast(CanonDataLoader, self.dataloader)
        self.tokens_per_step = job.training.global_batch_size * job.training.seq_len
        if torch.distributed.get_rank() == 0:
            config = job.to_dict()
            # whoever reads the run may stand in another folder
            config["data"]["path"] = str(Path(job.data.path).resolve())
            self.folder.write_config(config, self.identity)
        if job.training.local_batch_size != asked:
            logger.info(
                f"training.local_batch_size is {job.training.local_batch_size} (at most {asked} "
                f"was asked for): {self.gradient_accumulation_steps} micro-batches a step on each "
                f"of {world_size} ranks make the global batch of {job.training.global_batch_size}"
            )

    def should_continue_training(self) -> bool:
        return self.step < self.job_config.last_step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a checkpoint's step; this rank's token count follows from the present batch."""
        self.step = state_dict["step"]
        self.ntokens_seen = self.step * self.tokens_per_step // torch.distributed.get_world_size()

    def batch_generator(self, data_iterable: Any) -> Any:
        # the first thing that Trainer.train does once a checkpoint is loaded
        self.first_step = self.step
        if not self.step:
            self._refuse_a_second_beginning()
        if self.should_continue_training():
            self._announce()
        return super().batch_generator(data_iterable)

    def _refuse_a_second_beginning(self) -> None:
        """Raise UserError before step 1 of a run whose folder holds checkpoints that failed."""
        if not self.checkpointer.enable:
            return
        left = sorted(Path(self.checkpointer.folder).glob("step-*"))
        if left:
            raise UserError(
                f"{left[-1].parent} holds {', '.join(path.name for path in left)}, and none of "
                "them is whole, so this run would begin again at step 1. Move that folder away to "
                "do so, or put a whole checkpoint there to go on from it"
            )

    def _announce(self) -> None:
        """Say and log where this launch begins."""
        metrics, job = self.metrics_processor, self.job_config
        facts = {
            "world_size": torch.distributed.get_world_size(),
            "torch": torch.__version__,
            "torchtitan": torchtitan.__version__,
            "data_fingerprint": self.identity["data_fingerprint"],
        }
        if self.step:
            metrics.event("resume", from_step=self.step, **facts)
        else:
            metrics.event("start", **facts)
        verb = "going on" if self.step else "starting"
        logger.info(
            f"{verb} at step {self.step + 1} of {job.training.steps}, to step {job.last_step}, "
            f"in {self.folder.path}"
        )
        metrics.begin(self.step)

    def train(self) -> None:
        """Train to the last step of this launch and leave a checkpoint there."""
        super().train()
        if self.checkpointer.enable:
            self.checkpointer._async_wait()  # torchtitan leaves without it, and may lose the last
        job = self.job_config
        if self.step == self.first_step:
            logger.info(
                f"nothing to do: {self.folder.path} stands at step {self.step}, and this launch "
                f"was to go to step {job.last_step}"
            )
        elif self.step < job.training.steps:
            if self.step % job.checkpoint.interval:
                self.checkpointer.save(self.step, last_step=True)
            self.metrics_processor.event("stop", step=self.step, reason="run.stop_at")
            logger.info(
                f"stopped at step {self.step} of {job.training.steps} as --run.stop_at asks; the "
                "same command without it goes on from here"
            )
        else:
            self.metrics_processor.event("done", step=self.step)
            logger.info(f"finished: step {self.step} of {self.folder.path}")
        if self.step == job.training.steps and torch.distributed.get_rank() == 0:
            self.folder.write_done(self.step)


def run_identity(job: CanonJobConfig, fingerprint: str) -> dict[str, Any]:
    """All that a run may not change between its launches; world size is not part of it."""
    optimizer, schedule, training = job.optimizer, job.lr_scheduler, job.training
    return {
        **{f"model.{name}": value for name, value in asdict(job.model_args).items()},
        **{f"optimizer.{name}": value for name, value in asdict(optimizer).items()},
        **{f"lr_scheduler.{name}": value for name, value in asdict(schedule).items()},
        "data_fingerprint": fingerprint,
        "data.data_seed": job.data.data_seed,
        "training.seq_len": training.seq_len,
        "training.global_batch_size": training.global_batch_size,
        "training.steps": training.steps,
        "training.max_norm": training.max_norm,
        "training.dtype": training.dtype,
        "training.mixed_precision_param": training.mixed_precision_param,
        "training.mixed_precision_reduce": training.mixed_precision_reduce,
    }

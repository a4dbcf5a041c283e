"""What a launch reads once and shares: the data's commit marks a node, the run folder a run.

Hundreds of ranks that read the same thousands of small files stall a shared file system. So the
first rank of each node opens the data, rank 0 compares the launch with the run folder, both before
the ranks meet (their errors end the launch); `share` gives all ranks what rank 0 has.
"""

import socket
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.titan.data import open_shards
from canon_pretrain.titan.identity import Comparison
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.validation import open_parts, settle_validation


@dataclass(frozen=True)
class OpenedData:
    """What is trained on and the held-out part of each folder, with every commit mark checked."""

    training: Mixture
    held_out: list[TokenShards | None]
    notices: list[str]
    identity: dict[str, Any]
    """What the run's identity says of the held-out part."""

    @property
    def fingerprints(self) -> list[str]:
        return [self.training.fingerprint, *map(str, self.identity.values())]


def open_data(job: CanonJobConfig) -> OpenedData:
    """Open what `job` trains and validates on; sets what `open_shards` and `settle_validation` set.

    Raises UserError.
    """
    with open_shards(job) as training:
        held_out = open_parts(job)
        notices, identity = settle_validation(job, training, held_out)
    return OpenedData(training, held_out, notices, identity)


def share(
    job: CanonJobConfig, data: OpenedData | None, compared: Comparison | None
) -> tuple[OpenedData, Comparison]:
    """What rank 0 has of both, on all ranks; collective.

    `data` is None but on the first rank of each node, `compared` but on rank 0. Raises UserError on
    all ranks, naming the nodes, where a node has other data than rank 0's.
    """
    settled = (job.model.vocab_size, job.validation.enable)
    answer = [(data, compared, settled)]
    dist.broadcast_object_list(answer, src=0)
    first, compared, (job.model.vocab_size, job.validation.enable) = answer[0]
    assert first is not None and compared is not None
    own = None if data is None else (socket.gethostname(), data.fingerprints)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    others = {host: found for host, found in filter(None, everyone) if found != first.fingerprints}
    if others:
        raise UserError(
            f"{', '.join(job.data.folders)} does not hold the same data on all nodes: fingerprint "
            f"{first.fingerprints} on rank 0's, "
            + "; ".join(f"{found} on {host}" for host, found in others.items())
            + ". Copy it from one node to the others, or use a shared folder",
            shared=True,
        )
    return first, compared

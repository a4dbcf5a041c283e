"""Muon (Jordan et al. 2024) for matrices that are sharded by rows, with torch.optim.Muon's results.

Each rank updates the momentum of its rows. Then each matrix goes to its owner, the one rank that
orthogonalizes it, and the result goes back: an exchange of bfloat16 values in each direction, of
all matrices at once. A stack of experts is sharded by expert, so that each is already whole.

Shapes: R rows and C columns of a matrix, E experts.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from canon_pretrain.titan.local_update import LocalOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration; these and EPS are torch.optim.Muon's."""
EPS = 1e-7


def orthogonalize(direction_RC: Tensor, num_steps: int) -> Tensor:
    """Return the nearest semi-orthogonal matrix of a bfloat16 one, roughly, by Newton-Schulz.

    The singular values become 0.7 to 1.2. `direction_RC` is overwritten.
    """
    a, b, c = COEFFICIENTS
    is_tall = direction_RC.shape[0] > direction_RC.shape[1]
    x = direction_RC.T if is_tall else direction_RC
    x.div_(x.norm().clamp(min=EPS))
    for _ in range(num_steps):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if is_tall else x


def orthogonalize_flops(shape: Sequence[int], num_steps: int) -> int:
    """Return the FLOPs of `orthogonalize` for a matrix of this shape, or for a stack of them."""
    *stack, num_rows, num_columns = shape
    small, large = sorted((num_rows, num_columns))
    return math.prod(stack) * num_steps * (4 * small**2 * large + 2 * small**3)


class UpdateCosts(NamedTuple):
    """What Muon's part of a step costs on one rank, beyond what AdamW's costs."""

    flops: float
    """On the rank that owns most."""
    received_bytes: float
    peak_bytes: float
    """Allocated during the update: copies of this rank's share, and those of the largest matrix."""


def update_costs(shapes: Sequence[torch.Size], num_shards: int, num_steps: int) -> UpdateCosts:
    """Return the costs for matrices and stacks of these shapes, sharded over `num_shards` ranks."""
    matrices = [shape for shape in shapes if len(shape) == 2]
    owners = assign_owners(matrices, num_shards)
    flops = [0.0] * num_shards
    for shape, owner in zip(matrices, owners, strict=True):
        flops[owner] += orthogonalize_flops(shape, num_steps)
    stacks = [shape for shape in shapes if len(shape) == 3]
    stack_flops = sum(orthogonalize_flops(shape, num_steps) for shape in stacks) / num_shards

    # Each message is in bfloat16, and so are the copies: of rows, of a message, of whole matrices.
    itemsize = torch.bfloat16.itemsize
    share = sum(map(math.prod, matrices)) / num_shards
    stack_share = sum(map(math.prod, stacks)) / num_shards
    largest = max((math.prod(shape[-2:]) for shape in shapes), default=0)
    return UpdateCosts(
        flops=max(flops) + stack_flops,
        received_bytes=2 * itemsize * share * (num_shards - 1) / num_shards,
        peak_bytes=itemsize * (3 * share + 2 * stack_share + 3 * largest),
    )


def assign_owners(shapes: Sequence[torch.Size], num_ranks: int) -> list[int]:
    """Return the rank that orthogonalizes each matrix: the next costly one to the least loaded."""
    costs = [orthogonalize_flops(shape, 1) for shape in shapes]
    loads = [0] * num_ranks
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: (-costs[index], index)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def rows_by_rank(num_rows: int, num_ranks: int) -> list[int]:
    """Return the rows on each rank, as FSDP2 shards them."""
    chunk = -(-num_rows // num_ranks)
    return [max(0, min(chunk, num_rows - rank * chunk)) for rank in range(num_ranks)]


class Exchange:
    """Sends the rows of matrices to the matrices' owners, and rows of the results back."""

    def __init__(
        self, shapes: Sequence[torch.Size], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.shapes = shapes
        self.group = group
        self.device = device
        self.num_ranks = group.size()
        self.rank = group.rank()
        self.rows = [rows_by_rank(num_rows, self.num_ranks) for num_rows, _ in shapes]

        # Matrices are sent in the order of their owners.
        owners = assign_owners(shapes, self.num_ranks)
        self.owned: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for index, owner in enumerate(owners):
            self.owned[owner].append(index)
        self.mine = self.owned[self.rank]

        # What this rank has of each owner's matrices, and what each rank has of mine.
        self.sizes_here = [self._num_values(matrices, self.rank) for matrices in self.owned]
        self.sizes_of_mine = [self._num_values(self.mine, rank) for rank in range(self.num_ranks)]

    def _num_values(self, matrices: list[int], rank: int) -> int:
        """Return the values of these matrices on a rank."""
        return sum(self.rows[index][rank] * self.shapes[index][1] for index in matrices)

    def to_owners(self, shards: list[Tensor]) -> list[Tensor]:
        """Return the matrices that this rank owns, of this rank's rows of all matrices."""
        pieces = [shards[index] for matrices in self.owned for index in matrices]
        messages = self._send(pieces, self.sizes_here, self.sizes_of_mine)

        # From each rank its rows of my matrices: join them by matrix.
        rows_by_matrix = zip(
            *(self._unpack(message, self.mine, rank) for rank, message in enumerate(messages)),
            strict=True,
        )
        return [torch.cat(rows) for rows in rows_by_matrix]

    def to_shards(self, matrices: list[Tensor]) -> list[Tensor]:
        """Return this rank's rows of all matrices, of the matrices that this rank owns."""
        rows_by_matrix = [
            matrix.split(self.rows[index])
            for index, matrix in zip(self.mine, matrices, strict=True)
        ]
        pieces = [rows[rank] for rank in range(self.num_ranks) for rows in rows_by_matrix]
        messages = self._send(pieces, self.sizes_of_mine, self.sizes_here)

        # From each owner my rows of its matrices: back in the order of all matrices.
        shards: dict[int, Tensor] = {}
        for indices, message in zip(self.owned, messages, strict=True):
            shards |= zip(indices, self._unpack(message, indices, self.rank), strict=True)
        return [shards[index] for index in range(len(self.shapes))]

    def _send(
        self, pieces: list[Tensor], sizes_sent: list[int], sizes_received: list[int]
    ) -> Sequence[Tensor]:
        """Send the values of `pieces`, which are sorted by rank; return a message of each rank."""
        sent = torch.empty(sum(sizes_sent), dtype=torch.bfloat16, device=self.device)
        if pieces:
            torch.cat([piece.flatten() for piece in pieces], out=sent)
        received = torch.empty(sum(sizes_received), dtype=torch.bfloat16, device=self.device)
        dist.all_to_all_single(received, sent, sizes_received, sizes_sent, group=self.group)
        return received.split(sizes_received)

    def _unpack(self, message: Tensor, matrices: list[int], rank: int) -> list[Tensor]:
        """Return the rows of each of these matrices that are on a rank."""
        shapes = [(self.rows[index][rank], self.shapes[index][1]) for index in matrices]
        parts = message.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Muon(LocalOptimizer):
    """Muon with Nesterov momentum for matrices [R, C] and stacks of them [E, R, C].

    A DTensor is sharded by rows or, a stack, by expert. `adjust_lr` is torch's adjust_lr_fn.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, momentum: float, num_steps: int, adjust_lr: str
    ) -> None:
        super().__init__(groups)
        self.momentum = momentum
        self.num_steps = num_steps
        self.adjust_lr = adjust_lr

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients, the same ones on all ranks. Collective."""
        groups = []
        parameters = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    groups.append(group)
                    parameters.append(parameter)

        directions = [self._update_momentum(parameter) for parameter in parameters]
        updates = self._orthogonalize_all(parameters, directions)
        for parameter, group, update in zip(parameters, groups, updates, strict=True):
            lr_ratio = learning_rate_ratio(parameter.shape, self.adjust_lr)
            self.apply(parameter, group, update, lr_ratio=lr_ratio)

    def _update_momentum(self, parameter: Tensor) -> Tensor:
        """Update the momentum; return what is to be orthogonalized, of this rank, in bfloat16."""
        momentum, grad = self.momentum_and_grad(parameter, "momentum_buffer")
        momentum.lerp_(grad, 1 - self.momentum)
        return grad.lerp(momentum, self.momentum).bfloat16()

    def _orthogonalize_all(
        self, parameters: list[Tensor], directions: list[Tensor]
    ) -> list[Tensor]:
        """Return the orthogonalized directions, of this rank's rows; `directions` is emptied."""
        # Those of which other ranks have rows are exchanged, in groups of the same ranks.
        updates: dict[int, Tensor] = {}
        exchanged: dict[dist.ProcessGroup, list[int]] = {}
        for index, parameter in enumerate(parameters):
            ranks = _ranks_of_rows(parameter)
            if ranks is not None:
                exchanged.setdefault(ranks, []).append(index)
            elif parameter.ndim == 2:
                updates[index] = orthogonalize(directions[index], self.num_steps)
            else:
                experts = [orthogonalize(one, self.num_steps) for one in directions[index]]
                # a rank may have none
                updates[index] = torch.stack(experts) if experts else directions[index]

        for ranks, indices in exchanged.items():
            shapes = [parameters[index].shape for index in indices]
            exchange = Exchange(shapes, ranks, directions[indices[0]].device)
            matrices = exchange.to_owners([directions[index] for index in indices])
            directions.clear()  # their memory is as large as a message's
            matrices = [orthogonalize(matrix, self.num_steps) for matrix in matrices]
            updates |= zip(indices, exchange.to_shards(matrices), strict=True)
        return [updates[index] for index in range(len(parameters))]


def learning_rate_ratio(shape: Sequence[int], adjust_lr: str) -> float:
    """Return the factor of the learning rate for a matrix, or for each one of a stack.

    original: sqrt(max(1, R / C)). match_rms_adamw: updates as large as AdamW's, 0.2 of the
    orthogonalized matrix's root mean square 1 / sqrt(max(R, C)) (Liu et al. 2025).
    """
    num_rows, num_columns = shape[-2:]
    if adjust_lr == "original":
        return math.sqrt(max(1, num_rows / num_columns))
    return 0.2 * math.sqrt(max(num_rows, num_columns))


def _ranks_of_rows(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that have rows of the same matrices; None if each matrix is on one rank."""
    if not isinstance(parameter, DTensor):
        return None
    # not Shard: the experts of several ranks may be a _StridedShard
    sharded = {
        dim: placement
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    }
    for placement in sharded.values():
        assert getattr(placement, "dim", None) == 0, "FSDP2 shards the first dimension"
    if parameter.ndim == 3 or not sharded:
        return None

    (mesh_dim,) = sharded
    if parameter.device_mesh.size(mesh_dim) == 1:
        return None
    return parameter.device_mesh.get_group(mesh_dim)

"""What is minimised, against sums written out in float64, and what the log says of it."""

import dataclasses
import math

import pytest
import torch
from torch._dynamo.utils import counters
from torchtitan.components.loss import IGNORE_INDEX

from canon_pretrain.run.config import Loss
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.spec import build_loss, head_loss
from tests.support import ROOT

DEBUG = ["--config", str(ROOT / "train_configs" / "debug.toml")]
FORMS = [Loss(), Loss(z_loss=0.3), Loss(squared_loss=0.3)]
every_form = pytest.mark.parametrize("config", FORMS, ids=str)
every_way = pytest.mark.parametrize("chunk_tokens", [0, 4096, 5])


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Large logits, far from 0 in the mean, so that logsumexp is neither small nor the loss."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 + 4 * torch.randn(2, 5, 11, generator=generator)
    labels = torch.randint(11, (2, 5), generator=generator)
    labels[1, 2] = IGNORE_INDEX
    return logits, labels


def by_hand(logits: torch.Tensor, labels: torch.Tensor, config: Loss) -> tuple[float, float]:
    """The definitions, a token at a time, in float64."""
    cross_entropy = objective = 0.0
    for row, label in zip(logits.flatten(0, 1).tolist(), labels.flatten().tolist(), strict=True):
        if label == IGNORE_INDEX:
            continue
        z = math.log(math.fsum(math.exp(value) for value in row))
        loss = z - row[label]
        cross_entropy += loss
        objective += loss + config.z_loss * z**2 + config.squared_loss * loss**2
    return cross_entropy, objective


def of_logits(
    config: Loss, logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of given logits: of a head whose weight is the identity."""
    nats_N, objective = head_loss(config)(
        logits.flatten(0, 1), torch.eye(logits.shape[-1], dtype=logits.dtype), labels.flatten()
    )
    return nats_N.sum(), objective


@every_form
@every_way
def test_sums_and_gradients_are_those_of_the_definition(config, chunk_tokens):
    config = dataclasses.replace(config, chunk_tokens=chunk_tokens)
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    loss, objective = of_logits(config, logits, labels)
    expected = by_hand(logits.detach(), labels, config)
    assert (loss.item(), objective.item()) == pytest.approx(expected, rel=1e-6)
    objective.backward()
    assert logits.grad is not None
    # the derivative by central differences, of a few logits; none at an ignored token
    for place in ((0, 0, 3), (1, 4, int(labels[1, 4])), (0, 2, int(labels[0, 2])), (1, 2, 5)):
        sides = []
        for sign in (1, -1):
            moved = logits.detach().double()
            moved[place] += sign * 1e-5
            sides.append(by_hand(moved, labels, config)[1])
        assert logits.grad[place].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=2e-5)


# torch looks whether what it compiles for has gradients
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@every_way
def test_the_loss_compiles_with_its_terms(chunk_tokens):
    logits, labels = logits_and_labels()
    weight = torch.eye(logits.shape[-1])
    for config in FORMS[1:]:
        job = CanonJobConfig()
        job.loss = dataclasses.replace(config, chunk_tokens=chunk_tokens)
        job.compile.enable, job.compile.backend = True, "aot_eager"
        assert "loss" in job.compile.components  # torchtitan's default
        grads = []
        for components, frames in ((["model", "loss"], 1), (["model"], 0)):
            job.compile.components = components
            torch.compiler.reset()
            counters.clear()
            leaf = logits.flatten(0, 1).clone().requires_grad_()
            nats_N, objective = build_loss(job)(leaf, weight, labels.flatten())
            values = (nats_N.sum().item(), objective.item())
            assert values == pytest.approx(by_hand(logits, labels, config))
            objective.backward()
            grads.append(leaf.grad)
            assert counters["stats"]["unique_graphs"] == frames
        torch.testing.assert_close(*grads)

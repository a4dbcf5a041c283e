"""What is minimised, against sums written out in float64, and what the log says of it."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss

from canon_pretrain.config import Loss
from canon_pretrain.errors import UserError
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.identity import check_identity, run_identity
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.loss import build_loss, loss_function
from tests.support import ROOT

DEBUG = ["--config", str(ROOT / "train_configs" / "debug.toml")]
FORMS = [Loss(), Loss(z_loss=0.3), Loss(squared_loss=0.3)]
every_form = pytest.mark.parametrize("config", FORMS, ids=str)


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


@every_form
def test_sums_and_gradients_are_those_of_the_definition(config: Loss) -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    loss, objective = loss_function(config)(logits, labels)
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


def test_without_a_term_it_is_torchtitans_to_the_bit() -> None:
    logits, labels = logits_and_labels()
    loss, objective = loss_function(Loss())(logits, labels)
    assert loss is objective
    assert torch.equal(loss, cross_entropy_loss(logits, labels))


@every_form
def test_bfloat16_logits_are_summed_in_float32(config: Loss) -> None:
    logits, labels = logits_and_labels()
    logits = logits.bfloat16().repeat(400, 1, 1)  # enough terms for bfloat16 sums to stand still
    labels = labels.repeat(400, 1)
    sums = loss_function(config)(logits, labels)
    assert all(value.dtype == torch.float32 for value in sums)
    expected = by_hand(logits.float(), labels, config)
    assert [value.item() for value in sums] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("config", FORMS[1:], ids=str)
def test_the_loss_compiles_with_its_terms(config: Loss) -> None:
    job = CanonJobConfig()
    job.loss = config
    job.compile.enable, job.compile.backend = True, "aot_eager"
    assert "loss" in job.compile.components  # torchtitan's default
    compiled, plain = build_loss(job), loss_function(config)
    logits, labels = logits_and_labels()
    grads = []
    for function in (compiled, plain):
        leaf = logits.clone().requires_grad_()
        loss, objective = function(leaf, labels)
        assert (loss.item(), objective.item()) == pytest.approx(by_hand(logits, labels, config))
        objective.backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
    assert compiled is not plain
    job.compile.components = ["model"]
    assert not hasattr(build_loss(job), "_torchdynamo_orig_callable")
    assert hasattr(compiled, "_torchdynamo_orig_callable")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loss.z_loss", "-1"], "loss.z_loss = -1.0: expected a finite number of at least 0"),
        (["--loss.squared_loss", "nan"], "loss.squared_loss = nan"),
        (["--loss.z_loss", "1e-4", "--loss.squared_loss", "1e-4"], "two forms of one thing"),
    ],
)
def test_what_is_no_coefficient_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_job([*DEBUG, *words])


def test_it_is_part_of_what_a_run_is_and_was_off_before_it_had_a_name(tmp_path: Path) -> None:
    plain, z_loss = parse_job(DEBUG), parse_job([*DEBUG, "--loss.z_loss", "1e-4"])
    folder = RunFolder(tmp_path)
    old = run_identity(plain, "f")
    del old["loss.z_loss"], old["loss.squared_loss"]
    folder.config_file.write_text(json.dumps({"identity": old, "config": {}}))
    assert check_identity(folder, run_identity(plain, "f"), []) == {}
    with pytest.raises(UserError, match="loss.z_loss: 0.0 -> 0.0001"):
        check_identity(folder, run_identity(z_loss, "f"), [])
    assert {f"loss.{f.name}" for f in dataclasses.fields(Loss)} <= run_identity(z_loss, "f").keys()

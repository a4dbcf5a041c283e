"""Every variant trains: sharded over two ranks, it takes the steps that the whole model takes."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.config import Data, Loss
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import build_dataloader, open_shards
from eval.model.load import load_model
from tests.ranks import assert_same_run, events, launch, whole_state
from tests.sharded import Steps, assert_equal_steps, on_ranks, sharded_steps, whole_steps
from tests.support import EOS_ID, ROOT, VOCAB_SIZE, debug_run, token_documents
from tests.variants import VARIANTS

RANKS = 2
# in one chunk, in several, and of whole logits
LOSSES = [
    Loss(),
    Loss(z_loss=0.01, chunk_tokens=20),
    Loss(squared_loss=0.01, chunk_tokens=16),
    Loss(chunk_tokens=0),
]


def loss_of(name: str) -> Loss:
    """Each variant with one of the three losses, in turn."""
    return LOSSES[list(VARIANTS).index(name) % len(LOSSES)]


def _train_on_rank(rank: int, folder: Path) -> None:
    from canon_pretrain.titan.parallelize import shard, write_shard

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    found = {}
    for name, args in VARIANTS.items():
        with torch.device("meta"):
            model = Transformer(args)
        shard(model, mesh)
        model.to_empty(device="cpu")
        model.init_weights(write=write_shard)
        found[name] = sharded_steps(model, args, loss_of(name), rank, RANKS, rounds=1)
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Steps]]:
    """What each rank has of each variant's steps."""
    folder = tmp_path_factory.mktemp("variants")
    on_ranks(_train_on_rank, RANKS, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("name", VARIANTS)
def test_it_takes_the_steps_of_the_whole_model(trained: list[dict[str, Steps]], name: str) -> None:
    whole = whole_steps(VARIANTS[name], loss_of(name))
    assert_equal_steps([part[name] for part in trained], whole)
    assert whole.losses[0] != whole.losses[1]


def test_documents_must_end_with_the_token_that_the_model_looks_for(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        documents = [np.where(ids == EOS_ID, 5, ids) for ids in token_documents(seed, 3, 200)]
        write_shards(folder / "train", documents, vocab_size=VOCAB_SIZE, eos_id=5)
    job = parse_job(["--config", str(ROOT / "train_configs/debug.toml")])
    for data in (Data(path=str(folders[0])), Data(paths=list(map(str, folders)), weights=[1, 1])):
        job.data = data
        job.model.document_mask, job.model.eos_id = True, None
        message = rf"model.eos_id = 2, but documents of {folders[0]} end with 5: set model.eos_id ="
        with pytest.raises(UserError, match=message):
            open_shards(job)
        job.model.eos_id = 5
        open_shards(job).close()
        job.model.document_mask, job.model.eos_id = False, None  # nobody asks which it is
        open_shards(job).close()


# -- one run of many of them together, as a user starts it -----------------------------------------

TOGETHER = (
    *("--model.position", "alibi", "--model.num_kv_heads", 2, "--model.tie_embeddings", True),
    *("--model.canon_trainable", False, "--model.document_mask", True, "--loss.z_loss", 0.01),
    *("--training.steps", 10, "--training.local_batch_size", 2, "--lr_scheduler.decay_ratio", 0.4),
    *("--checkpoint.interval", 5, "--checkpoint.async_mode", "disabled"),
)


def _die_in_step_7(rank: int) -> None:
    """kill -9 of every rank, in the middle of a step that no checkpoint has."""
    from canon_pretrain.titan.trainer import CanonTrainer

    original = CanonTrainer._share

    def share(trainer: Any, *arguments: Any) -> Any:
        if trainer.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(trainer, *arguments)

    CanonTrainer._share = share  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def straight(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    ended = launch(*debug_run(data_folder, folder / "run"), *TOGETHER, output=folder / "out")
    assert ended.output.count("attention by sdpa") == 1
    return folder / "run"


def test_it_goes_on_after_a_kill_as_if_nothing_had_been(
    straight: Path, data_folder: Path, tmp_path: Path
) -> None:
    arguments = [*debug_run(data_folder, tmp_path / "run"), *TOGETHER]
    ended = launch(*arguments, output=tmp_path, before=_die_in_step_7, check=False)
    assert ended.codes == [-signal.SIGKILL] * RANKS
    launch(*arguments, output=tmp_path)
    assert_same_run(tmp_path / "run", straight, step=10)
    assert [event["from_step"] for event in events(tmp_path / "run", "resume")] == [5]


def test_the_first_step_is_that_of_the_whole_model_on_the_whole_batch(
    straight: Path, data_folder: Path
) -> None:
    """Loss, objective and its gradient, with the documents that the shards' own EOS ends."""
    job = parse_job([*map(str, [*debug_run(data_folder, straight), *TOGETHER])])
    model = Transformer(job.model_args)
    model.init_weights()
    job.training.local_batch_size = job.training.global_batch_size
    inputs, labels = next(iter(build_dataloader(1, 0, None, job, data=open_shards(job))))
    tokens = inputs["input"]
    assert len({int(row.eq(EOS_ID).sum()) for row in tokens}) > 1  # some hold a boundary
    logits = model(tokens).double()
    z = logits.exp().sum(dim=-1).log()
    each = z - logits.gather(2, labels[..., None])[..., 0]
    objective = (each + 0.01 * z**2).mean()
    objective.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    first = events(straight, "step")[0]
    assert first["loss"] == pytest.approx(each.mean().item(), rel=1e-6)
    assert first["objective"] == pytest.approx(objective.item(), rel=1e-6)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    # another EOS makes other documents
    other = Transformer(replace(job.model_args, eos_id=EOS_ID + 1))
    other.init_weights()
    with torch.no_grad():
        moved = other(tokens).double()
    assert (moved - logits).abs().max() > 1e-3


def test_cst_canon_is_in_the_checkpoint_and_in_evals_model_as_it_was(straight: Path) -> None:
    step_10 = straight / "checkpoint" / "step-10"
    model = load_model(step_10, torch.device("cpu"))
    initial = Transformer(model.args)
    initial.init_weights()
    same = {
        name: torch.equal(value, dict(initial.named_parameters())[name])
        for name, value in model.named_parameters()
    }
    assert {name for name, equal in same.items() if equal} == {n for n in same if "canon_" in n}
    state = whole_state(step_10)
    optimized = {name for name in state if name.startswith("optimizer.")}
    assert optimized
    assert not [name for name in optimized if "canon_" in name]
    assert not [name for name in state if name.startswith("output.")]  # tied


@pytest.mark.slow
def test_a_stable_rate_can_be_held_longer_or_decayed_from(
    straight: Path, data_folder: Path, tmp_path: Path
) -> None:
    """WSD: the README's two commands, from a checkpoint before the decay."""
    before = events(straight, "step")[5]  # step 6, the last one at the full rate but one
    peak = before["lr"]
    assert peak == 3e-3

    # decay from step 5 within 2 steps, in a folder of its own
    branch = tmp_path / "branch"
    words = (
        *("--checkpoint.initial_load_path", straight / "checkpoint" / "step-5"),
        *("--checkpoint.no_initial_load_model_only", "--training.steps", 7),
        *("--lr_scheduler.decay_ratio", 2 / 7),
    )
    launch(*debug_run(data_folder, branch), *TOGETHER, *words, output=tmp_path / "out")
    found = events(branch, "step")
    assert [event["step"] for event in found] == [6, 7]
    assert [event["lr"] for event in found] == pytest.approx([peak, peak * (0.1 + 0.9 / 2)])
    for name in ("loss", "objective", "grad_norm", "data_digests"):
        assert found[0][name] == before[name]

    # or go on in the run itself: it becomes the longer one
    longer = tmp_path / "run"
    shutil.copytree(straight, longer)
    words = (
        *("--checkpoint.load_step", 5, "--training.steps", 12, "--run.stop_at", 9),
        *("--run.allow_changes", "training.steps"),
    )
    launch(*debug_run(data_folder, longer), *TOGETHER, *words, output=tmp_path / "out")
    found = events(longer, "step")
    assert [event["step"] for event in found] == list(range(1, 10))
    assert [event["lr"] for event in found[4:8]] == [peak] * 4  # the decay is the last 5 of 12
    assert found[8]["lr"] < peak
    assert found[5]["loss"] == before["loss"]

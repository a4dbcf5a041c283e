"""Every variant trains: sharded over two ranks, it takes the steps of the unsharded model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.config import Data, Loss
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import open_shards
from tests.ranks import assert_same_run, events, launch
from tests.sharded import assert_equal_steps, on_ranks, sharded_steps, whole_steps
from tests.support import EOS_ID, ROOT, VOCAB_SIZE, debug_run, refused, token_documents
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
    """Assign one of LOSSES to each variant in turn."""
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
def trained(tmp_path_factory):
    """The steps of each variant, by rank."""
    folder = tmp_path_factory.mktemp("variants")
    on_ranks(_train_on_rank, RANKS, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.system
@pytest.mark.parametrize("name", VARIANTS)
def test_it_takes_the_steps_of_the_whole_model(trained, name):
    whole = whole_steps(VARIANTS[name], loss_of(name))
    assert_equal_steps([part[name] for part in trained], whole)
    assert whole.losses[0] != whole.losses[1]


def test_documents_must_end_with_the_models_eos_id(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        documents = [np.where(ids == EOS_ID, 5, ids) for ids in token_documents(seed, 3, 200)]
        write_shards(folder / "train", documents, vocab_size=VOCAB_SIZE, eos_id=5)
    job = parse_job(["--config", str(ROOT / "train_configs/debug.toml")])
    for data in (Data(path=str(folders[0])), Data(paths=list(map(str, folders)), weights=[1, 1])):
        job.data = data
        job.model.document_mask, job.model.eos_id = True, None
        with refused("data.eos_id", folder=str(folders[0]), expected=5):
            open_shards(job)
        for mask, eos_id in ((True, 5), (False, None)):
            job.model.document_mask, job.model.eos_id = mask, eos_id
            open_shards(job).close()


@pytest.mark.system
def test_a_stable_rate_is_prolonged_or_decayed_from(data_folder, tmp_path):
    """WSD: branch off, or prolong, from a checkpoint before the decay."""
    run, branch, long = (tmp_path / name for name in ("run", "branch", "long"))

    def train(folder: Path, steps: int, *words: object) -> list[dict[str, Any]]:
        schedule = ("--lr_scheduler.warmup_steps", 1, "--lr_scheduler.decay_ratio", 0.5)
        argv = (*debug_run(data_folder, folder), "--training.steps", steps, *schedule)
        launch(*argv, "--checkpoint.interval", 2, *words, output=tmp_path / "out")
        return events(folder, "step")

    train(run, 6)  # the decay is its last 3 steps
    origin = ("--checkpoint.initial_load_path", run / "checkpoint" / "step-2")
    found = train(branch, 4, *origin, "--checkpoint.no_initial_load_model_only")
    assert [event["step"] for event in found] == [3, 4]
    assert [event["lr"] for event in found] == pytest.approx([3e-3, 3e-3 * 0.55])
    allowed = ("--run.allow_changes", "training.steps", "--run.stop_at", 4)
    assert train(run, 10, "--checkpoint.load_step", 2, *allowed)[3]["lr"] == 3e-3
    train(long, 10, "--run.stop_at", 4)
    assert_same_run(run, long, step=4)
    for name in ("loss", "grad_norm", "data_digests"):
        assert found[0][name] == events(long, "step")[2][name]

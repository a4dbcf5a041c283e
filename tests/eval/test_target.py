"""What is evaluated: a run's checkpoint or an exported folder, and every way to name it wrongly."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from canon_pretrain.checkpoint.writer import save_alone
from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.hf.export import export
from canon_pretrain.hf.reading import import_folder
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import question_of
from data_prep.planning import train_tokenizer
from eval.model.lm import CanonLM
from eval.model.target import EvalTarget
from eval.validation import model_loss
from tests.data_folders import make_data_folder, sentence
from tests.hf_exports import identity_of
from tests.support import write_data
from tests.variants import VARIANTS, build

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder, a run on it with a checkpoint, and the checkpoint's export."""
    base = tmp_path_factory.mktemp("target")
    data = base / "data"
    make_data_folder(data, [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])
    shards = TokenShards.open(data / "train")
    model = build(replace(VARIANTS["nope ABCD"], vocab_size=shards.vocab_size))
    config = {"data": {"path": str(data), "paths": []}, "training": {"seq_len": 100}}
    identity = identity_of(model.args) | {"data_fingerprint": shards.fingerprint}
    RunFolder(base / "run").write_config(config, identity)
    save_alone(dict(model.named_parameters()), base / "run" / "checkpoint" / "step-3", step=3)
    export(base / "run" / "checkpoint" / "step-3", base / "out")
    return base


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base / "out", tmp_path / "out")
    return tmp_path / "out"


def test_a_checkpoint_and_its_export_are_asked_the_same(base, copy):
    of_run = EvalTarget.open(base / "run" / "checkpoint" / "step-3")
    exported, other = EvalTarget.open(base / "out"), EvalTarget.open(copy)
    assert (of_run.step, of_run.seq_len, exported.step) == (3, 100, 3)
    assert exported.seq_len == VARIANTS["nope ABCD"].max_seq_len
    assert of_run.evals == base / "run" / "evals" and exported.evals is None
    ids = of_run.tokenizer.encode("the river of the house was not in it").tolist()
    assert exported.tokenizer.encode("the river of the house was not in it").tolist() == ids
    # the export's file is another one, made from the training tokenizer
    assert exported.tokenizer.sha256 != of_run.tokenizer.sha256
    assert exported.identity["tokenizer_sha256"] == of_run.identity["tokenizer_sha256"]
    # the place is another, what is evaluated is the same until a weight is
    assert exported.identity != other.identity
    assert question_of(exported.identity) == question_of(other.identity)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert other.identity["content"] != EvalTarget.open(copy).identity["content"]


def test_an_export_takes_data_for_what_reads_shards(base):
    with pytest.raises(UserError, match="out is an export, which names no data: .* --data"):
        EvalTarget.open(base / "out").check_held_out()
    with_data = EvalTarget.open(base / "out", base / "data")
    with_data.check_held_out()
    losses = []
    for target in (with_data, EvalTarget.open(base / "run" / "checkpoint" / "step-3")):
        lm = CanonLM(target.load(CPU), None, max_length=40)
        losses.append(model_loss(lm, target.held_out_shards, seq_len=40)[0].nats_per_token)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_exports_without_parts_say_what_is_missing(base, copy, tmp_path):
    (copy / "tokenizer.json").unlink()
    (copy / "canon_pretrain.json").unlink()  # as a folder of another making
    foreign = EvalTarget.open(copy)  # validation needs none
    assert foreign.step is None and foreign.identity["tokenizer_sha256"] is None
    with pytest.raises(UserError, match="Export the checkpoint with its tokenizer"):
        foreign.tokenizer  # noqa: B018
    write_data(tmp_path)  # shards that name no tokenizer
    with pytest.raises(UserError, match="another tokenizer than .* was trained with; its hash"):
        EvalTarget.open(base / "out", tmp_path)


def test_an_import_is_evaluated_by_its_export(copy, tmp_path):
    """Issue 17, item 9: its config.json is whole, but there is no run behind it."""
    found = import_folder(copy, tmp_path / "imported")
    for path in (found.checkpoint, found.checkpoint.parent):
        with pytest.raises(UserError, match="is an import.*canon_pretrain.hf export"):
            EvalTarget.open(path, None)


def test_text_or_a_tokenizer_of_another_vocabulary_is_refused(base, tmp_path):
    step = base / "run" / "checkpoint" / "step-3"
    write_data(tmp_path / "text")  # of another tokenizer
    with pytest.raises(UserError, match="another tokenizer than"):
        EvalTarget.open(step, held_out=tmp_path / "text").check_held_out()
    data = Path(shutil.copytree(base / "data", tmp_path / "data"))
    (data / "tokenizer.model").write_bytes(train_tokenizer([sentence(1, 999)], 290))
    with pytest.raises(UserError, match="expected"):
        EvalTarget.open(step, data).tokenizer  # noqa: B018

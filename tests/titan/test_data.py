"""The data of a job: one folder or several by weight, in either order, as a user trains on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.sampler import num_windows, permuted_offset
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.run.config import Data
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import read_log
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import absolute_folders, build_dataloader, open_shards
from canon_pretrain.titan.dry_run import make_plan, reference
from canon_pretrain.titan.identity import check_identity, run_identity
from canon_pretrain.train import main
from tests.support import EOS_ID, ROOT, VOCAB_SIZE, token_documents, train

BATCH, SEQ_LEN = 12, 64
WEIGHTS = [0.75, 0.25]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("sources")
    for k, name in enumerate(("web", "books")):
        documents = token_documents(7 + k, 40, length=200)
        write_shards(base / name / "train", documents, vocab_size=VOCAB_SIZE, eos_id=EOS_ID)
    return [base / "web", base / "books"]


def experiment(tmp_path: Path, **data: Any) -> list[str]:
    """The command line of debug.toml with this [data] section, into tmp_path/run."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    config = tmp_path / "experiment.toml"
    base = f"extends = {json.dumps(str(ROOT / 'train_configs' / 'debug.toml'))}"
    config.write_text("\n".join([base, "[data]", *lines]) + "\n")
    return ["--config", str(config), "--job.dump_folder", str(tmp_path / "run")]


def steps(tmp_path: Path) -> list[dict[str, Any]]:
    log = read_log(RunFolder(tmp_path / "run").log_file)
    return [event for event in log if event["event"] == "step"]


@pytest.mark.slow
def test_a_mixture_trains_stops_and_goes_on_at_another_world_size(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = experiment(tmp_path, paths=[str(f) for f in folders], weights=WEIGHTS)
    train(*argv, "--run.stop_at", 2, ranks=2)
    train(*argv, "--run.stop_at", 4)
    found = steps(tmp_path)
    assert [event["step"] for event in found] == [1, 2, 3, 4]
    blocks = [np.random.Philox(key=0, counter=(i - 1) % 2**256) for i in range(4 * BATCH)]
    is_books = [int(block.random_raw(2)[1]) >= 3 * 2**62 for block in blocks]
    for event in found:
        books = sum(is_books[: event["step"] * BATCH])
        tokens = {"web": event["step"] * BATCH - books, "books": books}
        assert event["source_tokens"] == {name: n * SEQ_LEN for name, n in tokens.items()}
        assert sum(event["source_tokens"].values()) == event["tokens"]
    with Mixture.open(folders, WEIGHTS) as mixture:
        config = RunFolder(tmp_path / "run").read_config()
        assert config["identity"]["data_fingerprint"] == mixture.fingerprint
    assert config["config"]["data"]["paths"] == [str(folder) for folder in folders]
    # other weights are another run
    other = experiment(tmp_path, paths=[str(f) for f in folders], weights=[0.5, 0.5])
    with pytest.raises(SystemExit) as left:
        main(other)
    assert left.value.code == 2
    assert "data_fingerprint: " in capsys.readouterr().err


def test_the_loader_of_a_job_has_its_order(folders: list[Path], tmp_path: Path) -> None:
    job = parse_job(experiment(tmp_path, path=str(folders[1]), order="permute"))
    inputs, labels = next(iter(build_dataloader(1, 0, None, job)))
    with TokenShards.open(folders[1] / "train") as shards:
        assert num_windows(shards.num_tokens, SEQ_LEN) > BATCH
        for j, (window, label) in enumerate(zip(inputs["input"], labels, strict=True)):
            offset = permuted_offset(0, j, shards.num_tokens, SEQ_LEN)
            expected = shards.read(offset, SEQ_LEN + 1).tolist()
            assert (window.tolist(), label.tolist()) == (expected[:-1], expected[1:])


def test_the_order_is_part_of_the_run(folders: list[Path], tmp_path: Path) -> None:
    permuted = parse_job(experiment(tmp_path, path=str(folders[1]), order="permute"))
    drawn = parse_job(experiment(tmp_path, path=str(folders[1])))
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.write_config({}, run_identity(permuted, "x"))
    with pytest.raises(UserError, match="data.order: 'permute' -> 'random'"):
        check_identity(run, run_identity(drawn, "x"), [])
    changes = check_identity(run, run_identity(drawn, "x"), ["data.order"])
    loader = build_dataloader(1, 0, None, permuted)
    next(iter(loader))
    state, other = loader.state_dict(), build_dataloader(1, 0, None, drawn)
    with pytest.raises(UserError, match="mode is 'permute' in the checkpoint, 'random' now"):
        other.load_state_dict(state)
    other.allow_changes(changes)
    other.load_state_dict(state)
    assert other.source_tokens == {"books": permuted.training.local_batch_size * SEQ_LEN}


def test_folders_and_weights_on_the_command_line(folders: list[Path], tmp_path: Path) -> None:
    paths = map(str, folders)
    argv = [*experiment(tmp_path), "--data.paths", *paths, "--data.weights", "0.75", "0.25"]
    job = parse_job(argv)
    assert job.data.folders == [str(folder) for folder in folders]
    assert job.data.shares == WEIGHTS
    plan = make_plan(job, reference("h200", 0.4), 2)
    with open_shards(job) as mixture:
        assert plan.data_fingerprint == mixture.fingerprint
        assert plan.data_bytes == 2 * mixture.num_tokens == 2 * 80 * 200


def test_what_a_run_records_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_folders(Data(path="a")) == {"path": f"{tmp_path}/a", "paths": []}
    both = Data(paths=["a", "/b"], weights=[1, 1])
    assert absolute_folders(both) == {"path": "", "paths": [f"{tmp_path}/a", "/b"]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "a", "paths": ["b"], "weights": [1]}, "data.path = 'a' and data.paths = "),
        ({"paths": ["a", "b"]}, "data.weights has 0 numbers for 2 folders of data.paths"),
        ({"path": "a", "weights": [1.0]}, "data.weights has 1 numbers for 0 folders"),
        ({"paths": ["a", "b"], "weights": [1, 0]}, "data.weights has 0, expected finite"),
        (
            {"paths": ["a", "b"], "weights": [1, 2], "order": "permute"},
            "'permute' takes one folder, not a weighted mixture",
        ),
        ({"path": "a", "order": "shuffled"}, "'data.order' = 'shuffled' is a string; expected one"),
    ],
)
def test_data_that_contradicts_itself_is_refused(
    tmp_path: Path, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_job(experiment(tmp_path, **data))
    assert message in str(caught.value)


def test_a_source_too_short_or_of_another_vocabulary_is_named(
    folders: list[Path], tmp_path: Path
) -> None:
    write_shards(tmp_path / "short" / "train", [np.arange(30)], vocab_size=512, eos_id=EOS_ID)
    both = [str(folders[0]), str(tmp_path / "short")]
    job = parse_job(experiment(tmp_path, paths=both, weights=[1, 1]))
    with pytest.raises(UserError, match="short holds 30 training tokens, fewer than one window"):
        open_shards(job)
    write_shards(tmp_path / "other" / "train", [np.arange(300)], vocab_size=600, eos_id=EOS_ID)
    other = [str(folders[0]), str(tmp_path / "other")]
    job = parse_job(experiment(tmp_path, paths=other, weights=[1, 1]))
    with pytest.raises(UserError, match="vocab_size is 512 in .*, 600 in .*other/train"):
        open_shards(job)


def test_the_vocabulary_is_that_of_the_data_unless_it_is_given(tmp_path: Path) -> None:
    """Issue 17, item 11."""
    write_shards(tmp_path / "other" / "train", [np.arange(300)], vocab_size=600, eos_id=EOS_ID)
    words = experiment(tmp_path, path=str(tmp_path / "other"))
    job = parse_job(words)
    assert job.model_args.vocab_size == 512  # the flavor's, before the data are read
    open_shards(job).close()
    assert job.model_args.vocab_size == 600
    with pytest.raises(UserError, match="model.vocab_size = 512.* 600"):
        open_shards(parse_job([*words, "--model.vocab_size", "512"]))

"""What ranks read at their start: small files once a node or once, and a node that differs."""

import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import canon_pretrain
from tests.ranks import Ended, assert_failed, events, launch
from tests.support import debug_run, token_documents, write_data


def on_nodes(rank: int, ranks_per_node: int, folder: Path, log: Path | None = None) -> None:
    """Put in by a rank before it starts: it is of node K, in whose `folder`/K it stands, and writes
    down what it opens, if anything is to be."""
    node, local_rank = divmod(rank, ranks_per_node)
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    os.chdir(folder / str(node))
    if log is None:
        return
    descriptor = os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT)

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open" and isinstance(arguments[0], (str, os.PathLike)):
            os.write(descriptor, f"{os.fspath(arguments[0])}\n".encode())

    sys.addaudithook(hook)


def opened(log: Path, ranks: int) -> list[Counter[str]]:
    """How often each rank has opened each file."""
    return [Counter(Path(f"{log}-{rank}").read_text().splitlines()) for rank in range(ranks)]


def test_small_files_are_read_once_a_node_or_once(data_folder: Path, tmp_path: Path) -> None:
    """Two nodes of two ranks, each node a replica: a start, and a resume."""
    run, log = tmp_path / "run", tmp_path / "opened"
    for node in "01":
        (tmp_path / node).mkdir()
    words = ("--training.steps", 4, "--parallelism.data_parallel_replicate_degree", 2)
    marks = {str(path) for path in data_folder.glob("*/part-*.json")}
    manifests = {str(path) for path in data_folder.glob("*/manifest.json")}
    assert len(marks) == len(manifests) == 2  # of train and validation
    code = str(Path(canon_pretrain.__file__).parent / "core/files.py")
    for name, more in (("start", ("--run.stop_at", 2)), ("resume", ())):
        log = tmp_path / name
        launch(
            *(*debug_run(data_folder, run), *words, *more),
            ranks=4,
            output=tmp_path / "out",
            before=on_nodes,
            before_args=(2, tmp_path, log),
        )
        found = opened(log, 4)
        for path in marks | manifests:
            assert [count[path] for count in found] == [1, 0, 1, 0], path
        assert [count[code] > 0 for count in found] == [True, False, False, False]  # to be hashed
        assert [count[str(run / "config.json")] > 0 for count in found[1:]] == [False] * 3
    checkpoint = run / "checkpoint" / "step-2"
    # rank 0 opens it once to resume; its retention hashes it again, after the last save
    assert [count[str(checkpoint / ".metadata")] > 0 for count in found] == [True] + [False] * 3
    assert [count[str(checkpoint / "manifest.json")] for count in found[1:]] == [0, 0, 0]
    shards = [str(path) for path in checkpoint.glob("*.distcp")]
    assert all(any(count[path] for path in shards) for count in found)
    assert [event["from_step"] for event in events(run, "resume")] == [2]


def start_on_two_nodes(tmp_path: Path) -> Ended:
    """A launch that reads ./data, which each of its two ranks has on a disk of its own."""
    return launch(
        *debug_run(Path("data"), tmp_path / "run"),
        ranks=2,
        output=tmp_path / "out",
        check=False,
        before=on_nodes,
        before_args=(1, tmp_path),
    )


def test_a_node_with_other_data_is_named(tmp_path: Path) -> None:
    from canon_pretrain.data.shard_writer import write_shards

    write_data(tmp_path / "0" / "data")
    shutil.copytree(tmp_path / "0" / "data", tmp_path / "1" / "data")
    shutil.rmtree(tmp_path / "1" / "data" / "validation")
    documents = token_documents(3, 8, length=200)
    options = {"vocab_size": 512, "eos_id": 2, "num_bytes": [600] * 8}
    write_shards(tmp_path / "1" / "data" / "validation", documents, **options)  # type: ignore
    ended = start_on_two_nodes(tmp_path)
    assert_failed(ended, 2)
    assert ended.output.count("does not hold the same data on all nodes") == 1
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_damaged_mark_on_one_node_ends_the_launch(tmp_path: Path) -> None:
    write_data(tmp_path / "0" / "data")
    shutil.copytree(tmp_path / "0" / "data", tmp_path / "1" / "data")
    mark = tmp_path / "1" / "data" / "train" / "part-00000-0.json"
    mark.write_text(mark.read_text().replace("}", " }"))
    ended = start_on_two_nodes(tmp_path)
    # the other node waits for this one until it is killed, as by srun
    assert ended.codes[1] == 2 and ended.codes[0] < 0
    assert ended.output.count("commit mark's hash does not fit") == 1

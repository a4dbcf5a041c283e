"""`eval run` over whole suites by their task files, on fixtures: ranks, kills, full disks."""

import json
import shutil
import subprocess
import time

import pytest

from canon_pretrain.run.results import RESULTS, read_results, read_samples
from eval.__main__ import main
from eval.suite_names import SUITES
from tests.checkpoint_folders import small_disk
from tests.commands import Command
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.eval_text_runs import write_run
from tests.ports import free_port
from tests.support import HANGS_AFTER_S, command_error, error_codes

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """run/ and data/ of an untrained model, and staged/: a small data set of every schema."""
    base = tmp_path_factory.mktemp("suites")
    texts = [row["input"] for row in rows_of("babilong_qa1_4k") + rows_of("babilong_qa3_1k")]
    write_run(base, 700, texts)
    stage_fixtures(base / "staged")
    return base


def command(base, suite, out, *words):
    """Return the words of `eval` that evaluate a suite on the run, with the staged data."""
    argv = [
        "run",
        *("--checkpoint", base / "run/checkpoint/step-3"),
        *("--suite", suite),
        *("--out", out),
        *("--staged", base / "staged"),
        *("--batch_tokens", 4096),
        *words,
    ]
    return [*map(str, argv)]


def start(words, folder, ranks=1):
    """Start `eval` as processes that are connected as torchrun's are; each has an output file."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        output = folder / f"rank-{rank}.txt"
        processes.append(Command("eval", *words, stdout=output, environment=environment))
    return processes


def results_in(out):
    """Return the results of the suites in a folder by name."""
    return {path.parent.name: read_results(path) for path in sorted(out.glob(f"*/{RESULTS}"))}


def assert_scores_are_means(results, samples):
    """Each score of birth-year is the mean over its two items."""
    for task, scores in results.scores.items():
        for metric, score in scores.items():
            first, second = [sample[metric] for sample in samples[task]]
            assert score.value == pytest.approx((first + second) / 2)


def test_all_suites_alike_on_one_rank_and_on_two(base, tmp_path, capsys):
    """Scores and every item's record, bit for bit."""
    words = ("--limit", 2, "--option", "jrt_tokens=120")

    main(command(base, "all", tmp_path / "one", *words))
    printed = capsys.readouterr().out
    ranks = start(command(base, "all", tmp_path / "two", *words), tmp_path, ranks=2)
    assert [rank.wait(HANGS_AFTER_S) for rank in ranks] == [0, 0]

    of_one = results_in(tmp_path / "one")
    of_two = results_in(tmp_path / "two")
    assert set(of_one) == set(of_two) == set(SUITES)
    for suite in SUITES:
        assert of_one[suite] == of_two[suite]
        assert suite in printed
        samples = read_samples(tmp_path / "one" / suite)
        assert samples == read_samples(tmp_path / "two" / suite)
        assert set(samples) == ({suite} if suite == "validation" else set(of_one[suite].scores))

    assert_scores_are_means(of_one["birth-year"], read_samples(tmp_path / "one" / "birth-year"))
    # each score of Figures 17 and 25
    num_tasks = [len(of_one[suite].scores) for suite in ("discriminative", "jrt", "babilong")]
    assert num_tasks == [9, 12, 20]
    assert of_one["jrt"].asked["tasks"]["jrt_fda"]["counts"]["kept"] > 0

    # only rank 0 prints
    printed_by_two = "".join((tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    assert printed_by_two.count("written to") == len(SUITES)


def test_a_missing_data_set_is_refused_first(base, tmp_path, capsys):
    shutil.copytree(base / "staged", tmp_path / "staged")
    shutil.rmtree(tmp_path / "staged" / "babilong_qa5_4k")
    with pytest.raises(SystemExit, match="2"):
        main(command(base, "all", tmp_path / "out", "--staged", tmp_path / "staged"))
    error = capsys.readouterr().err
    assert error_codes(error) == ["stage.missing"]
    assert f"--only babilong_qa5_4k --to {tmp_path}" in error
    assert not [*tmp_path.glob(f"out/**/{RESULTS}")]


def test_a_kill_loses_only_the_running_task(base, tmp_path, capsys):
    killed = tmp_path / "killed"
    kept = killed / "unfinished"
    words = command(base, "jrt", killed, "--max_length", 1000)
    (process,) = start(words, tmp_path)
    try:
        end = time.monotonic() + HANGS_AFTER_S
        while len([*kept.glob("*.task.json")]) < 2 and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    num_done = len([*kept.glob("*.task.json")])
    assert 2 <= num_done < 12
    assert not (killed / RESULTS).exists()

    (kept / "jrt_fda.task.json.tmp").write_text("{torn")
    capsys.readouterr()
    main(words)
    assert f"resumed after {num_done} " in capsys.readouterr().out
    assert not kept.exists()

    whole = tmp_path / "whole"
    main(command(base, "jrt", whole, "--max_length", 1000))
    assert read_results(killed / RESULTS) == read_results(whole / RESULTS)
    assert read_samples(killed) == read_samples(whole)


def test_a_full_disk_keeps_what_was_written(base, tmp_path, capsys):
    disk = tmp_path / "small"
    out = disk / "x"
    with small_disk(disk, "size=96k"):
        words = command(base, "jrt", out, "--max_length", 1000)
        assert command_error(capsys, main, words) == "eval.cannot_write"
        assert not (out / RESULTS).exists()
        kept = [*(out / "unfinished").glob("*.task.json")]
        assert kept
        for path in kept:
            assert json.loads(path.read_text())["samples"]

        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        main(words)
        assert f"resumed after {len(kept)} " in capsys.readouterr().out
        assert len(read_results(out / RESULTS).scores) == 12

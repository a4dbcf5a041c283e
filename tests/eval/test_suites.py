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
from tests.support import error_codes

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
    argv = ["run", "--checkpoint", base / "run/checkpoint/step-3", "--suite", suite, "--out", out]
    argv += ["--staged", base / "staged", "--batch_tokens", 4096, *words]
    return [*map(str, argv)]


def start(words, folder, ranks=1):
    """Start `eval` as processes that are connected as torchrun's are; each has an output file."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        output = folder / f"rank-{rank}.txt"
        processes.append(Command("eval", *words, stdout=output, environment=variables))
    return processes


def results_in(out):
    return {path.parent.name: read_results(path) for path in sorted(out.glob(f"*/{RESULTS}"))}


def test_all_suites_alike_on_one_rank_and_on_two(base, tmp_path, capsys):
    """Scores and every item's record, bit for bit."""
    words = ("--limit", 2, "--option", "jrt_tokens=120")
    main(command(base, "all", tmp_path / "one", *words))
    printed = capsys.readouterr().out
    ranks = start(command(base, "all", tmp_path / "two", *words), tmp_path, ranks=2)
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    printed_by_two = "".join((tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    one, two = results_in(tmp_path / "one"), results_in(tmp_path / "two")
    assert set(one) == set(two) == set(SUITES)
    for suite in SUITES:
        assert one[suite] == two[suite] and suite in printed
        samples = read_samples(tmp_path / "one" / suite)
        assert samples == read_samples(tmp_path / "two" / suite)
        assert set(samples) == ({suite} if suite == "validation" else set(one[suite].scores))
    samples = read_samples(tmp_path / "one" / "birth-year")
    for task, scores in one["birth-year"].scores.items():
        for metric, score in scores.items():
            values = [sample[metric] for sample in samples[task]]
            assert len(values) == 2 and score.value == pytest.approx(sum(values) / 2)
    # each score of Figures 17 and 25
    assert [len(one[s].scores) for s in ("discriminative", "jrt", "babilong")] == [9, 12, 20]
    assert one["jrt"].asked["tasks"]["jrt_fda"]["counts"]["kept"] > 0
    assert printed_by_two.count("written to") == len(SUITES)  # only rank 0 prints


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
    words = command(base, "jrt", tmp_path / "killed", "--max_length", 1000)
    (process,) = start(words, tmp_path)
    kept = tmp_path / "killed" / "unfinished"
    try:
        end = time.monotonic() + 120
        while len([*kept.glob("*.task.json")]) < 2 and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    done = len([*kept.glob("*.task.json")])
    assert 2 <= done < 12 and not (tmp_path / "killed" / RESULTS).exists()
    (kept / "jrt_fda.task.json.tmp").write_text("{torn")
    capsys.readouterr()
    main(words)
    assert f"resumed after {done} " in capsys.readouterr().out
    main(command(base, "jrt", tmp_path / "whole", "--max_length", 1000))
    assert read_results(tmp_path / "killed" / RESULTS) == read_results(tmp_path / "whole" / RESULTS)
    assert read_samples(tmp_path / "killed") == read_samples(tmp_path / "whole")
    assert not kept.exists()


def test_a_full_disk_keeps_what_was_written(base, tmp_path, capsys):
    out = tmp_path / "small"
    with small_disk(out, "size=96k"):
        words = command(base, "jrt", out / "x", "--max_length", 1000)
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert error_codes(capsys.readouterr().err) == ["eval.cannot_write"]
        assert not (out / "x" / RESULTS).exists()
        kept = [*(out / "x" / "unfinished").glob("*.task.json")]
        assert kept and all(json.loads(path.read_text())["samples"] for path in kept)
        subprocess.run(["mount", "-o", "remount,size=10m", out], check=True)
        main(words)
        assert f"resumed after {len(kept)} " in capsys.readouterr().out
        assert len(read_results(out / "x" / RESULTS).scores) == 12

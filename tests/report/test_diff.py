"""`run diff`: each planted difference is found in its section."""

import json
import math

import pytest

from canon_pretrain.report.diff import RTOL, Digests, compare, compare_digests, compare_losses
from canon_pretrain.report.record import Curve, RunRecord
from canon_pretrain.run.log import Event
from tests.report_runs import FINGERPRINT, launch, plant_run, run_command, step
from tests.support import error_codes


def lines(last, every=10, changed=()):
    """Return step events to `last` with data digests, others at the steps `changed`."""
    digests = [f"{k:015x}{int(k in changed)}" for k in range(1, last + 1)]
    steps = range(every, last + 1, every)
    return [Event(step(k, 5 - k / 1000), data_digests=digests[k - every : k]) for k in steps]


def plant_launch(run, number=1, **changes):
    """Write RUN/launches/NNN; a key of `changes` updates the fields of a file."""
    folder = run.path / "launches" / f"{number:03}"
    folder.mkdir(parents=True)
    facts = {"launch": number, "hosts": [f"node-{run.path.name}"], "python": "3.11.7"}
    facts["devices"] = {"type": "cuda", "count": 8, "names": ["H100"]}
    facts["git"] = {"commit": "c0ffee", "untracked": [], "problem": None} | changes.get("git", {})
    (folder / "launch.json").write_text(json.dumps(facts | changes.get("launch", {})))
    packages = {"numpy": "2.1.0", "torch": "2.13.0"} | changes.get("packages", {})
    (folder / "packages.txt").write_text("".join(f"{k}=={v}\n" for k, v in packages.items()))
    around = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": run.path.name} | changes.get("around", {})
    (folder / "environment.json").write_text(json.dumps(around))
    if patch := changes.get("patch"):
        (folder / "source.patch").write_text(patch)


def found(a, b):
    return compare(RunRecord(a.path), RunRecord(b.path), rtol=RTOL)


@pytest.fixture
def pair(tmp_path):
    def plant(a, b, **identity):
        """Plant two runs that differ in their logs, and in `identity`."""
        given = (("a", a, {}), ("b", b, identity))
        return [plant_run(tmp_path / x, [launch("start"), *log], **more) for x, log, more in given]

    return plant


@pytest.mark.parametrize(
    ("changed", "every", "first"),
    [(range(1, 61), 4, 1), (range(11, 61), 4, 11), ([60], 4, 60), ([23], 10, 23), ([], 10, None)],
)
def test_first_step_with_other_data(changed, every, first):
    result = compare_digests(lines(60), lines(60, every, changed))
    assert result == Digests((60, 60), 60, len(changed), first, last_common=60)
    # steps that one run did not log are not compared
    result = compare_digests(lines(60), lines(30) + lines(90)[6:])
    assert (result.common, result.last_common, result.different) == (30, 30, 0)


def test_of_repeated_steps_the_last_is_compared(pair):
    lost = lines(40, changed=range(21, 41))[2:]
    interrupted = [*lines(20), *lost, launch("resume", from_step=20), *lines(60)[2:]]
    result = found(*pair(lines(60), interrupted))
    assert result.same and result.data_digests.common == 60
    assert found(*pair(lines(60), [*lines(20), *lost])).data_digests.first_different == 21


def test_first_step_with_losses_beyond_the_tolerance():
    """Also where losses are not finite."""

    def losses(*values):
        return Curve.of(enumerate(values, 1))

    ours = losses(4.0, 3.0, 2.0, 1.0, 1.0)
    theirs = losses(4.0, 3.0 * (1 + 1e-7), 2.0 * (1 + 2e-4), 1.5, 1.0)
    for rtol, first in ((1e-4, 3), (1e-3, 4), (0.5, None)):
        result = compare_losses(ours, theirs, rtol)
        assert (result.first_unequal, result.first_beyond) == (2, first)
        assert result.largest == pytest.approx(0.5 / 1.5) and result.largest_step == 4
    values = [math.nan, math.inf, 0.0, 1.0]
    assert compare_losses(losses(*values), losses(*values), 1e-4).first_unequal is None
    for k, value in enumerate((1.0, -math.inf, math.nan, math.nan)):
        theirs = losses(*values[:k], value, *values[k + 1 :])
        result = compare_losses(losses(*values), theirs, 1e-4)
        assert result.first_beyond == k + 1 and result.largest == math.inf
    assert compare_losses(losses(*values), None, 1e-4).common == 0


def test_runs_that_differ_in_their_jobs_only_are_the_same(pair, capsys):
    a, b = pair(lines(60), lines(40))
    plant_launch(a, patch="+ an older line")
    for run, number in ((a, 2), (a, 10), (b, 1)):
        plant_launch(run, number)
    assert run_command("diff", a.path, b.path) == 0  # the newest launch is compared
    assert "SLURM_JOB_ID" not in capsys.readouterr().out
    assert run_command("diff", a.path, b.path, "--all") == 0
    assert "SLURM_JOB_ID" in capsys.readouterr().out


def test_each_difference_is_in_its_section(pair):
    changes = {"optimizer.lr": 0.002, "data_fingerprint": "f" * 64, "guards.outlier_sigma": 6.0}
    a, b = pair(lines(20), lines(20), **changes)
    stored = b.read_config()
    jobs = {"job": stored["config"]["job"] | {"dump_folder": str(b.path)}}
    b.write_config(stored["config"] | jobs | {"training": {"compile": True}}, stored["identity"])
    plant_launch(a, patch="+ one line")
    plant_launch(
        b,
        git={"commit": "decaf", "untracked": ["notes.py"]},
        packages={"torch": "2.11.0", "triton": "3.6.0"},
        around={"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"},
        launch={"devices": {"type": "cpu", "count": 2, "names": []}},
    )
    result = found(a, b)
    differences = {name: part.differences for name, part in result.sections.items()}
    code, devices = differences.pop("code"), {"devices.type": ["cuda", "cpu"]}
    devices |= {"devices.count": [8, 2], "devices.names": [["H100"], []]}
    assert differences == {
        "identity": {"optimizer.lr": [0.004, 0.002], "guards.outlier_sigma": [None, 6.0]},
        "data": {"data_fingerprint": [FINGERPRINT, "f" * 64]},
        "config": {"training.compile": [None, True]},
        "packages": {"torch": ["2.13.0", "2.11.0"], "triton": [None, "3.6.0"]},
        "environment": {"NCCL_DEBUG": [None, "INFO"], "OMP_NUM_THREADS": ["1", "4"], **devices},
        "launch": {},
    }
    assert code.keys() == {"commit", "patch", "untracked"}
    assert code["commit"] == ["c0ffee", "decaf"] and code["patch"][1] is None
    assert result.sections["launch"].own.keys() == {"hosts"}
    assert result.sections["config"].own.keys() == {"job.dump_folder"}
    assert not result.same


def test_exit_codes_and_json(pair, tmp_path, capsys):
    a, b = pair(lines(60), lines(60, changed=[23]))
    assert run_command("diff", a.path, b.path, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["data_digests"]["first_different"] == 23 and document["same"] is False
    b.log_file.unlink()
    for words in ([tmp_path / "nothing"], [b.path], [a.path, "--rtol", "-1"]):
        assert run_command("diff", a.path, *words) == 2
        assert len(error_codes(capsys.readouterr().err)) == 1


@pytest.mark.system
def test_a_real_run_and_a_resumed_one_differ_in_launches(runs, capsys):
    code = run_command("diff", runs.straight, runs.resumed, "--json", "--rtol", "0")
    document = json.loads(capsys.readouterr().out)
    found, sections = document["data_digests"], document["sections"]
    assert (found["common"], found["first_different"]) == (12, None)
    assert document["losses"]["first_unequal"] is None
    assert sections["launch"]["own"] == {"launches": [1, 2]}
    different = {name for name, part in sections.items() if part["differences"]}
    assert code == bool(different) and different <= {"environment"}  # torchrun sets variables

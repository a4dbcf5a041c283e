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
    return [
        Event(step(k, 5 - k / 1000), data_digests=digests[k - every : k])
        for k in range(every, last + 1, every)
    ]


def plant_launch(run, number=1, *, launch=None, git=None, packages=None, around=None, patch=None):
    """Write RUN/launches/NNN; `launch`, `git`, `packages` and `around` update fields of files."""
    folder = run.path / "launches" / f"{number:03}"
    folder.mkdir(parents=True)

    record = {
        "launch": number,
        "hosts": [f"node-{run.path.name}"],
        "python": "3.11.7",
        "devices": {"type": "cuda", "count": 8, "names": ["H100"]},
        "git": {"commit": "c0ffee", "untracked": [], "problem": None} | (git or {}),
    }
    (folder / "launch.json").write_text(json.dumps(record | (launch or {})))

    versions = {"numpy": "2.1.0", "torch": "2.13.0"} | (packages or {})
    requirements = [f"{name}=={version}\n" for name, version in versions.items()]
    (folder / "packages.txt").write_text("".join(requirements))

    environment = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": run.path.name} | (around or {})
    (folder / "environment.json").write_text(json.dumps(environment))

    if patch is not None:
        (folder / "source.patch").write_text(patch)


def diff(a, b):
    """Compare two planted runs."""
    return compare(RunRecord(a.path), RunRecord(b.path), rtol=RTOL)


@pytest.fixture
def pair(tmp_path):
    """Return the function that plants two runs."""

    def plant(log_a, log_b, **identity):
        """Plant runs with these logs; `identity` changes fields of the second."""
        a = plant_run(tmp_path / "a", [launch("start"), *log_a])
        b = plant_run(tmp_path / "b", [launch("start"), *log_b], **identity)
        return a, b

    return plant


@pytest.mark.parametrize(
    ("changed", "every", "first"),
    [(range(1, 61), 4, 1), (range(11, 61), 4, 11), ([60], 4, 60), ([23], 10, 23), ([], 10, None)],
)
def test_first_step_with_other_data(changed, every, first):
    result = compare_digests(lines(60), lines(60, every, changed))

    assert result == Digests((60, 60), 60, len(changed), first, last_common=60)


def test_data_of_steps_that_one_run_did_not_log_is_not_compared():
    without_31_to_60 = lines(30) + lines(90)[6:]

    result = compare_digests(lines(60), without_31_to_60)

    assert (result.common, result.last_common, result.different) == (30, 30, 0)


def test_of_repeated_steps_the_last_is_compared(pair):
    lost = lines(40, changed=range(21, 41))[2:]
    interrupted = [*lines(20), *lost, launch("resume", from_step=20), *lines(60)[2:]]
    result = diff(*pair(lines(60), interrupted))
    assert result.same
    assert result.data_digests.common == 60

    not_resumed = diff(*pair(lines(60), [*lines(20), *lost]))
    assert not_resumed.data_digests.first_different == 21


def losses(*values):
    """Return the curve of these losses at steps 1, 2, 3 and so on."""
    return Curve.of(enumerate(values, 1))


@pytest.mark.parametrize(("rtol", "first_beyond"), [(1e-4, 3), (1e-3, 4), (0.5, None)])
def test_first_step_with_losses_beyond_the_tolerance(rtol, first_beyond):
    ours = losses(4.0, 3.0, 2.0, 1.0, 1.0)
    theirs = losses(4.0, 3.0 * (1 + 1e-7), 2.0 * (1 + 2e-4), 1.5, 1.0)

    result = compare_losses(ours, theirs, rtol)

    assert (result.first_unequal, result.first_beyond) == (2, first_beyond)
    assert result.largest == pytest.approx(0.5 / 1.5)
    assert result.largest_step == 4


def test_losses_that_are_not_finite_are_compared():
    values = [math.nan, math.inf, 0.0, 1.0]
    equal = compare_losses(losses(*values), losses(*values), 1e-4)
    assert equal.first_unequal is None

    for k, other_value in enumerate((1.0, -math.inf, math.nan, math.nan)):
        other = losses(*values[:k], other_value, *values[k + 1 :])
        result = compare_losses(losses(*values), other, 1e-4)
        assert result.first_beyond == k + 1
        assert result.largest == math.inf

    assert compare_losses(losses(*values), None, 1e-4).common == 0


def test_runs_that_differ_in_their_jobs_only_are_the_same(pair, capsys):
    a, b = pair(lines(60), lines(40))
    plant_launch(a, patch="+ an older line")
    plant_launch(a, 2)
    plant_launch(a, 10)
    plant_launch(b, 1)

    # the newest launch is compared
    assert run_command("diff", a.path, b.path) == 0
    assert "SLURM_JOB_ID" not in capsys.readouterr().out

    assert run_command("diff", a.path, b.path, "--all") == 0
    assert "SLURM_JOB_ID" in capsys.readouterr().out


def test_each_difference_is_in_its_section(pair):
    a, b = pair(
        lines(20),
        lines(20),
        optimizer__lr=0.002,
        data_fingerprint="f" * 64,
        guards__outlier_sigma=6.0,
    )
    stored = b.read_config()
    changed_config = {
        "job": stored["config"]["job"] | {"dump_folder": str(b.path)},
        "training": {"compile": True},
    }
    b.write_config(stored["config"] | changed_config, stored["identity"])
    plant_launch(a, patch="+ one line")
    plant_launch(
        b,
        git={"commit": "decaf", "untracked": ["notes.py"]},
        packages={"torch": "2.11.0", "triton": "3.6.0"},
        around={"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"},
        launch={"devices": {"type": "cpu", "count": 2, "names": []}},
    )

    result = diff(a, b)

    assert not result.same
    differences = {name: section.differences for name, section in result.sections.items()}
    code = differences.pop("code")
    assert differences == {
        "identity": {"optimizer.lr": [0.004, 0.002], "guards.outlier_sigma": [None, 6.0]},
        "data": {"data_fingerprint": [FINGERPRINT, "f" * 64]},
        "config": {"training.compile": [None, True]},
        "packages": {"torch": ["2.13.0", "2.11.0"], "triton": [None, "3.6.0"]},
        "environment": {
            "NCCL_DEBUG": [None, "INFO"],
            "OMP_NUM_THREADS": ["1", "4"],
            "devices.type": ["cuda", "cpu"],
            "devices.count": [8, 2],
            "devices.names": [["H100"], []],
        },
        "launch": {},
    }
    assert code.keys() == {"commit", "patch", "untracked"}
    assert code["commit"] == ["c0ffee", "decaf"]
    assert code["patch"][1] is None

    # what differs between any two jobs
    assert result.sections["launch"].own.keys() == {"hosts"}
    assert result.sections["config"].own.keys() == {"job.dump_folder"}


def test_exit_codes_and_json(pair, tmp_path, capsys):
    a, b = pair(lines(60), lines(60, changed=[23]))

    assert run_command("diff", a.path, b.path, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["data_digests"]["first_different"] == 23
    assert document["same"] is False

    b.log_file.unlink()
    for words in ([tmp_path / "nothing"], [b.path], [a.path, "--rtol", "-1"]):
        assert run_command("diff", a.path, *words) == 2
        assert len(error_codes(capsys.readouterr().err)) == 1


@pytest.mark.system
def test_a_real_run_and_a_resumed_one_differ_in_launches(runs, capsys):
    code = run_command("diff", runs.straight, runs.resumed, "--json", "--rtol", "0")

    document = json.loads(capsys.readouterr().out)
    digests = document["data_digests"]
    assert (digests["common"], digests["first_different"]) == (12, None)
    assert document["losses"]["first_unequal"] is None

    sections = document["sections"]
    different = {name for name, section in sections.items() if section["differences"]}
    assert sections["launch"]["own"] == {"launches": [1, 2]}
    assert different <= {"environment"}  # torchrun sets variables
    assert code == bool(different)

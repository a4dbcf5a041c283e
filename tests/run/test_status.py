"""status.json: atomic writes, counts of launches, and which runs are hung or dead."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from canon_pretrain.run.status import Status, StatusWriter, health, read_status

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "status.json"


def writer_of(path, **environ):
    return StatusWriter(path, steps=100, world_size=4, environ=environ)


def test_readers_never_see_a_partial_status(path):
    """Several threads write; step and reason always match."""
    writer, seen = writer_of(path), set[int]()
    writer.write()

    def train(step):
        writer.set(step=step, reason=f"{step}" * (step % 50))
        assert writer.write()

    with ThreadPoolExecutor(3) as pool:
        trained = [pool.submit(train, step) for step in range(1, 500)]
        while not trained[-1].done():
            status = read_status(path)
            assert status is not None and status.reason == f"{status.step}" * (status.step % 50)
            seen.add(status.step)
    assert [each.result() for each in trained] == [None] * 499 and len(seen) > 10
    assert [each.name for each in path.parent.iterdir()] == ["status.json"]


def test_launches_are_counted_and_their_ends_written(path):
    for launch in (1, 2, 3):
        writer = writer_of(path)
        assert (writer.status.state, writer.status.step) == ("running", 0)
        assert writer.end("stopped", "SIGTERM", 5)
        status = read_status(path)
        assert status is not None and status.launches == launch
        found = (status.state, status.reason, status.step, status.phase)
        assert found == ("stopped", "SIGTERM", 5, "ended")
    writer.end("failed", "OutOfMemoryError: 1 GiB", 6)
    writer.end("stopped", "SIGTERM", 7)
    status = read_status(path)
    assert status is not None and (status.state, status.step) == ("failed", 6), "a failure is kept"
    path.write_text("{")
    assert writer_of(path).status.launches == 1, "a damaged status is replaced"


def status_of(written_s, heartbeat_s, **values):
    """Return a status written so many seconds before NOW."""
    fields: dict[str, object] = {"state": "running", "step": 1, "steps": 9, "phase": "training"}
    fields["written"] = (NOW - timedelta(seconds=written_s)).isoformat()
    fields["heartbeat"] = (NOW - timedelta(seconds=heartbeat_s)).isoformat()
    return Status(**(fields | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written_s", "heartbeat_s", "values", "expected"),
    [
        (1, 2, {"seconds_per_step": 1.0}, "running"),
        (1, 5, {"seconds_per_step": 1.0}, "slow"),
        (1, 62, {"seconds_per_step": 1.0}, "hung"),
        # a step of 20 s counts as hung after 200 s
        (1, 150, {"seconds_per_step": 20.0}, "slow"),
        (1, 202, {"seconds_per_step": 20.0}, "hung"),
        # steps after the file was written are not in it
        (9, 9.1, {"seconds_per_step": 0.1}, "running"),
        (61, 61, {"seconds_per_step": 0.1}, "dead"),
        # no step yet: compilation may take long
        (1, 900, {}, "running"),
        (1, 1802, {}, "hung"),
        (1, 900, {"phase": "saving", "seconds_per_step": 1.0}, "running"),
        (1, 1802, {"phase": "saving", "seconds_per_step": 1.0}, "hung"),
        # the reader's clock is behind
        (-30, -30, {"seconds_per_step": 1.0}, "running"),
        (9000, 9000, {"state": "stopped", "phase": "ended"}, "stopped"),
    ],
)
def test_health(written_s, heartbeat_s, values, expected):
    assert health(status_of(written_s, heartbeat_s, **values), NOW.astimezone()) == expected

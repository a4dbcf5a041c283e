"""The speed of the synthetic tasks."""

from canon_pretrain.synthetic.tasks import TASKS
from tests.bench import __main__ as benches
from tests.bench import synthetic


def test_bench_prints_a_rate_per_task(capsys, monkeypatch):
    monkeypatch.setattr(synthetic, "SECONDS", 0.001)
    monkeypatch.setattr(synthetic, "WINDOWS", 2)
    benches.main(["synthetic"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)

"""Results on disk: what is kept while a suite runs, and what damage does to it."""

from canon_pretrain.run.results import PartialResults, Score, TaskResult

ASKED = {"checkpoint": "c", "step": 3, "suite": "s", "limit": None, "train_fingerprint": "f"}
SAMPLES = [{"doc_id": 0, "acc": 1}, {"doc_id": 1, "acc": 0}]
ANSWERS = TaskResult({"acc": Score(0.5, 0.1)}, 2, SAMPLES)


def test_what_ended_is_kept_and_read_for_its_question_alone(tmp_path):
    kept = PartialResults(tmp_path, ASKED)
    other = PartialResults(tmp_path, ASKED | {"content": "other"})
    kept.add("first", ANSWERS)
    kept.add("a/b", ANSWERS)
    assert PartialResults(tmp_path, ASKED).read() == {"first": ANSWERS, "a/b": ANSWERS}
    assert other.read() == {}
    for torn in ("", "{", '{"task": "first"}', "null"):  # asked again
        (tmp_path / "unfinished" / "first.task.json").write_text(torn)
        assert list(kept.read()) == ["a/b"]
    kept.remove()
    assert not [*tmp_path.iterdir()]

"""`canon synthetic`: show, score and stats."""

import contextlib
import json

import pytest

from canon_pretrain.synthetic.tasks import TASKS, build_task
from tests.support import canon_stage, error_codes


def run(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) if code else contextlib.nullcontext() as stopped:
        canon_stage("synthetic")(arguments)
    assert not code or stopped.value.code == code
    return capsys.readouterr()


def test_window_is_shown_as_json_and_as_words(capsys):
    task = build_task("copy", {"n": 3, "seq_len": 11})
    ids = task.windows(4, 2, 1).ids[0].tolist()
    command = ["show", "copy", "--set", "n=3", "seq_len=11", "--seed", 4, "--index", 2]

    printed = json.loads(run(capsys, *command, "--json").out)
    assert printed == {"ids": ids, "loss_mask": [0] * 5 + [1] * 3 + [0] * 3}

    a, b, c = ids[1:4]
    text = f"<bos> {a} {b} {c} <query> [{a} {b} {c}]\n<bos> {ids[9]} {ids[10]}\n"
    assert run(capsys, *command).out == text


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_shown_and_described(capsys, name):
    task = build_task(name, {})
    words = " ".join(map(task.word, task.windows(0, 0, 1).ids[0].tolist())).split()
    assert run(capsys, "show", name).out.replace("[", "").replace("]", "").split() == words
    assert f" {task.vocab_size:,}" in run(capsys, "stats", name, "--windows", 2).out


def test_score_counts_right_and_wrong(capsys, tmp_path):
    questions = list(build_task("mano", {"l": 3}).questions(0, 0, 1))[:40]
    lines = [{"prompt": question.prompt, "answer": question.answer} for question in questions]
    lines[5]["answer"] = []
    lines[6]["answer"] = [26]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    for more in (["--set", "l=3", "seq_len=99", path], [path, "--set", "l=3"]):
        printed = run(capsys, "score", "mano", *more)
        assert json.loads(printed.out) == {"right": 38, "wrong": 2}
        assert "1 empty" in printed.err and "1 malformed" in printed.err


def test_bad_line_is_refused_with_its_number(capsys, tmp_path):
    path = tmp_path / "answers.jsonl"
    good = '{"prompt": [27, 29, 24, 1, 1, 28], "answer": [1]}\n'
    no_json = ("{", "", '{"prompt": [1]}', '{"prompt": [1], "answer": ["2"]}', "[1]")
    for line in (*no_json, '{"prompt": [1], "answer": []}'):
        path.write_text(f"{good}{good}{line}\n")
        printed = run(capsys, "score", "mano", path, code=2)
        code = "task.line" if line in no_json else "task.prompt"
        assert (printed.out, error_codes(printed.err)) == ("", [code])
        assert "line 3" in printed.err


def test_bad_arguments_exit_with_2(capsys):
    for arguments, code in {
        "show copy --set m=3": "task.unknown_setting",
        "show cpoy": "config.unknown_choice",
        "score copy /no/file": "file.os_error",
    }.items():
        assert error_codes(run(capsys, *arguments.split(), code=2).err) == [code]
    for arguments in ("show copy --set n", "show copy --seed -1", "stats copy --windows 0"):
        assert "usage" in run(capsys, *arguments.split(), code=2).err

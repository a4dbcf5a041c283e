"""The plan: input groups, the held-out rule, saving and loading."""

import hashlib
import json

from data_prep import plan as plans
from data_prep.plan import Input, Options, Plan, TokenizerRecord, is_held_out, make_input_groups
from tests.support import refused

INPUTS = tuple(Input(f"f{i}.py", 10 * i, f"{i:064x}") for i in range(12))
PLAN = Plan(
    source="stdlib",
    source_version="python 3",
    text_field="text",
    group_field=None,
    options=Options(holdout=0.1),
    tokenizer=TokenizerRecord("train:300", "ab", 300, 1, 2, {"x": [5]}),
    units=make_input_groups(INPUTS, Options(holdout=0.1, unit_bytes=100)),
    inputs=INPUTS,
)


def test_input_groups_cover_the_inputs_in_order():
    def groups(inputs: tuple[Input, ...], **rule: int) -> tuple[tuple[int, int], ...]:
        return make_input_groups(inputs, Options(holdout=0.1, **rule))

    assert PLAN.units == ((0, 5), (5, 7), (7, 9), (9, 11), (11, 12))
    assert groups(INPUTS, unit_bytes=10**9) == ((0, 12),)
    assert groups(INPUTS[5:], unit_bytes=1) == tuple((i, i + 1) for i in range(7))
    assert groups((), unit_bytes=1) == groups((), unit_files=1) == ()
    assert groups(INPUTS, unit_files=5) == ((0, 5), (5, 10), (10, 12))
    assert groups(INPUTS, unit_files=5, unit_bytes=1) == groups(INPUTS, unit_files=5)


def test_held_out_by_hash():
    texts = [f"document {i}".encode() for i in range(4000)]
    held_out = [text for text in texts if is_held_out(text, 0.1)]
    assert 330 < len(held_out) < 470
    assert set(held_out) < {text for text in texts if is_held_out(text, 0.2)}
    assert not any(is_held_out(text, 0.0) for text in texts)
    share = int(hashlib.sha256(b"holdout" + texts[0]).hexdigest()[:16], 16) / 2**64
    assert is_held_out(texts[0], share + 1e-9) and not is_held_out(texts[0], share - 1e-9)


def test_a_damaged_plan_is_refused(tmp_path):
    with refused("plan.missing"):
        plans.load_plan(tmp_path)
    plans.save_plan(tmp_path, PLAN)
    assert plans.load_plan(tmp_path) == PLAN
    path = tmp_path / "plan.json"
    good = path.read_text()
    changes = {"version": 7, "source": "x", "options": {"holdout": 3}, "units": [[1]]}
    changed = [json.dumps({**json.loads(good), name: value}) for name, value in changes.items()]
    for bad in [good[:-20], "[]", *changed]:
        path.write_text(bad)
        with refused("plan.damaged", path=path):
            plans.load_plan(tmp_path)

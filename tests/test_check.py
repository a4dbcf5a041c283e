"""`canon check`: right mixers pass, and each planted mistake is named by its row.

A mistake is the smallest mixer (train_configs/mixers/decaying_average.py) with some lines replaced.
"""

import json
from dataclasses import dataclass

import pytest
import torch

from canon_pretrain.check import all_checks, check_export, parse_overrides
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.mixer_check import CHECKS, Check, run_checks, tiny_args
from tests.support import ROOT, canon_stage, command_error, refused

EXAMPLE = ROOT / "train_configs" / "mixers" / "decaying_average.py"
RIGHT = ("attention", "gla", "mamba2", "gated_deltanet", f"{EXAMPLE}:DecayingAverage")
SLOW = ("compile", "counts", "speed")
FAST_CHECKS = [check for check in CHECKS if check.name not in SLOW]
COMPILE = [check for check in CHECKS if check.name == "compile"]

# lines of the example
VALUES = "v_BTD = (1 - a_D) * self.wv(x_BTD)"
STARTS = "if starts_BT is not None:"
RECALL = 'h_BD = context.recall("average")'
KEEP = 'context.keep("average", h_BD)'
INIT = 'init = {"decay": ("uniform", 4.0)}'
BUILD = "self.decay = nn.Parameter(torch.empty(args.dim))"
RESULT = "return self.wo(torch.stack(averages, dim=1))"
IMPORTS = "import torch\n"


@dataclass(frozen=True)
class Mistake:
    """`lines`: of the example, and what they become; `row` names it, `others` may fail too.

    `fields`: of the row.
    """

    row: str
    lines: dict[str, str]
    fields: dict
    others: tuple[str, ...] = ()


WRONG_SQUARE = """import torch


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


"""
GROWING = f"""{KEEP}
        history = context.recall("history")
        history = v_BTD if history is None else torch.cat((history, v_BTD), dim=1)
        context.keep("history", history)"""
MISTAKES = {
    "a leak by one token": Mistake(
        "causality",
        {VALUES: f"{VALUES} + self.wv(x_BTD.roll(-1, dims=1))"},
        {"token": 0, "source": 1},
        ("cache", "padding", "beams", "documents", "bfloat16"),
    ),
    "a leak without a gradient": Mistake(
        "causality",
        {VALUES: f"{VALUES} + x_BTD.detach().roll(-1, dims=1).sign()"},
        {"token": 0, "source": 1},
        ("cache", "padding", "beams", "documents", "gradients"),
    ),
    "the length of the text": Mistake(
        "causality",
        {VALUES: f"{VALUES} / x_BTD.shape[1]"},
        {"token": 0},
        ("cache", "padding", "beams", "documents"),
    ),
    "a state that crosses documents": Mistake(
        "documents", {STARTS: "if False:"}, {"row": 0, "token": 5, "source": 4}, ("padding",)
    ),
    "a document's first token": Mistake(
        "documents",
        {"starts_BT[:, t, None]": "starts_BT[:, max(t - 1, 0), None]"},
        {"row": 0, "token": 5},
        ("padding",),
    ),
    "a cache that is off by one": Mistake(
        "cache",
        {KEEP: 'context.keep("average", averages[max(0, len(averages) - 2)])'},
        {"token": 5},
        ("padding", "beams", "documents"),
    ),
    "a state that is not reordered": Mistake(
        "beams",
        {
            RECALL: "h_BD = self.memory if context.cache and context.cache.start else None",
            KEEP: "self.memory = h_BD.detach()",
        },
        {"row": 0, "token": 12},
    ),
    "a state with rows last": Mistake(
        "state",
        {
            RECALL: f"{RECALL}\n        h_BD = None if h_BD is None else h_BD.T",
            KEEP: 'context.keep("average", h_BD.T)',
        },
        {"parameter": "average"},
        ("beams",),
    ),
    "the other rows of the batch": Mistake(
        "rows",
        {VALUES: f"{VALUES}\n        v_BTD = v_BTD + v_BTD.mean(dim=0)"},
        {"row": 0},
        ("padding", "beams", "documents"),
    ),
    "an initial value by the world size": Mistake(
        "initial values",
        {
            IMPORTS: "import os\nimport torch\n",
            INIT: 'init = {"decay": ("uniform", 4.0 / int(os.environ.get("WORLD_SIZE", 1)))}',
        },
        {"parameter": "decay"},
    ),
    "an initial value at random": Mistake(
        "initial values",
        {
            BUILD: f"{BUILD}\n        self.gain = torch.rand(args.dim)",
            VALUES: f"{VALUES} * self.gain.to(x_BTD)",
        },
        {"parameter": "layers.0.attention.gain"},
        ("meta device", "save and load"),
    ),
    "noise in forward": Mistake(
        "initial values",
        {RESULT: f"x_BTD.new_empty(1).uniform_()\n        {RESULT}"},
        {},
    ),
    "a buffer that is lost on the meta device": Mistake(
        "meta device",
        {
            BUILD: f'{BUILD}\n        self.register_buffer("halves", torch.full((1,), 0.5))',
            VALUES: f"{VALUES} * self.halves.to(x_BTD)",
        },
        {"parameter": "layers.0.attention.halves"},
    ),
    "an average that is not saved": Mistake(
        "save and load",
        {
            BUILD: f"{BUILD}\n        self.mean = 1.0",
            VALUES: f"{VALUES} * self.mean\n        self.mean *= 1.0 + 0.1 * self.training",
        },
        {"row": 0, "token": 0},
        tuple(check.name for check in FAST_CHECKS),
    ),
    "a wrong backward": Mistake(
        "gradients",
        {IMPORTS: WRONG_SQUARE, VALUES: f"{VALUES} + Square.apply(self.wv(x_BTD))"},
        {"parameter": "x", "token": 0},
    ),
    "an unused parameter": Mistake(
        "every gradient",
        {BUILD: f"{BUILD}\n        self.extra = nn.Linear(args.dim, 1)"},
        {"parameter": "extra.weight"},
    ),
    "an overflow": Mistake(
        "bfloat16",
        {VALUES: f"{VALUES} * self.wv(x_BTD).exp()"},
        {"row": 0},
    ),
    "a result in float32": Mistake("dtype", {RESULT: f"{RESULT}.float()"}, {}),
    "a state that grows": Mistake(
        "state", {KEEP: GROWING}, {"parameter": "history", "amount": 128.0}, ("cache",)
    ),
    "another shape": Mistake("forward", {RESULT: f"{RESULT}[:, -1]"}, {}),
}


@pytest.fixture
def write(tmp_path):
    """Write the example with lines replaced; return FILE.py:Name."""

    def write(lines):
        source = EXAMPLE.read_text()
        for old, new in lines.items():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        (tmp_path / "wrong.py").write_text(source)
        return f"{tmp_path / 'wrong.py'}:DecayingAverage"

    return write


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_by_its_row(name, write):
    mistake = MISTAKES[name]
    rows = {row.name: row for row in run_checks(tiny_args(write(mistake.lines)), FAST_CHECKS)}
    failed = {row.name for row in rows.values() if row.state == "failed"}
    assert mistake.row in failed
    assert failed <= {mistake.row, *mistake.others}
    row = rows[mistake.row]
    assert {key: getattr(row, key) for key in mistake.fields} == mistake.fields


@pytest.mark.parametrize("mixer", RIGHT)
def test_right_mixers_pass(mixer):
    rows = list(run_checks(tiny_args(mixer), FAST_CHECKS))
    assert [row.name for row in rows] == [check.name for check in FAST_CHECKS]
    assert [row for row in rows if row.state != "ok"] == []


def test_a_branch_on_data_breaks_the_graph(write):
    name = write({RESULT: f"scale = 2.0 if x_BTD.sum() > 0 else 1.0\n        {RESULT} * scale"})
    (row,) = run_checks(tiny_args(name), COMPILE)
    assert (row.name, row.state) == ("compile", "failed")


def test_the_smallest_mixer_is_one_graph_and_counted():
    checks = [check for check in CHECKS if check.name in ("compile", "counts")]
    rows = list(run_checks(tiny_args(RIGHT[-1]), checks))
    assert [row.state for row in rows] == ["ok", "ok"]


@pytest.mark.parametrize("mixer", ["gla", f"{EXAMPLE}:DecayingAverage"])
def test_an_export_is_read_back(mixer):
    (row,) = run_checks(tiny_args(mixer), [Check("export", check_export)])
    assert (row.name, row.state) == ("export", "ok")


def test_nothing_runs_after_a_forward_that_fails(write):
    rows = list(run_checks(tiny_args(write(MISTAKES["another shape"].lines)), all_checks()))
    assert [row.state for row in rows] == ["failed", *["skipped"] * (len(rows) - 1)]


def test_an_exception_names_the_line_of_the_file(write):
    (row,) = run_checks(tiny_args(write({RECALL: "h_BD = x_BTD[9]"})), CHECKS[:1])
    lines = EXAMPLE.read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if RECALL in line)
    assert (row.state, f"line {number}, in forward" in row.measured) == ("failed", True)


def test_widths_grow_until_the_class_accepts_one(write):
    check = "assert args.dim >= 128"
    args = tiny_args(write({BUILD: f"{BUILD}\n        {check}"}))
    assert (args.dim, args.num_heads) == (128, 8)
    with refused("check.cannot_build"):
        tiny_args(write({BUILD: f"{BUILD}\n        {check}"}), {"dim": 64})


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ({BUILD: "self.decay = args.width"}, "check.cannot_build"),
        ({INIT: "init = {}"}, "mixer.init"),
        ({INIT: 'init = {"decay": ("gauss", 1.0)}'}, "config.unknown_choice"),
        ({BUILD: "self.decay = nn.Parameter(torch.empty(()))"}, "mixer.scalar"),
        ({IMPORTS: "import no_such_module\n"}, "mixer.import"),
        ({"class DecayingAverage(Mixer)": "class Other(Mixer)"}, "mixer.no_class"),
    ],
)
def test_a_class_that_cannot_be_built_is_refused(lines, code, write):
    with refused(code):
        tiny_args(write(lines))


def test_a_class_without_parameters_has_every_gradient(tmp_path):
    file = tmp_path / "twice.py"
    file.write_text(
        "from canon_pretrain.model.mixers import Mixer\n"
        "class Twice(Mixer):\n"
        "    def __init__(self, args): super().__init__()\n"
        "    def forward(self, x_BTD, context=None): return 2 * x_BTD\n"
    )
    assert {row.state for row in run_checks(tiny_args(f"{file}:Twice"), FAST_CHECKS)} == {"ok"}


def test_experts_next_to_a_mixer_have_initial_values(write):
    args = tiny_args(write({}), {"ffn": "moe", "num_experts": 4})
    assert args.num_expert_layers == 2


def test_a_class_may_set_values_that_depend_on_the_model(write):
    lines = """
    @classmethod
    def initial_value(cls, args, name, usual):
        if name != "decay":
            return usual
        return type(usual)(usual.name, usual.shape, usual.seed, "constant", float(args.dim))
"""
    args = tiny_args(write({INIT: lines}))
    shape = torch.Size([args.dim])
    value = initial_value(args, "layers.1.attention.decay", shape)
    assert value.rows(0, 2).tolist() == [args.dim] * 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("nowhere.py:Name", "mixer.no_file"),
        ("gated_delta", "config.unknown_choice"),
        ("gla --model.dimm 64", "config.unknown_key"),
        ("gla --model.dim wide", "config.type"),
        ("gla --model.dim", "cli.usage"),
        ("gla --dim 64", "cli.usage"),
        ("gla --model.num_heads 5", "model.not_divisible"),
        ("gla --json /nowhere/x", "check.no_folder"),
    ],
)
def test_bad_arguments_are_refused(words, code, capsys):
    assert command_error(capsys, canon_stage("check"), words.split()) == code


def test_keys_of_the_model_have_their_types():
    words = "--model.dim 64 --model.canon_set=ABCD --model.mixer_conv True --model.expand_k 0.5"
    expected = {"dim": 64, "canon_set": "ABCD", "mixer_conv": True, "expand_k": 0.5}
    assert parse_overrides(words.split()) == expected


@pytest.mark.parametrize(("lines", "code"), [({}, 0), ({RESULT: f"{RESULT}.float()"}, 1)])
def test_the_command_prints_and_writes_its_rows(lines, code, write, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("canon_pretrain.check.all_checks", lambda: list(CHECKS[:2]))
    file = tmp_path / "rows.json"
    words = [write(lines), "--json", file]
    if code:
        with pytest.raises(SystemExit, match="1"):
            canon_stage("check")(words)
    else:
        canon_stage("check")(words)
    states = ["ok", "failed" if code else "ok"]
    rows = json.loads(file.read_text())
    assert [(row["name"], row["state"]) for row in rows] == list(
        zip(("forward", "dtype"), states, strict=True)
    )
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[1:-1]] == [
        [state, name] for name, state in zip(("forward", "dtype"), states, strict=True)
    ]

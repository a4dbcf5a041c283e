"""`canon check`: right mixers pass, and each planted mistake is named by its row.

A mistake is the smallest mixer (train_configs/mixers/decaying_average.py) with some lines replaced.
"""

from dataclasses import dataclass

import pytest

from canon_pretrain.model.mixer_check import CHECKS, run_checks, tiny_args
from tests.support import ROOT

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
    "a sum in bfloat16": Mistake(
        "bfloat16",
        {VALUES: f"{VALUES} + 1000.0", RESULT: f"{RESULT} - self.wo(1000.0 + 0.0 * v_BTD)"},
        {},
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

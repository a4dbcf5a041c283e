"""From a mixer in a file to a verdict: `canon playground compare FILE.py:Name`.

Checks the mixer, chooses sizes of equal parameters, and writes DIR/board.toml: an ordinary board of
tiny tasks that this machine trains within the minutes, with the learning rates and seeds of all
architectures alike. It is trained and shown as by `canon playground run`; then each task has a
verdict: better, worse, or not decided yet, and how many minutes more would decide.

What does not fit into the minutes is cut: first steps, of all tasks by the same share down to that
of LEAST_SHARE, then tasks from the end of TASKS. The same command continues after an interruption;
with more --seeds it adds runs to the board.
"""

import argparse
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from canon_pretrain import compare_page
from canon_pretrain.boards import tables
from canon_pretrain.boards.board import NAME, read_board
from canon_pretrain.boards.commands import PAGE, read_board_plan, run_run
from canon_pretrain.boards.content import board_content
from canon_pretrain.boards.driver import Driver
from canon_pretrain.boards.plan import plan_board
from canon_pretrain.cluster.sweep import Sweep
from canon_pretrain.compare_page import RUN_S, CompareContent, PlannedTask, compare_content
from canon_pretrain.core.cli import available_cores, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console, duration
from canon_pretrain.machine.hardware import visible_gpus
from canon_pretrain.model.args import ModelArgs, fill_model, flavor
from canon_pretrain.model.counts import flops_per_token, num_parameters, state_bytes
from canon_pretrain.model.mixer_check import CHECKS, run_checks, tiny_args
from canon_pretrain.model.mixer_files import mixer_file
from canon_pretrain.report.eval_report import write_report
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.sections import interval, number, signed
from canon_pretrain.run.config import read_experiment, to_toml
from canon_pretrain.run.folder import PLAN

Settings = dict[str, Any]

BOARD = "board.toml"
CONFIGS = Path(__file__).resolve().parents[1] / "train_configs" / "playground" / "tiny"
BASELINES: Mapping[str, Settings] = {
    "rope": {"position": "rope", "canon_set": ""},
    "nope": {"position": "nope", "canon_set": ""},
    "rope_canon": {"position": "rope", "canon_set": "ABCD"},
    "nope_canon": {"position": "nope", "canon_set": "ABCD"},
    "gla": {"mixer": "gla", "position": "nope", "canon_set": ""},
    "gla_canon": {"mixer": "gla", "position": "nope", "canon_set": "ABCD"},
    "gated_deltanet": {"mixer": "gated_deltanet", "position": "nope", "canon_set": ""},
    "gated_deltanet_canon": {"mixer": "gated_deltanet", "position": "nope", "canon_set": "ABCD"},
}
"""What a mixer is compared with: keys of `[model]` by the architecture's name."""
DEFAULT_BASELINES = ("rope_canon", "gated_deltanet")

SHAPE = {"num_layers": 2, "dim": 64, "num_heads": 2, "ffn": "gated", "init": "lingua"}
"""Of all architectures; their feed-forwards differ, so that their parameters are equal."""
FFN_DIM = 176
"""Width of the feed-forward of the architecture with the most parameters: the least one."""
FFN_MULTIPLE = 8
LEARNING_RATES = (3e-3, 1e-2)
SEEDS = 3


@dataclass(frozen=True)
class CompareTask:
    """A task of the comparison: a tiny config with other values, and its steps if time allows.

    `chance`: what a guess scores that knows the form of the answers, and not the task.
    """

    name: str
    config: str
    steps: int
    chance: float
    set: Settings


# In the order in which they are kept. Windows are equal, so that all share compiled code.
TASKS = (
    CompareTask(
        name="copy",
        config="copy.toml",
        steps=320,
        chance=0.0,
        set={"data.task.n": 23, "validation.windows": 64},
    ),
    CompareTask(
        name="mqar",
        config="mqar.toml",
        steps=240,
        # each value is asked for once: one of those that were not yet, (1 + 1/2 + .. + 1/11) / 11
        chance=0.275,
        set={
            "data.task.vocab": 64,
            "data.task.pairs": 11,
            "data.task.queries": 11,
            "data.task.slots": 11,
            "validation.windows": 16,
        },
    ),
    CompareTask(
        name="depo",
        config="depo.toml",
        steps=400,
        # one of the five other nodes, without those that were answers: at most
        chance=0.41,
        set={"data.task.n": 6, "data.task.vocab": 6, "validation.windows": 32},
    ),
    CompareTask(
        name="mano",
        config="mano.toml",
        steps=480,
        chance=0.28,  # 0, to which a product is more often equal
        set={"validation.windows": 32},
    ),
    CompareTask(
        name="state",
        config="state.toml",
        steps=480,
        chance=1 / 2,
        set={"validation.windows": 64},
    ),
)
"""At these steps an attention with Canon layers learned each of them; half as many are too few. The
windows that score a run have 128 to 192 questions, of copy 64."""
BOARD_CHECKS = (
    "forward",
    "dtype",
    "causality",
    "rows",
    "cache",  # answers are generated, in rows that are padded on the left
    "padding",
    "initial values",
    "meta device",
    "gradients",
    "every gradient",
)
"""Those of `canon check` on which training and scores of a board depend. The pilot compiles."""

SEQ_LEN = 48
BATCH = 32
VALIDATIONS = 2
LEAST_SHARE = 0.7
"""Of a task's steps; with fewer, a task is left out instead."""
BUSY = 1.25
"""A step of the board over one of the pilot, where cores are not all busy (measured on 2 cores)."""

PILOT = "pilot"
"""Folder in DIR of a short run of each architecture, which is timed."""
PILOT_STEPS = 40
OVERHEAD_S = 20.0
"""Of the command after the runs and before the pilot: imports, the page."""


# -- the command


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("mixer", metavar="FILE.py:Name", help="contract: train_configs/mixers/README.md")
    add(
        "--with",
        dest="baselines",
        nargs="+",
        choices=BASELINES,
        default=DEFAULT_BASELINES,
        metavar="ARCHITECTURE",
        help=f"one or more of {', '.join(BASELINES)} (default: {' '.join(DEFAULT_BASELINES)})",
    )
    add("--canon", default="", metavar="SITES", help='Canon sites around the mixer, such as "ACD"')
    add("--minutes", type=float, default=15.0, help="for all runs (default: %(default)g)")
    add("--seeds", type=positive, default=SEEDS, metavar="N", help="default: %(default)s")
    add("--parallel", type=positive, metavar="N", help="runs at once (default: one per core)")
    add("--out", type=Path, metavar="DIR", help="default: outputs/compare/NAME")
    add(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="for a mixer that torch.compile takes long for, such as a loop over tokens",
    )
    add("--plan-only", action="store_true", help="write DIR/board.toml and train only the pilot")


def run_compare(arguments: argparse.Namespace) -> None:
    """Check, plan, train, and print the verdicts."""
    began_s = time.monotonic()
    _, _, name = arguments.mixer.rpartition(":")
    path = mixer_file(arguments.mixer).path.resolve()
    mixer = f"{path}:{name}"
    folder = arguments.out or Path("outputs", "compare", name)
    parallel = arguments.parallel or available_cores()
    check_mixer(mixer)

    # Sizes.
    own = {"mixer": mixer, "position": "nope", "canon_set": arguments.canon.upper()}
    baselines = {baseline: BASELINES[baseline] for baseline in arguments.baselines}
    architectures = equal_sizes({own_name(name, baselines): own} | baselines)
    show_sizes(architectures)

    # The board: that of the folder, with more seeds if they are asked for, or a new one.
    board_file = folder / BOARD
    if board_file.exists():
        board = continued_board(board_file, architectures, arguments.seeds)
    else:
        costs = pilot_costs(architectures, folder / PILOT, parallel, compiles=arguments.compile)
        left_s = 60 * arguments.minutes - OVERHEAD_S - (time.monotonic() - began_s)
        steps = plan_steps(costs, arguments.seeds, parallel * left_s)
        board = board_values(
            architectures,
            steps,
            range(arguments.seeds),
            arguments.compile,
            LEARNING_RATES,
        )
    write_board(board_file, board)
    print(f"board: {board_file}")
    if arguments.plan_only:
        return

    # Train and show it as any other board.
    run_run(
        argparse.Namespace(
            tier="",
            board=board_file,
            out=folder,
            extend=(folder / PLAN).exists(),
            parallel=parallel,
            race=False,
        )
    )
    own_arm, *others = architectures
    title = f"{own_arm} against {' and '.join(others)}"
    content = board_content(read_board_plan(folder, title), datetime.now(UTC))
    compared = compare_content(content, own_arm, planned_tasks(board), parallel)
    labels = {"entry": tables.architectures(compared)}
    write_report(folder, PAGE, compared, labels, "compare", board=tables, compare=compare_page)
    show_verdicts(compared, arguments, folder)


def own_name(name: str, baselines: Collection[str]) -> str:
    """Return the name of the own architecture in the board. Raises UserError."""
    if not NAME.fullmatch(name) or name in baselines:
        raise UserError(
            "compare.name",
            f"the class {name!r}: expected a name of letters, digits and _ that is not that of "
            f"another architecture ({', '.join(baselines)})",
            name=name,
        )
    return name


# -- the mixer


def check_mixer(mixer: str) -> None:
    """Run BOARD_CHECKS. Raises UserError if one fails."""
    checks = [check for check in CHECKS if check.name in BOARD_CHECKS]
    for row in run_checks(tiny_args(mixer), checks):
        if row.state == "failed":
            raise UserError(
                "compare.check_failed",
                f"{mixer}: {row.name}: {row.measured}. `canon check {mixer}` has all checks",
                given=mixer,
                check=row.name,
            )


def model_args(model: Mapping[str, Any], vocab_size: int, seq_len: int) -> ModelArgs:
    """Return the arguments of keys of `[model]`, as a run of the board has them."""
    return fill_model(flavor("debug"), {**model, "vocab_size": vocab_size, "max_seq_len": seq_len})


# -- sizes


def equal_sizes(architectures: Mapping[str, Settings]) -> dict[str, Settings]:
    """Return the architectures with SHAPE and the `ffn_dim` at which their parameters are equal.

    The largest one at FFN_DIM has it; others get wider feed-forwards, in multiples of
    FFN_MULTIPLE, up to which parameters differ.
    """

    def layer(model: Settings, ffn_dim: int) -> int:
        one_layer = model | SHAPE | {"num_layers": 1, "ffn_dim": ffn_dim}
        return num_parameters(model_args(one_layer, 1, 1))

    # The number of parameters is linear in the width of the feed-forward.
    target = max(layer(model, FFN_DIM) for model in architectures.values())
    sized = {}
    for name, model in architectures.items():
        base = layer(model, FFN_DIM)
        per_step = layer(model, FFN_DIM + FFN_MULTIPLE) - base
        num_steps = round((target - base) / per_step)
        sized[name] = model | SHAPE | {"ffn_dim": FFN_DIM + FFN_MULTIPLE * num_steps}
    return sized


def show_sizes(architectures: Mapping[str, Settings]) -> None:
    """Print parameters, FLOPs and state of two layers at the lengths of the tasks."""
    table = Table(
        *("architecture", "ffn_dim", "parameters", "FLOPs/token", "state bytes", "+ per token"),
        box=box.SIMPLE,
        pad_edge=False,
    )
    for name, model in architectures.items():
        args = model_args(model, 64, SEQ_LEN)
        state = state_bytes(args, itemsize=2)  # of keys and values, as on the board's page
        table.add_row(
            name,
            str(model["ffn_dim"]),
            f"{num_parameters(args):,}",
            f"{flops_per_token(args, SEQ_LEN):,}",
            f"{state.per_row:,}",
            f"{state.per_token:,}",
        )
    title = f"two layers of width {SHAPE['dim']}, {SEQ_LEN} tokens of a vocabulary of 64"
    Console(highlight=False).print(title, table, sep="\n", markup=False)


# -- the plan


@dataclass(frozen=True)
class PilotCost:
    """Seconds of an architecture on one core: of a step, and of a run besides its steps."""

    step_s: float
    fixed_s: float


@dataclass(frozen=True)
class TaskCost:
    """Core-seconds of all runs of a task: of `steps` each, and besides their steps."""

    task: str
    steps: int
    training_s: float
    fixed_s: float


def pilot_costs(
    architectures: Mapping[str, Settings], folder: Path, parallel: int, *, compiles: bool
) -> list[PilotCost]:
    """Train each architecture for PILOT_STEPS steps of the first task, and time it.

    All tasks have steps of equal size. Raises UserError if a run fails.
    """
    first_task = TASKS[0]
    board = board_values(
        architectures, {first_task.name: PILOT_STEPS}, [0], compiles, LEARNING_RATES[:1]
    )
    write_board(folder / BOARD, board)
    sweep, _ = plan_board(read_board(folder / BOARD), folder)
    train_runs(sweep, folder, parallel)

    costs = []
    for run in sweep.runs:
        record = RunRecord(folder / run.name)
        # the first of them compile
        step_s = statistics.median(
            event["seconds_per_step"] for event in record.steps if event.step > PILOT_STEPS // 2
        )
        validation_s = min(event["seconds"] for event in record.own_validations)
        costs.append(PilotCost(step_s, RUN_S + VALIDATIONS * validation_s))
    return costs


def train_runs(sweep: Sweep, folder: Path, parallel: int) -> None:
    """Train the runs of the pilot. Raises UserError if one fails."""
    driver = Driver(sweep, folder, parallel, gpus=visible_gpus())
    driver.train()
    if driver.stops:
        raise KeyboardInterrupt
    for name, reason in driver.failures.items():
        raise UserError(
            "compare.pilot",
            f"{folder / name}: {reason}. If torch.compile is at fault, pass --no-compile",
            run=name,
        )


def plan_steps(costs: Sequence[PilotCost], num_seeds: int, core_seconds: float) -> dict[str, int]:
    """Print which tasks fit into the core-seconds, with how many steps, and return those steps."""
    num_runs = num_seeds * len(LEARNING_RATES)  # of an architecture
    task_costs = [
        TaskCost(
            task=task.name,
            steps=task.steps,
            training_s=num_runs * task.steps * BUSY * sum(cost.step_s for cost in costs),
            fixed_s=num_runs * sum(cost.fixed_s for cost in costs),
        )
        for task in TASKS
    ]
    steps = fit_steps(task_costs, core_seconds)
    for cost in task_costs:
        if cost.task in steps:
            share = steps[cost.task] / cost.steps
            seconds = share * cost.training_s + cost.fixed_s
            print(
                f"{cost.task}: {steps[cost.task]} steps ({share:.0%} of {cost.steps}), "
                f"{num_runs * len(costs)} runs, {duration(seconds)} of a core"
            )
    left_out = [cost.task for cost in task_costs if cost.task not in steps]
    if left_out:
        print(f"left out, for lack of time: {', '.join(left_out)}")
    return steps


def fit_steps(costs: Sequence[TaskCost], core_seconds: float) -> dict[str, int]:
    """Return the steps of the tasks that fit into the core-seconds, by name.

    All tasks have the same share of their steps, of at least LEAST_SHARE; else the last task is
    left out. Steps are multiples of VALIDATIONS. Raises UserError if not even one task fits.
    """
    for num_tasks in range(len(costs), 0, -1):
        kept = costs[:num_tasks]
        left_s = core_seconds - sum(cost.fixed_s for cost in kept)
        share = min(left_s / sum(cost.training_s for cost in kept), 1.0)
        if share >= LEAST_SHARE:
            return {
                cost.task: int(share * cost.steps) // VALIDATIONS * VALIDATIONS for cost in kept
            }

    needed_s = costs[0].fixed_s + LEAST_SHARE * costs[0].training_s
    raise UserError(
        "compare.minutes",
        f"{duration(max(core_seconds, 0))} of a core: the task {costs[0].task} alone needs "
        f"{duration(needed_s)}. Set more --minutes, or compare with fewer architectures",
        needed_s=needed_s,
    )


def board_values(
    architectures: Mapping[str, Settings],
    steps: Mapping[str, int],
    seeds: Sequence[int],
    compiles: bool,
    learning_rates: Sequence[float] = LEARNING_RATES,
) -> dict[str, Any]:
    """Return the content of the board: every architecture at every learning rate and seed."""
    tasks: dict[str, Settings] = {}
    for task in TASKS:
        if task.name not in steps:
            continue
        num_steps = steps[task.name]
        tasks[task.name] = {
            "config": str(CONFIGS / task.config),
            "learning_rates": list(learning_rates),
            "score": "exact",
            "set": task.set
            | {
                # so many are enough for these verdicts, and more would take minutes in all
                "validation.last_windows": task.set["validation.windows"],
                "training.seq_len": SEQ_LEN,
                "training.steps": num_steps,
                "training.global_batch_size": BATCH,
                "training.local_batch_size": BATCH,
                "lr_scheduler.warmup_steps": num_steps // 10,
                "validation.freq": num_steps // VALIDATIONS,
                "compile.enable": compiles,
            },
        }
    return {
        "seeds": list(seeds),
        "architectures": dict(architectures),
        "tasks": tasks,
    }


def continued_board(
    path: Path, architectures: Mapping[str, Settings], num_seeds: int
) -> dict[str, Any]:
    """Return the board of DIR with at least `num_seeds` seeds.

    Raises UserError if it compares other architectures.
    """
    board = read_experiment(path)
    if board.get("architectures") != dict(architectures):
        raise UserError(
            "compare.other_board",
            f"{path} compares other architectures ({', '.join(board.get('architectures', ()))}), "
            "or the same at other sizes: choose another --out",
            path=path,
        )
    first_seeds = list(range(num_seeds))
    return board | {"seeds": max(board["seeds"], first_seeds, key=len)}


def planned_tasks(board: Mapping[str, Any]) -> list[PlannedTask]:
    """Return TASKS with their steps on the board."""
    planned = []
    for task in TASKS:
        steps = 0
        if task.name in board["tasks"]:
            steps = board["tasks"][task.name]["set"]["training.steps"]
        planned.append(PlannedTask(task.name, steps, task.steps, task.chance))
    return planned


def write_board(path: Path, board: Mapping[str, Any]) -> None:
    """Write a board's TOML, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, board_text(board).encode())


def board_text(board: Mapping[str, Any]) -> str:
    """Return the TOML of a board."""
    lines = [
        "# Written by `canon playground compare`. Train and show it:",
        "# canon playground run BOARD.toml --out DIR",
        "",
        to_toml({"seeds": board["seeds"]}),
    ]
    for table in ("architectures", "tasks"):
        for name, values in board[table].items():
            lines += [f"[{table}.{name}]", to_toml(values)]
    return "\n".join(lines)


# -- the verdicts


def show_verdicts(content: CompareContent, arguments: argparse.Namespace, folder: Path) -> None:
    """Print the verdicts, and the command that would decide the next one."""
    table = Table(
        *("task", "against", "scores", "difference", "95 %", "verdict", "to decide"),
        box=box.SIMPLE,
        pad_edge=False,
    )
    for row in content.verdicts:
        table.add_row(
            row.task,
            row.baseline,
            f"{number(row.own_score, 3)}, {number(row.baseline_score, 3)}",
            signed(row.difference),
            interval(row.interval),
            row.verdict,
            compare_page.to_decide(row),
        )
    Console(highlight=False).print(table, markup=False)
    for sentence in (*compare_page.cuts(content), *compare_page.headline(content)):
        print(sentence)

    waiting = [row.more_seeds for row in content.verdicts if row.more_seeds]
    if waiting:
        num_seeds = arguments.seeds + min(waiting)
        canon = f" --canon {arguments.canon}" if arguments.canon else ""
        print(
            f"the next one: canon playground compare {arguments.mixer} --with "
            f"{' '.join(arguments.baselines)}{canon} --seeds {num_seeds} --out {folder}"
        )

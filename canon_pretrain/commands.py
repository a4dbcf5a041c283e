"""The commands of `canon`: the module of each, and what it is for.

A module has two functions per command, imported only when the command is used:

    add_arguments(parser)             if it is its only command, else add_NAME_arguments(parser)
    run(arguments) -> exit code       if it is its only command, else run_NAME(arguments)

`run` may return None for 0. Stages are modules by name only: they still meet on disk alone.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from canon_pretrain.core.cli import Parser, command
from canon_pretrain.core.errors import EPILOG, UserError, nearest

SECTION_KEY = re.compile(r"--[A-Za-z_][\w-]*\.[\w.-]+(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command of a module, see above."""

    module: str
    summary: str
    prints: bool = False  # stdout is the result: if it cannot be written, the command fails
    interrupted: str = ""  # what Ctrl-C prints
    takes_keys: bool = False  # unknown arguments become `arguments.overrides`
    ends_with_keys: bool = False  # the first --section.key and all that follows do
    parses: bool = False  # the module's `main(argv)` parses for itself
    is_hidden: bool = False  # not in help: for scripts


@dataclass(frozen=True)
class Group:
    """Commands with a common first word."""

    summary: str
    description: str
    commands: dict[str, Command]

    @property
    def visible(self) -> list[str]:
        return [name for name, inner in self.commands.items() if not inner.is_hidden]


DATA_INTERRUPTED = "interrupted; run the same command again to resume"
EVAL_INTERRUPTED = "interrupted: what is finished is kept, the same command resumes"

# in the order in which a user meets them
COMMANDS: dict[str, Command | Group] = {
    "doctor": Command(
        "canon_pretrain.cluster.doctor",
        "what this machine has and lacks",
        prints=True,
        takes_keys=True,
    ),
    "try": Command("canon_pretrain.trial", "does Canon help on your text? train, compare, report"),
    "new": Command("canon_pretrain.new", "propose an experiment for your own text"),
    "data": Group(
        "text to token shards",
        "Write text as token shards, and check them.",
        {
            "build": Command(
                "data_prep.build",
                "tokenize a source into DIR/train and DIR/validation; run it again to resume",
                interrupted=DATA_INTERRUPTED,
            ),
            "finish": Command(
                "data_prep.finish",
                "write the manifests after all --shard builds, or with other limits",
                interrupted=DATA_INTERRUPTED,
            ),
            "verify": Command(
                "data_prep.verify",
                "check a finished folder (exit code 2 if it is damaged), and repair it",
                interrupted=DATA_INTERRUPTED,
            ),
            "stats": Command(
                "data_prep.stats",
                "show counts, lengths, tokens, duplicates and groups of a finished folder",
            ),
            "show": Command(
                "data_prep.show",
                "print a document or a training window as text, as the model sees it",
                prints=True,
            ),
        },
    ),
    "train": Command(
        "canon_pretrain.train", "train or resume (several GPUs: torchrun)", parses=True
    ),
    "run": Group(
        "inspect runs",
        "Inspect runs, during training or later.",
        {
            "status": Command(
                "canon_pretrain.report.status",
                "the state of runs: step, loss, speed, checkpoint, evaluations, job",
                prints=True,
            ),
            "costs": Command(
                "canon_pretrain.report.costs",
                "held-out loss, tokens/s, memory and overhead of architectures",
                prints=True,
            ),
            "plot": Command("canon_pretrain.report.plot", "curves of several runs on one page"),
            "diff": Command(
                "canon_pretrain.report.diff",
                "how two runs differ, and from which step on",
                prints=True,
            ),
            "export": Command("canon_pretrain.report.export", "copy a run to wandb or other tools"),
            "profile": Command(
                "canon_pretrain.report.profile",
                "top kernels of a traced step, and its time by purpose",
                prints=True,
            ),
        },
    ),
    "check": Command(
        "canon_pretrain.check",
        "prove that a mixer of your own is correct",
        prints=True,
        takes_keys=True,
    ),
    "explain": Command(
        "canon_pretrain.explain",
        "the documents behind a training step, outliers first",
        prints=True,
    ),
    "sample": Command(
        "canon_pretrain.sample", "text from a checkpoint, or from two side by side", prints=True
    ),
    "serve": Command(
        "canon_pretrain.serve.commands",
        "serve a checkpoint or an export to clients of OpenAI's completions",
    ),
    "checkpoint": Group(
        "a run's checkpoints",
        "List, verify and prune the checkpoints of a run.",
        {
            "list": Command(
                "canon_pretrain.checkpoint.commands",
                "list checkpoints, by manifests and file sizes",
                prints=True,
            ),
            "verify": Command(
                "canon_pretrain.checkpoint.commands",
                "check the hash of every file; changes nothing",
            ),
            "prune": Command(
                "canon_pretrain.checkpoint.commands",
                "delete all but the newest K verified ones",
            ),
        },
    ),
    "eval": Group(
        "scores",
        "Evaluate checkpoints.",
        {
            "run": Command(
                "eval.run_command",
                "evaluate checkpoints on some suites, or on all",
                interrupted=EVAL_INTERRUPTED,
            ),
            "compare": Command(
                "canon_pretrain.report.comparison", "what differs between two runs", prints=True
            ),
            "report": Command(
                "canon_pretrain.report.eval_report", "scores and verdicts of runs as one HTML page"
            ),
            "tasks": Command(
                "eval.suite_names", "list suites and tasks, ours and lm_eval's", prints=True
            ),
            "stage": Command(
                "eval.stage",
                "download the suites' data once, on a machine with network",
                interrupted=EVAL_INTERRUPTED,
            ),
            "submit": Command(
                "eval.submit",
                "evaluate checkpoints as they are saved, by Slurm jobs or locally",
                interrupted=EVAL_INTERRUPTED,
            ),
        },
    ),
    "hf": Group(
        "to Hugging Face and back",
        "Export checkpoints to Hugging Face folders, push them, and import them.",
        {
            "export": Command(
                "canon_pretrain.hf.commands",
                "write a checkpoint as a folder for transformers",
            ),
            "push": Command(
                "canon_pretrain.hf.commands",
                "upload an export with a model card to the hub",
            ),
            "import": Command(
                "canon_pretrain.hf.commands",
                "write a Hugging Face folder as a checkpoint",
            ),
        },
    ),
    "sweep": Group(
        "configs x learning rates x seeds",
        "Configs x learning rates x seeds, each a run in its own folder.",
        {
            "plan": Command(
                "canon_pretrain.cluster.sweep",
                "write SWEEP/sweep.json",
                ends_with_keys=True,
            ),
            "run": Command(
                "canon_pretrain.cluster.sweep",
                "train or resume one run",
                prints=True,
                ends_with_keys=True,
            ),
            "table": Command(
                "canon_pretrain.cluster.sweep",
                "print the state of the runs",
                prints=True,
                ends_with_keys=True,
            ),
            "todo": Command(
                "canon_pretrain.cluster.sweep",
                "print the numbers of runs to submit",
                prints=True,
                ends_with_keys=True,
                is_hidden=True,
            ),
        },
    ),
    "playground": Group(
        "models x tasks",
        "Compare architectures on tasks: plan a board, train its runs, show them.",
        {
            "plan": Command(
                "canon_pretrain.boards.commands",
                "write DIR/sweep.json and configs",
                prints=True,
            ),
            "run": Command(
                "canon_pretrain.boards.commands",
                "plan, and train what is not DONE",
                prints=True,
            ),
            "status": Command(
                "canon_pretrain.boards.commands",
                "print the state of the runs",
                prints=True,
            ),
            "report": Command(
                "canon_pretrain.boards.commands",
                "write DIR/report.html, .json, .md",
                prints=True,
            ),
            "paper": Command(
                "canon_pretrain.boards.paper",
                "list the paper's figures: what each takes, and what is done here",
                prints=True,
            ),
            "compare": Command(
                "canon_pretrain.compare",
                "is the mixer in FILE.py:Name better? check it, train a board of tiny tasks",
                prints=True,
            ),
        },
    ),
    "synthetic": Group(
        "the paper's tasks",
        "Show, score and describe the synthetic tasks.",
        {
            "show": Command(
                "canon_pretrain.synthetic.commands",
                "print a window: one instance after another, with answers in brackets, or as JSON",
                prints=True,
            ),
            "score": Command(
                "canon_pretrain.synthetic.commands",
                "print the numbers of right and wrong answers; those of the verdicts go to stderr",
                prints=True,
            ),
            "stats": Command(
                "canon_pretrain.synthetic.commands",
                "print the ids of words, lengths, and shares, over some windows and instances",
                prints=True,
            ),
        },
    ),
    "bench": Group(
        "speed of Canon, and of generation",
        "Compare speeds on this machine, on the GPU if there is one.",
        {
            "step": Command(
                "canon_pretrain.bench",
                "what Canon sets cost in a training step",
                prints=True,
            ),
            "generate": Command(
                "canon_pretrain.bench",
                "what Canon sets cost in generation, or an export's speed over transformers'",
                prints=True,
            ),
        },
    ),
    "completion": Command(
        "canon_pretrain.completion", "print what a shell completes: bash, zsh", prints=True
    ),
}


def run_command(argv: Sequence[str], on_import: Callable[[], None]) -> None:
    """Run the command that `argv` begins with; exit with its code if that is not 0.

    `on_import` is called once the command's module is imported: Ctrl-C may raise from then on.
    """
    name = argv[0]
    chosen: Command | Group | None = COMMANDS[name]
    if isinstance(chosen, Group):
        name = argv[1] if len(argv) > 1 else ""
        chosen = chosen.commands.get(name)

    code: int | None
    if chosen is None:
        on_import()
        with command():
            code = _show_help(argv)
    elif chosen.parses:
        module = import_module(chosen.module)
        on_import()
        code = module.main(argv[1:])
    else:
        add_arguments, run = functions_of(name, chosen)
        on_import()
        with command(prints=chosen.prints, interrupted=chosen.interrupted):
            code = run(_parse(argv, chosen, add_arguments))
    if code:
        raise SystemExit(code)


def functions_of(
    name: str, chosen: Command
) -> tuple[Callable[..., None], Callable[..., int | None]]:
    """Import a command's module; return its functions to add arguments, and to run."""
    module = import_module(chosen.module)
    if hasattr(module, "run"):  # its only command
        return module.add_arguments, module.run
    return getattr(module, f"add_{name}_arguments"), getattr(module, f"run_{name}")


def make_parser(
    name: str, add_arguments: dict[str, Callable[[argparse.ArgumentParser], None]]
) -> Parser:
    """Return the parser of a command or a group.

    `add_arguments`: by command of the group, "" for a command that is none; other commands have no
    arguments, as their modules are not imported.
    """
    stage = COMMANDS[name]
    if isinstance(stage, Command):
        parser = Parser(prog=f"canon {name}", description=_sentence(stage.summary), epilog=EPILOG)
        add_arguments[""](parser)
        return parser

    # argparse lists hidden commands in its usage, unless it gets the names to show.
    metavar = None
    if len(stage.visible) < len(stage.commands):
        metavar = f"{{{','.join(stage.visible)}}}"
    parser = Parser(prog=f"canon {name}", description=stage.description, epilog=EPILOG)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar=metavar)
    for word, inner in stage.commands.items():
        help_options: dict[str, Any] = {} if inner.is_hidden else {"help": inner.summary}
        subparser = subparsers.add_parser(
            word, description=_sentence(inner.summary), **help_options
        )
        if word in add_arguments:
            add_arguments[word](subparser)
    return parser


def _parse(
    argv: Sequence[str], chosen: Command, add_arguments: Callable[..., None]
) -> argparse.Namespace:
    name, *rest = argv
    is_group = isinstance(COMMANDS[name], Group)
    parser = make_parser(name, {rest[0] if is_group else "": add_arguments})

    # What is no option of the command may be a key of a job's config.
    if chosen.takes_keys:
        arguments, arguments.overrides = parser.parse_known_args(rest)
        return arguments
    if not chosen.ends_with_keys:
        return parser.parse_args(rest)

    # The keys of a job are checked when its config is read, not here.
    keys_begin = next(
        (k for k, argument in enumerate(rest) if SECTION_KEY.fullmatch(argument)), len(rest)
    )
    arguments = parser.parse_args(rest[:keys_begin])
    arguments.overrides = rest[keys_begin:]
    return arguments


def _show_help(argv: Sequence[str]) -> int:
    """Print the help of a group, as an error unless `argv` asks for it; return the exit code."""
    parser = make_parser(argv[0], {})
    if argv[1:]:
        parser.parse_args(argv[1:])  # --help, or an unknown command
        return 0
    with redirect_stdout(sys.stderr), suppress(SystemExit):
        parser.parse_args(["--help"])
    return 2


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def print_commands() -> None:

    print("usage: canon STAGE ...    (more: canon STAGE --help)\n")
    for name, stage in COMMANDS.items():
        line = f"  {name:11} {stage.summary}"
        if isinstance(stage, Group):
            line = f"{line}: {', '.join(stage.visible)}"
        print(line)


def unknown_command(word: str) -> UserError:
    """Build the error for an unknown first word, with the nearest command."""
    # A user may have meant a stage, or a command of a group, such as `export` of two of them.
    lines = {name: [f"canon {name}"] for name in COMMANDS}
    groups = {name: stage for name, stage in COMMANDS.items() if isinstance(stage, Group)}
    for name, group in groups.items():
        for inner in group.commands:
            if inner not in COMMANDS:
                lines.setdefault(inner, []).append(f"canon {name} {inner}")

    near = nearest(word, lines)
    suggestion = ""
    if near:
        suggestion = f" Did you mean `{'` or `'.join(lines[near])}`?"
    return UserError(
        "cli.unknown_stage",
        f'"{word}" is not a stage; `canon` lists them.{suggestion}',
        given=word,
        choices=[*COMMANDS],
    )

"""The command `canon`, also `python -m canon_pretrain`: every program under one name.

It starts `main(argv)` of the module that its first word names, and imports no other. The stages
are modules by name only: they still meet on disk alone.
"""

# nothing else is imported here: Ctrl-C during an import must leave no traceback, see `start`
import os
import signal
import sys

STAGES = {
    "doctor": ("canon_pretrain.cluster.doctor", "what this machine has and lacks", ""),
    "try": ("canon_pretrain.trial", "does Canon help on your text? train, compare, report", ""),
    "new": ("canon_pretrain.new", "propose an experiment for your own text", ""),
    "data": ("data_prep.__main__", "text to token shards", "build show stats verify finish"),
    "train": ("canon_pretrain.train", "train or resume (several GPUs: torchrun)", ""),
    "run": ("canon_pretrain.report.__main__", "inspect runs", "status plot diff export profile"),
    "sample": ("canon_pretrain.sample", "text from a checkpoint, or from two side by side", ""),
    "checkpoint": (
        "canon_pretrain.checkpoint.__main__",
        "a run's checkpoints",
        "list verify prune",
    ),
    "eval": ("eval.__main__", "scores", "run compare report tasks stage submit"),
    "hf": ("canon_pretrain.hf.__main__", "to Hugging Face and back", "export push import"),
    "sweep": ("canon_pretrain.cluster.sweep", "configs x learning rates x seeds", "plan run table"),
    "playground": ("canon_pretrain.boards.__main__", "models x tasks", "plan run status report"),
    "synthetic": (
        "canon_pretrain.synthetic.__main__",
        "the paper's tasks",
        "show score stats bench",
    ),
    "bench": ("canon_pretrain.bench.__main__", "speed and memory of models and kernels", ""),
    "completion": ("canon_pretrain.completion", "print what a shell completes", "bash zsh"),
}
"""Word -> its module, what it is for, and its commands, in the order in which they are met."""


def main(argv: list[str] | None = None) -> None:
    """Run the program that the first word names; print the table of them if there is none."""
    from contextlib import redirect_stdout, suppress
    from importlib import import_module

    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in STAGES:
        module, _, commands = STAGES[words[0]]
        start = import_module(module).main
        _catch_interrupts()
        if commands and not words[1:]:  # help, as an error
            with redirect_stdout(sys.stderr), suppress(SystemExit):
                start(["--help"])
            raise SystemExit(2)
        start(words[1:])
        return
    from canon_pretrain.core.cli import command

    _catch_interrupts()
    with command(prints=True):
        if words == ["--version"]:
            from canon_pretrain.run.launches import own_version

            print(f"canon_pretrain {own_version() or 'not installed'}")
            return
        if words and words[0] not in ("-h", "--help"):
            raise _unknown(words[0])
        print("usage: canon STAGE ...    (more: canon STAGE --help)\n")
        for name, (_, about, commands) in STAGES.items():
            print(f"  {name:11} {about}{': ' if commands else ''}{', '.join(commands.split())}")


def _unknown(word: str) -> Exception:
    """Return the UserError for an unknown word, with the nearest stage, or command of a stage."""
    from canon_pretrain.core.errors import UserError, nearest

    lines = {name: [f"canon {name}"] for name in STAGES}
    for name, (_, _, commands) in STAGES.items():
        for each in commands.split():
            if each not in STAGES:
                lines.setdefault(each, []).append(f"canon {name} {each}")
    near = nearest(word, lines)
    hint = f" Did you mean `{'` or `'.join(lines[near])}`?" if near else ""
    return UserError(
        "cli.unknown_stage",
        f'"{word}" is not a stage; `canon` lists them.{hint}',
        given=word,
        choices=[*STAGES],
    )


def start() -> None:
    """Run `main` as the console script; Ctrl-C ends it with code 130, also while it imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _leave)
    from canon_pretrain.core.cli import run_process

    run_process(main)


def _leave(number: int, frame: object) -> None:
    """Exit at once: an exception in the middle of an import would print a traceback."""
    os._exit(128 + number)


def _catch_interrupts() -> None:
    """Raise KeyboardInterrupt at Ctrl-C from now on."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    start()

"""How a build is split over jobs: which of its shards still have work, and how it is finished.

    python -m data_prep.jobs --shards 64 -- --source fineweb-edu --tokenizer T --out DATA ...

What slurm/data_prep.sh asks before it submits anything: the options after `--` are those of
`python -m data_prep build`, so that a wrong one is refused before it has waited in a queue.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from canon_pretrain.core.cli import command
from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shard_writer import unit_marks
from data_prep import build
from data_prep.folder import TRAIN, is_complete, limits_of
from data_prep.plan import NO_LIMITS, PLAN, Limits, load_plan


def unbuilt_shards(out: Path, shards: int, limits: Limits = NO_LIMITS) -> list[int]:
    """The numbers i of --shard i/`shards` that still have a unit to build; all without a plan.

    Units behind the end that `limits` set to the training stream are none.
    """
    if not (out / PLAN).exists():
        return list(range(1, shards + 1))
    plan = load_plan(out)
    left = set()
    documents = tokens = 0
    for unit in range(len(plan.units)):
        if limits.reached(documents, tokens):
            break
        marks = unit_marks(out / TRAIN, unit, plan.sha256)
        if marks is None or not is_complete(out, unit, plan.sha256):
            left.add(unit % shards + 1)
            continue
        documents += sum(mark.documents for mark in marks)
        tokens += sum(mark.tokens for mark in marks)
    return sorted(left)


def main(argv: Sequence[str] | None = None) -> None:
    """Print, each ended by a NUL byte: the shards as i,j,...; DATA; the arguments of `finish`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    place = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.jobs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shards", type=int, required=True)
    shards = parser.parse_args(argv[:place]).shards
    # the build takes shortened options too, so it is the build that must read them
    builder = argparse.ArgumentParser(prog="python -m data_prep build")
    build.add_arguments(builder)
    arguments = builder.parse_args(argv[place + 1 :])
    with command(prints=True):
        if shards < 1:
            raise UserError(f"--shards {shards}: expected at least 1")
        if arguments.shard:
            raise UserError(f"--shard {arguments.shard}: each job is given its own; see --shards")
        finish = [str(arguments.out)]
        for name in ("max_documents", "max_tokens"):
            if (limit := getattr(arguments, name)) is not None:
                finish += [f"--{name.replace('_', '-')}", str(limit)]
        left = unbuilt_shards(arguments.out, shards, limits_of(arguments))
        words = (",".join(map(str, left)), str(arguments.out), *finish)
        sys.stdout.write("".join(f"{word}\0" for word in words))


if __name__ == "__main__":
    main()

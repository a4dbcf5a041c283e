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
from data_prep import build
from data_prep.folder import positive
from data_prep.plan import NO_LIMITS, PLAN, Limits, load_plan


def unbuilt_shards(out: Path, shards: int, limits: Limits = NO_LIMITS) -> list[int]:
    """The numbers i of --shard i/`shards` that still have a unit to build; all without a plan."""
    if not (out / PLAN).exists():
        return list(range(1, shards + 1))
    stream = build.TrainingStream(out, load_plan(out), limits)
    return sorted({unit % shards + 1 for unit in stream.unbuilt()})


def main(argv: Sequence[str] | None = None) -> None:
    """Print, each ended by a NUL byte: the shards as i,j,...; DATA; the arguments of `finish`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    place = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.jobs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shards", type=positive, required=True)
    shards = parser.parse_args(argv[:place]).shards
    # the build takes shortened options too, so it is the build that must read them
    builder = argparse.ArgumentParser(prog="python -m data_prep build")
    build.add_arguments(builder)
    arguments = builder.parse_args(argv[place + 1 :])
    with command(prints=True):
        if arguments.shard:
            raise UserError(f"--shard {arguments.shard}: each job is given its own; see --shards")
        finish = [str(arguments.out)]
        for name in ("max_documents", "max_tokens"):
            if (limit := getattr(arguments, name)) is not None:
                finish += [f"--{name.replace('_', '-')}", str(limit)]
        limits = Limits(arguments.max_documents, arguments.max_tokens)
        left = unbuilt_shards(arguments.out, shards, limits)
        words = (",".join(map(str, left)), str(arguments.out), *finish)
        sys.stdout.write("".join(f"{word}\0" for word in words))


if __name__ == "__main__":
    main()

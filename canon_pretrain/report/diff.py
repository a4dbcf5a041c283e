"""`python -m canon_pretrain.run diff A B`: how two runs differ, and from which step on.

`compare.py` finds the differences; this shows them: tables on a terminal, plain lines elsewhere.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.core.text import printable
from canon_pretrain.report.compare import SECTIONS, compare, read_recorded

RTOL = 1e-4
"""Relative: how far losses of one experiment are apart on two machines, by rounding alone."""
EXIT_SAME, EXIT_DIFFERENT = 0, 1
TITLES = {
    "identity": "identity (what is computed)",
    "data": "data",
    "config": "config (the rest)",
    "code": "code",
    "packages": "packages",
    "environment": "environment",
    "launch": "launches",
}


def show(found: dict[str, Any], console: Console, *, all_of_it: bool) -> None:
    """Print what `compare` found; `all_of_it` with what is each run's own."""
    for name in ("a", "b"):
        _say(console, f"{name.upper()}  {found[name]}")
    for name in SECTIONS:
        _show_section(found["sections"][name], TITLES[name], console, all_of_it=all_of_it)
    _say(console, f"data digests: {digest_words(found['data_digests'])}")
    _say(console, f"losses: {loss_words(found['losses'])}")
    for sentence in found["notes"]:
        _say(console, f"note: {sentence}")
    _say(console, "same" if found["same"] else "different")


def _show_section(
    section: dict[str, Any], title: str, console: Console, *, all_of_it: bool
) -> None:
    if section["unknown"]:
        where = " and ".join(section["unknown"])
        _say(console, f"{title}: not compared: not recorded in {where}")
        return
    differences, own = section["differences"], section["own"]
    rows = differences | (own if all_of_it else {})
    words = f"{len(differences)} of {section['compared']} differ" if differences else "same"
    if own and not all_of_it:
        words += f" but for what is each run's own (--all shows {len(own)})"
    _say(console, f"{title}: {words}")
    if rows and console.is_terminal:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=True, show_edge=False)
        table.add_column("")
        table.add_column("A", style="red", overflow="fold")
        table.add_column("B", style="green", overflow="fold")
        for name, (a, b) in rows.items():
            table.add_row(Text(_own(name, own)), Text(shown(a)), Text(shown(b)))
        console.print(table)
    else:
        for name, (a, b) in rows.items():
            _say(console, f"  {_own(name, own)}: {shown(a)} -> {shown(b)}")


def _own(name: str, own: dict[str, Any]) -> str:
    return printable(name) + (" (own)" if name in own else "")


def shown(value: Any) -> str:
    """A value on one line; – where one run has none."""
    if value is None:
        return "–"
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def digest_words(digests: dict[str, Any]) -> str:
    """Whether the runs saw the same data, or from which step on they did not."""
    common, first = digests["common"], digests["first_different"]
    if not common:
        return f"none in common (A has {digests['logged'][0]:,}, B {digests['logged'][1]:,})"
    if first is None:
        return f"equal in all {common:,} common steps, to step {digests['last_common']:,}"
    return f"part at step {first:,} ({digests['different']:,} of {common:,} common steps differ)"


def loss_words(losses: dict[str, Any]) -> str:
    """From which step on the losses differ, and how far apart they come."""
    if not losses["common"]:
        return "no logged step in common"
    lines = f"{losses['common']:,} common lines, to step {losses['last_common']:,}"
    if losses["first_unequal"] is None:
        return f"equal bit for bit in all {lines}"
    far = losses["largest"]
    most = f"{far:.1e}" if isinstance(far, float | int) else str(far)
    most = f"largest relative difference {most} at step {losses['largest_step']:,}"
    first = f"first unequal at step {losses['first_unequal']:,}"
    if losses["first_beyond"] is None:
        return f"equal to {losses['rtol']:g} in all {lines}; {first}; {most}"
    a, b = (f"{loss:.7g}" if isinstance(loss, float) else loss for loss in losses["there"])
    return (
        f"part beyond {losses['rtol']:g} at step {losses['first_beyond']:,} ({a} -> {b}); "
        f"{first}; {most}; {lines}"
    )


def _say(console: Console, sentence: str) -> None:
    console.print(printable(sentence), markup=False, highlight=False, soft_wrap=True)


def add_parser(subparsers: Any) -> None:
    """The sub-command `diff`."""
    parser = subparsers.add_parser(
        "diff",
        help="how two runs differ, and from which step on",
        description="Compare two run folders: identity, data, config, code, packages, environment; "
        "and their logs: from which step on they saw other data (digests), and from which their "
        "losses part. What is each run's own (its folder, job ids, world size) counts for nothing; "
        "nor do steps that one of them has not reached. Of several launches the newest counts. "
        "Exit code 0: same; 1: different; 2: trouble.",
        epilog="example: python -m canon_pretrain.run diff outputs/a outputs/b",
    )
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a run folder")
    parser.add_argument(
        "--rtol",
        type=float,
        default=RTOL,
        help="losses may be apart by rounding so far, relative (default: %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="also show what is each run's own")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """`python -m canon_pretrain.run diff` with parsed arguments. Raises UserError."""
    if not 0 <= arguments.rtol < 1:
        raise UserError(f"--rtol {arguments.rtol}: expected at least 0 and less than 1")
    found = compare(read_recorded(arguments.a), read_recorded(arguments.b), rtol=arguments.rtol)
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        show(found, Console(), all_of_it=arguments.all)
    return EXIT_SAME if found["same"] else EXIT_DIFFERENT

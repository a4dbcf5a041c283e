"""Results as a table in the terminal: the last thing that `eval run` prints of a suite."""

from rich.table import Table
from rich.text import Text

from canon_pretrain.core.terminal import Console
from canon_pretrain.run.results import Results, bound_words
from eval.suite_names import VALIDATION


def print_results(console: Console, subject: str, results: Results) -> None:
    """The scores of one suite; losses best first. `subject` names what was evaluated."""
    limit = results.asked["limit"]
    cut = "" if limit is None else f"; the first {limit:,} items only: not a result"
    if results.asked["suite"] == VALIDATION:
        console.print(_loss_table(subject, results))
        return
    title = Text(f"{results.asked['suite']}: {subject}{cut}")
    table = Table(title=title, title_justify="left")
    for column in ("task", "metric"):
        table.add_column(column, no_wrap=True)
    for column in ("score", "+-", "items"):
        table.add_column(column, justify="right", no_wrap=True)
    for task, metrics in results.scores.items():
        primary = results.asked["tasks"].get(task, {}).get("primary", ())
        for metric, score in metrics.items():
            error = "" if score.stderr is None else f"{score.stderr:.4f}"
            if score.bound is not None:
                error = bound_words(score.value, score.bound)
            style = "bold" if metric in primary else ""
            count = f"{results.num_samples[task]:,}"
            table.add_row(Text(task), Text(metric, style), f"{score.value:.4f}", error, count)
    console.print(table)
    cut_items = [
        f"{task} {count:,} of {results.num_samples[task]:,}"
        for task, count in results.truncated.items()
        if count
    ]
    if cut_items:
        words = (
            f"contexts longer than max_length {results.asked['max_length']} lost their beginning "
            f"(--max_length reads more): {', '.join(cut_items)}"
        )
        console.print(Text(words), soft_wrap=True)
    for task, described in results.asked["tasks"].items():
        if counts := described.get("counts"):
            words = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            console.print(Text(f"documents of {task}: {words}"), soft_wrap=True)


def _loss_table(subject: str, results: Results) -> Table:
    tokens = results.num_samples[VALIDATION]
    title = Text(f"held-out loss over {tokens:,} tokens: {subject}")
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    table.add_column("nats/token", justify="right")
    table.add_column("bits/byte", justify="right")
    for name, metrics in sorted(
        results.scores.items(), key=lambda item: item[1]["bits_per_byte"].value
    ):
        label = f"{name} of the training shards" if name != VALIDATION else "this checkpoint"
        nats, bits = metrics["nats_per_token"].value, metrics["bits_per_byte"].value
        table.add_row(label, f"{nats:.4f}", f"{bits:.4f}")
    return table

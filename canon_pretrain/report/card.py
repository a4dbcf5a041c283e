"""The model card of an exported checkpoint: Markdown with the hub's metadata, and a picture.

Its tables are those of a report; it shows the run up to the checkpoint's step, and no paths or host
names, because it is made to be published. No torch.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCardData

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_json
from canon_pretrain.core.terminal import printable
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import active_parameters, num_parameters
from canon_pretrain.report import eval_report, evaluations, sections
from canon_pretrain.report.content import Setting
from canon_pretrain.report.curves import downsample, segments
from canon_pretrain.report.items import Evaluation, ItemCache
from canon_pretrain.report.picture import Line, Panel, draw
from canon_pretrain.report.record import Curve, RunRecord, collapse_repeats, is_outdated
from canon_pretrain.run.results import BITS, VALIDATION
from canon_pretrain.stats.noise import MIN_CLUSTERS, student_half_width

CARD, PICTURE = "README.md", "training_curves.png"
MAX_POINTS = 400  # segments of a line in the picture
MAX_SAMPLES, MAX_SCORES = 8, 4
_CACHED = re.compile(r"/datasets--([\w.-]+?)--([\w.-]+)/snapshots/")
_SETTINGS = ("optimizer.", "lr_scheduler.", "training.", "data.", "loss.", "guards.")
_POSITIONS = {
    "rope": "rotary (RoPE)",
    "nope": "none (NoPE)",
    "alibi": "ALiBi",
    "h_alibi": "ALiBi by windows, one length per head (H-ALiBi)",
    "partial_rope_a": "rotary in half of the heads and half of their dimensions",
    "partial_rope_b": "rotary in a quarter of the heads",
    "partial_rope_c": "rotary in {rope_dim} of the {head_dim} dimensions of each head",
}
_MIXERS = {
    "attention": "causal self-attention, {num_heads} heads of {head_dim}",
    "gla": "gated linear attention (GLA), {num_heads} heads",
    "mamba2": "Mamba2, {num_heads} heads",
    "gated_deltanet": "Gated DeltaNet, {num_heads} heads",
}
_SITES = {
    "A": "before the mixer",
    "B": "inside the mixer",
    "C": "before the feed-forward",
    "D": "inside the feed-forward",
}

Row = Sequence[str]


def model_card(
    path: Path, step: int, *, title: str, lead: str, loading: str, license_id: str | None
) -> dict[str, bytes]:
    """Return README.md and, if the run has a log, its picture, for the run's checkpoint at `step`.

    `lead`: what the weights are. `loading`: Markdown. Equal runs make equal bytes.
    """
    run = RunRecord(path, "score")  # what tables call its column
    try:
        has_log = bool(run.steps)
    except UserError:  # an import has no log; a damaged one is no reason not to export
        has_log = False
    picture = _picture(run, step) if has_log else None

    # What it is and how it was trained.
    args = run.model_args
    data, datasets = _data(run)
    description = printable(str(run.config.get("job", {}).get("description") or ""))
    summary = [description, lead] if description else [lead]
    total = run.identity.get("training.steps") or step
    if step < total:
        summary.append(f"The run was configured for {total:,} steps of training.")
    settings = [
        Setting(name, [value])
        for name, value in run.identity.items()
        if name.startswith(_SETTINGS) and value is not None
    ]

    # A full result replaces a trial.
    by_suite = {
        evaluation.suite: evaluation
        for evaluation in run.evaluations
        if evaluation.step == step and not is_outdated(run.folder, evaluation.results)
    }
    in_order = [by_suite[name] for name in sorted(by_suite, key=evaluations.suite_order)]
    results = [*_eval_results(in_order)]

    content = {
        "title": title,
        "summary": summary,
        "loading": loading,
        "model": args and sections.make_table(["", ""], [*_architecture(args)], text=2),
        "training": sections.make_table(["", ""], [*_training(run, step, has_log), *data], text=2),
        "settings": sections.settings(["value"], settings),
        "picture": picture and PICTURE,
        "suites": [eval_report.suite_content(x.suite, {run: x}, step) for x in in_order],
        "at_chance": [*_at_chance(in_order)],
        "samples": [*_samples(run, step)] if has_log else [],
        "limits": [*_limits(run, license_id)],
    }
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license_id,
        datasets=sorted(datasets) or None,
        tags=["canon_pretrain", *([args.mixer, args.position] if args else [])],
        model_name=title if results else None,
        eval_results=results or None,
    )
    page = eval_report.markdown_page({"content": content, "kind": "card", "tables": sections})
    files = {CARD: f"---\n{metadata.to_yaml()}\n---\n\n{page}".encode()}
    return files | ({PICTURE: picture} if picture else {})


def _architecture(args: ModelArgs) -> Iterator[Row]:
    sizes = {name: getattr(args, name) for name in ("num_heads", "head_dim", "rope_dim")}
    used = active_parameters(args)
    per_token = "" if used == num_parameters(args) else f", {used:,} used per token"
    yield "parameters", f"{num_parameters(args):,}{per_token}"
    yield "layers", f"{args.num_layers} of width {args.dim:,}"
    shared = f", {args.kv_heads} of keys and values" if args.num_kv_heads else ""
    conv = ", with its convolution" if args.mixer_conv else ""
    yield "mixer", _MIXERS[args.mixer].format(**sizes) + shared + conv
    yield "positions", _POSITIONS[args.position].format(**sizes)
    yield "Canon layers", _canon(args)
    feed_forward = "none"
    if args.ffn != "none":
        feed_forward = f"{args.ffn}, {args.ffn_activation}, width {args.ffn_dim:,}"
    experts = ""
    if args.ffn == "moe":
        experts = f", {args.experts_per_token} of {args.num_experts} experts per token"
    yield "feed-forward", feed_forward + experts
    qk_norm = f", QK-norm {args.qk_norm}" if args.qk_norm != "none" else ""
    yield "norm", args.norm + qk_norm
    tied = ", input and output embeddings tied" if args.tie_embeddings else ""
    yield "vocabulary", f"{args.vocab_size:,} tokens{tied}"
    masked = ", documents in it are separated" if args.document_mask else ""
    yield "longest context", f"{args.max_seq_len:,} tokens{masked}"


def _canon(args: ModelArgs) -> str:
    """Return the Canon set in words (Physics of Language Models, part 4.1)."""
    if not args.canon_set:
        return "no Canon"
    properties = {
        f"over {args.canon_kernel} tokens": True,
        "plus their input": args.canon_residual,
        "with SiLU": args.canon_activation,
        "fixed at their initial values": not args.canon_trainable,
        "with filters that depend on the token": args.canon_filter == "dynamic",
    }
    convolutions = " ".join(text for text, holds in properties.items() if holds)
    sites = ", ".join(f"{site} {_SITES[site]}" for site in args.canon_set)
    return f"Canon-{args.canon_set}: causal convolutions per channel {convolutions}; {sites}"


def _training(run: RunRecord, step: int, has_log: bool) -> Iterator[Row]:
    total = run.identity.get("training.steps")
    if total or has_log or step:
        yield "step", f"{step:,} of {total:,}" if total else f"{step:,}"
    if not has_log:
        yield "log", "none: steps, tokens and curves of the training are not known"
        return
    if started := run.initial_load:
        yield "started from", f"{started}, not from random weights; its training is not shown here"
    tokens = evaluations.tokens_at(run, step)
    yield "tokens seen", sections.number(tokens, 0)
    for event in run.own_validations:
        if event.step == step:
            bits = event.get("bits_per_byte")
            loss = f"{sections.number(event.get('loss'))} nats per token"
            per_byte = "" if bits is None else f", {sections.number(bits)} bits per byte"
            yield "held-out loss in training", loss + per_byte
            scores = (event.get("scores") or {}).items()
            texts = [f"{name} {sections.number(value)}" for name, value in scores]
            if texts:
                yield "scores in training", printable(", ".join(texts))
    launches = [event for event in run.launch_events if event.from_step < step]
    for name in eval_report.LAUNCH_FIELDS:
        values = collapse_repeats(event.get(name) for event in launches)
        yield name.replace("_", " "), ", ".join(map(str, values))


def _data(run: RunRecord) -> tuple[list[Row], set[str]]:
    """Return rows on the run's data, and the ids of the datasets of the hub in it."""
    if task := run.identity.get("data.task.name"):
        return [("data", f"the synthetic task {task}, generated while training")], set()

    fingerprint = str(run.identity.get("data_fingerprint") or "")
    rows: list[Row] = [("data fingerprint", fingerprint or "not recorded")]
    datasets: set[str] = set()
    data = run.config.get("data", {})
    folders = data.get("paths") or [x for x in [data.get("path")] if x]
    with contextlib.suppress(UserError, OSError):  # moved or changed since: only the fingerprint
        mixture = Mixture.open(folders, data.get("weights") or [1.0] * len(folders))
        if mixture.fingerprint != fingerprint:
            return rows, datasets
        for folder, name, source, share in zip(
            folders, mixture.names, mixture.sources, mixture.shares, strict=True
        ):
            plan: dict[str, Any] = {}
            with contextlib.suppress(UserError):  # written by others than data_prep
                plan = read_json(Path(folder) / "plan.json")
            origin = " ".join(str(plan[x]) for x in ("source", "source_version") if plan.get(x))
            if match := _CACHED.search(str(plan.get("root"))):
                datasets.add("/".join(match.groups()))

            label, windows = "data", ""
            if len(folders) > 1:
                label = f"data {Path(name).name}"
                windows = f"{float(share):.1%} of the windows; "
            tokens = f"{source.num_tokens:,} tokens from {origin or 'a source not recorded'}"
            rows.append((printable(label), printable(windows + tokens)))
    return rows, datasets


def _picture(run: RunRecord, step: int) -> bytes:
    """Return training and held-out loss, and scores of a synthetic task or the gradient norm."""

    def line(label: str, curve: Curve | None) -> Line:
        steps, values = curve or (np.zeros(0, np.int64), np.zeros(0))
        steps, values = steps[steps <= step], values[steps <= step]
        kept = downsample(values, segments(len(values), MAX_POINTS))
        tokens = np.array([evaluations.tokens_at(run, at) for at in steps[kept]], float)
        return Line(label, tokens, values[kept])

    held_out = Curve.of(
        (event.step, event["loss"]) for event in run.own_validations if "loss" in event
    )
    losses = [line("training", run.curve("loss")), line("held out", held_out)]
    scores = [line(name, curve) for name, curve in run.scores.items() if name != "loss"]
    norms = Panel("Gradient norm, before clipping", [line("", run.curve("grad_norm"))])
    right = Panel("Scores on the task", scores[:MAX_SCORES]) if scores else norms
    left = Panel("Loss, nats per token", [x for x in losses if len(x.x)])
    return draw([left, right], "png")


def _samples(run: RunRecord, step: int) -> Iterator[tuple[str, str]]:
    """Yield captions and the last texts, as indented blocks, which nothing in them can end."""
    for prompt, by_step in [*run.samples.items()][:MAX_SAMPLES]:
        at = max((x for x in by_step if x <= step), default=0)
        if at:
            text = by_step[at]
            lines = ["(not finite)"] if text is None else text.splitlines() or [""]
            caption = f"Step {at:,}, after “{prompt}”:" if prompt else f"Step {at:,}, no prompt:"
            yield caption, "\n".join(f"    {line}" for line in lines)


def _at_chance(shown: Sequence[Evaluation]) -> Iterator[str]:
    """Yield a sentence with the primary scores whose 95 % interval has the task's chance level."""
    at_chance, cache = [], ItemCache()
    for evaluation in shown:
        results = evaluation.results
        for task, metrics in results.scores.items():
            for metric, score in metrics.items():
                chance = None
                with contextlib.suppress(UserError):  # damaged answers
                    chance = cache.chance(evaluation, task, metric)
                count = results.num_sources.get(task, results.num_samples.get(task, 0))
                if chance is None or score.stderr is None or count < MIN_CLUSTERS:
                    continue

                if abs(score.number - chance) <= student_half_width(score.stderr, count - 1):
                    at_chance.append(f"{task} {metric} (chance {sections.number(chance, 3)})")
    if at_chance:
        listed = printable(", ".join(dict.fromkeys(at_chance)))
        yield f"Not distinguishable from guessing: {listed}."


def _eval_results(shown: Sequence[Evaluation]) -> Iterator[EvalResult]:
    """Yield the primary scores for the hub's index; trials of the first items are not results."""
    for evaluation in shown:
        suite = evaluation.suite
        for task, metrics in evaluation.results.scores.items() if evaluation.limit is None else ():
            names = evaluation.primary_metrics(task) if evaluation.is_task(task) else []
            if suite == VALIDATION and names and BITS in metrics:
                names = [BITS]
            for metric in names:
                value = metrics[metric].number
                if math.isfinite(value):
                    title = task if task == suite else f"{suite}: {task}"
                    yield EvalResult(
                        task_type="text-generation",
                        dataset_type=printable(task),
                        dataset_name=printable(title),
                        metric_type=printable(metric),
                        metric_value=value,
                    )


def _limits(run: RunRecord, license_id: str | None) -> Iterator[str]:
    task, length = run.identity.get("data.task.name"), run.identity.get("training.seq_len")
    if task:
        yield f"It was trained on token ids of the synthetic task {task}: it knows no language."
    else:
        yield "It continues text; it was not trained to follow instructions, or to be right."
    if length:
        yield f"It was trained on sequences of {length:,} tokens; use beyond that is untested."
    yield (
        "This card was written from the files of the run. Not verified: that the training "
        "data has none of the evaluation texts, that the data may be used for your purpose, and "
        "all that is not stated here."
    )
    if license_id is None:
        yield "No license is stated."

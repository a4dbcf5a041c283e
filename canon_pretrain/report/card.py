"""The model card of an exported checkpoint: Markdown with the hub's metadata, and a picture.

Its tables are those of a report; it shows the run up to the checkpoint's step, and no paths or host
names, because it is made to be published. No torch.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

CARD = "README.md"
PICTURE = "training_curves.png"
MAX_POINTS = 400  # segments of a line in the picture
MAX_SAMPLES = 8  # prompts
MAX_SCORES = 4  # lines in the picture
_HUB_CACHE = re.compile(r"/datasets--([\w.-]+?)--([\w.-]+)/snapshots/")
_SETTINGS = ("optimizer.", "lr_scheduler.", "training.", "data.", "loss.", "guards.")
_POSITIONS = {
    "rope": "rotary (RoPE)",
    "nope": "none (NoPE)",
    "alibi": "ALiBi",
    "h_alibi": "windows of 1 to {num_windowed} tokens in the first {num_windowed} heads (H-ALiBi)",
    "relative": "biases of the scores at {bias_extent:,} distances, learned from {relative_dim} "
    "channels of each head (Inkling's)",
    "partial_rope_a": "rotary in half of the heads and half of their dimensions",
    "partial_rope_b": "rotary in a quarter of the heads",
    "partial_rope_c": "rotary in {rope_dim} of the {head_dim} dimensions of each head",
}
_ATTENTION = "causal self-attention, {num_heads} heads of {head_dim}"
_FILTERS = {
    "static": "causal convolutions over {taps} tokens, with taps for each channel",
    "dynamic": "causal convolutions over {taps} tokens, with taps that depend on the token",
    "dynamic_heads": "causal convolutions over {taps} tokens, with taps that depend on the token "
    "and the head at Q, K and V",
    "scalar": "causal convolutions over {taps} tokens, with the same taps for all channels",
    "shift": "a learned mix of each channel with the token before (token shift)",
}
_SITES = {
    "A": "before the mixer",
    "B": "inside the mixer",
    "C": "before the feed-forward",
    "D": "inside the feed-forward",
    "F": "after the feed-forward",
    "K": "on keys",
    "O": "after the mixer",
    "Q": "on queries",
    "V": "on values",
}

_QK_NORMS = {
    "full": "RMSNorm of all queries and of all keys (QK-norm full)",
    "per_head": "RMSNorm of each head's queries and keys (QK-norm per head)",
}
_GATES = {"per_channel": "a learned sigmoid gate on each channel of its output"}

Row = tuple[str, str]


def model_card(
    path: Path,
    step: int,
    *,
    title: str,
    lead: str,
    loading: str,
    library: str | None,
    license_id: str | None,
) -> dict[str, bytes]:
    """Return README.md and, if the run has a log, its picture, for the run's checkpoint at `step`.

    `lead`: what the weights are. `loading`: Markdown. `library`: the hub's name of what loads it.
    Equal runs make equal bytes.
    """
    run = RunRecord(path, "score")  # what tables call its column
    has_log = False
    with contextlib.suppress(UserError):  # an import has no log; a damaged one may be exported
        has_log = bool(run.steps)
    picture = None
    samples = []
    if has_log:
        picture = _picture(run, step)
        samples = [*_samples(run, step)]

    # What it is and how it was trained.
    args = run.model_args
    data = _data(run)
    summary = [text for text in (run.description, lead) if text]
    total_steps = run.identity.get("training.steps") or step
    if step < total_steps:
        summary.append(f"The run was configured for {total_steps:,} steps of training.")
    training = [*_training(run, step, has_log), *data.rows]
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
    evaluated = [by_suite[name] for name in sorted(by_suite, key=evaluations.suite_order)]
    results = [*_eval_results(evaluated)]
    suites = [eval_report.suite_content(x.suite, {run: x}, step) for x in evaluated]

    model = None
    if args:
        architecture = [*_architecture(args)]
        model = sections.make_table(["", ""], architecture, text=2)
    content = {
        "title": title,
        "summary": summary,
        "loading": loading,
        "model": model,
        "training": sections.make_table(["", ""], training, text=2),
        "settings": sections.settings(["value"], settings),
        "picture": picture and PICTURE,
        "suites": suites,
        "at_chance": [*_at_chance(evaluated)],
        "samples": samples,
        "limits": [*_limits(run, license_id)],
    }

    # The hub's metadata; results need the name of a model.
    tags = ["canon_pretrain"]
    if args:
        tags += _tags(args)
    metadata = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        license=license_id,
        datasets=sorted(data.datasets) or None,
        tags=tags,
        model_name=title if results else None,
        eval_results=results or None,
    )
    page = eval_report.markdown_page({"content": content, "kind": "card", "tables": sections})
    card = f"---\n{metadata.to_yaml()}\n---\n\n{page}"
    files = {CARD: card.encode()}
    if picture:
        files[PICTURE] = picture
    return files


def _tags(args: ModelArgs) -> list[str]:
    """Return the mixers and positions of the model's layers, for the hub."""
    layers = args.kinds.values()
    # of FILE.py:Name the class
    mixers = [layer.mixer.rpartition(":")[2] for layer in layers]
    positions = [layer.position for layer in layers]
    return [*dict.fromkeys((*mixers, *positions))]


def _architecture(args: ModelArgs) -> Iterator[Row]:
    """Yield the rows on the model's sizes and modules."""
    num_total = num_parameters(args)
    num_active = active_parameters(args)
    parameters = [f"{num_total:,}"]
    if num_active != num_total:
        parameters.append(f"{num_active:,} used per token")
    yield "parameters", ", ".join(parameters)
    yield "layers", f"{args.num_layers} of width {args.dim:,}"

    # Layers that differ: a row for what all have in common, else one for each kind of layer.
    kinds = {printable(name): dict(_layer(layer)) for name, layer in args.kinds.items()}
    if len(kinds) > 1:
        yield "order of the layers", _order(args)
    labels = dict.fromkeys(label for rows in kinds.values() for label in rows)
    for label in labels:
        texts = {name: rows[label] for name, rows in kinds.items() if label in rows}
        if len(texts) == len(kinds) and len(set(texts.values())) == 1:
            yield label, next(iter(texts.values()))
        else:
            for name, text in texts.items():
                yield f"{label}, layers {name}", text

    # Tokens in and out.
    vocabulary = [f"{args.vocab_size:,} tokens"]
    if args.tie_embeddings:
        vocabulary.append("input and output embeddings tied")
    if args.embed_norm:
        vocabulary.append("embeddings normalized")
    yield "vocabulary", ", ".join(vocabulary)
    if args.smear:
        yield (
            "smear",
            "to each embedding, that of the token before is added, times a gate learned from the "
            f"first {args.smear_dim} channels",
        )
    context = [f"{args.max_seq_len:,} tokens"]
    if args.document_mask:
        context.append("documents in it are separated")
    yield "longest context", ", ".join(context)


def _order(args: ModelArgs) -> str:
    """Return the pattern in words, and the number of layers of each kind."""
    names = [name.rpartition("/")[2] for name in args.pattern[: args.num_layers]]
    order = " > ".join(names)
    if len(names) < args.num_layers:
        order = f"{order}, repeated"
    counts = zip(args.kinds, args.layer_counts, strict=True)
    numbers = [f"{count} {name.rpartition('/')[2]}" for name, (_, count) in counts]
    return printable(f"{order}: {', '.join(numbers)}")


def _layer(args: ModelArgs) -> Iterator[Row]:
    """Yield the rows on the modules of a layer."""
    # The mixer and its positions.
    sizes = {
        "num_heads": args.num_heads,
        "head_dim": args.head_dim,
        "rope_dim": args.rope_dim,
        "num_windowed": args.num_windowed,
        "bias_extent": args.bias_extent,
        "relative_dim": args.relative_dim,
    }
    if args.is_own_mixer:
        name = args.mixer.rpartition("/")[2]
        mixer = [printable(f"a class of its own ({name}), {args.num_heads} heads")]
    elif args.recurrent is not None:
        mixer = [args.recurrent.label.format(**sizes)]
    else:
        mixer = [_ATTENTION.format(**sizes)]
    if args.num_kv_heads:
        mixer.append(f"{args.kv_heads} of keys and values")
    if args.window:
        mixer.append(f"over a window of the last {args.window:,} tokens")
    if args.qk_norm != "none":
        mixer.append(_QK_NORMS[args.qk_norm])
    if args.attention_gate != "none":
        mixer.append(_GATES[args.attention_gate])
    if args.mixer_conv:
        mixer.append("with its convolution")
    if args.allow_neg_eigval:
        mixer.append("with negative eigenvalues")
    if args.mimetic_init:
        mixer.append("from mimetic initial values")
    yield "mixer", ", ".join(mixer)
    yield "positions", _POSITIONS[args.position].format(**sizes)
    yield "Canon layers", _canon(args)

    # The feed-forward network.
    feed_forward = [args.ffn]
    if args.ffn != "none":
        feed_forward += [args.ffn_activation, f"width {args.ffn_dim:,}"]
    if args.ffn == "moe":
        feed_forward.append(f"{args.experts_per_token} of {args.num_experts} experts per token")
    yield "feed-forward", ", ".join(feed_forward)

    norm = args.norm
    if args.norm_place == "output":
        norm = f"{norm} of the outputs of mixer and feed-forward, not of their inputs"
    yield "norm", norm


def _canon(args: ModelArgs) -> str:
    """Return the Canon layers in words (Physics of Language Models, part 4.1)."""
    if not args.canon_set:
        return "no Canon"

    properties = [_FILTERS[args.canon_filter].format(taps=args.canon_kernel)]
    if args.canon_activation:
        properties.append("with SiLU")
    if args.canon_filter != "shift":  # which has its input by definition
        properties.append("added to their input" if args.canon_residual else "without their input")
    if args.canon_scale == "sqrt":
        # dynamic sites have more terms
        factors = dict.fromkeys(args.canon_factor_at(site) for site in args.canon_set)
        num_terms = " or ".join(str(round(factor**-2)) for factor in factors)
        properties.append(f"the sum divided by the square root of {num_terms}")
    if not args.canon_trainable:
        properties.append("fixed at their initial values")
    sites = ", ".join(f"{site} {_SITES[site]}" for site in args.canon_set)
    return f"Canon-{args.canon_set}: {', '.join(properties)}; {sites}"


def _training(run: RunRecord, step: int, has_log: bool) -> Iterator[Row]:
    """Yield the rows on the training up to `step`."""
    total_steps = run.identity.get("training.steps")
    if total_steps:
        yield "step", f"{step:,} of {total_steps:,}"
    elif has_log or step:
        yield "step", f"{step:,}"
    if not has_log:
        yield "log", "none: steps, tokens and curves of the training are not known"
        return

    if checkpoint := run.initial_load:
        origin = f"{checkpoint}, not from random weights; its training is not shown here"
        yield "started from", origin
    yield "tokens seen", sections.number(evaluations.tokens_at(run, step), 0)

    # The validation at this step, which training logged.
    for event in run.own_validations:
        if event.step != step:
            continue
        nats = event.get("loss")
        losses = [f"{sections.number(nats)} nats per token"]
        bits = event.get("bits_per_byte")
        if bits is not None:
            losses.append(f"{sections.number(bits)} bits per byte")
        yield "held-out loss in training", ", ".join(losses)
        if scores := event.get("scores"):
            texts = []
            for name, value in scores.items():
                score = sections.number(value)
                texts.append(f"{name} {score}")
            yield "scores in training", printable(", ".join(texts))

    launches = [event for event in run.launch_events if event.from_step < step]
    for name in eval_report.LAUNCH_FIELDS:
        values = collapse_repeats(event.get(name) for event in launches)
        heading = name.replace("_", " ")
        yield heading, ", ".join(map(str, values))


class DataRows(NamedTuple):
    """Rows on a run's data, and the ids of the datasets of the hub in it."""

    rows: list[Row]
    datasets: set[str]


def _data(run: RunRecord) -> DataRows:
    """Describe the run's data; by its fingerprint alone if the data has moved or changed."""
    if task := run.identity.get("data.task.name"):
        row = "data", f"the synthetic task {task}, generated while training"
        return DataRows([row], set())

    fingerprint = str(run.identity.get("data_fingerprint") or "")
    described = DataRows([("data fingerprint", fingerprint or "not recorded")], set())
    data = run.config.get("data", {})
    folders = data.get("paths") or []
    if not folders and data.get("path"):
        folders = [data["path"]]
    weights = data.get("weights") or [1.0] * len(folders)
    with contextlib.suppress(UserError, OSError):  # the data has moved
        mixture = Mixture.open(folders, weights)
        if mixture.fingerprint != fingerprint:
            return described

        # A row per folder of the mixture: its share, its tokens and where they are from.
        for folder, name, source, share in zip(
            folders,
            mixture.names,
            mixture.sources,
            mixture.shares,
            strict=True,
        ):
            plan: dict[str, Any] = {}
            with contextlib.suppress(UserError):  # written by others than data_prep
                plan = read_json(Path(folder) / "plan.json")
            root = str(plan.get("root"))
            if match := _HUB_CACHE.search(root):
                described.datasets.add("/".join(match.groups()))

            source_name = [plan.get("source"), plan.get("source_version")]
            origin = " ".join(str(part) for part in source_name if part)
            label = "data"
            text = f"{source.num_tokens:,} tokens from {origin or 'a source not recorded'}"
            if len(folders) > 1:
                label = f"data {Path(name).name}"
                text = f"{float(share):.1%} of the windows; {text}"
            row = printable(label), printable(text)
            described.rows.append(row)
    return described


def _picture(run: RunRecord, step: int) -> bytes:
    """Return training and held-out loss, and scores of a synthetic task or the gradient norm."""

    def line(label: str, curve: Curve | None) -> Line:
        """Return a curve up to `step` over the tokens seen."""
        if curve is None:
            return Line(label, np.zeros(0), np.zeros(0))

        steps, values = curve
        values = values[steps <= step]
        kept = downsample(values, segments(len(values), MAX_POINTS))
        tokens = [evaluations.tokens_at(run, at) for at in steps[kept]]
        return Line(label, np.array(tokens, float), values[kept])

    # On the left the losses; training may have logged only one of them.
    held_out_points = [(event.step, event.get("loss")) for event in run.own_validations]
    held_out = Curve.of(held_out_points)
    losses = [
        line("training", run.curve("loss")),
        line("held out", held_out),
    ]
    logged_losses = [loss for loss in losses if len(loss.x)]
    left = Panel("Loss, nats per token", logged_losses)

    # On the right the scores of the task, which text does not have.
    scores = []
    for name, curve in run.scores.items():
        if name != "loss":
            scores.append(line(name, curve))
    if scores:
        right = Panel("Scores on the task", scores[:MAX_SCORES])
    else:
        grad_norm = line("", run.curve("grad_norm"))
        right = Panel("Gradient norm, before clipping", [grad_norm])
    return draw([left, right], "png")


def _samples(run: RunRecord, step: int) -> Iterator[tuple[str, str]]:
    """Yield captions and the last texts, as indented blocks, which nothing in them can end."""
    samples = [*run.samples.items()]
    for prompt, by_step in samples[:MAX_SAMPLES]:
        last_step = max((x for x in by_step if x <= step), default=0)
        if not last_step:
            continue
        text = by_step[last_step]
        lines = ["(not finite)"]
        if text is not None:
            lines = text.splitlines() or [""]
        block = "\n".join(f"    {line}" for line in lines)
        after = f"after “{prompt}”" if prompt else "no prompt"
        yield f"Step {last_step:,}, {after}:", block


def _at_chance(shown: Sequence[Evaluation]) -> Iterator[str]:
    """Yield a sentence with the scores whose 95 % interval contains the task's chance level."""
    at_chance = []
    cache = ItemCache()
    for evaluation in shown:
        results = evaluation.results
        for task, metrics in results.scores.items():
            for metric, score in metrics.items():
                chance = None
                with contextlib.suppress(UserError):  # damaged answers
                    chance = cache.chance(evaluation, task, metric)
                num_items = results.num_samples.get(task, 0)
                num_clusters = results.num_sources.get(task, num_items)
                if chance is None or score.stderr is None or num_clusters < MIN_CLUSTERS:
                    continue

                half_width = student_half_width(score.stderr, num_clusters - 1)
                if abs(score.number - chance) <= half_width:
                    level = sections.number(chance, 3)
                    at_chance.append(f"{task} {metric} (chance {level})")
    if at_chance:
        scores = printable(", ".join(dict.fromkeys(at_chance)))
        yield f"Not distinguishable from guessing: {scores}."


def _eval_results(shown: Sequence[Evaluation]) -> Iterator[EvalResult]:
    """Yield the primary scores for the hub's index; trials of the first items are not results."""
    for evaluation in shown:
        if evaluation.limit is not None:
            continue

        suite = evaluation.suite
        for task, scores in evaluation.results.scores.items():
            # Baselines such as count models are no tasks; of held-out losses one unit is enough.
            if not evaluation.is_task(task):
                continue
            metrics = evaluation.primary_metrics(task)
            if suite == VALIDATION and metrics and BITS in scores:
                metrics = [BITS]

            title = task if task == suite else f"{suite}: {task}"
            for metric in metrics:
                value = scores[metric].number
                if not math.isfinite(value):
                    continue
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=printable(task),
                    dataset_name=printable(title),
                    metric_type=printable(metric),
                    metric_value=value,
                )


def _limits(run: RunRecord, license_id: str | None) -> Iterator[str]:
    """Yield sentences on what the model is not made for, and what was not verified."""
    task = run.identity.get("data.task.name")
    length = run.identity.get("training.seq_len")
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

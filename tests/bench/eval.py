"""Time our runner and `lm_eval --model hf` on the same export and requests, in one process.

Both alternate on every case and must return the same answers. Number and length of the requests
are those of the suites; the text is the standard library's.
"""

import argparse
import contextlib
import io
import logging
import os
import platform
import random
import re
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import sentencepiece
import torch
from lm_eval.api.instance import Instance
from pydantic import TypeAdapter, ValidationError

from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.core.cli import positive
from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.data.tokenizer import SENTENCEPIECE_FILE, Tokenizer
from canon_pretrain.hf.export import export
from canon_pretrain.hf.loading import dtype_for
from canon_pretrain.machine.device import check_cuda
from canon_pretrain.machine.hardware import cpu_info
from canon_pretrain.model.args import ModelArgs, flavor
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from eval.model.budget import batch_tokens_for
from eval.model.lm import CanonLM
from eval.model.target import EvalTarget
from tests.bench import tables, timing

MAX_LENGTH = 2048  # tokens of context; also the window of perplexities
TEXT_CHARACTERS = 600_000
TOLERANCE = 1e-3  # nats between the two log-likelihoods in float32
# lm_eval's fastest of these counts; its `auto` would exceed a CPU's memory
HF_BATCH_SIZES = {"cpu": (1, 4, 16), "cuda": (8, 32, 128)}
NO_TEXT = 3 + 256  # ids of control tokens and bytes in a new SentencePiece tokenizer
CHOICE = "multiple choice"
ROLLING = "perplexity"
GENERATION = "generation"
KINDS = {
    CHOICE: "loglikelihood",
    ROLLING: "loglikelihood_rolling",
    GENERATION: "generate_until",
}
# required speedup on a CPU
TARGETS = {
    CHOICE: tables.Target((1.2,), True, "x"),
    GENERATION: tables.Target((1.5,), True, "x"),
}


class CaseSpec(NamedTuple):
    """The form of a suite's requests; {6-14} is replaced by a text of 6 to 14 tokens."""

    group: str
    items: int  # at scale 1
    prompt: str
    choices: tuple[str, ...] = ()
    head: str = ""  # the same text before every prompt
    new_tokens: int = 0
    until: tuple[str, ...] = ()


BABILONG = "<context>\n{650-950}\n</context>\n\nQuestion: {6-9}?\nAnswer:"
BIRTH_YEAR = "{310-360}\n\nAnswer me: {5-8} was born in the year of "
CASES = {
    "hellaswag": CaseSpec(CHOICE, 6, "{20-110}", (" {10-45}",) * 4),
    "boolq": CaseSpec(CHOICE, 8, "{80-300}\nQuestion: {6-14}?\nAnswer:", (" no", " yes")),
    "piqa": CaseSpec(CHOICE, 16, "Question: {5-25}\nAnswer:", (" {8-50}",) * 2),
    "wikitext": CaseSpec(ROLLING, 1, "{1400-2400}"),
    "jrt": CaseSpec(GENERATION, 4, "{880-1000}", new_tokens=48, until=("\n",)),
    "babilong": CaseSpec(GENERATION, 3, BABILONG, head="{230-230}\n\n", new_tokens=20),
    "birth-year": CaseSpec(GENERATION, 8, BIRTH_YEAR, new_tokens=5),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group()
    model_help = "random weights of this size and variant (default: Canon ABCD and no positions)"
    model.add_argument("--model", metavar="FLAVOR[,FIELD=VALUE...]", help=model_help)
    model.add_argument(
        "--checkpoint",
        type=Path,
        metavar="RUN/checkpoint/step-N",
        help="a trained checkpoint instead",
    )
    add = parser.add_argument
    add("--repeats", type=positive, default=3, help="measurements per case (%(default)s)")
    add("--scale", type=float, help="factor on the requests (default: 1 on a CPU, 16 on a GPU)")
    add("--cases", nargs="+", metavar="CASE", help="only these, such as hellaswag or jrt")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print; raises UserError if the two sides answer differently."""
    console = tables.make_console()
    result = measure(arguments, partial(tables.print_lines, console))
    print_result(result, console)
    if arguments.json:
        write_json(arguments.json, result)


# ---- the requests


def library_texts() -> list[str]:
    """Return the source texts of the running Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_text("utf-8", errors="ignore") for path in sorted(folder.glob("*.py"))]


def make_requests(
    tokenizer: Tokenizer, names: Sequence[str], scale: float
) -> dict[str, list[Instance]]:
    """Return the requests by case, the same for the same arguments and standard library."""
    # one line: the suites' texts have few line breaks
    text = " ".join(" ".join(library_texts()).split())
    ids = tokenizer.encode(text[:TEXT_CHARACTERS])
    generator = random.Random(0)

    def random_text(match: re.Match[str]) -> str:
        count = generator.randint(int(match[1]), int(match[2]))
        start = generator.randrange(len(ids) - count)
        return tokenizer.decode(ids[start : start + count]).strip()

    fill = partial(re.sub, r"\{(\d+)-(\d+)\}", random_text)
    requests = {}
    for name in names:
        case = CASES[name]
        options = {"until": list(case.until), "max_gen_toks": case.new_tokens, "do_sample": False}
        head = fill(case.head)
        inputs = list[Any]()
        for _ in range(max(1, round(case.items * scale))):
            prompt = head + fill(case.prompt)
            inputs += [(prompt, fill(choice)) for choice in case.choices]
            if not case.choices:
                inputs.append((prompt, options) if case.new_tokens else (prompt,))
        kind = KINDS[case.group]
        requests[name] = [Instance(kind, {}, args, index) for index, args in enumerate(inputs)]
    return requests


# ---- the model


def parse_model(text: str) -> ModelArgs:
    """Return the args of FLAVOR[,FIELD=VALUE...]; Canon ABCD and NoPE by default."""
    name, *settings = text.split(",")
    changes: dict[str, Any] = {"position": "nope", "canon_set": "ABCD"}
    types = get_type_hints(ModelArgs, include_extras=True)
    for setting in settings:
        field, _, value = setting.partition("=")
        check_choice("--model: field", field, types)
        try:
            changes[field] = TypeAdapter(types[field]).validate_python(value)
        except ValidationError as error:
            raise UserError("eval.bench_model", f"--model {text}: {error}") from None
    args = replace(flavor(name), **changes)
    return replace(args, max_seq_len=max(args.max_seq_len, MAX_LENGTH))


def write_random_export(args: ModelArgs, folder: Path, dtype: str) -> None:
    """Write the export of an untrained model, with a tokenizer of its size, to `folder`/out."""
    tokenizer = folder / SENTENCEPIECE_FILE
    tokenizer.write_bytes(trained_tokenizer(args.vocab_size))
    model = Transformer(replace(args, tie_embeddings=False))
    model.init_weights()
    assert model.output is not None
    with torch.no_grad():  # logits of 0 are below many others: answers are text of full length
        model.output.weight[:NO_TEXT] = 0.0
    run = RunFolder(folder / "run")
    run.write_config({"data": {}}, {f"model.{k}": v for k, v in asdict(model.args).items()})
    checkpoint = run.path / "checkpoint" / "step-1"
    save_no_dist(dict(model.named_parameters()), checkpoint, step=1)
    export(checkpoint, folder / "out", dtype=dtype, tokenizer=tokenizer)


def trained_tokenizer(vocab_size: int) -> bytes:
    """Return a SentencePiece BPE model trained on the standard library as by data_prep."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(x for t in library_texts() for x in t.split("\n") if 0 < len(x) < 4000),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def load_theirs(folder: Path, device: torch.device, dtype: str, scratch: Path) -> Any:
    """Return the model of `lm_eval --model hf --model_args pretrained=FOLDER,...`, without BOS."""
    # the export's code is copied there, by default to the home folder
    os.environ.setdefault("HF_MODULES_CACHE", str(scratch / "modules"))
    import transformers
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return HFLM(
        pretrained=str(folder),
        trust_remote_code=True,
        device=device.type,
        dtype=dtype,
        max_length=MAX_LENGTH,
        max_position_embeddings=MAX_LENGTH,  # training sequences may have been shorter
        add_bos_token=False,
    )


# ---- the measurement


def measure(arguments: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures of all cases as JSON values; times in seconds."""
    for name in arguments.cases or ():
        check_choice("--cases", name, CASES)
    names = [name for name in CASES if not arguments.cases or name in arguments.cases]
    check_cuda()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    weights = dtype_for("auto", device)
    dtype = str(weights).removeprefix("torch.")

    with tempfile.TemporaryDirectory(prefix="canon-eval-bench-") as scratch:
        # One export for both sides.
        folder = Path(scratch)
        if arguments.checkpoint is not None:
            export(arguments.checkpoint, folder / "out", dtype=dtype)
        else:
            args = parse_model(arguments.model or ("1b3" if on_gpu else "8L512D"))
            write_random_export(args, folder, dtype)

        target = EvalTarget.open(folder / "out", None)
        transformer = target.load(device, weights, MAX_LENGTH)
        ours = CanonLM(transformer, target.tokenizer, max_length=MAX_LENGTH)
        ours.batch_tokens = batch_tokens_for(ours, folder, lambda line: None)
        theirs = load_theirs(folder / "out", device, dtype, folder)

        rows = []
        scale = arguments.scale or (16.0 if on_gpu else 1.0)
        for name, requests in make_requests(target.tokenizer, names, scale).items():
            rows.append(measure_case(ours, theirs, name, requests, arguments.repeats))
            log(f"{name}: {rows[-1]['ratio']:.2f}x")

    args = transformer.args
    kind = args.position if args.mixer == "attention" else args.mixer
    title = f"{args.num_layers}L{args.dim}D, {kind}, Canon {args.canon_set or 'none'}"
    cpu = f"{cpu_info('model name') or platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "bench": "eval",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else cpu,
        "versions": {name: version(name) for name in ("torch", "transformers", "lm_eval")},
        "model": str(arguments.checkpoint or f"random weights, {title}"),
        "num_parameters": num_parameters(args),
        "dtype": dtype,
        "batch_tokens": ours.batch_tokens,
        "seconds_are": timing.clock_name(),
        "cases": rows,
        "groups": means_by_group(rows, on_gpu),
    }


def means_by_group(rows: Sequence[dict[str, Any]], on_gpu: bool) -> list[dict[str, Any]]:
    """Return the geometric mean of the ratios of each group, and its target on a CPU."""
    means = []
    for group in dict.fromkeys(row["group"] for row in rows):
        mean = statistics.geometric_mean(row["ratio"] for row in rows if row["group"] == group)
        verdict = TARGETS[group].verdict(mean) if group in TARGETS and not on_gpu else ""
        means.append({"group": group, "ratio": mean, "target": verdict})
    return means


def measure_case(
    ours: Any, theirs: Any, name: str, requests: list[Instance], repeats: int
) -> dict[str, Any]:
    """Measure both sides alternately; raises UserError if they disagree in float32."""
    batch_size = best_batch_size(theirs, requests)
    theirs.batch_size_per_gpu = batch_size
    run_requests(ours, requests[:1])  # warm up
    answers: dict[Any, list[Any]] = {}

    def run_block(side: Any) -> dict[str, float]:
        answers[side], seconds = run_requests(side, requests)
        return {timing.STEP: seconds}

    times = timing.time_pairs(partial(run_block, ours), partial(run_block, theirs), repeats)
    dtype = ours.model.tok_embeddings.weight.dtype
    return {
        "case": name,
        "group": CASES[name].group,
        "requests": len(requests),
        "batch_size": batch_size,
        **times[timing.STEP],
        "agreement": agreement(name, answers[ours], answers[theirs], dtype),
    }


def run_requests(side: Any, requests: list[Instance]) -> tuple[list[Any], float]:
    """Return the answers of one side and the seconds they took."""
    answers: list[Any] = []
    method = getattr(side, requests[0].request_type)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        seconds = timing.seconds_of(lambda: answers.extend(method(requests, disable_tqdm=True)))
    return answers, seconds


def best_batch_size(theirs: Any, requests: list[Instance]) -> int:
    """Return lm_eval's fastest batch size: try larger ones until one is slower or fails."""
    best_size = 0
    best_s = float("inf")
    for size in HF_BATCH_SIZES[theirs.device.type]:
        theirs.batch_size_per_gpu = size
        try:
            if not best_size:
                run_requests(theirs, requests[:1])  # warm up
            _, seconds = run_requests(theirs, requests)
        except torch.OutOfMemoryError:
            break
        if seconds >= best_s:
            break
        best_size = size
        best_s = seconds
    return best_size or 1


def is_same_text(ours: str, theirs: str) -> bool:
    """lm_eval drops the space before the first word and the bytes of an incomplete character."""
    text, was_cut, _ = ours.removeprefix(" ").partition("\ufffd")
    return theirs.startswith(text) if was_cut else theirs == text


def agreement(case: str, ours: list[Any], theirs: list[Any], dtype: torch.dtype) -> str:
    """Describe how closely the answers agree; raises UserError in float32 if they do not."""
    agrees = []
    if isinstance(ours[0], str):
        for our_text, their_text in zip(ours, theirs, strict=True):
            agrees.append(is_same_text(our_text, their_text))
        text = f"{sum(agrees)} of {len(agrees)} texts"
    else:
        gaps = []
        for our_answer, their_answer in zip(ours, theirs, strict=True):
            # (log-likelihood, is greedy), or a log-likelihood alone
            our_value, *our_greedy = our_answer if isinstance(our_answer, tuple) else (our_answer,)
            their_value, *their_greedy = (
                their_answer if isinstance(their_answer, tuple) else (their_answer,)
            )
            gap = abs(our_value - their_value)
            # rounding adds up over the thousands of tokens of a document
            is_close = gap <= TOLERANCE * max(1, abs(our_value) / 100)
            agrees.append(is_close and our_greedy == their_greedy)
            gaps.append(gap)
        text = f"to {max(gaps):.0e} nat"

    if not all(agrees) and dtype == torch.float32:
        message = f"{case}: answers differ ({text}), so times can't be compared"
        raise UserError("eval.bench_differs", message, case=case)
    return text


def print_result(result: dict[str, Any], console: Console) -> None:
    columns: tables.Columns = {
        "case": lambda case: case["case"],
        "requests": lambda case: str(case["requests"]),
        "ours s": lambda case: f"{case['base_s']:.2f}",
        "hf s": lambda case: f"{case['other_s']:.2f}",
        "batch": lambda case: str(case["batch_size"]),
        **tables.FACTOR,
        "answers": lambda case: case["agreement"],
    }
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    means = [
        f"{group['group']}: {group['ratio']:.2f}x, the geometric mean of its cases; target "
        f"{group['target'] or 'none'}"
        for group in result["groups"]
    ]
    facts = (
        f"{result['device']}; {versions}; {result['time']}; {result['model']}, "
        f"{result['num_parameters']:,} parameters in {result['dtype']}; ours with batch_tokens "
        f"{result['batch_tokens']:,}, hf with the best batch size; {result['seconds_are']} time"
    )
    tables.print_table(console, result["cases"], columns, *means, facts)

"""Our runner beside `lm_eval --model hf`: the same export, the same requests, one process.

Both sides take turns on every case and must give the same answers. The requests are in number and
length like those of the suites; their text is the standard library's.
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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from lm_eval.api.instance import Instance

from canon_pretrain.bench.tables import FACTOR, Columns, print_lines, print_table
from canon_pretrain.bench.timing import clock_name, paired, synchronize
from canon_pretrain.checkpoint.writer import save_alone
from canon_pretrain.core.errors import UserError, check_choice, suggestion
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.data.tokenizer import SENTENCEPIECE_FILE, Tokenizer
from canon_pretrain.hf.export import export
from canon_pretrain.kernels.hardware import check_cuda
from canon_pretrain.model.args import ModelArgs, flavor, num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from eval.model.budget import batch_tokens_for
from eval.model.lm import CanonLM
from eval.model.load import cpu_info, dtype_for
from eval.model.subject import Subject

MAX_LENGTH = 2048
"""Tokens that both sides read at most; perplexities are in windows of it."""
TEXT_CHARACTERS = 600_000
TOLERANCE = 1e-3
"""Nats that log-likelihoods of the two may be apart in float32: sums of rounding."""
HF_BATCH_SIZES = {"cpu": (1, 4, 16), "cuda": (8, 32, 128)}
"""The best of these is theirs; `auto` is not among them: it tries the largest on 2,048 tokens,
which on a CPU is beyond its memory, and on a GPU costs passes of its own."""
NO_TEXT = 3 + 256
"""The ids of control tokens and bytes in a tokenizer that SentencePiece has just trained."""
CHOICE, ROLLING, GENERATION = "multiple choice", "perplexity", "generation"
KINDS = {CHOICE: "loglikelihood", ROLLING: "loglikelihood_rolling", GENERATION: "generate_until"}
"""lm_eval's requests by group."""
TARGETS = {CHOICE: 1.2, GENERATION: 1.5}
"""How many times as fast ours should be on a CPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    about = "random weights of this size and variant (default: Canon ABCD and no positions)"
    model.add_argument("--model", metavar="FLAVOR[,FIELD=VALUE...]", help=about)
    about = "a trained one instead"
    model.add_argument("--checkpoint", type=Path, metavar="RUN/checkpoint/step-N", help=about)
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of both sides")
    add("--repeats", type=int, default=3, help="how often each case is measured (%(default)s)")
    add("--scale", type=float, help="so many times the requests (default: 1 on a CPU, 16 on a GPU)")
    add("--cases", nargs="+", metavar="CASE", help="these only, as hellaswag or jrt")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file too")


def execute(arguments: argparse.Namespace) -> None:
    """Measure and print. Raises UserError, also if the two sides answer differently."""
    if arguments.repeats < 1 or (arguments.scale is not None and arguments.scale <= 0):
        raise UserError(
            f"--repeats {arguments.repeats} --scale {arguments.scale}: expected at least 1, and "
            "more than 0"
        )
    console = Console()
    result = measure(arguments, lambda line: print_lines(console, line))
    print_result(result, console)
    if arguments.json:
        write_json(arguments.json, result)


# ---- the requests


class Words:
    """Texts of so many tokens, from random places of the standard library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # in one line: a text of the suites has few
        text = " ".join(" ".join(library_texts()).split())[:TEXT_CHARACTERS]
        self._tokenizer, self._ids = tokenizer, tokenizer.encode(text)
        self._random = random.Random(0)

    def fill(self, form: str) -> str:
        """Return `form` with a text of 6 to 14 tokens in the place of {6-14}."""

        def some(place: re.Match[str]) -> str:
            count = self._random.randint(int(place[1]), int(place[2]))
            start = self._random.randrange(len(self._ids) - count)
            return self._tokenizer.decode(self._ids[start : start + count]).strip()

        return re.sub(r"\{(\d+)-(\d+)\}", some, form)


def library_texts() -> list[str]:
    """Return the modules of the running Python's standard library, as texts."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_text("utf-8", errors="ignore") for path in sorted(folder.glob("*.py"))]


@dataclass(frozen=True)
class Form:
    """What a suite's requests look like, as forms for `Words.fill`."""

    group: str
    items: int
    """At scale 1."""
    prompt: str
    choices: tuple[str, ...] = ()
    head: str = ""
    """Before every prompt, the same each time."""
    new_tokens: int = 0
    until: tuple[str, ...] = ()


CASES = {
    "hellaswag": Form(CHOICE, 6, "{20-110}", (" {10-45}",) * 4),
    "boolq": Form(CHOICE, 8, "{80-300}\nQuestion: {6-14}?\nAnswer:", (" no", " yes")),
    "piqa": Form(CHOICE, 16, "Question: {5-25}\nAnswer:", (" {8-50}",) * 2),
    "wikitext": Form(ROLLING, 1, "{1400-2400}"),
    "jrt": Form(GENERATION, 4, "{880-1000}", new_tokens=48, until=("\n",)),
    "babilong": Form(
        GENERATION,
        3,
        "<context>\n{650-950}\n</context>\n\nQuestion: {6-9}?\nAnswer:",
        head="{230-230}\n\n",
        new_tokens=20,
    ),
    "birth-year": Form(
        GENERATION, 8, "{310-360}\n\nAnswer me: {5-8} was born in the year of ", new_tokens=5
    ),
}


@dataclass(frozen=True)
class Case:
    """`requests` of one group; `tokens`: all that are in them, or asked for."""

    name: str
    group: str
    requests: list[Instance]
    tokens: int


def make_cases(tokenizer: Tokenizer, names: Sequence[str], scale: float) -> list[Case]:
    """Return the cases `names`; equal for equal arguments and an equal standard library."""
    words = Words(tokenizer)
    cases = []
    for name in names:
        form = CASES[name]
        head = words.fill(form.head)
        options = {"until": list(form.until), "max_gen_toks": form.new_tokens, "do_sample": False}
        asked: list[tuple[Any, ...]] = []
        for _ in range(max(1, round(form.items * scale))):
            prompt = head + words.fill(form.prompt)
            if form.group == CHOICE:
                asked += [(prompt, words.fill(choice)) for choice in form.choices]
            else:
                asked.append((prompt, options) if form.new_tokens else (prompt,))
        texts = [part for given in asked for part in given if isinstance(part, str)]
        tokens = sum(map(len, map(tokenizer.encode, texts))) + form.new_tokens * len(asked)
        kind = KINDS[form.group]
        requests = [Instance(kind, {}, given, index) for index, given in enumerate(asked)]
        cases.append(Case(name, form.group, requests, tokens))
    return cases


# ---- the model


def parse_model(text: str) -> ModelArgs:
    """Return the args that FLAVOR[,FIELD=VALUE...] names; Canon ABCD and NoPE by default."""
    name, *settings = text.split(",")
    changes: dict[str, Any] = {"position": "nope", "canon_set": "ABCD"}
    known: dict[str, type] = {f.name: type(f.default) for f in fields(ModelArgs)}
    for setting in settings:
        field, _, value = setting.partition("=")
        if field not in known:
            raise UserError(
                f'--model {text}: "{field}" is no field of a model.{suggestion(field, known)}'
            )
        kind = known[field]
        try:
            changes[field] = value == "true" if kind is bool else kind(value)
        except ValueError:
            raise UserError(f'--model {text}: {field} = "{value}" is no {kind.__name__}') from None
    args = replace(flavor(name), **changes)
    return replace(args, max_seq_len=max(args.max_seq_len, MAX_LENGTH))


def write_random_export(args: ModelArgs, folder: Path, dtype: str) -> None:
    """Write to `folder`/out the export of an untrained model, with a tokenizer of its size.

    Its likeliest token is never EOS, a newline or another byte: answers are of full length, and
    text.
    """
    tokenizer = folder / SENTENCEPIECE_FILE
    tokenizer.write_bytes(trained_tokenizer(args.vocab_size))
    model = Transformer(replace(args, tie_embeddings=False))
    model.init_weights()
    assert model.output is not None
    with torch.no_grad():
        model.output.weight[:NO_TEXT] = 0.0  # a logit of 0: many others are above it
    run = RunFolder(folder / "run")
    run.write_config({"data": {}}, {f"model.{k}": v for k, v in asdict(model.args).items()})
    checkpoint = run.path / "checkpoint" / "step-1"
    save_alone(dict(model.named_parameters()), checkpoint, step=1)
    export(checkpoint, folder / "out", dtype=dtype, tokenizer=tokenizer)


def trained_tokenizer(vocab_size: int) -> bytes:
    """Return a SentencePiece BPE model of the standard library, as data_prep trains one."""
    lines = (line for text in library_texts() for line in text.split("\n") if 0 < len(line) < 4000)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=2,
        minloglevel=2,
    )
    return model.getvalue()


def load_theirs(folder: Path, device: torch.device, dtype: str, scratch: Path) -> Any:
    """Return what `lm_eval --model hf --model_args pretrained=FOLDER,...` makes, without BOS."""
    # where transformers copies the export's code to, by default below the home folder
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
        max_position_embeddings=MAX_LENGTH,  # of the model, which may have seen shorter texts
        add_bos_token=False,
    )


# ---- the measurement


def measure(asked: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures of one run, as JSON can hold them; seconds. Raises UserError."""
    for name in asked.cases or ():
        check_choice("--cases", name, CASES)
    check_cuda()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    weights = dtype_for(asked.dtype, device)
    dtype = str(weights).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="canon-eval-bench-") as scratch:
        folder = Path(scratch)
        if asked.checkpoint is not None:
            export(asked.checkpoint, folder / "out", dtype=dtype)
            title = str(asked.checkpoint)
        else:
            args = parse_model(asked.model or ("1b3" if on_gpu else "8L512D"))
            canon = f"Canon-{args.canon_set}" if args.canon_set else "no Canon"
            title = f"random weights, {args.num_layers}L{args.dim}D, {args.position}, {canon}"
            write_random_export(args, folder, dtype)
        subject = Subject.open(folder / "out", None)
        transformer = subject.load(device, weights, MAX_LENGTH)
        ours = CanonLM(transformer, subject.tokenizer, max_length=MAX_LENGTH)
        ours.batch_tokens = batch_tokens_for(ours, folder, lambda line: None)
        theirs = load_theirs(folder / "out", device, dtype, folder)
        names = [name for name in CASES if not asked.cases or name in asked.cases]
        scale = asked.scale or (16.0 if on_gpu else 1.0)
        cases = []
        for case in make_cases(subject.tokenizer, names, scale):
            cases.append(measure_case(ours, theirs, case, asked.repeats))
            say(f"{case.name}: {cases[-1]['ratio']:.2f}x")
    cpu = f"{cpu_info('model name') or platform.machine()}, {torch.get_num_threads()} threads"
    groups = {
        group: [case["ratio"] for case in cases if case["group"] == group]
        for group in dict.fromkeys(case["group"] for case in cases)
    }
    return {
        "bench": "eval",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else cpu,
        "versions": {name: version(name) for name in ("torch", "transformers", "lm_eval")},
        "model": title,
        "args": asdict(transformer.args),
        "num_parameters": num_parameters(transformer.args),
        "dtype": dtype,
        "batch_tokens": ours.batch_tokens,
        "max_length": MAX_LENGTH,
        "repeats": asked.repeats,
        "ratio_of": clock_name(),
        "cases": cases,
        "groups": [
            {
                "group": group,
                "ratio": statistics.geometric_mean(ratios),
                "target": None if on_gpu else TARGETS.get(group),
            }
            for group, ratios in groups.items()
        ],
    }


def measure_case(ours: Any, theirs: Any, case: Case, repeats: int) -> dict[str, Any]:
    """Measure both sides in turn; raises UserError if they do not agree in float32."""
    batch_size = best_batch_size(theirs, case)
    theirs.batch_size_per_gpu = batch_size
    answer(ours, case, case.requests[:1])  # the first call warms up
    answers: dict[Any, list[Any]] = {}

    def block(side: Any) -> dict[str, float]:
        answers[side], clocks = answer(side, case, case.requests)
        return clocks

    found = paired(partial(block, ours), partial(block, theirs), repeats)
    ratio = asdict(found[clock_name()])
    weight = ours.model.tok_embeddings.weight
    return {
        "case": case.name,
        "group": case.group,
        "requests": len(case.requests),
        "tokens": case.tokens,
        "ours": {clock: times.base_s for clock, times in found.items()},
        "hf": {"batch_size": batch_size} | {clock: t.other_s for clock, t in found.items()},
        **{name: ratio[name] for name in ("ratio", "ratio_low", "ratio_high")},
        "target": None if weight.is_cuda else TARGETS.get(case.group),
        "agreement": agreement(case, answers[ours], answers[theirs], weight.dtype),
    }


def answer(
    side: Any, case: Case, requests: Sequence[Instance]
) -> tuple[list[Any], dict[str, float]]:
    """Return what one side answers, and the seconds of it by both clocks."""
    synchronize()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):  # their bars
        answers = getattr(side, KINDS[case.group])(list(requests), disable_tqdm=True)
    synchronize()
    clocks = {"clock": time.perf_counter() - begin, "CPU": time.process_time() - begin_cpu}
    return answers, clocks


def best_batch_size(theirs: Any, case: Case) -> int:
    """Return theirs' fastest batch size: larger ones are tried until one is slower or fails."""
    best, fastest = 1, float("inf")
    for size in HF_BATCH_SIZES[theirs.device.type]:
        theirs.batch_size_per_gpu = size
        try:
            if size == HF_BATCH_SIZES[theirs.device.type][0]:
                answer(theirs, case, case.requests[:1])  # the first call warms up
            took = answer(theirs, case, case.requests)[1][clock_name()]
        except torch.OutOfMemoryError:
            break
        if took >= fastest:
            break
        best, fastest = size, took
    return best


def agreement(case: Case, ours: list[Any], theirs: list[Any], dtype: torch.dtype) -> str:
    """Return how the answers are the same; in float32 raises UserError if they are not."""

    def is_same(own: str, other: str) -> bool:
        # theirs lack the space before the first word, and bytes of a character that was cut off
        text, was_cut, _ = own.removeprefix(" ").partition("\ufffd")
        return other.startswith(text) if was_cut else other == text

    if case.group == GENERATION:
        same = [is_same(own, text) for own, text in zip(ours, theirs, strict=True)]
        text, agrees = f"{sum(same)} of {len(same)} texts", all(same)
    else:
        scores = [[a if isinstance(a, float) else a[0] for a in side] for side in (ours, theirs)]
        apart = [abs(own - other) for own, other in zip(*scores, strict=True)]
        text = f"to {max(apart):.0e} nat"
        # rounding adds up over the thousands of tokens of a document
        near = [
            gap <= TOLERANCE * max(1, abs(score) / 100)
            for gap, score in zip(apart, scores[0], strict=True)
        ]
        greedy = [[a[1] for a in side if not isinstance(a, float)] for side in (ours, theirs)]
        agrees = all(near) and greedy[0] == greedy[1]
    if not agrees and dtype == torch.float32:
        raise UserError(
            f"{case.name}: the two sides answer differently ({text}), so their times can't be "
            "compared"
        )
    return text


def print_result(result: dict[str, Any], console: Console) -> None:
    clock = result["ratio_of"]

    def goal(found: dict[str, Any]) -> str:
        if found["target"] is None:
            return ""
        return f"{found['target']:g} {'met' if found['ratio'] >= found['target'] else 'MISSED'}"

    columns: Columns = {
        "case": lambda case: case["case"],
        "tokens": lambda case: f"{case['tokens']:,}",
        "ours s": lambda case: f"{case['ours'][clock]:.2f}",
        "hf s": lambda case: f"{case['hf'][clock]:.2f}",
        "batch": lambda case: str(case["hf"]["batch_size"]),
        **FACTOR,
        "goal": goal,
        "answers": lambda case: case["agreement"],
    }
    print_table(console, result["cases"], columns)
    versions = ", ".join(f"{name} {found}" for name, found in result["versions"].items())
    print_lines(
        console,
        *(
            f"{group['group']}: {group['ratio']:.2f}x, the geometric mean of its cases; goal "
            f"{goal(group) or 'none'}"
            for group in result["groups"]
        ),
        f"{result['device']}; {versions}; {result['time']}; {result['model']}, "
        f"{result['num_parameters']:,} parameters in {result['dtype']}; ours with batch_tokens "
        f"{result['batch_tokens']:,}, hf with the best batch size; medians of {result['repeats']}, "
        f"{clock} time",
    )

"""Propose an experiment for a folder of text: `canon new NAME --data FOLDER` writes NAME.toml.

The text is read by data_prep (a sample of a large one), candidate sizes are timed on this machine,
and every proposed value is written beside the rule that it follows from.
"""

import argparse
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canon_pretrain.core.cli import available_cores, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import create_file
from canon_pretrain.core.terminal import duration, printable, size
from canon_pretrain.machine.device import check_cuda
from canon_pretrain.machine.hardware import cpu_info, threads_per_process
from canon_pretrain.machine.memory import memory_per_process
from canon_pretrain.machine.timing import best_rate
from canon_pretrain.model.args import ModelArgs, flavor
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.run.config import to_toml
from data_prep.plan import MAX_HOLDOUT, holdout_for
from data_prep.sources import LOCAL, SourceOptions
from data_prep.survey import Survey, survey

SIZES = {
    "debug": (1024, 256),
    "quickstart": (2048, 256),
    "4M": (4096, 512),
    "8L512D": (16384, 1024),
    "162M": (32000, 2048),
    "1b3": (32000, 2048),
}
"""Flavor -> vocabulary and sequence length: at most half of the parameters embed tokens, but of
texts with many characters (LARGER_VOCABULARY)."""
TOKENS_PER_PARAMETER = 20
EPOCHS = 8
"""The most epochs. On 0.8 MB, the held-out loss of 0.2M parameters was 1.81, 1.51, 1.53 and 1.81
nats after 4, 8, 16 and 32."""
WORN_EPOCHS = 15.4  # R* of Muennighoff et al. (2023): how repeated tokens lose their worth
LEAST_STEPS = 300
LEAST_BATCH_TOKENS, LEAST_BATCH_FLOPS, DEEPSEEK_FLOPS = 1024, 2e12, 1e17
"""Of small models: bits per byte of held-out text after 70 CPU seconds at width 64, with steps of
512, 1,024 and 2,048 tokens (learning rates 1e-2, 1e-2, 4e-3): prose of 2.4 MB 2.148, 2.102, 2.143;
Python code of 12 MB -, 1.804, 1.816. A bigram has 2.504 and 2.130."""
LEAST_BYTES = 20_000
BYTES_PER_TOKEN = 3.5
"""Assumed until the tokenizer of the chosen size is trained."""
MOST_RARE = 0.01
LARGER_VOCABULARY, LEAST_TOKENS_PER_PIECE = 4, 180
"""Of a text in which more than MOST_RARE of the characters would be bytes, such as Chinese. Bits
per byte of 12.6 MB of it with 1,024, 4,096 and 16,384 pieces at width 64: after one CPU minute
3.067, 2.994 and 3.057, after two 2.960, 2.900 and 2.942, after ten 2.827, 2.698 and 2.740. The
bigrams of these vocabularies have 3.540, 2.955 and 2.747, and a model shall beat its own: 4,096
pieces do it after two minutes, which are 200 tokens per piece. One seed, three at 16,384."""
PAPER_LR, LR, LR_WIDTH = 1e-3, 6e-3, 96
"""Bits per byte of held-out text at width 64 with 4e-3, 6e-3 and 1e-2, after 773 steps of 1,024
tokens (one CPU minute): prose of 2.4 MB 2.225, 2.220 to 2.289, 2.553 to 2.569; a text of 0.3 MB
2.273, 2.276 to 2.299, 2.432 to 2.453; dialogues of 4.6 MB 2.073, 2.064 to 2.067, 2.057 to 2.058;
Python code of 12 MB -, 1.927 to 1.957, 1.951 to 1.984. Three seeds of 6e-3 and of 1e-2. The
bigrams have 2.504, 2.451, 2.239 and 2.130."""
LEAST_WARMUP, MOST_WARMUP = 200, 1000
"""After 731 steps of 1,024 tokens of prose (width 64, 6e-3), bits per byte on 64 windows: with 74
steps of warmup 2.285 and 2.659 with Canon layers, 2.660 and 2.686 without (seeds 0 and 1); with 200
steps 2.226 and 2.223 (and 2.216 with seed 2), 2.373 and 2.381. Its bigram has 2.486."""
DOCUMENTS = 200
HELD_OUT_BYTES, LEAST_BUILT_BYTES = 4_000_000, 20_000_000
MEASURE_S, MEASUREMENTS = 1.0, 3
TRAINER_SHARE = 0.8  # of forward and backward alone: measured 0.85 at width 64 on a CPU
SHOWN_CHARACTERS, PROMPT_WORDS, PROMPT_CHARACTERS = 200, 3, 40
SHOWN_SUFFIXES = 5
BYTES_PER_PARAMETER = 24  # float32 weights, gradients, AdamW's moments, and what FSDP2 gathers


@dataclass(frozen=True)
class Machine:
    """The devices of this machine: `ranks` GPUs, or all CPU cores as one; `memory` is of each.

    `parallel`: models that train at once, each on a GPU, or on its part of the cores.
    """

    name: str
    is_gpu: bool
    ranks: int
    memory: float
    parallel: int = 1

    @classmethod
    def find(cls, models: int = 1) -> "Machine":
        """Return the machine on which `models` models are to be trained, at once if they can be."""
        import torch

        check_cuda()
        if gpus := torch.cuda.device_count():
            memory = memory_per_process(1)
            name = f"{gpus} x {torch.cuda.get_device_name(0)}"
            ranks = 1 << (gpus.bit_length() - 1)  # a power of two divides the batch
            if models > 1:
                return cls(name, True, 1, memory, parallel=min(models, gpus))
            return cls(name, True, ranks, memory)

        cores = available_cores()
        name = f"{cores} cores of {cpu_info('model name') or 'a CPU'}"
        parallel = min(models, cores)
        return cls(name, False, 1, memory_per_process(parallel), parallel)

    def micro_batch(self, args: ModelArgs) -> int:
        """Return the windows of a forward pass that surely fit into the memory, or 0.

        A CPU's is left to half to other programs.
        """
        # bytes per value, and values that a token keeps of a block's width: what --dry-run counts
        # in bfloat16, about twice that on a CPU
        width, kept, share = (2, 8, 0.8) if self.is_gpu else (4, 16, 0.5)
        values = kept * args.num_layers * (args.dim + args.ffn_dim) + 8 * args.vocab_size
        room = share * self.memory - BYTES_PER_PARAMETER * num_parameters(args) / self.ranks
        fitting = int(room / (width * values * args.max_seq_len))
        return min(64, 1 << (fitting.bit_length() - 1)) if fitting > 0 else 0

    def tokens_per_second(self, args: ModelArgs) -> float:
        """Time forward and backward of the model on one device; return the speed of all."""
        import torch
        import torch.nn.functional as F

        from canon_pretrain.model.transformer import Transformer

        if self.parallel > 1 and not self.is_gpu:
            torch.set_num_threads(threads_per_process(self.parallel))
        device = torch.device("cuda" if self.is_gpu else "cpu")
        model = Transformer(args).to(device)
        model.init_weights()
        if self.is_gpu:
            model.bfloat16()
        # a small step has the smallest share of the processor's speed
        windows = 8 if self.is_gpu else max(1, LEAST_BATCH_TOKENS // args.max_seq_len)
        windows = min(windows, self.micro_batch(args))
        tokens = torch.randint(args.vocab_size, (windows, args.max_seq_len), device=device)

        def step() -> None:
            logits = model(tokens).flatten(0, 1).float()
            F.cross_entropy(logits, tokens.flatten()).backward()
            if self.is_gpu:
                torch.cuda.synchronize()

        step()  # compiles and allocates
        return (
            TRAINER_SHARE * best_rate(step, MEASURE_S, MEASUREMENTS) * tokens.numel() * self.ranks
        )


@dataclass(frozen=True)
class Proposal:
    """A size, with its speed on this machine, for a text of `unique` training tokens.

    `share` of it is built for `max_tokens` (0: all).
    """

    machine: Machine
    name: str
    args: ModelArgs
    speed: float
    unique: float
    seconds: float
    max_tokens: int = 0
    share: float = 1.0

    @property
    def tokens(self) -> float:
        """The training tokens: of the time, of EPOCHS epochs, of LEAST_STEPS steps."""
        most = max(EPOCHS * self.unique, LEAST_STEPS * LEAST_BATCH_TOKENS)
        return min(self.speed * self.seconds, most)

    @property
    def parameters(self) -> int:
        return num_parameters(self.args)

    @property
    def ratio(self) -> float:
        """Tokens per parameter, repeated ones counted as the new ones that they are worth."""
        repeats = max(0.0, self.tokens / self.unique - 1)
        worth = 1 + WORN_EPOCHS * (1 - math.exp(-repeats / WORN_EPOCHS))
        return min(self.tokens, self.unique * worth) / self.parameters

    @property
    def shortfall(self) -> str:
        """What keeps the ratio below half of TOKENS_PER_PARAMETER, or ""."""
        if self.ratio >= TOKENS_PER_PARAMETER / 2:
            return ""
        best = min(TOKENS_PER_PARAMETER, replace(self, seconds=math.inf).ratio)
        if best < 2 * self.ratio:
            return "too little text for this size"
        worth = best * self.parameters / self.unique - 1
        repeats = worth if worth < 0 else -WORN_EPOCHS * math.log(1 - worth / WORN_EPOCHS)
        minutes = math.ceil((1 + repeats) * self.unique / self.speed / 60)
        return f"about {best:.2g} would be ideal: {minutes} minutes of training"

    @property
    def batch(self) -> int:
        """Windows in a step for C FLOPs: DeepSeek's 0.292 C^0.3271 tokens from 1e17 FLOPs on.

        Below, where they did not measure: a power law between theirs at 1e17 and LEAST_BATCH_TOKENS
        at LEAST_BATCH_FLOPS. Down to a power of two.
        """
        flops = 6 * self.parameters * self.tokens
        tokens = 0.292 * max(flops, DEEPSEEK_FLOPS) ** 0.3271
        if flops < DEEPSEEK_FLOPS:
            share = math.log(DEEPSEEK_FLOPS / flops) / math.log(DEEPSEEK_FLOPS / LEAST_BATCH_FLOPS)
            tokens = max(LEAST_BATCH_TOKENS, tokens * (LEAST_BATCH_TOKENS / tokens) ** share)
        return max(self.machine.ranks, 1 << int(math.log2(tokens / self.args.max_seq_len)))

    @property
    def steps(self) -> int:
        return max(10, round(self.tokens / (self.batch * self.args.max_seq_len)))

    @property
    def lr(self) -> float:
        return min(LR, max(PAPER_LR, LR * LR_WIDTH / self.args.dim))

    @property
    def warmup(self) -> int:
        """A tenth of the steps, from LEAST_WARMUP to MOST_WARMUP; a quarter of fewer steps."""
        tenth = -(-self.steps // 10)
        return min(max(LEAST_WARMUP, tenth), MOST_WARMUP, -(-self.steps // 4))

    @property
    def epochs(self) -> float:
        return self.steps * self.batch * self.args.max_seq_len / (self.max_tokens or self.unique)


def propose(machine: Machine, num_bytes: float, seconds: float) -> Proposal:
    """Return the size with about TOKENS_PER_PARAMETER: the largest, or the one below it.

    Sizes are timed from the smallest on. Raises UserError.
    """
    found: list[Proposal] = []
    for name, (vocab_size, seq_len) in SIZES.items():
        args = replace(flavor(name), vocab_size=vocab_size, max_seq_len=seq_len, canon_set="ABCD")
        if not machine.micro_batch(args):
            break
        speed = machine.tokens_per_second(args)
        unique = num_bytes / BYTES_PER_TOKEN
        found.append(Proposal(machine, name, args, speed, unique, seconds))
        if found[-1].ratio < TOKENS_PER_PARAMETER:
            break
    if not found:
        message = f"{size(machine.memory)} of memory are available: too little for any model; "
        raise UserError("memory.too_small", f"{message}end other programs")
    return min(found, key=lambda one: abs(math.log(one.ratio / TOKENS_PER_PARAMETER)))


def with_larger_vocabulary(given: Proposal) -> Proposal:
    """Return the proposal with a vocabulary LARGER_VOCABULARY times as large.

    Or as it is, if it would train on fewer than LEAST_TOKENS_PER_PIECE tokens for each piece.
    """
    vocab_size = LARGER_VOCABULARY * given.args.vocab_size
    args = replace(given.args, vocab_size=vocab_size)
    if not given.machine.micro_batch(args):
        return given  # too little memory
    larger = replace(given, args=args, speed=given.machine.tokens_per_second(args))
    return larger if larger.tokens >= LEAST_TOKENS_PER_PIECE * vocab_size else given


def cut_and_holdout(found: Survey, share: float = 1.0) -> tuple[int, float]:
    """Return --max-document-bytes (0: none) and --holdout, for a build of `share` of the text.

    Enough documents to tell losses apart, and of a large text no more than HELD_OUT_BYTES beyond.
    """
    cut, documents = 0, float(found.num_documents)
    if documents < DOCUMENTS:
        cut = min(20_000, max(1_000, found.num_bytes // (2 * DOCUMENTS)))
        cut = round(cut, 1 - len(str(cut)))
        documents = found.num_bytes / cut
    most = min(0.02, HELD_OUT_BYTES / found.num_bytes) / share
    most = max(holdout_for(share * documents), min(MAX_HOLDOUT, most))
    digits = max(2, 1 - math.floor(math.log10(most)))
    return cut, math.ceil(most * 10**digits) / 10**digits


def limit_tokens(found: Survey, total: float, given: Proposal) -> Proposal:
    """Set max_tokens if the run uses less than a quarter of the text's `total` tokens.

    Whole files are built, so it saves nothing of a single one, and little of a small text.
    """
    needed = given.steps * given.batch * given.args.max_seq_len
    most = max(4 * needed, round(LEAST_BUILT_BYTES * total / found.num_bytes))
    most = round(most, 2 - len(str(most)))
    share = math.ceil(found.num_files * most / total) / found.num_files
    return replace(given, max_tokens=most, share=share) if share < 1 else given


def steps_rule(given: Proposal) -> str:
    """Return what the steps are and what limits them, in two lines."""
    tokens = given.steps * given.batch * given.args.max_seq_len
    facts = f"{tokens:,} tokens, {given.epochs:.1f} epochs: {duration(tokens / given.speed)} here"
    if given.epochs > EPOCHS + 1:
        why = "The text is short: it is repeated until the fewest useful steps are done."
    elif given.epochs > EPOCHS - 0.5:
        why = f"More than {EPOCHS} epochs of a small text gain nothing on held-out text."
    else:
        why = f"The time limit: {given.seconds / 60:.3g} minutes of training."
    return f"{facts} ({given.speed:,.0f} tokens/s).\n# {why}"


def toml(name: str, files: str, prompt: str, given: Proposal, *, command: str = "canon new") -> str:
    """Return the experiment's file, each value with its rule."""
    machine = given.machine
    quoted = {
        "description": f"{name}, on {files}",
        "run": f"outputs/{name}/canon",
        "data": f"outputs/{name}/data",
        "prompt": prompt,
    }
    text = Path(__file__).with_suffix(".toml").read_text()
    return text.format(
        **{key: to_toml({"": text})[5:-1] for key, text in quoted.items()},
        command=command,
        files=printable(files),
        machine=printable(machine.name),
        flavor=given.name,
        layers=given.args.num_layers,
        dim=given.args.dim,
        parameters=given.parameters,
        ratio=given.ratio,
        choice=given.shortfall or "of all sizes nearest to it",
        sizes=", ".join(each for each in SIZES if each != given.name),
        goal=TOKENS_PER_PARAMETER,
        steps_rule=steps_rule(given),
        steps=given.steps,
        seq_len=given.args.max_seq_len,
        least_batch=LEAST_BATCH_TOKENS,
        batch=given.batch,
        windows=min(machine.micro_batch(given.args), given.batch // machine.ranks),
        dtype="bfloat16" if machine.is_gpu else "float32",
        top_lr=LR,
        lr_width=LR_WIDTH,
        lr=given.lr,
        warmup=given.warmup,
        least_warmup=LEAST_WARMUP,
        most_warmup=MOST_WARMUP,
        quarter=-(-given.steps // 4),
        tenth=-(-given.steps // 10),
        hundredth=-(-given.steps // 100),
        compiles="true" if machine.is_gpu else "false",
    )


def build_options(
    out: str,
    paths: Sequence[Path],
    found: Survey,
    text_field: str | None,
    proposal: Proposal,
) -> list[str]:
    """Return the options of `canon data build` that write the proposal's shards to `out`."""
    cut, holdout = cut_and_holdout(found, proposal.share)
    words = ["--source", "local", "--files", *map(str, paths)]
    if found.suffixes:
        words += ["--text-suffixes", *found.suffixes]
    if text_field:
        words += ["--text-field", text_field]
    if cut:
        words += ["--max-document-bytes", str(cut)]
    if proposal.max_tokens:
        words += ["--max-tokens", str(proposal.max_tokens)]
    words += ["--holdout", f"{holdout:g}", "--tokenizer", f"train:{proposal.args.vocab_size}"]
    return [*words, "--out", out]


def next_commands(
    name: str, paths: Sequence[Path], found: Survey, text_field: str | None, proposal: Proposal
) -> Iterator[tuple[str, str]]:
    """Yield (what it does, the command as it is pasted)."""
    canon = "canon" if shutil.which("canon") else "python -m canon_pretrain"
    words = build_options(f"outputs/{name}/data", paths, found, text_field, proposal)
    yield "text to shards of tokens", f"{canon} data build {shlex.join(words)}"

    run, other = f"outputs/{name}/canon", f"outputs/{name}/without-canon"
    ranks = proposal.machine.ranks
    torchrun = f"torchrun --nproc-per-node {ranks} -m canon_pretrain.train"
    train = f"{torchrun if ranks > 1 else f'{canon} train'} --config {name}.toml"
    yield "train; Ctrl-C saves, the same command resumes", train
    yield "let it write", f"{canon} sample {run}"

    without = f'--model.canon_set "" --job.dump_folder {other}'
    yield "then the same model without Canon layers", f"{train} {without}"
    yield (
        "score both on the held-out documents",
        f"{canon} eval run {other} {run} --suite validation",
    )
    yield "what is different, and by how much", f"{canon} eval compare {other} {run}"


def check_name(name: str) -> None:
    """Raise UserError unless `name` can name a file and a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise UserError(
            "option.invalid",
            f"NAME {name!r}: expected letters, digits, _ . and -, such as mine",
            option="NAME",
        )


def inspect_text(
    paths: Sequence[Path], text_field: str | None, suffixes: Sequence[str], option: str
) -> Survey:
    """Print what the text of `option` is. Raises UserError if nothing can be trained on it."""
    for path in paths:
        if Path("outputs").resolve().is_relative_to(path.resolve()):
            raise UserError(
                "new.outputs_in_data",
                f"{option} {path}: outputs/ would be in it and be read as text; run this in a "
                "folder outside of the text's",
                path=path,
            )

    found = survey(
        SourceOptions(
            LOCAL, paths, text_field=text_field, text_suffixes=suffixes, files_option=option
        )
    )
    print_survey(found)
    check_text(found, ", ".join(map(str, paths)))
    return found


def choose(machine: Machine, found: Survey, seconds: float) -> Proposal:
    """Print and return what to train for `seconds` on a text. Raises UserError."""
    each = " each" if max(machine.ranks, machine.parallel) > 1 else ""
    show("machine", f"{machine.name}, {size(machine.memory)} of memory{each}")
    load, cores = os.getloadavg()[0], available_cores()
    if load > cores:
        show("", f"load average {load:.1f} on {cores} cores: times are those of a busy machine")
        # measured: 107 tokens/s with 2 threads beside three other programs, 4,872 with one
        show("", "beside other programs OMP_NUM_THREADS=1 is often many times as fast")

    # The size is chosen by bytes, then the tokens of its vocabulary are counted.
    _, holdout = cut_and_holdout(found)
    chosen = propose(machine, (1 - holdout) * found.num_bytes, seconds)
    if found.rare_share(chosen.args.vocab_size) > MOST_RARE:
        chosen = with_larger_vocabulary(chosen)
    vocab_size, share = found.tokens_per_byte(chosen.args.vocab_size)
    total = share * found.num_bytes
    if vocab_size != chosen.args.vocab_size:  # a text of few words
        args = replace(chosen.args, vocab_size=vocab_size)
        chosen = replace(chosen, args=args, speed=machine.tokens_per_second(args))
    chosen = replace(chosen, unique=(1 - holdout) * total)
    chosen = limit_tokens(found, total, chosen)

    show("tokens", f"{total:,.0f} of a vocabulary of {vocab_size:,}, {1 / share:.2f} bytes each")
    if chosen.max_tokens:
        part = f"of the first files, {chosen.max_tokens:,} are built"
        show("", f"{part}: at least four times what the run uses")

    facts = f"{chosen.name}: {chosen.parameters:,} parameters"
    ratio = f"{chosen.ratio:.1f} tokens per parameter"
    show("model", facts, "; ".join(filter(None, (ratio, chosen.shortfall))))
    show("training", *steps_rule(chosen).split("\n# "))
    return chosen


def propose_experiment(given: argparse.Namespace) -> None:
    """Print what is found and proposed, and write NAME.toml. Raises UserError."""
    target, outputs = Path(f"{given.name}.toml"), Path("outputs", given.name)
    check_name(given.name)
    for path in (target, outputs):
        if path.exists():
            raise UserError(
                "new.exists",
                f"{path}: exists; give another name, or remove it if you do not need it",
                path=path,
            )

    found = inspect_text(given.data, given.text_field, given.text_suffixes, "--data")
    chosen = choose(Machine.find(), found, 60.0 * given.minutes)
    files = ", ".join(map(str, given.data))
    with create_file(target) as file:
        file.write(toml(given.name, files, first_words(found.sample), chosen).encode())

    print(f"\nWrote {target}, with the reason for each value. Next:\n")
    for about, words in next_commands(given.name, given.data, found, given.text_field, chosen):
        print(f"# {about}\n{words}\n")


def check_text(found: Survey, files: str) -> None:
    """Raise UserError if the text is too little, or most of it not UTF-8."""
    if found.num_bytes < LEAST_BYTES:
        message = f"{files}: {found.num_bytes:,} bytes of text, expected at least {LEAST_BYTES:,}; "
        manual = f"--data {Path(os.__file__).parent / 'pydoc_data'} --text-suffixes .py"
        message += skipped_advice(found) or f"add text, or try Python's manual: {manual}"
        raise UserError("new.too_little_text", message, given=found.num_bytes)
    if 2 * found.num_damaged > found.num_probed:
        raise UserError(
            "new.not_utf8",
            f"{files}: most of the text is not UTF-8: {damage(found)}",
            given=found.num_damaged,
        )


def damage(found: Survey) -> str:
    """Return how many sampled documents are not UTF-8, and what to do."""
    counts = f"{found.num_damaged:,} of {found.num_probed:,} sampled documents"
    return f"{counts} are not UTF-8 text: convert with `iconv -f ENCODING -t utf-8 OLD > NEW`"


def skipped_advice(found: Survey) -> str:
    """Return the option that reads skipped text, if it is more than what is read, or ""."""
    suffixes = [*found.skipped_text][:SHOWN_SUFFIXES]
    num_bytes = sum(found.skipped_text[suffix] for suffix in suffixes)
    if num_bytes <= found.num_bytes:
        return ""
    counts = ", ".join(f"{found.skipped[suffix]:,} {suffix}" for suffix in suffixes)
    option = shlex.join(["--text-suffixes", *found.suffixes, *suffixes])
    return f"{counts} hold {size(num_bytes)}: add {option}"


def first_words(texts: Sequence[str]) -> str:
    """Return the first words of the last text that has some; a text may be without spaces."""
    words = next((found for text in reversed(texts) if (found := text.split())), [])
    return " ".join(words[:PROMPT_WORDS])[:PROMPT_CHARACTERS]


def show(label: str, *lines: str) -> None:
    for line in lines:
        print(f"{label:12}{printable(line)}")
        label = ""


def print_survey(found: Survey) -> None:
    """Print what was found of the text."""
    show(
        "text",
        f"{found.num_files:,} files, {size(found.file_bytes)}: "
        f"{found.num_documents:,} documents, {size(found.num_bytes)} of text",
    )
    if found.sampled < found.num_bytes:
        show("", f"estimated from a sample of {size(found.sampled)}")
    if found.suffixes:
        show("", f"read as plain text: {' '.join(found.suffixes)}")
    if found.skipped:
        common = found.skipped.most_common(SHOWN_SUFFIXES)
        kinds = ", ".join(f"{count:,} {kind or 'without suffix'}" for kind, count in common)
        advice = [skipped_advice(found)]
        if found.skipped_text and not advice[0]:
            suffixes = " ".join([*found.skipped_text][:SHOWN_SUFFIXES])
            advice = [f"--text-suffixes reads {suffixes} as plain text"]
        advice += ["gunzip .gz first"] if ".gz" in found.skipped else []
        show("", "; ".join(filter(None, (f"skipped: {kinds}", *advice))))
    if found.num_damaged:
        show("", damage(found))
    if found.sample:
        text = " ".join(found.sample[len(found.sample) // 2].split())
        show("sample", f"{text[:SHOWN_CHARACTERS]} ...")


FILES_HELP = "files or folders: .txt, .jsonl or .json (.zst, .gz), .parquet, or other plain text"


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on how files are read."""
    add = parser.add_argument
    add("--text-field", metavar="F", help="name of the text in rows, also a.b (default: text)")
    suffixes = "read files of these suffixes as plain text too, such as .md .rst"
    add("--text-suffixes", nargs="+", default=(), metavar=".S", help=suffixes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Propose an experiment for your text: look at it and at this machine, write "
        "NAME.toml, and print the next commands."
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="of NAME.toml and of outputs/NAME")
    add("--data", nargs="+", type=Path, required=True, metavar="PATH", help=FILES_HELP)
    add("--minutes", type=positive, default=10, help="of training here (default: %(default)s)")
    add_text_options(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write NAME.toml and print the next commands. Raises UserError."""
    propose_experiment(arguments)

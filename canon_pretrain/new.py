"""Propose an experiment for a folder of text: `canon new NAME --data FOLDER` writes NAME.toml.

The text is read by data_prep (a sample of a large one), candidate sizes are timed on this machine,
and every proposed value is written next to the rule that it follows from.
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

# Flavor -> vocabulary and sequence length: at most half of the parameters embed tokens, but of
# texts with many characters (LARGER_VOCABULARY).
SIZES = {
    "debug": (1024, 256),
    "quickstart": (2048, 256),
    "4M": (4096, 512),
    "8L512D": (16384, 1024),
    "162M": (32000, 2048),
    "1b3": (32000, 2048),
}
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. (2022)

# On 0.8 MB, the held-out loss of 0.2M parameters was 1.81, 1.51, 1.53 and 1.81 nats after 4, 8, 16
# and 32 epochs.
EPOCHS = 8  # maximum number
WORN_EPOCHS = 15.4  # R* of Muennighoff et al. (2023): how repeated tokens lose their worth
MIN_STEPS = 300

# Steps of small models: bits per byte of held-out text after 70 CPU seconds at width 64, with steps
# of 512, 1,024 and 2,048 tokens (learning rates 1e-2, 1e-2, 4e-3): prose of 2.4 MB 2.148, 2.102,
# 2.143; Python code of 12 MB -, 1.804, 1.816. A bigram has 2.504 and 2.130.
MIN_BATCH_TOKENS = 1024
MIN_BATCH_FLOPS = 2e12
DEEPSEEK_FLOPS = 1e17
MIN_BYTES = 20_000
BYTES_PER_TOKEN = 3.5  # assumed until the tokenizer of the chosen size is trained

# Of a text in which more than MAX_RARE_SHARE of the characters would be bytes, such as Chinese.
# Bits per byte of 12.6 MB of it with 1,024, 4,096 and 16,384 pieces at width 64: after one CPU
# minute 3.067, 2.994 and 3.057, after two 2.960, 2.900 and 2.942, after ten 2.827, 2.698 and 2.740.
# The bigrams of these vocabularies have 3.540, 2.955 and 2.747, and a model shall beat its own:
# 4,096 pieces do it after two minutes, which are 200 tokens per piece. One seed, three at 16,384.
MAX_RARE_SHARE = 0.01
LARGER_VOCABULARY = 4
MIN_TOKENS_PER_PIECE = 180

# Bits per byte of held-out text at width 64 with 4e-3, 6e-3 and 1e-2, after 773 steps of 1,024
# tokens (one CPU minute): prose of 2.4 MB 2.225, 2.220 to 2.289, 2.553 to 2.569; a text of 0.3 MB
# 2.273, 2.276 to 2.299, 2.432 to 2.453; dialogues of 4.6 MB 2.073, 2.064 to 2.067, 2.057 to 2.058;
# Python code of 12 MB -, 1.927 to 1.957, 1.951 to 1.984. Three seeds of 6e-3 and of 1e-2. The
# bigrams have 2.504, 2.451, 2.239 and 2.130.
PAPER_LR = 1e-3
LR = 6e-3
LR_WIDTH = 96

# After 731 steps of 1,024 tokens of prose (width 64, 6e-3), bits per byte on 64 windows: with 74
# steps of warmup 2.285 and 2.659 with Canon layers, 2.660 and 2.686 without (seeds 0 and 1); with
# 200 steps 2.226 and 2.223 (and 2.216 with seed 2), 2.373 and 2.381. Its bigram has 2.486.
MIN_WARMUP = 200
MAX_WARMUP = 1000

MIN_DOCUMENTS = 200  # to tell held-out losses apart; longer documents are cut to have as many
MIN_CUT_BYTES = 1_000
MAX_CUT_BYTES = 20_000
MAX_HELD_OUT_SHARE = 0.02
HELD_OUT_BYTES = 4_000_000
MIN_BUILT_BYTES = 20_000_000
MEASURE_S = 1.0
MEASUREMENTS = 3
GPU_WINDOWS = 8  # of a timed step
MAX_MICRO_BATCH = 64
TRAINER_SHARE = 0.8  # of forward and backward alone: measured 0.85 at width 64 on a CPU
SHOWN_CHARACTERS = 200
PROMPT_WORDS = 3
PROMPT_CHARACTERS = 40
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
        """Inspect this machine, for `models` models that train at once if they can."""
        import torch

        check_cuda()
        num_gpus = torch.cuda.device_count()
        if not num_gpus:
            cores = available_cores()
            parallel = min(models, cores)
            model = cpu_info("model name") or "a CPU"
            return cls(
                name=f"{cores} cores of {model}",
                is_gpu=False,
                ranks=1,
                memory=memory_per_process(parallel),
                parallel=parallel,
            )

        # Several models have a GPU each; one has a number of GPUs that divides the batch.
        parallel = min(models, num_gpus)
        return cls(
            name=f"{num_gpus} x {torch.cuda.get_device_name(0)}",
            is_gpu=True,
            ranks=1 if models > 1 else _power_of_two(num_gpus),
            memory=memory_per_process(1),
            parallel=parallel,
        )

    def micro_batch(self, args: ModelArgs) -> int:
        """Return the windows of a forward pass that surely fit into the memory, or 0."""
        # Values that a token keeps of a block's width: what --dry-run counts in bfloat16, about
        # twice that on a CPU, where half of the memory is left to other programs.
        if self.is_gpu:
            bytes_per_value = 2
            values_per_width = 8
            memory_share = 0.8
        else:
            bytes_per_value = 4
            values_per_width = 16
            memory_share = 0.5

        block_values = values_per_width * args.num_layers * (args.dim + args.ffn_dim)
        values_per_token = block_values + 8 * args.vocab_size
        weight_bytes = BYTES_PER_PARAMETER * num_parameters(args) / self.ranks
        free_bytes = memory_share * self.memory - weight_bytes
        window_bytes = bytes_per_value * values_per_token * args.max_seq_len
        windows = int(free_bytes / window_bytes)
        if windows <= 0:
            return 0
        return min(MAX_MICRO_BATCH, _power_of_two(windows))

    def tokens_per_second(self, args: ModelArgs) -> float:
        """Time forward and backward of the model on one device; return the speed of all."""
        import torch
        import torch.nn.functional as F

        from canon_pretrain.model.transformer import Transformer

        # The model as it is trained: in bfloat16 on a GPU, on its part of the cores on a CPU.
        if self.parallel > 1 and not self.is_gpu:
            torch.set_num_threads(threads_per_process(self.parallel))
        device = torch.device("cuda" if self.is_gpu else "cpu")
        model = Transformer(args).to(device)
        model.init_weights()
        if self.is_gpu:
            model.bfloat16()

        # On a CPU, the smallest step: it has the smallest share of the processor's speed.
        num_windows = max(1, MIN_BATCH_TOKENS // args.max_seq_len)
        if self.is_gpu:
            num_windows = GPU_WINDOWS
        num_windows = min(num_windows, self.micro_batch(args))
        shape = (num_windows, args.max_seq_len)
        tokens_BT = torch.randint(args.vocab_size, shape, device=device)

        def step() -> None:
            logits_NV = model(tokens_BT).flatten(0, 1).float()
            F.cross_entropy(logits_NV, tokens_BT.flatten()).backward()
            if self.is_gpu:
                torch.cuda.synchronize()

        step()  # compiles and allocates
        steps_per_second = TRAINER_SHARE * best_rate(step, MEASURE_S, MEASUREMENTS)
        return steps_per_second * tokens_BT.numel() * self.ranks


def _power_of_two(count: int) -> int:
    """Round down to a power of two."""
    return 1 << (count.bit_length() - 1)


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

    def with_model(self, args: ModelArgs) -> "Proposal":
        """Return the proposal with another model, which is timed."""
        return replace(self, args=args, speed=self.machine.tokens_per_second(args))

    @property
    def tokens(self) -> float:
        """The training tokens: of the time, at most of EPOCHS epochs (of MIN_STEPS if more)."""
        max_tokens = max(EPOCHS * self.unique, MIN_STEPS * MIN_BATCH_TOKENS)
        return min(self.speed * self.seconds, max_tokens)

    @property
    def parameters(self) -> int:
        return num_parameters(self.args)

    @property
    def ratio(self) -> float:
        """Tokens per parameter, repeated ones counted as the new ones that they are worth.

        Muennighoff et al. (2023): U unique tokens that are repeated R times are worth as many as
        U + U R* (1 - exp(-R / R*)) new ones.
        """
        repeats = max(0.0, self.tokens / self.unique - 1)
        worth = 1 + WORN_EPOCHS * (1 - math.exp(-repeats / WORN_EPOCHS))
        worth_tokens = min(self.tokens, self.unique * worth)
        return worth_tokens / self.parameters

    @property
    def shortfall(self) -> str:
        """What keeps the ratio below half of TOKENS_PER_PARAMETER, or ""."""
        if self.ratio >= TOKENS_PER_PARAMETER / 2:
            return ""
        best_ratio = min(TOKENS_PER_PARAMETER, replace(self, seconds=math.inf).ratio)
        if best_ratio < 2 * self.ratio:
            return "too little text for this size"

        # The time of the best ratio: `ratio`, solved for the repeats.
        repeats = best_ratio * self.parameters / self.unique - 1
        if repeats >= 0:
            repeats = -WORN_EPOCHS * math.log(1 - repeats / WORN_EPOCHS)
        best_tokens = (1 + repeats) * self.unique
        minutes = math.ceil(best_tokens / self.speed / 60)
        return f"about {best_ratio:.2g} would be ideal: {minutes} minutes of training"

    @property
    def batch(self) -> int:
        """Windows in a step for C FLOPs: DeepSeek's 0.292 C^0.3271 tokens from 1e17 FLOPs on.

        Below, where they did not measure: a power law between theirs at 1e17 and MIN_BATCH_TOKENS
        at MIN_BATCH_FLOPS. Down to a power of two.
        """
        flops = 6 * self.parameters * self.tokens
        tokens = 0.292 * max(flops, DEEPSEEK_FLOPS) ** 0.3271

        # Below DeepSeek's range; `share` is 0 at its end of the power law, 1 at the other.
        if flops < DEEPSEEK_FLOPS:
            log_range = math.log(DEEPSEEK_FLOPS / MIN_BATCH_FLOPS)
            share = math.log(DEEPSEEK_FLOPS / flops) / log_range
            tokens = max(MIN_BATCH_TOKENS, tokens * (MIN_BATCH_TOKENS / tokens) ** share)
        windows = tokens / self.args.max_seq_len
        return max(self.machine.ranks, 1 << int(math.log2(windows)))

    @property
    def steps(self) -> int:
        return max(10, round(self.tokens / self.tokens_per_step))

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.args.max_seq_len

    @property
    def lr(self) -> float:
        lr_of_width = LR * LR_WIDTH / self.args.dim
        return min(LR, max(PAPER_LR, lr_of_width))

    @property
    def warmup(self) -> int:
        """A tenth of the steps, from MIN_WARMUP to MAX_WARMUP; a quarter of fewer steps."""
        tenth = math.ceil(self.steps / 10)
        quarter = math.ceil(self.steps / 4)
        return min(max(MIN_WARMUP, tenth), MAX_WARMUP, quarter)

    @property
    def epochs(self) -> float:
        built_tokens = self.max_tokens or self.unique
        return self.steps * self.tokens_per_step / built_tokens

    def steps_rule(self) -> list[str]:
        """Return what the steps are and what limits them, in two lines."""
        tokens = self.steps * self.tokens_per_step
        minutes = self.seconds / 60
        rule = f"The time limit: {minutes:.3g} minutes of training."
        if self.epochs > EPOCHS + 1:
            rule = "The text is short: it is repeated until the fewest useful steps are done."
        elif self.epochs > EPOCHS - 0.5:
            rule = f"More than {EPOCHS} epochs of a small text gain nothing on held-out text."
        return [
            f"{tokens:,} tokens, {self.epochs:.1f} epochs: {duration(tokens / self.speed)} here "
            f"({self.speed:,.0f} tokens/s).",
            rule,
        ]


def propose(machine: Machine, num_bytes: float, seconds: float) -> Proposal:
    """Return the size with about TOKENS_PER_PARAMETER: the largest, or the one below it.

    Sizes are timed from the smallest on. Raises UserError.
    """
    unique = num_bytes / BYTES_PER_TOKEN
    proposals: list[Proposal] = []
    for name, (vocab_size, seq_len) in SIZES.items():
        args = replace(flavor(name), vocab_size=vocab_size, max_seq_len=seq_len, canon_set="ABCD")
        if not machine.micro_batch(args):
            break
        speed = machine.tokens_per_second(args)
        proposal = Proposal(machine, name, args, speed, unique, seconds)
        proposals.append(proposal)
        if proposal.ratio < TOKENS_PER_PARAMETER:
            break  # larger ones have fewer

    if not proposals:
        raise UserError(
            "memory.too_small",
            f"{size(machine.memory)} of memory are available: too little for any model; "
            "end other programs",
        )

    def distance(proposal: Proposal) -> float:
        return abs(math.log(proposal.ratio / TOKENS_PER_PARAMETER))

    return min(proposals, key=distance)


def with_larger_vocabulary(proposal: Proposal) -> Proposal:
    """Return the proposal with a vocabulary LARGER_VOCABULARY times as large.

    Or as it is, if it would train on fewer than MIN_TOKENS_PER_PIECE tokens for each piece.
    """
    vocab_size = LARGER_VOCABULARY * proposal.args.vocab_size
    args = replace(proposal.args, vocab_size=vocab_size)
    if not proposal.machine.micro_batch(args):
        return proposal  # too little memory
    larger = proposal.with_model(args)
    if larger.tokens < MIN_TOKENS_PER_PIECE * vocab_size:
        return proposal
    return larger


def cut_and_holdout(text: Survey, share: float = 1.0) -> tuple[int, float]:
    """Return --max-document-bytes (0: none) and --holdout, for a build of `share` of the text.

    Enough documents to tell losses apart, and of a large text no more than HELD_OUT_BYTES beyond.
    """
    # A text of few documents is cut into more, of a round number of bytes.
    cut = 0
    num_documents = float(text.num_documents)
    if num_documents < MIN_DOCUMENTS:
        cut = text.num_bytes // (2 * MIN_DOCUMENTS)
        cut = min(max(MIN_CUT_BYTES, cut), MAX_CUT_BYTES)
        cut = _round_to_digits(cut, 1)
        num_documents = text.num_bytes / cut

    # Rounded up to two digits, or to whole percents.
    holdout = min(MAX_HELD_OUT_SHARE, HELD_OUT_BYTES / text.num_bytes) / share
    holdout = min(MAX_HOLDOUT, holdout)
    holdout = max(holdout, holdout_for(share * num_documents))
    magnitude = math.floor(math.log10(holdout))
    scale = 10 ** max(2, 1 - magnitude)
    return cut, math.ceil(holdout * scale) / scale


def _round_to_digits(number: int, digits: int) -> int:
    """Round to the first digits of a positive number."""
    return round(number, digits - len(str(number)))


def limit_tokens(text: Survey, total: float, proposal: Proposal) -> Proposal:
    """Set max_tokens if the run uses less than a quarter of the text's `total` tokens.

    Whole files are built, so it saves nothing of a single one, and little of a small text.
    """
    tokens_used = proposal.steps * proposal.tokens_per_step
    min_tokens = round(MIN_BUILT_BYTES * total / text.num_bytes)
    max_tokens = _round_to_digits(max(4 * tokens_used, min_tokens), 2)

    # The share of the files that have as many tokens.
    num_files = math.ceil(text.num_files * max_tokens / total)
    share = num_files / text.num_files
    if share >= 1:
        return proposal
    return replace(proposal, max_tokens=max_tokens, share=share)


def toml(
    name: str, files: str, prompt: str, proposal: Proposal, *, command: str = "canon new"
) -> str:
    """Return the experiment's file, each value with its rule."""
    # Values that the template formats itself are attributes of `proposal`.
    machine = proposal.machine
    template = Path(__file__).with_suffix(".toml").read_text()
    return template.format(
        description=_toml_string(f"{name}, on {files}"),
        run=_toml_string(f"outputs/{name}/canon"),
        data=_toml_string(f"outputs/{name}/data"),
        prompt=_toml_string(prompt),
        command=command,
        files=printable(files),
        machine=printable(machine.name),
        proposal=proposal,
        choice=proposal.shortfall or "of all sizes nearest to it",
        sizes=", ".join(other for other in SIZES if other != proposal.name),
        goal=TOKENS_PER_PARAMETER,
        steps_rule="\n# ".join(proposal.steps_rule()),
        min_batch=MIN_BATCH_TOKENS,
        windows=min(machine.micro_batch(proposal.args), proposal.batch // machine.ranks),
        dtype="bfloat16" if machine.is_gpu else "float32",
        top_lr=LR,
        lr_width=LR_WIDTH,
        min_warmup=MIN_WARMUP,
        max_warmup=MAX_WARMUP,
        quarter=math.ceil(proposal.steps / 4),
        tenth=math.ceil(proposal.steps / 10),
        hundredth=math.ceil(proposal.steps / 100),
        compiles="true" if machine.is_gpu else "false",
    )


def _toml_string(text: str) -> str:
    line = to_toml({"": text})
    return line.removeprefix('"" = ').removesuffix("\n")


def build_options(
    out: str, paths: Sequence[Path], text: Survey, text_field: str | None, proposal: Proposal
) -> list[str]:
    """Return the options of `canon data build` that write the proposal's shards to `out`."""
    cut, holdout = cut_and_holdout(text, proposal.share)
    options = ["--source", "local", "--files", *map(str, paths)]
    if text.suffixes:
        options += ["--text-suffixes", *text.suffixes]
    if text_field:
        options += ["--text-field", text_field]
    if cut:
        options += ["--max-document-bytes", str(cut)]
    if proposal.max_tokens:
        options += ["--max-tokens", str(proposal.max_tokens)]
    options += ["--holdout", f"{holdout:g}"]
    options += ["--tokenizer", f"train:{proposal.args.vocab_size}"]
    return [*options, "--out", out]


def next_commands(
    name: str, paths: Sequence[Path], text: Survey, text_field: str | None, proposal: Proposal
) -> Iterator[tuple[str, str]]:
    """Yield (what it does, the command as it is pasted)."""
    canon = "canon" if shutil.which("canon") else "python -m canon_pretrain"
    data = f"outputs/{name}/data"
    options = build_options(data, paths, text, text_field, proposal)
    build = shlex.join(options)
    yield "text to shards of tokens", f"{canon} data build {build}"

    run = f"outputs/{name}/canon"
    ranks = proposal.machine.ranks
    train = f"{canon} train"
    if ranks > 1:
        train = f"torchrun --nproc-per-node {ranks} -m canon_pretrain.train"
    train = f"{train} --config {name}.toml"
    yield "train; Ctrl-C saves, the same command resumes", train
    yield "let it write", f"{canon} sample {run}"

    other = f"outputs/{name}/without-canon"
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
    """Survey the text of `option`, and print it. Raises UserError if it is not for training."""
    for path in paths:
        if Path("outputs").resolve().is_relative_to(path.resolve()):
            raise UserError(
                "new.outputs_in_data",
                f"{option} {path}: outputs/ would be in it and be read as text; run this in a "
                "folder outside of the text's",
                path=path,
            )

    options = SourceOptions(
        LOCAL, paths, text_field=text_field, text_suffixes=suffixes, files_option=option
    )
    text = survey(options)
    print_survey(text)
    check_text(text, ", ".join(map(str, paths)))
    return text


def choose(machine: Machine, text: Survey, seconds: float) -> Proposal:
    """Print and return what to train for `seconds` on a text. Raises UserError."""
    memory = f"{size(machine.memory)} of memory"
    if max(machine.ranks, machine.parallel) > 1:
        memory = f"{memory} each"
    show("machine", f"{machine.name}, {memory}")

    # Times are measured on the machine as it is.
    load = os.getloadavg()[0]
    cores = available_cores()
    if load > cores:
        # Measured: 107 tokens/s with 2 threads next to three other programs, 4,872 with one.
        show(
            "",
            f"load average {load:.1f} on {cores} cores: times are those of a busy machine",
            "beside other programs OMP_NUM_THREADS=1 is often many times as fast",
        )

    # The size is chosen by bytes.
    _, holdout = cut_and_holdout(text)
    train_bytes = (1 - holdout) * text.num_bytes
    proposal = propose(machine, train_bytes, seconds)
    if text.rare_share(proposal.args.vocab_size) > MAX_RARE_SHARE:
        proposal = with_larger_vocabulary(proposal)

    # Then the tokens of its vocabulary are counted, which is smaller for a text of few words.
    vocab_size, tokens_per_byte = text.tokens_per_byte(proposal.args.vocab_size)
    total = tokens_per_byte * text.num_bytes
    if vocab_size != proposal.args.vocab_size:
        proposal = proposal.with_model(replace(proposal.args, vocab_size=vocab_size))
    proposal = replace(proposal, unique=(1 - holdout) * total)
    proposal = limit_tokens(text, total, proposal)

    # What is proposed.
    bytes_each = 1 / tokens_per_byte
    show(
        "tokens",
        f"{total:,.0f} of a vocabulary of {vocab_size:,}, {bytes_each:.2f} bytes each",
    )
    if proposal.max_tokens:
        show(
            "",
            f"of the first files, {proposal.max_tokens:,} are built: "
            "at least four times what the run uses",
        )
    reasons = [f"{proposal.ratio:.1f} tokens per parameter", proposal.shortfall]
    show(
        "model",
        f"{proposal.name}: {proposal.parameters:,} parameters",
        "; ".join(filter(None, reasons)),
    )
    show("training", *proposal.steps_rule())
    return proposal


def run(arguments: argparse.Namespace) -> None:
    """Survey the text, write NAME.toml and print the next commands. Raises UserError."""
    name = arguments.name
    check_name(name)
    target = Path(f"{name}.toml")
    for path in (target, Path("outputs", name)):
        if path.exists():
            raise UserError(
                "new.exists",
                f"{path}: exists; choose another name, or remove it if you do not need it",
                path=path,
            )

    paths = arguments.data
    text = inspect_text(paths, arguments.text_field, arguments.text_suffixes, "--data")
    machine = Machine.find()
    proposal = choose(machine, text, seconds=60.0 * arguments.minutes)
    content = toml(
        name,
        files=", ".join(map(str, paths)),
        prompt=first_words(text.sample),
        proposal=proposal,
    )
    with create_file(target) as file:
        file.write(content.encode())

    print(f"\nWrote {target}, with the reason for each value. Next:\n")
    for purpose, command in next_commands(name, paths, text, arguments.text_field, proposal):
        print(f"# {purpose}\n{command}\n")


def check_text(text: Survey, files: str) -> None:
    """Raise UserError if the text is too little, or most of it not UTF-8."""
    if text.num_bytes < MIN_BYTES:
        folder = Path(os.__file__).parent / "pydoc_data"
        manual = f"--data {folder} --text-suffixes .py"
        advice = skipped_advice(text) or f"add text, or try Python's manual: {manual}"
        raise UserError(
            "new.too_little_text",
            f"{files}: {text.num_bytes:,} bytes of text, expected at least {MIN_BYTES:,}; {advice}",
            given=text.num_bytes,
        )
    if 2 * text.num_damaged > text.num_probed:
        raise UserError(
            "new.not_utf8",
            f"{files}: most of the text is not UTF-8: {damage(text)}",
            given=text.num_damaged,
        )


def damage(text: Survey) -> str:
    """Return how many sampled documents are not UTF-8, and what to do."""
    return (
        f"{text.num_damaged:,} of {text.num_probed:,} sampled documents are not UTF-8 text: "
        "convert with `iconv -f ENCODING -t utf-8 OLD > NEW`"
    )


def skipped_advice(text: Survey) -> str:
    """Return the option that reads skipped text, if it is more than what is read, or ""."""
    suffixes = [*text.skipped_text][:SHOWN_SUFFIXES]
    num_bytes = sum(text.skipped_text[suffix] for suffix in suffixes)
    if num_bytes <= text.num_bytes:
        return ""
    counts = ", ".join(f"{text.skipped[suffix]:,} {suffix}" for suffix in suffixes)
    option = shlex.join(["--text-suffixes", *text.suffixes, *suffixes])
    return f"{counts} hold {size(num_bytes)}: add {option}"


def first_words(texts: Sequence[str]) -> str:
    """Return the first words of the last text that has some; a text may be without spaces."""
    words_of_texts = (text.split() for text in reversed(texts))
    prompt = next(filter(None, words_of_texts), [])[:PROMPT_WORDS]
    return " ".join(prompt)[:PROMPT_CHARACTERS]


def show(label: str, *lines: str) -> None:
    """Print lines, the first one after its label."""
    for line in lines:
        print(f"{label:12}{printable(line)}")
        label = ""


def print_survey(text: Survey) -> None:
    """Print what files were read, how, and what was not read."""
    show(
        "text",
        f"{text.num_files:,} files, {size(text.file_bytes)}: "
        f"{text.num_documents:,} documents, {size(text.num_bytes)} of text",
    )
    if text.sampled < text.num_bytes:
        show("", f"estimated from a sample of {size(text.sampled)}")
    if text.suffixes:
        show("", f"read as plain text: {' '.join(text.suffixes)}")
    if text.skipped:
        show("", "; ".join(_skipped(text)))
    if text.num_damaged:
        show("", damage(text))
    if text.sample:
        middle = text.sample[len(text.sample) // 2]
        line = " ".join(middle.split())
        show("sample", f"{line[:SHOWN_CHARACTERS]} ...")


def _skipped(text: Survey) -> Iterator[str]:
    """Yield which files were skipped, and how they can be read."""
    common = text.skipped.most_common(SHOWN_SUFFIXES)
    kinds = []
    for suffix, count in common:
        name = suffix or "without suffix"
        kinds.append(f"{count:,} {name}")
    yield f"skipped: {', '.join(kinds)}"

    advice = skipped_advice(text)
    if advice:
        yield advice
    elif text.skipped_text:
        suffixes = [*text.skipped_text][:SHOWN_SUFFIXES]
        yield f"--text-suffixes reads {' '.join(suffixes)} as plain text"
    if ".gz" in text.skipped:
        yield "gunzip .gz first"


FILES_HELP = "files or folders: .txt, .jsonl or .json (.zst, .gz), .parquet, or other plain text"


def add_text_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text-field", metavar="F", help="name of the text in rows, also a.b (default: text)")
    add(
        "--text-suffixes",
        nargs="+",
        default=(),
        metavar=".S",
        help="read files of these suffixes as plain text too, such as .md .rst",
    )


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

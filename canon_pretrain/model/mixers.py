"""The contract of a mixer other than attention, and the classes that keep it.

A class is the product's, a row of mixer_table.py, or the user's own: FILE.py:Name
(train_configs/mixers/README.md).

Shapes: B batch, T tokens, D hidden.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import NO_CONTEXT, Context, LayerCache
from canon_pretrain.model.initial_value import InitialValue
from canon_pretrain.model.mixer_files import MixerFile, mixer_file
from canon_pretrain.model.mixer_table import RECURRENT

KINDS = ("constant", "normal", "uniform", "log_uniform", "log_count", "step")
"""Of the values in `Mixer.init`."""
# three equally spaced lengths in tokens, which determine a quadratic
COUNTED_LENGTHS = (256, 512, 768)
# read into an empty cache; the size per row and per token is the same for any number
CACHED_TOKENS = 8


class Mixer(nn.Module):
    """What a layer computes from the tokens up to each one: x_BTD -> what is added to h, [B, T, D].

    A subclass has a constructor of ModelArgs and `forward`. Everything else is derived: parameters,
    FLOPs and the size of the state are counted (`measure`). Those of a class of the product are in
    its row, and its constructor also takes the backends of Canon and of its recurrence.
    """

    reads_mask: bool = False
    """Whether `forward` needs `context.mask`, the tokens that each token sees: for attention.
    None there means causal attention."""
    init: Mapping[str, tuple[str, float]] = {}
    """Initial value of a parameter by its name: (kind, scale) of InitialValue, such as
    ("uniform", 0.1). Others: matrices as the model's, norm gains 1, biases 0."""

    readers = 1
    """Number of linear layers that read x; see `per_reader`."""

    def forward(self, x_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Return what is added to the residual stream, [B, T, D].

        `context` has the states after the tokens before these (`recall`, `keep`, `append`) and says
        where a document starts (`starts`), before which nothing may be seen.
        """
        raise NotImplementedError

    @classmethod
    def initial_value(cls, args: ModelArgs, name: str, usual: InitialValue) -> InitialValue:
        """Return the initial value of the parameter `name` of the class: by default that of `init`.

        Override it where a value depends on `args`. `usual` is that of other modules: of a matrix
        the model's, of a norm's gain 1, of a bias 0, else of the kind UNKNOWN.
        """
        if name not in cls.init:
            return usual
        kind, scale = cls.init[name]
        check_choice(f'{args.mixer}: init["{name}"]', kind, KINDS)
        return replace(usual, kind=kind, scale=scale)


def fresh_class(mixer: str) -> type[Mixer]:
    """Return the class of FILE.py:Name from another import of its file, as another process does."""
    module_name = mixer_class(mixer).__module__
    module = sys.modules[module_name]
    file = mixer_file(mixer)
    try:
        # past the cache, which would return the class that is loaded already
        return _load.__wrapped__(file, mixer, file.sha256)
    finally:
        sys.modules[module_name] = module


def mixer_class(mixer: str) -> type[Mixer]:
    """Return the class of a row of mixer_table.py, or of FILE.py:Name.

    Raises UserError if the user's file has none.
    """
    if row := RECURRENT.get(mixer):
        # the name of this package differs in an export
        module = importlib.import_module(f"{__package__}.{row.module}")
        return getattr(module, row.class_name)

    file = mixer_file(mixer)
    return _load(file, mixer, file.sha256)


@functools.cache
def _load(file: MixerFile, mixer: str, sha256: str) -> type[Mixer]:
    """Return the class as the file defines it now; `sha256`: of the file."""
    try:
        module = _import(file.path, sha256)
    except Exception as error:
        raise UserError(
            "mixer.import",
            f'mixer = "{mixer}": {file.path} cannot be imported: {type(error).__name__}: {error}',
            given=mixer,
        ) from error

    kind = getattr(module, file.name, None)
    if not (isinstance(kind, type) and issubclass(kind, Mixer)):
        names = [name for name, value in vars(module).items() if _is_mixer_of(value, module)]
        raise UserError(
            "mixer.no_class",
            f'mixer = "{mixer}": {file.path} has no class {file.name} that is a '
            f"canon_pretrain.model.mixers.Mixer; it has {', '.join(names) or 'none'}",
            given=mixer,
        )
    return kind


def _import(path: Path, sha256: str) -> ModuleType:
    """Return the file as a module."""
    # an export has it next to this file, as a module of one package with relative imports
    if path.parent == Path(__file__).parent:
        return importlib.import_module(f"{__package__}.{path.stem}")

    # in sys.modules, so that dataclasses, pickle and torch.compile find it
    module_name = f"canon_mixer_{sha256[:16]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    # spec_from_file_location may return None; for an existing .py file it does not
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[module_name]
        raise
    return module


def _is_mixer_of(value: object, module: ModuleType) -> bool:
    is_mixer = isinstance(value, type) and issubclass(value, Mixer)
    return is_mixer and value.__module__ == module.__name__


class Measures(NamedTuple):
    """What a mixer of the user's own costs, counted by running it."""

    num_parameters: int
    base_flops: float
    """FLOPs of a token's products, forward and backward, at any length."""
    flops_per_length: float
    """Further FLOPs of a token, times the length of the sequence."""
    state_per_row: int
    """Numbers that decoding holds of a sequence, in float32."""
    state_per_token: int
    """Numbers that it holds of each token, in the dtype of the model."""

    def flops_per_token(self, num_tokens: int) -> float:
        return self.base_flops + self.flops_per_length * num_tokens


@functools.lru_cache(maxsize=64)
def measure(args: ModelArgs) -> Measures:
    """Count what the mixer FILE.py:Name of a layer costs, on tensors without data.

    FLOPs of the products of a sequence are counted at three lengths: a constant, such as what the
    first chunk saves, is left out, the rest is linear and quadratic in the length.
    """
    # tables of positions must reach the longest one
    max_seq_len = max(args.max_seq_len, *COUNTED_LENGTHS)
    with torch.device("meta"):
        mixer = mixer_class(args.mixer)(replace(args, max_seq_len=max_seq_len))

    # Forward and backward of whole sequences.
    totals = []
    for num_tokens in COUNTED_LENGTHS:
        x_BTD = torch.empty(1, num_tokens, args.dim, device="meta", requires_grad=True)
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            mixer(x_BTD, context_for(mixer, num_tokens)).sum().backward()
        totals.append(counter.get_total_flops())

    # total = constant + base * length + quadratic * length^2, at equally spaced lengths

    # The second difference of a quadratic is 2 quadratic step^2, the first one step * (base +
    # quadratic * (short + middle)).
    short, middle, long = COUNTED_LENGTHS
    step = long - middle
    quadratic = (totals[2] - 2 * totals[1] + totals[0]) / (2 * step**2)
    base = (totals[1] - totals[0]) / step - quadratic * (short + middle)

    # What is kept between tokens, after a few of them.
    cache = LayerCache(window=args.window)
    with torch.no_grad():
        x_BTD = torch.empty(1, CACHED_TOKENS, args.dim, device="meta")
        mixer(x_BTD, context_for(mixer, CACHED_TOKENS)._replace(cache=cache))
    return Measures(
        num_parameters=sum(parameter.numel() for parameter in mixer.parameters()),
        base_flops=base,
        flops_per_length=quadratic,
        state_per_row=cache.numbers_per_row,
        state_per_token=cache.numbers_per_token,
    )


def context_for(mixer: Mixer, num_tokens: int, device: str = "meta") -> Context:
    """Return the context of a single sequence without documents."""
    if not mixer.reads_mask:
        return NO_CONTEXT
    return Context(torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril())

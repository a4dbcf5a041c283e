"""Each row of the table of recurrent mixers is complete, and agrees with the class it names."""

import ast
import math
from dataclasses import replace

import pytest
import torch

from canon_pretrain.hf.classes import to_hf
from canon_pretrain.hf.config import OWN_MIXER
from canon_pretrain.hf.writing import bundled_code
from canon_pretrain.kernels import fla_mixers
from canon_pretrain.kernels.backends import MIXER_BACKENDS
from canon_pretrain.kernels.recurrences import CHUNKED
from canon_pretrain.model.args import LAYER_FIELDS, ModelArgs, fill_model, flavor
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.canon import Canon, ShortConv
from canon_pretrain.model.counts import state_size
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.mixer_table import RECURRENT
from canon_pretrain.model.mixers import Mixer, mixer_class
from canon_pretrain.model.transformer import make_mixer
from tests.support import ROOT, refused
from tests.variants import BASE, build, random_tokens

each_mixer = pytest.mark.parametrize("mixer", RECURRENT)
PACKAGE = ROOT / "canon_pretrain"
FOREIGN_FORMATS = {"hf/mamba2.py", "hf/standard.py", "hf/export.py", "hf/lingua_linear.py"}
"""Where a mixer is a class of others with its own config.json or params.json, or of its layers."""
BASELINES = {"compare.py"}
"""The architectures that `playground compare` trains, by their names on its command line."""


def args_of(mixer, **changes):
    """Return a small model of a mixer with sizes that differ from each other."""
    sizes = {"expand_k": 0.75, "expand_v": 1.5, "state_dim": 6}
    options = {name: sizes[name] for name in RECURRENT[mixer].options if name in sizes}
    return replace(BASE, mixer=mixer, position="nope", **options | changes)


def size_of(module):
    return sum(parameter.numel() for parameter in module.parameters())


@each_mixer
def test_a_row_names_a_class_that_an_export_has(mixer):
    row = RECURRENT[mixer]
    kind = mixer_class(mixer)
    assert issubclass(kind, Mixer)
    assert (kind.__module__.rpartition(".")[2], kind.__name__) == (row.module, row.class_name)
    assert f"{row.module}.py" in bundled_code(None)


@each_mixer
def test_a_row_names_fields_of_a_layer(mixer):
    row = RECURRENT[mixer]
    assert {*row.options, *row.sizes} <= {*LAYER_FIELDS}
    assert row.label.format(num_heads=4)
    assert math.isfinite(row.temporary_bytes) and row.temporary_bytes > 0
    assert row.step_times["triton"] == 1
    assert row.step_times.keys() == {*MIXER_BACKENDS} - {"auto"}


@each_mixer
@pytest.mark.parametrize(
    "changes", [{}, {"mixer_conv": True, "canon_kernel": 3}, {"output_gate_rank": 5}], ids=str
)
def test_parameters_of_a_row_are_those_of_the_class(mixer, changes):
    row = RECURRENT[mixer]
    if not changes.keys() - {"canon_kernel"} <= {*row.options}:
        pytest.skip("no option of this mixer")
    args = args_of(mixer, **changes)
    assert row.num_parameters(args) == size_of(make_mixer(args, None, None))


@each_mixer
def test_widths_of_a_row_are_those_of_the_class(mixer):
    widths = RECURRENT[mixer].widths(args_of(mixer))
    modules = [*make_mixer(args_of(mixer, canon_set="B"), None, None).modules()]
    (canon,) = [module for module in modules if isinstance(module, Canon)]
    assert canon.num_channels == sum(widths.parts)

    modules = [*make_mixer(args_of(mixer, mixer_conv=True), None, None).modules()]
    (conv,) = [module for module in modules if isinstance(module, ShortConv)]
    assert len(conv.weight) == widths.conv_channels


@each_mixer
def test_a_layer_keeps_one_state_of_the_rows_widths(mixer):
    args = args_of(mixer)
    cache = Cache.of(args)
    with torch.no_grad():
        build(args)(random_tokens(args, 2, 5), cache=cache)

    widths = RECURRENT[mixer].widths(args)
    (state,) = cache.layers[0].states.values()
    assert state.shape == (2, args.num_heads, widths.key_dim, widths.value_dim)
    assert state_size(args) == cache.layers[0].numbers_per_row


@each_mixer
def test_heads_that_do_not_divide_the_widths_are_refused(mixer):
    numbers = RECURRENT[mixer].per_head(args_of(mixer)).values()
    assert all(number % BASE.num_heads == 0 for number in numbers)
    with refused("model.not_divisible", divisor=7):
        args_of(mixer, num_heads=7)


@each_mixer
@pytest.mark.parametrize("init", ["paper", "lingua"])
def test_every_parameter_has_an_initial_value(mixer, init):
    args = args_of(mixer, init=init, mixer_conv=True)
    for name, parameter in make_mixer(args, None, None).named_parameters():
        value = initial_value(args, f"layers.0.attention.{name}", parameter.shape)
        assert value.rows(0, len(parameter)).shape == parameter.shape


@each_mixer
def test_an_export_has_a_name_for_every_parameter(mixer):
    args = args_of(mixer, mixer_conv=True)
    names = [name for name, _ in make_mixer(args, None, None).named_parameters()]
    exported = [to_hf(f"layers.0.attention.{name}", args=args) for name in names]
    assert len({*exported}) == len(names)

    module = "self_attn" if RECURRENT[mixer].has_llama_names else OWN_MIXER
    assert all(name.startswith(f"model.layers.0.{module}.") for name in exported)


@each_mixer
def test_the_papers_sizes_make_a_model(mixer):
    args = fill_model(flavor("1b3"), {"mixer": mixer})
    for name, value in RECURRENT[mixer].sizes.items():
        assert getattr(args, name) == value
    assert args.mixer_conv == RECURRENT[mixer].has_conv
    assert args.position == "nope"


def test_the_kernels_are_of_mixers_of_the_table():
    assert fla_mixers.MIXERS.keys() <= CHUNKED.keys() <= RECURRENT.keys()


def test_no_other_file_names_a_mixer():
    """Rooms ask the row: a mixer's name as a string is in the table and in kernels/ alone."""
    naming = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in RECURRENT:
                naming.add(str(path.relative_to(PACKAGE)))
    kernels = {name for name in naming if name.startswith("kernels/")}
    assert naming - kernels == {"model/mixer_table.py", *FOREIGN_FORMATS, *BASELINES}


def test_a_mixer_of_no_row_has_none():
    assert ModelArgs().recurrent is None
    own = str(ROOT / "train_configs/mixers/decaying_average.py:DecayingAverage")
    assert ModelArgs(mixer=own).recurrent is None

"""Traffic estimated from graphs: by hand for small ones, and beside Inductor's own for blocks."""

import json
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from canon_pretrain.kernels.delta import OPERATORS  # registers the recurrence
from canon_pretrain.kernels.traffic import estimate_work, recurrence_work
from canon_pretrain.model.args import flavor
from canon_pretrain.titan.costs import compiled_block_costs
from canon_pretrain.titan.step_time import TRAFFIC_FACTOR
from tests.bench.codegen import RECORD, Case

KIB = 1024
ROWS, WIDTH = 128, 256
VALUE_BYTES = 4 * ROWS * WIDTH
BLOCKS = [
    row
    for row in json.loads(RECORD.read_text())["rows"]
    if (row["model"], row["canon_set"], row["backend"])
    in {
        ("nope", "", "compiled"),
        ("nope", "ABCD", "triton"),
        ("rope", "AC", "triton"),
        ("rope_standard_gelu", "", "compiled"),
        ("released_1b", "ABCD", "triton"),
    }
]

QUICK = ("nope", "released_1b")


def work_of(function, *shapes, constant_shapes=()):
    """Trace a function of tensors of these shapes, and estimate its work."""
    with FakeTensorMode():
        values = [torch.empty(shape) for shape in shapes]
        graph = make_fx(function)(*values)
    return estimate_work(graph, constant_shapes)


def test_pointwise_operators_share_a_kernel():
    work = work_of(lambda x, y: [(x * y + 1).exp()], (ROWS, WIDTH), (ROWS, WIDTH))
    assert (work.launches, work.bytes_moved) == (1, 3 * VALUE_BYTES)


def test_a_product_between_them_separates_kernels():
    square = (WIDTH, WIDTH)

    def function(x, weight):
        return [(x.relu() @ weight).relu()]

    work = work_of(function, (ROWS, WIDTH), square, constant_shapes=[square])
    # relu reads and writes, so does the product (weights are free), and relu again
    assert (work.launches, work.bytes_moved) == (3, 4 * VALUE_BYTES)
    assert work.product_bytes == 2 * VALUE_BYTES
    assert work.flops == {"float32": 2 * ROWS * WIDTH * WIDTH}


def test_two_results_of_one_input_read_it_once():
    work = work_of(lambda x: [x.relu(), x.exp()], (ROWS, WIDTH))
    assert (work.launches, work.bytes_moved) == (1, 3 * VALUE_BYTES)


def test_another_order_in_memory_needs_a_kernel_of_its_own():
    work = work_of(lambda x: [x.relu(), x.permute(1, 0).exp().clone()], (ROWS, WIDTH))
    assert (work.launches, work.bytes_moved) == (2, 4 * VALUE_BYTES)


def test_a_reduction_is_stored_and_fused():
    work = work_of(lambda x: [x - x.mean(1, keepdim=True)], (ROWS, WIDTH))
    assert (work.launches, work.bytes_moved) == (1, 2 * VALUE_BYTES)


def test_parameters_and_their_gradients_are_free():
    square = (WIDTH, WIDTH)
    work = work_of(lambda weight: [weight * 2], square, constant_shapes=[square])
    assert (work.launches, work.bytes_moved) == (1, 0)


def test_a_recurrence_is_counted_by_what_is_inside():
    chunks = 8
    heads = 2
    length = 64
    width = 16
    operator = getattr(torch.ops.canon_pretrain, f"{OPERATORS.partition('::')[2]}_delta_scan")

    def function(system, value, read, write, decay, state):
        return operator(system, value, read, write, decay, state)

    rows = (chunks, heads, length, width)
    with FakeTensorMode():
        graph = make_fx(function)(
            torch.empty(chunks, heads, length, length),
            torch.empty(rows),
            torch.empty(rows),
            torch.empty(rows),
            torch.empty(chunks, heads, 1, 1),
            torch.empty(heads, width, width),
        )
    work = recurrence_work(graph)

    # of a chunk: read and write the state, and a product with the inverse
    flops = chunks * heads * 2 * (2 * length * width * width + length * length * width)
    assert work.flops == {"float32": flops}
    assert work.launches > 3 * chunks


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row["model"] in QUICK else pytest.mark.long) for row in BLOCKS],
    ids=lambda row: f"{row['model']}-{row['canon_set']}",
)
def test_blocks_move_what_inductor_counts(row):
    """Counted by Inductor for an H100: kernels/codegen.json."""
    args = replace(Case(row["model"], row["canon_set"], row["backend"]).args, max_seq_len=4096)

    costs = compiled_block_costs(args, torch.bfloat16, row["backend"])

    counted_bytes = KIB * (row["forward"]["kib"]["other"] + row["backward"]["kib"]["other"])
    assert TRAFFIC_FACTOR * moved_bytes(costs) == pytest.approx(counted_bytes, rel=0.2)
    for estimated, counted in (
        (costs.forward, row["forward"]),
        (costs.backward, row["backward"]),
    ):
        launches = counted["launches"] + counted["operators"] + counted["gemms"]
        assert estimated.launches == pytest.approx(launches, rel=0.25)


def moved_bytes(costs):
    """Return the bytes that a block moves in a step."""
    return costs.forward.bytes_moved + costs.backward.bytes_moved


@pytest.mark.parametrize("num_tokens", [64, 176])
def test_a_length_like_a_width_counts_its_activations(num_tokens):
    """Activations [T, C] are told from parameters by their shapes."""
    args = replace(flavor("debug"), position="nope")
    assert {args.dim, args.ffn_dim} == {64, 176}

    def costs_of(length):
        return compiled_block_costs(replace(args, max_seq_len=length), torch.bfloat16, "compiled")

    costs = costs_of(num_tokens)
    expected = costs_of(1024)

    assert moved_bytes(costs) == pytest.approx(moved_bytes(expected), rel=0.01)
    product_bytes = expected.forward.product_bytes
    assert costs.forward.product_bytes == pytest.approx(product_bytes, rel=0.01)


def test_a_block_does_not_know_its_vocabulary():
    args = replace(
        flavor("debug"), document_mask=True, vocab_size=128256, eos_id=128001, max_seq_len=128
    )
    assert compiled_block_costs(args, torch.bfloat16, "compiled").kept_bytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_experts_count(dtype):
    args = replace(
        flavor("debug"),
        ffn="moe",
        num_experts=4,
        experts_per_token=2,
        ffn_dim=64,
        moe_gated=True,
        canon_set="",
        position="nope",
        max_seq_len=256,
    )

    flops = compiled_block_costs(args, dtype, "compiled").forward.flops

    num_matrices = 3  # of a gated expert
    experts = 2 * args.experts_per_token * num_matrices * args.dim * args.ffn_dim
    if dtype == torch.bfloat16:
        assert flops["grouped"] == experts
    else:
        assert flops["float32"] >= experts + 2 * 4 * args.dim**2

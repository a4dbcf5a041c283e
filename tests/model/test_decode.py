"""Generation and passes with a cache against full passes, for every variant and batch layout."""

import copy
import itertools
import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from canon_pretrain.kernels.decode_step import CanonMemory
from canon_pretrain.model import decode
from canon_pretrain.model.cache import FIRST_CAPACITY, Cache
from canon_pretrain.model.decode import DecodeStep, Sampling, generate, sample, sample_generator
from tests.support import refused
from tests.variants import (
    BASE,
    EOS_ID,
    VARIANTS,
    build,
    every_variant,
    prefer_ids_from,
    random_tokens,
    variant,
)

NEW = 10


def prompts_for(args, lengths):
    return [random_tokens(args, 1, n, seed=n)[0].tolist() for n in lengths]


@contextmanager
def recorded(model):
    """Collect the logits of every forward pass in the block."""
    passes = []
    handle = model.register_forward_hook(lambda *hook: passes.append(hook[2]))
    yield passes
    handle.remove()


@every_variant
def test_tokens_and_logits_equal_full_passes(args):
    model, prompts = build(args), prompts_for(args, (1, 3, 30, 9, 31))
    with recorded(model) as passes:
        together = generate(model, prompts, max_new_tokens=NEW)
    assert len(passes) == NEW
    # no graph, and no inference tensors, which fail in a later training step
    assert not any(logits.requires_grad or logits.is_inference() for logits in passes)
    with recorded(model) as passes_in_parts:  # one row per batch, 12 tokens per pass
        in_parts = generate(model, prompts, max_new_tokens=NEW, batch_tokens=12)
    assert len(passes_in_parts) == len(prompts) * NEW + 2 + 2
    assert together == in_parts == generate(model, prompts, max_new_tokens=NEW, read_tokens=30)
    longest_first = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for row, i in enumerate(longest_first):
        with torch.no_grad():
            whole = model(torch.tensor([prompts[i] + together[i][:-1]]))[0, len(prompts[i]) - 1 :]
        assert whole.argmax(-1).tolist() == together[i]
        found = torch.stack([logits_B1V[row, -1] for logits_B1V in passes])
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)


def cut_answer(free, limit, eos_id, stop_id):
    for place, token in enumerate(free[:limit]):
        if token in (eos_id, stop_id):
            is_eos = token == eos_id
            return free[: place + (not is_eos)], "eos" if is_eos else "stop"
    return free[:limit], "limit"


@pytest.mark.parametrize("name", ["rope ABCD gqa", "alibi BD gqa"])
def test_rows_end_independently_and_keep_their_order(name):
    model = build(variant(name))
    prompts = prompts_for(model.args, (5, 1, 17, 2, 40, 17, 8))
    free = generate(model, prompts, max_new_tokens=NEW)
    limits = [NEW, 1, NEW, 7, NEW, 2, NEW]
    # find two ids for which answers end for all three reasons
    for eos_id, stop_id in itertools.permutations(sorted({t for row in free for t in row}), 2):
        cut = [cut_answer(*pair, eos_id, stop_id) for pair in zip(free, limits, strict=True)]
        if {reason for _, reason in cut} == {"eos", "stop", "limit"}:
            break
    else:
        pytest.fail("no such ids")
    expected = [tokens for tokens, _ in cut]
    asked, ended = [], []

    def stop(i, tokens):
        assert i not in ended
        asked.append((i, list(tokens)))
        return tokens[-1] == stop_id

    options = {"max_new_tokens": limits, "eos_id": eos_id, "stop": stop, "on_end": ended.append}
    for batch_tokens in (10_000, 120, 1):
        asked.clear()
        ended.clear()
        assert generate(model, prompts, batch_tokens=batch_tokens, **options) == expected
        assert sorted(ended) == list(range(len(prompts)))
        # once per token, with all tokens so far
        prefixes = [(i, row[: n + 1]) for i, row in enumerate(expected) for n in range(len(row))]
        assert sorted(asked) == prefixes
    with recorded(model) as passes:  # rows that have ended are not computed
        generate(model, [[5], [6, 7], [8]], max_new_tokens=[4, 1, 2])
    assert [len(logits) for logits in passes] == [3, 2, 1, 1]
    assert generate(model, [], max_new_tokens=3) == []


LIMITS = [12, 3, 40, 1, 40]


def answers_of(model, **options):
    """Generate with rows that end at different places; return answers and rounded log-probs."""
    found = [[] for _ in LIMITS]
    options |= {"max_new_tokens": LIMITS, "eos_id": EOS_ID}
    answers = generate(
        model,
        prompts_for(model.args, (1, 3, 30, 9, 31)),
        on_token=lambda i, token, logp: found[i].append((token, pytest.approx(logp, abs=1e-3))),
        **options,
    )
    return answers, found


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Read tokens in blocks, and steps into a fixed cache, as on a GPU."""
    monkeypatch.setattr(decode, "TOKENS_PER_READ", {"cpu": 5})
    monkeypatch.setattr(decode, "FIXED_DEVICES", ("cpu",))
    monkeypatch.setattr(decode, "MIN_FIXED_STEPS", 20)


class NoWaits(TorchDispatchMode):
    """Refuses operators for which the host would wait: they cannot be captured."""

    WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.WAITS, name
        return func(*args, **kwargs or {})


def addresses(cache):
    tensors = cache.replaced()
    tensors += [cache._segments, cache.position]
    tensors += [buffer for layer in cache.layers for buffer in layer._buffers.values()]
    tensors += [tensor for step in cache._steps for tensor in (*step._sums, step._x_B1C)]
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@every_variant
def test_a_fixed_step_is_in_place_waits_for_nothing_and_is_equal(args, as_on_a_gpu, monkeypatch):
    model, seen = build(args), []
    run, prepared = DecodeStep._pass, []

    def checked(step, tokens_B1):
        if prepared and prepared[-1] is tokens_B1:  # else the first pass of these rows
            before = addresses(step._cache)
            with NoWaits():
                logits_BV = run(step, tokens_B1)
            assert addresses(step._cache) == before
            seen.append(step._cache.length)
            return logits_BV
        prepared.append(tokens_B1)
        return run(step, tokens_B1)

    is_looped = args.ffn == "moe"  # experts in float32, by a loop over their numbers
    monkeypatch.setattr(DecodeStep, "_pass", run if is_looped else checked)
    found, found_logs = answers_of(model)
    assert seen or is_looped
    monkeypatch.undo()
    expected, expected_logs = answers_of(model)
    assert found == expected and found_logs == expected_logs


class FakeGraph:
    """Stands in for a CUDA graph: a capture leaves no trace, a replay runs the step."""

    replays = 0

    def replay(self):
        FakeGraph.replays += 1
        length = self.step._cache.length
        self.step._logits_BV.copy_(self.step._pass(self.step._tokens_B1))
        self.step._cache.length = length


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["rope ABCD gqa", "gla BD dynamic", "alibi A documents"])
def test_a_captured_step_gives_the_same_answers(name, fails, as_on_a_gpu, monkeypatch):
    model = build(variant(name))
    steps = []

    @contextmanager
    def capture(graph, **options):
        cache = steps[-1]._cache
        graph.step = steps[-1]
        kept = [copy.deepcopy(cache.layers), cache._segments, cache.position.clone()]
        kept[1] = None if kept[1] is None else kept[1].clone()
        document = None if cache.next_document is None else cache.next_document.clone()
        yield
        cache.position.copy_(kept[2])
        if cache._segments is not None:
            cache._segments.copy_(kept[1])
        if document is not None:
            cache.next_document.copy_(document)
        for layer, old in zip(cache.layers, kept[0], strict=True):
            for mine, its in (
                (layer.states.get("state"), old.states.get("state")),
                (layer._buffers.get("keys"), old._buffers.get("keys")),
            ):
                if mine is not None:
                    mine.copy_(its)
            for site, memory in layer.canon.items():
                if isinstance(memory, CanonMemory):
                    memory._sums_PB1C.copy_(old.canon[site]._sums_PB1C)
                else:
                    for window, its in zip(memory.windows, old.canon[site].windows, strict=True):
                        window.copy_(its)
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    start = DecodeStep.__init__

    def begin(step, *arguments):
        start(step, *arguments)
        step._can_capture = step._is_fixed
        steps.append(step)

    monkeypatch.setattr(DecodeStep, "__init__", begin)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    FakeGraph.replays = 0
    with pytest.warns(UserWarning, match="CUDA graph") if fails else nullcontext():
        found = answers_of(model)
    assert bool(FakeGraph.replays) != fails
    monkeypatch.undo()
    assert found == answers_of(model)


def test_logits_that_are_not_finite_are_refused_in_blocks_too(as_on_a_gpu):
    model = build(BASE)
    torch.nn.init.constant_(model.norm.weight, math.nan)
    with refused("generate.logits_not_finite"):
        answers_of(model, temperature=1.0, generator=torch.Generator().manual_seed(0))


def test_sampled_answers_do_not_depend_on_blocks(as_on_a_gpu, monkeypatch):
    model = build(variant("rope AC no_res act standard_relu2 qk_full gqa tied documents"))

    def draw():
        generator = torch.Generator().manual_seed(1)
        return answers_of(model, temperature=0.9, top_p=0.95, generator=generator)

    found = draw()
    monkeypatch.undo()
    assert found == draw()


def test_generation_does_not_affect_training():
    """Generate between forward and backward, before the step, and under inference_mode."""

    def train(generates):
        model = build(variant("partial_rope_a ABCD k2 no_res act cst relu2"))
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)

        def maybe_generate():
            for enabled in (False, True) if generates else ():
                with torch.inference_mode(enabled):
                    generate(model, [[3, 4], [5]], max_new_tokens=5)

        for step in range(3):
            tokens = random_tokens(model.args, 2, 20, seed=step)
            logits = model(tokens)
            maybe_generate()
            optimizer.zero_grad()
            cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            maybe_generate()
            optimizer.step()
        assert model.training
        return [p.detach() for p in model.parameters()] + [p.grad for p in parameters]

    for with_it, without in zip(train(True), train(False), strict=True):
        assert torch.equal(with_it, without)


def test_samples_depend_on_the_seed_only():
    model = build(variant("rope AC no_res act standard_relu2 qk_full gqa tied documents"))
    prompts = prompts_for(model.args, (5, 1, 17, 2, 40))

    def draw(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        options |= {"temperature": 0.9, "top_p": 0.95, "top_k": 30, "generator": generator}
        return generate(model, prompts, max_new_tokens=15, **options)

    torch.manual_seed(0)
    first = draw(1)
    torch.manual_seed(7)
    assert first == draw(1) == draw(1, batch_tokens=1) == draw(1, batch_tokens=90)
    assert first != draw(2)
    greedy = generate(model, prompts, max_new_tokens=15)
    assert all(a != b for a, b in zip(first, greedy, strict=True))
    # near temperature 0 the most likely token is always drawn
    cold = {"temperature": 1e-4, "generator": torch.Generator().manual_seed(3)}
    assert generate(model, prompts, max_new_tokens=15, **cold) == greedy


def expected_probabilities(logits, temperature, top_k, top_p):
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None]
    weights = {i: math.exp((logits[i] - max(logits)) / temperature) for i in ranked}
    nucleus = {}
    for i in ranked:
        if sum(nucleus.values()) < top_p:
            nucleus[i] = weights[i] / sum(weights.values())
    return [nucleus.get(i, 0.0) / sum(nucleus.values()) for i in range(len(logits))]


@pytest.mark.parametrize(
    "options", [(0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.6), (1.3, 5, 0.7), (1.0, 0, 1e-9)]
)
def test_tokens_are_sampled_with_their_probabilities(options):
    logits = torch.randn(11, generator=torch.Generator().manual_seed(0)) * 2
    num_draws = 20_000
    draws = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    ids, _ = sample(logits.expand(num_draws, -1), draws, Sampling(*options))
    found = torch.bincount(ids, minlength=11) / num_draws
    expected = expected_probabilities(logits.tolist(), *options)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=2 / num_draws)
    likely = {i for i, probability in enumerate(expected) if probability}
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    ids_at_edges, is_finite = sample(logits.expand(2, -1), edges, Sampling(*options))
    assert set(ids_at_edges.tolist()) <= likely and is_finite
    _, is_finite = sample(torch.full((1, 2), math.nan), draws[:1], Sampling(1.0, 0, 1.0))
    assert not is_finite


def chi_square_p(counts, probabilities):
    """Return the p-value of Pearson's test, of ids that can be drawn."""
    pairs = [(n, p * sum(counts)) for n, p in zip(counts, probabilities, strict=True) if p]
    assert sum(n for n, _ in pairs) == sum(counts)
    statistic = sum((n - mean) ** 2 / mean for n, mean in pairs)
    halves = torch.tensor([len(pairs) - 1, statistic], dtype=torch.float64) / 2
    return torch.special.gammaincc(*halves).item()


@pytest.mark.parametrize(
    ("options", "through_model"),
    [
        *(((t, k, p), False) for t, k, p in ((0.25, 0, 1.0), (0.2, 9, 1.0), (0.3, 0, 0.8))),
        ((0.3, 20, 0.7), False),
        pytest.param((0.3, 20, 0.9), True, marks=pytest.mark.system),
    ],
)
def test_draws_have_the_softmax_distribution(options, through_model):
    model, num_draws = build(BASE), 100_000
    with torch.no_grad():
        logits_V = model(torch.tensor([[7]]))[0, -1]
    generator = torch.Generator().manual_seed(1)
    if through_model:
        names = dict(zip(("temperature", "top_k", "top_p"), options, strict=True))
        names |= {"generator": generator, "batch_tokens": 80_000}
        answers = generate(model, [[7]] * num_draws, max_new_tokens=1, **names)
        ids = torch.tensor(answers).flatten()
    else:
        draws = torch.rand(num_draws, dtype=torch.float64, generator=generator)
        ids, _ = sample(logits_V.expand(num_draws, -1), draws, Sampling(*options))
    counts = ids.bincount(minlength=len(logits_V)).tolist()
    logits = logits_V.tolist()
    assert chi_square_p(counts, expected_probabilities(logits, *options)) > 0.01
    temperature, top_k, top_p = options
    if top_p == 1:  # else other ids may be left
        other = expected_probabilities(logits, 1.03 * temperature, top_k, top_p)
        assert chi_square_p(counts, other) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ids_that_pad_the_vocabulary_are_not_generated(temperature):
    padded, used = build(BASE), build(replace(BASE, vocab_size=30))
    state = padded.state_dict()
    rows = {name: state[name][:30] for name in ("tok_embeddings.weight", "output.weight")}
    used.load_state_dict(state | rows)
    prefer_ids_from(padded, 30)

    def answers(model, **options):
        if temperature:
            options |= {"temperature": temperature, "generator": torch.Generator().manual_seed(4)}
        return generate(model, [[5, 9], [7]], max_new_tokens=NEW, **options)

    assert max(map(max, answers(padded))) >= 30
    assert answers(padded, vocab_size=30) == answers(used) == answers(used, vocab_size=30)


def test_bad_arguments_are_refused_before_any_pass():
    model = build(BASE)
    with recorded(model) as passes:
        for code, prompts, options in (
            ("generate.empty_prompt", [[1], []], {}),
            ("generate.token_ids", [[1, 40]], {}),
            ("model.sequence_too_long", [[1] * 3, [1] * 152], {}),
            *(
                ("generate.max_new_tokens", [[1], [2]], {"max_new_tokens": n})
                for n in ([1], [1, 0])
            ),
            *(("generate.sampling", [[1]], {"temperature": given}) for given in (1.0, -1.0)),
            *(("generate.sampling", [[1]], given) for given in ({"top_k": 3}, {"top_p": 0.0})),
        ):
            with refused(code):
                generate(model, prompts, **{"max_new_tokens": NEW, **options})
    assert not passes


# ---- forward passes: chunks, padding, selected rows, branches

assert_close = torch.testing.assert_close
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


@torch.no_grad()
@every_variant
def test_chunks_and_single_tokens_equal_one_pass(args):
    model, tokens = build(args), random_tokens(args, rows=3, num_tokens=140)
    expected = model(tokens)
    assert FIRST_CAPACITY == 64  # passed by single tokens, by four, and by a first chunk
    for sizes in ([140], [1, 3, 2, 6, 48, *[1] * 8, 57, 4, 1, 1, 9], [129, 1, 10]):
        cache = Cache(args.num_layers)
        logits = [model(chunk, cache=cache) for chunk in tokens.split(sizes, dim=1)]
        assert cache.length == tokens.shape[1]
        assert_close(torch.cat(logits, dim=1), expected, **TOLERANCE)
    for kept in (1, 3):
        assert_close(model(tokens, logits_to_keep=kept), expected[:, -kept:], **TOLERANCE)
    places = torch.tensor([0, 32, 7, 7, 21])
    found = model(tokens, logits_at_M=places)
    assert_close(found, expected.flatten(0, 1)[places], rtol=1e-5, atol=1e-5)


def _rows_with_eos(seed):
    rows = [random_tokens(BASE, 1, n, seed)[0] for n in (2, 5, 9)]
    rows[1][3] = rows[2][0] = rows[2][6] = EOS_ID
    return rows


def _padded(rows, side, pad_id):
    tokens = torch.full((len(rows), max(len(row) for row in rows)), pad_id)
    is_real = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(rows):
        places = slice(tokens.shape[1] - len(ids), None) if side == "left" else slice(len(ids))
        tokens[row, places], is_real[row, places] = ids, True
    return tokens, is_real


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@every_variant
def test_padded_rows_equal_unpadded_rows(args, side):
    model, rows = build(args), _rows_with_eos(seed=0)
    found = []
    for pad_id in (EOS_ID, 33):
        tokens, is_real = _padded(rows, side, pad_id)
        logits = model(tokens, is_real_BT=is_real)
        assert torch.isfinite(logits).all()
        found.append(logits[is_real])
    assert_close(found[0], torch.cat([model(row[None])[0] for row in rows]), **TOLERANCE)
    assert torch.equal(*found)


@torch.no_grad()
@every_variant
def test_left_padded_rows_continue_and_are_selected(args):
    model, rows = build(args), _rows_with_eos(seed=1)
    tokens, is_real = _padded(rows, "left", EOS_ID)
    cache, pasts = Cache(args.num_layers), list(rows)
    for part, real in zip(tokens.split([3, 5, 1], 1), is_real.split([3, 5, 1], 1), strict=True):
        model(part, is_real_BT=real, cache=cache, logits_to_keep=1)
    # beams: repeated rows, one ends; then one row; then several again
    for step, selected in enumerate(([0, 1, 2], [2, 0, 0, 1], [3, 1, 1, 0], [2], [0, 0])):
        if step:
            cache.select_rows(torch.tensor(selected))
        after = random_tokens(args, rows=len(selected), num_tokens=1 + step % 2, seed=10 + step)
        pasts = [torch.cat((pasts[row], after[i])) for i, row in enumerate(selected)]
        logits = model(after, cache=cache)
        for row, past in enumerate(pasts):
            assert_close(logits[row], model(past[None])[0, -after.shape[1] :], **TOLERANCE)


@torch.no_grad()
@every_variant
def test_branches_of_one_prompt_are_independent(args):
    model = build(args)
    prompts, more = random_tokens(args, 2, 9), random_tokens(args, 5, 4, seed=1)
    rows = torch.tensor([1, 0, 0, 1, 1])
    trunk = Cache(args.num_layers, capacity=13)
    model(prompts, cache=trunk)
    whole = model(torch.cat((prompts[rows], more), dim=1))[:, 9:]
    for part in (slice(0, 3), slice(3, 5)):
        found = model(more[part], cache=trunk.branch(rows[part]))
        assert_close(found, whole[part], rtol=1e-4, atol=1e-4)
    whole = model(torch.cat((prompts, more[:2]), dim=1))[:, 9:]
    assert_close(model(more[:2], cache=trunk), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_past_max_seq_len_is_refused_without_effect():
    model = build(VARIANTS["rope"])
    tokens = random_tokens(model.args, rows=1, num_tokens=160)
    cache = Cache(model.args.num_layers)
    model(tokens[:, :159], cache=cache)
    with refused("model.sequence_too_long"):
        model(tokens[:, :2], cache=cache)
    assert_close(model(tokens[:, 159:], cache=cache), model(tokens)[:, -1:], **TOLERANCE)


@torch.no_grad()
def test_a_cache_after_an_interrupted_pass_is_refused():
    """The token is in the Canon state of some layers only."""
    model = build(variant("nope ABCD"))
    tokens, cache = random_tokens(model.args, rows=1, num_tokens=7), Cache(model.args.num_layers)
    model(tokens[:, :5], cache=cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.layers["1"].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens[:, 5:6], cache=cache)
    hook.remove()
    with refused("cache.incomplete"):
        model(tokens[:, 5:6], cache=cache)


def test_generators_of_far_items_draw_differently():
    draws = {
        (item, number): torch.rand(1, generator=sample_generator(item, number)).item()
        for item in (0, 1, 4096, 8192, 4096 * 4096, 4097)
        for number in (0, 1, 5)
    }
    assert len({*draws.values()}) == len(draws)

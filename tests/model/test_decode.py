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
from canon_pretrain.model.decode import (
    DecodeStep,
    Sampling,
    generate,
    likeliest,
    sample,
    sample_generator,
)
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
"""New tokens of most answers."""


def prompts_for(args, lengths):
    """Return a prompt of random ids of each length."""
    return [random_tokens(args, 1, length, seed=length)[0].tolist() for length in lengths]


@contextmanager
def recorded(model):
    """Collect the logits of every forward pass in the block."""
    passes = []
    handle = model.register_forward_hook(lambda module, inputs, logits: passes.append(logits))
    yield passes
    handle.remove()


@every_variant
def test_tokens_and_logits_equal_full_passes(args):
    model = build(args)
    prompts = prompts_for(args, (1, 3, 30, 9, 31))

    with recorded(model) as passes:
        answers = generate(model, prompts, max_new_tokens=NEW)

    assert len(passes) == NEW
    # no graph, and no inference tensors, which fail in a later training step
    assert not any(logits.requires_grad or logits.is_inference() for logits in passes)
    longest_first = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for row, i in enumerate(longest_first):
        with torch.no_grad():
            text = torch.tensor([prompts[i] + answers[i][:-1]])
            whole = model(text)[0, len(prompts[i]) - 1 :]
        assert whole.argmax(-1).tolist() == answers[i]
        logits = torch.stack([logits_B1V[row, -1] for logits_B1V in passes])
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4)


@every_variant
def test_answers_do_not_depend_on_the_size_of_passes(args):
    model = build(args)
    prompts = prompts_for(args, (1, 3, 30, 9, 31))
    answers = generate(model, prompts, max_new_tokens=NEW)

    with recorded(model) as passes:  # one row per batch, 12 tokens per pass
        in_parts = generate(model, prompts, max_new_tokens=NEW, batch_tokens=12)

    assert in_parts == answers
    assert len(passes) == len(prompts) * NEW + 2 + 2
    assert generate(model, prompts, max_new_tokens=NEW, read_tokens=30) == answers


def cut_answer(free, limit, eos_id, stop_id):
    """Return the part of a free answer that is kept, and why it ends there."""
    for place, token in enumerate(free[:limit]):
        if token == eos_id:
            return free[:place], "eos"
        if token == stop_id:
            return free[: place + 1], "stop"
    return free[:limit], "limit"


def ids_that_end_answers_in_every_way(free, limits):
    """Return an EOS and a stopping id, and the answers that they cut; each way to end occurs."""
    ids = sorted(set(itertools.chain(*free)))
    for eos_id, stop_id in itertools.permutations(ids, 2):
        cut = [
            cut_answer(tokens, limit, eos_id, stop_id)
            for tokens, limit in zip(free, limits, strict=True)
        ]
        if {reason for _, reason in cut} == {"eos", "stop", "limit"}:
            return eos_id, stop_id, [tokens for tokens, _ in cut]
    return pytest.fail("no such ids")


@pytest.mark.parametrize("batch_tokens", [10_000, 120, 1])
@pytest.mark.parametrize("name", ["rope ABCD gqa", "alibi BD gqa"])
def test_rows_end_independently_and_keep_their_order(name, batch_tokens):
    model = build(variant(name))
    prompts = prompts_for(model.args, (5, 1, 17, 2, 40, 17, 8))
    limits = [NEW, 1, NEW, 7, NEW, 2, NEW]
    free = generate(model, prompts, max_new_tokens=NEW)
    eos_id, stop_id, expected = ids_that_end_answers_in_every_way(free, limits)
    stop_calls = []
    ended = []

    def stop(i, tokens):
        assert i not in ended
        stop_calls.append((i, list(tokens)))
        return tokens[-1] == stop_id

    answers = generate(
        model,
        prompts,
        batch_tokens=batch_tokens,
        max_new_tokens=limits,
        eos_id=eos_id,
        stop=stop,
        on_end=ended.append,
    )

    assert answers == expected
    assert sorted(ended) == list(range(len(prompts)))
    # once per token, with all tokens so far
    prefixes = []
    for i, row in enumerate(expected):
        prefixes += [(i, row[: n + 1]) for n in range(len(row))]
    assert sorted(stop_calls) == prefixes


@pytest.mark.parametrize("name", ["rope ABCD gqa", "alibi BD gqa"])
def test_rows_that_have_ended_are_not_computed(name):
    model = build(variant(name))

    with recorded(model) as passes:
        generate(model, [[5], [6, 7], [8]], max_new_tokens=[4, 1, 2])

    assert [len(logits) for logits in passes] == [3, 2, 1, 1]
    assert generate(model, [], max_new_tokens=3) == []


LIMITS = [12, 3, 40, 1, 40]


def answers_of(model, **options):
    """Generate with rows that end at different places; return answers and rounded log-probs."""
    log_probs = [[] for _ in LIMITS]

    def on_token(i, token, log_prob):
        log_probs[i].append((token, pytest.approx(log_prob, abs=1e-3)))

    answers = generate(
        model,
        prompts_for(model.args, (1, 3, 30, 9, 31)),
        max_new_tokens=LIMITS,
        eos_id=EOS_ID,
        on_token=on_token,
        **options,
    )
    return answers, log_probs


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
    """Return the addresses of all tensors of a cache; None where there is none."""
    tensors = [*cache.replaced(), cache._segments, cache.position]
    for layer in cache.layers:
        tensors += layer._buffers.values()
    for step in cache._steps:
        tensors += [*step._sums, step._x_B1C]
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@every_variant
def test_a_fixed_step_is_in_place_waits_for_nothing_and_is_equal(args, as_on_a_gpu, monkeypatch):
    model = build(args)
    run = DecodeStep._pass
    prepared = []
    checked_lengths = []

    def checked(step, tokens_B1):
        is_first_of_rows = not prepared or prepared[-1] is not tokens_B1
        if is_first_of_rows:
            prepared.append(tokens_B1)
            return run(step, tokens_B1)

        before = addresses(step._cache)
        with NoWaits():
            logits_BV = run(step, tokens_B1)
        assert addresses(step._cache) == before
        checked_lengths.append(step._cache.length)
        return logits_BV

    is_looped = args.ffn == "moe"  # experts in float32, by a loop over their numbers
    monkeypatch.setattr(DecodeStep, "_pass", run if is_looped else checked)
    answers, log_probs = answers_of(model)
    monkeypatch.undo()
    expected_answers, expected_log_probs = answers_of(model)

    assert checked_lengths or is_looped
    assert answers == expected_answers
    assert log_probs == expected_log_probs


class SavedCache:
    """A copy of what a step changes in a cache, to be put back."""

    def __init__(self, cache):
        self.cache = cache
        self.layers = copy.deepcopy(cache.layers)
        self.position = cache.position.clone()
        self.segments = None if cache._segments is None else cache._segments.clone()
        document = cache.next_document
        self.next_document = None if document is None else document.clone()

    def restore(self):
        cache = self.cache
        cache.position.copy_(self.position)
        if cache._segments is not None:
            cache._segments.copy_(self.segments)
        if self.next_document is not None:
            cache.next_document.copy_(self.next_document)
        for layer, saved in zip(cache.layers, self.layers, strict=True):
            for name, state in layer.states.items():
                state.copy_(saved.states[name])
            for name, buffer in layer._buffers.items():
                buffer.copy_(saved._buffers[name])
            for site, memory in layer.canon.items():
                self._restore_canon(memory, saved.canon[site])

    def _restore_canon(self, memory, saved):
        if isinstance(memory, CanonMemory):
            memory._sums_PB1C.copy_(saved._sums_PB1C)
            return
        for window, saved_window in zip(memory.windows, saved.windows, strict=True):
            window.copy_(saved_window)


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
        graph.step = steps[-1]
        saved = SavedCache(graph.step._cache)
        yield
        saved.restore()
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
        answers = answers_of(model)

    assert bool(FakeGraph.replays) != fails
    monkeypatch.undo()
    assert answers == answers_of(model)


def test_logits_that_are_not_finite_are_refused_in_blocks_too(as_on_a_gpu):
    model = build(BASE)
    torch.nn.init.constant_(model.norm.weight, math.nan)
    with refused("generate.logits_not_finite"):
        answers_of(model, temperature=1.0, generator=torch.Generator().manual_seed(0))
    with refused("generate.logits_not_finite"):
        answers_of(model)


@pytest.mark.parametrize("num_ids", [1, 127, 128, 300, 512])
def test_the_likeliest_token_is_the_first_of_the_largest(num_ids):
    logits = torch.randn(64, num_ids + 1, generator=torch.Generator().manual_seed(0))
    coarse = logits[:, :num_ids].round()  # with equals, in rows that are no block of memory
    tokens, is_finite = likeliest(coarse)
    assert tokens.tolist() == [row.index(max(row)) for row in coarse.tolist()]
    assert is_finite

    # -inf is no choice, as of a token that was ruled out; the others are an error
    for value, expected in ((-math.inf, num_ids > 1), (math.inf, False), (math.nan, False)):
        coarse[3, num_ids // 2] = value
        assert bool(likeliest(coarse)[1]) == expected


def test_sampled_answers_do_not_depend_on_blocks(as_on_a_gpu, monkeypatch):
    model = build(variant("rope AC no_res act standard_relu2 qk_full gqa tied documents"))

    def draw():
        generator = torch.Generator().manual_seed(1)
        return answers_of(model, temperature=0.9, top_p=0.95, generator=generator)

    in_blocks = draw()
    monkeypatch.undo()

    assert in_blocks == draw()


def test_generation_does_not_affect_training():
    """Generate between forward and backward, before the step, and under inference_mode."""

    def train(generates):
        model = build(variant("partial_rope_a ABCD k2 no_res act cst relu2"))
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)

        def maybe_generate():
            if not generates:
                return
            for is_inference in (False, True):
                with torch.inference_mode(is_inference):
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

    for ours, expected in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, expected)


def test_samples_depend_on_the_seed_only():
    model = build(variant("rope AC no_res act standard_relu2 qk_full gqa tied documents"))
    prompts = prompts_for(model.args, (5, 1, 17, 2, 40))

    def draw(seed, **options):
        return generate(
            model,
            prompts,
            max_new_tokens=15,
            temperature=0.9,
            top_p=0.95,
            top_k=30,
            generator=torch.Generator().manual_seed(seed),
            **options,
        )

    torch.manual_seed(0)
    answers = draw(1)
    torch.manual_seed(7)

    assert draw(1) == answers
    assert draw(1, batch_tokens=1) == answers
    assert draw(1, batch_tokens=90) == answers
    assert draw(2) != answers


def test_samples_near_temperature_0_are_greedy():
    model = build(variant("rope AC no_res act standard_relu2 qk_full gqa tied documents"))
    prompts = prompts_for(model.args, (5, 1, 17, 2, 40))
    greedy = generate(model, prompts, max_new_tokens=15)

    def draw(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompts, max_new_tokens=15, generator=generator, **options)

    warm = draw(1, temperature=0.9, top_p=0.95, top_k=30)
    assert all(a != b for a, b in zip(warm, greedy, strict=True))
    assert draw(3, temperature=1e-4) == greedy


def expected_probabilities(logits, temperature, top_k, top_p):
    """Return the probability of each id, by definition."""
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
    expected = expected_probabilities(logits.tolist(), *options)
    num_draws = 20_000
    draws = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws

    ids, _ = sample(logits.expand(num_draws, -1), draws, Sampling(*options))

    shares = torch.bincount(ids, minlength=11) / num_draws
    torch.testing.assert_close(shares, torch.tensor(expected), rtol=0, atol=2 / num_draws)

    # the first and the last of all draws
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    ids_at_edges, is_finite = sample(logits.expand(2, -1), edges, Sampling(*options))
    possible_ids = {i for i, probability in enumerate(expected) if probability}
    assert set(ids_at_edges.tolist()) <= possible_ids
    assert is_finite


def test_sampling_reports_logits_that_are_not_finite():
    draws = torch.tensor([0.5], dtype=torch.float64)
    _, is_finite = sample(torch.full((1, 2), math.nan), draws, Sampling(1.0, 0, 1.0))
    assert not is_finite


def chi_square_p(counts, probabilities):
    """Return the p-value of Pearson's test, of ids that can be drawn."""
    total = sum(counts)
    pairs = [(n, p * total) for n, p in zip(counts, probabilities, strict=True) if p]
    assert sum(n for n, _ in pairs) == total
    statistic = sum((n - mean) ** 2 / mean for n, mean in pairs)
    halves = torch.tensor([len(pairs) - 1, statistic], dtype=torch.float64) / 2
    return torch.special.gammaincc(*halves).item()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "through_model"),
    [
        (0.25, 0, 1.0, False),
        (0.2, 9, 1.0, False),
        (0.3, 0, 0.8, False),
        (0.3, 20, 0.7, False),
        pytest.param(0.3, 20, 0.9, True, marks=pytest.mark.system),
    ],
    ids=["plain", "top_k", "top_p", "both", "model"],
)
def test_draws_have_the_softmax_distribution(temperature, top_k, top_p, through_model):
    model = build(BASE)
    num_draws = 100_000
    with torch.no_grad():
        logits_V = model(torch.tensor([[7]]))[0, -1]
    generator = torch.Generator().manual_seed(1)

    if through_model:
        answers = generate(
            model,
            [[7]] * num_draws,
            max_new_tokens=1,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
            batch_tokens=80_000,
        )
        ids = torch.tensor(answers).flatten()
    else:
        draws = torch.rand(num_draws, dtype=torch.float64, generator=generator)
        sampling = Sampling(temperature, top_k, top_p)
        ids, _ = sample(logits_V.expand(num_draws, -1), draws, sampling)

    counts = ids.bincount(minlength=len(logits_V)).tolist()
    logits = logits_V.tolist()
    expected = expected_probabilities(logits, temperature, top_k, top_p)
    assert chi_square_p(counts, expected) > 0.01
    if top_p == 1:  # else other ids may be left
        warmer = expected_probabilities(logits, 1.03 * temperature, top_k, top_p)
        assert chi_square_p(counts, warmer) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ids_that_pad_the_vocabulary_are_not_generated(temperature):
    num_used = 30
    padded = build(BASE)
    unpadded = build(replace(BASE, vocab_size=num_used))
    state = padded.state_dict()
    for name in ("tok_embeddings.weight", "output.weight"):
        state[name] = state[name][:num_used].clone()
    unpadded.load_state_dict(state)
    prefer_ids_from(padded, num_used)

    def answers(model, **options):
        if temperature:
            options["temperature"] = temperature
            options["generator"] = torch.Generator().manual_seed(4)
        return generate(model, [[5, 9], [7]], max_new_tokens=NEW, **options)

    expected = answers(unpadded)
    assert max(map(max, answers(padded))) >= num_used
    assert answers(padded, vocab_size=num_used) == expected
    assert answers(unpadded, vocab_size=num_used) == expected


@pytest.mark.parametrize(
    ("code", "prompts", "options"),
    [
        ("generate.empty_prompt", [[1], []], {}),
        ("generate.token_ids", [[1, 40]], {}),
        ("model.sequence_too_long", [[1] * 3, [1] * 152], {}),
        ("generate.max_new_tokens", [[1], [2]], {"max_new_tokens": [1]}),
        ("generate.max_new_tokens", [[1], [2]], {"max_new_tokens": [1, 0]}),
        ("generate.sampling", [[1]], {"temperature": 1.0}),
        ("generate.sampling", [[1]], {"temperature": -1.0}),
        ("generate.sampling", [[1]], {"top_k": 3}),
        ("generate.sampling", [[1]], {"top_p": 0.0}),
    ],
)
def test_bad_arguments_are_refused_before_any_pass(code, prompts, options):
    model = build(BASE)

    with recorded(model) as passes, refused(code):
        generate(model, prompts, **{"max_new_tokens": NEW, **options})

    assert not passes


# ---- forward passes: chunks, padding, selected rows, branches

assert_close = torch.testing.assert_close
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


@torch.no_grad()
@every_variant
def test_chunks_and_single_tokens_equal_one_pass(args):
    model = build(args)
    tokens = random_tokens(args, rows=3, num_tokens=140)
    expected = model(tokens)

    assert FIRST_CAPACITY == 64  # passed by single tokens, by four, and by a first chunk
    for sizes in ([140], [1, 3, 2, 6, 48, *[1] * 8, 57, 4, 1, 1, 9], [129, 1, 10]):
        cache = Cache.of(args)
        logits = [model(chunk, cache=cache) for chunk in tokens.split(sizes, dim=1)]

        assert cache.length == tokens.shape[1]
        assert_close(torch.cat(logits, dim=1), expected, **TOLERANCE)


@torch.no_grad()
@every_variant
def test_selected_logits_are_those_of_a_full_pass(args):
    model = build(args)
    tokens = random_tokens(args, rows=3, num_tokens=140)
    expected = model(tokens)

    for num_kept in (1, 3):
        logits = model(tokens, logits_to_keep=num_kept)
        assert_close(logits, expected[:, -num_kept:], **TOLERANCE)

    places = torch.tensor([0, 32, 7, 7, 21])
    logits = model(tokens, logits_at_M=places)
    assert_close(logits, expected.flatten(0, 1)[places], rtol=1e-5, atol=1e-5)


def _rows_with_eos(seed):
    """Return rows of 2, 5 and 9 random ids, with EOS inside and at a start."""
    rows = [random_tokens(BASE, 1, length, seed)[0] for length in (2, 5, 9)]
    rows[1][3] = EOS_ID
    rows[2][0] = EOS_ID
    rows[2][6] = EOS_ID
    return rows


def _padded(rows, side, pad_id):
    """Return the rows padded to one length, and where tokens are real."""
    tokens = torch.full((len(rows), max(len(row) for row in rows)), pad_id)
    is_real = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(rows):
        places = slice(tokens.shape[1] - len(ids), None) if side == "left" else slice(len(ids))
        tokens[row, places] = ids
        is_real[row, places] = True
    return tokens, is_real


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@every_variant
def test_padded_rows_equal_unpadded_rows(args, side):
    model = build(args)
    rows = _rows_with_eos(seed=0)

    logits_by_pad_id = []
    for pad_id in (EOS_ID, 33):
        tokens, is_real = _padded(rows, side, pad_id)
        logits = model(tokens, is_real_BT=is_real)
        assert torch.isfinite(logits).all()
        logits_by_pad_id.append(logits[is_real])

    unpadded = torch.cat([model(row[None])[0] for row in rows])
    assert_close(logits_by_pad_id[0], unpadded, **TOLERANCE)
    assert torch.equal(*logits_by_pad_id)


@torch.no_grad()
@every_variant
def test_left_padded_rows_continue_and_are_selected(args):
    model = build(args)
    texts = _rows_with_eos(seed=1)
    tokens, is_real = _padded(texts, "left", EOS_ID)
    cache = Cache.of(args)
    for part, real in zip(tokens.split([3, 5, 1], 1), is_real.split([3, 5, 1], 1), strict=True):
        model(part, is_real_BT=real, cache=cache, logits_to_keep=1)

    # beams: repeated rows, one ends; then one row; then several again
    for step, selected in enumerate(([0, 1, 2], [2, 0, 0, 1], [3, 1, 1, 0], [2], [0, 0])):
        if step:
            cache.select_rows(torch.tensor(selected))
        num_new = 1 + step % 2
        new_tokens = random_tokens(args, rows=len(selected), num_tokens=num_new, seed=10 + step)
        texts = [torch.cat((texts[row], new_tokens[i])) for i, row in enumerate(selected)]

        logits = model(new_tokens, cache=cache)

        for row, text in enumerate(texts):
            assert_close(logits[row], model(text[None])[0, -num_new:], **TOLERANCE)


@torch.no_grad()
@every_variant
def test_branches_of_one_prompt_are_independent(args):
    model = build(args)
    prompts = random_tokens(args, 2, 9)
    answers = random_tokens(args, 5, 4, seed=1)
    prompt_of_answer = torch.tensor([1, 0, 0, 1, 1])
    trunk = Cache.of(args, capacity=13)
    model(prompts, cache=trunk)

    expected = model(torch.cat((prompts[prompt_of_answer], answers), dim=1))[:, 9:]
    for part in (slice(0, 3), slice(3, 5)):
        logits = model(answers[part], cache=trunk.branch(prompt_of_answer[part]))
        assert_close(logits, expected[part], rtol=1e-4, atol=1e-4)

    # the trunk is as before
    expected = model(torch.cat((prompts, answers[:2]), dim=1))[:, 9:]
    assert_close(model(answers[:2], cache=trunk), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_past_max_seq_len_is_refused_without_effect():
    model = build(VARIANTS["rope"])
    tokens = random_tokens(model.args, rows=1, num_tokens=160)
    cache = Cache.of(model.args)
    model(tokens[:, :159], cache=cache)

    with refused("model.sequence_too_long"):
        model(tokens[:, :2], cache=cache)

    assert_close(model(tokens[:, 159:], cache=cache), model(tokens)[:, -1:], **TOLERANCE)


@torch.no_grad()
def test_a_cache_after_an_interrupted_pass_is_refused():
    """The token is in the Canon state of some layers only."""
    model = build(variant("nope ABCD"))
    tokens = random_tokens(model.args, rows=1, num_tokens=7)
    cache = Cache.of(model.args)
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

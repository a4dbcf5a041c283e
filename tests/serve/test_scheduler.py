"""The scheduler without a server: requests that come and go against each of them alone."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.decode import Sampling, generate, sample_generator
from canon_pretrain.serve.scheduler import MAX_PROMPTS, Request, Scheduler
from tests.support import ROOT, refused
from tests.variants import BASE, EOS_ID, build, random_tokens, variant

# attention with rotations and Canon, a window, states, documents, experts
VARIANTS = [
    "rope ABCD gqa",
    "nope ABCD dynamic documents",
    "gla BD dynamic tied",
    "mamba2 smear conv documents",
    "gdn FO conv k3",
    "rope AC moe capacity",
]


class Recorder:
    """A listener that keeps what it hears."""

    def __init__(self, stops=lambda tokens: False):
        self.stops = stops
        self.prompt = None
        self.tokens = {}
        self.reasons = {}
        self.error = None

    def on_prompt(self, tokens):
        assert self.prompt is None and not self.tokens
        self.prompt = [*tokens]

    def on_token(self, index, token):
        assert index not in self.reasons and self.error is None
        if token.id == EOS_ID:
            return False
        self.tokens.setdefault(index, []).append(token)
        return not self.stops(self.ids(index))

    def on_end(self, index, reason):
        assert index not in self.reasons and self.error is None
        self.reasons[index] = reason

    def on_error(self, error):
        assert self.error is None
        self.error = error

    def ids(self, index=0):
        return [token.id for token in self.tokens.get(index, [])]


def scheduler_of(model, **options):
    return Scheduler(model, eos_id=EOS_ID, **options)


def run(scheduler):
    while scheduler.step():
        pass
    assert (scheduler.num_rows, scheduler.num_waiting) == (0, 0)


def request(prompt, max_tokens, stops=lambda tokens: False, **options):
    return Request(prompt, max_tokens, Recorder(stops), **options)


def prompt_of(args, length, seed=0):
    return random_tokens(args, 1, length, seed=seed)[0].tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_requests_over_time_have_the_answers_of_each_alone(name):
    model = build(variant(name)).eval()
    requests = []
    for k in range(14):
        prompt = prompt_of(model.args, 1 + 7 * k % 40, seed=k)
        if k % 2:
            sampling = Sampling(0.9, 0 if k % 3 else 20, 0.95)
            requests.append(
                request(prompt, 3 + k, sampling=sampling, seed=k, num_answers=1 + k % 3)
            )
        else:
            requests.append(request(prompt, 3 + k))

    scheduler = scheduler_of(model, max_rows=5, read_tokens=16)
    for k in range(0, len(requests), 3):  # some come while others run
        scheduler.submit(requests[k : k + 3])
        for _ in range(2):
            scheduler.step()
            assert scheduler.num_rows <= 5
    run(scheduler)

    for done in requests:
        generators = [sample_generator(done.seed, k) for k in range(done.num_answers)]
        alone = generate(
            model,
            [done.prompt] * done.num_answers,
            max_new_tokens=done.max_tokens,
            eos_id=EOS_ID,
            generator=generators if done.sampling.temperature else None,
            batch_tokens=1,
            **done.sampling._asdict(),
        )
        listener = done.listener
        assert [listener.ids(k) for k in range(done.num_answers)] == alone
        for k, ids in enumerate(alone):
            assert listener.reasons[k] == ("length" if len(ids) == done.max_tokens else "stop")


def test_an_answer_ends_where_its_listener_says():
    model = build(variant("rope ABCD gqa")).eval()
    prompts = [prompt_of(model.args, 9, seed=k) for k in range(3)]
    requests = [request(prompt, 20, lambda tokens: len(tokens) == 4) for prompt in prompts]
    scheduler = scheduler_of(model)
    scheduler.submit(requests)
    run(scheduler)
    for done in requests:
        assert len(done.listener.ids()) <= 4
        assert done.listener.reasons == {0: "stop"}


@pytest.mark.parametrize("read_tokens", [5, 100])
def test_log_probabilities_are_those_of_a_full_pass(read_tokens):
    model = build(variant("rope ABCD gqa")).eval()
    scored = request(prompt_of(model.args, 23), 6, num_top=3, scores_prompt=True)
    only_prompt = request(prompt_of(model.args, 12, seed=1), 0, num_top=0, scores_prompt=True)
    others = [request(prompt_of(model.args, 5 + k), 30) for k in range(3)]
    scheduler = scheduler_of(model, read_tokens=read_tokens)
    scheduler.submit([*others, scored, only_prompt])
    run(scheduler)

    listener = scored.listener
    tokens = [*listener.prompt, *listener.tokens[0]]
    ids = [token.id for token in tokens]
    assert ids[:23] == scored.prompt
    with torch.no_grad():
        logps_TV = F.log_softmax(model(torch.tensor([ids[:-1]]))[0], dim=-1)
    assert tokens[0] == (ids[0], None, ())
    for t, token in enumerate(tokens[1:]):
        assert token.logp == pytest.approx(logps_TV[t, token.id].item(), abs=1e-5)
        assert [i for i, _ in token.top] == logps_TV[t].topk(3).indices.tolist()
        expected = logps_TV[t].topk(3).values.tolist()
        assert [logp for _, logp in token.top] == pytest.approx(expected, abs=1e-5)

    assert len(only_prompt.listener.prompt) == 12
    assert only_prompt.listener.tokens == {}
    assert only_prompt.listener.reasons == {0: "length"}


def test_rows_do_not_wait_for_many_short_prompts():
    model = build(variant("rope ABCD gqa")).eval()
    running = request(prompt_of(model.args, 9), 30)
    scheduler = scheduler_of(model)
    scheduler.submit([running])
    scheduler.step()
    short = [request(prompt_of(model.args, 2, seed=k), 0) for k in range(100)]
    scheduler.submit(short)

    for _ in range(3):
        num_before = len(running.listener.ids())
        num_ended = sum(bool(one.listener.reasons) for one in short)
        scheduler.step()
        assert len(running.listener.ids()) == num_before + 1
        assert sum(bool(one.listener.reasons) for one in short) == num_ended + MAX_PROMPTS
    run(scheduler)


def test_cancelled_requests_free_their_rows_and_change_nothing():
    model = build(variant("rope ABCD gqa")).eval()
    requests = [request(prompt_of(model.args, 1 + k, seed=k), 30) for k in range(12)]
    scheduler = scheduler_of(model, max_rows=4, read_tokens=8)
    scheduler.submit(requests)
    for _ in range(4):
        scheduler.step()
    cancelled = [requests[0], requests[2], requests[9], requests[11]]
    counts = [len(gone.listener.ids()) for gone in cancelled]
    assert counts[0]
    for gone in cancelled:
        scheduler.cancel(gone)
    run(scheduler)

    assert [len(gone.listener.ids()) for gone in cancelled] == counts
    for done in requests:
        if done in cancelled:
            assert not done.listener.reasons and done.listener.error is None
            continue
        [alone] = generate(model, [done.prompt], max_new_tokens=30, eos_id=EOS_ID)
        assert done.listener.ids() == alone


def test_a_full_queue_takes_nothing_of_what_does_not_fit():
    model = build(variant("rope ABCD gqa")).eval()
    scheduler = scheduler_of(model, max_rows=2, max_waiting=3)
    first = [request([5, 6], 4) for _ in range(3)]
    scheduler.submit(first)
    with refused("serve.queue_full", waiting=3, limit=3):
        scheduler.submit([request([5], 4)])
    scheduler.step()
    assert (scheduler.num_rows, scheduler.num_waiting) == (2, 1)
    with refused("serve.queue_full", waiting=1):
        scheduler.submit([request([5], 4, num_answers=2), request([5], 4)])
    scheduler.submit([request([5], 4, num_answers=2)])
    run(scheduler)


def test_logits_that_are_not_finite_fail_one_request():
    model = build(variant("nope ABCD")).eval()
    with torch.no_grad():
        model.tok_embeddings.weight[39] = torch.nan
    bad = request([39], 5, num_answers=2)
    good = request([5, 6], 5)
    scheduler = scheduler_of(model)
    scheduler.submit([good, bad])
    run(scheduler)
    assert bad.listener.error.code == "generate.logits_not_finite"
    assert good.listener.reasons and good.listener.error is None


def test_scores_of_a_prompt_that_are_not_finite_fail_it():
    model = build(variant("nope ABCD")).eval()
    with torch.no_grad():
        model.tok_embeddings.weight[39] = torch.nan
    scored = request([5, 39, 6], 0, num_top=1, scores_prompt=True)
    scheduler = scheduler_of(model)
    scheduler.submit([scored])
    run(scheduler)
    assert scored.listener.error.code == "generate.logits_not_finite"
    assert scored.listener.prompt is None


@pytest.mark.parametrize("num_good_passes", [0, 1, 4])
def test_what_a_pass_raises_fails_requests_but_not_the_scheduler(num_good_passes, monkeypatch):
    model = build(variant("rope ABCD gqa")).eval()
    requests = [request([5 + k], 8, num_answers=2) for k in range(3)]
    scheduler = scheduler_of(model, max_rows=3, read_tokens=1)
    scheduler.submit(requests)
    passes = iter(range(100))

    def fail(module, args, kwargs):
        if next(passes) == num_good_passes:
            raise torch.OutOfMemoryError("out of memory")

    handle = model.register_forward_pre_hook(fail, with_kwargs=True)
    run(scheduler)
    handle.remove()

    failed = [done for done in requests if done.listener.error is not None]
    assert 1 <= len(failed) < 3
    for done in requests:
        if done not in failed:
            assert len(done.listener.reasons) == 2

    again = request([5], 8)
    scheduler.submit([again])
    run(scheduler)
    assert again.listener.reasons


def test_a_closed_scheduler_fails_what_waits_and_what_comes():
    model = build(variant("rope ABCD gqa")).eval()
    scheduler = scheduler_of(model, max_rows=1)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    requests = [request([5 + k], 150) for k in range(4)]
    scheduler.submit(requests)
    scheduler.close(UserError("serve.stopping", "the server stops"))
    thread.join(60)

    assert not thread.is_alive()
    assert all(done.listener.error or done.listener.reasons for done in requests)
    assert requests[-1].listener.error.code == "serve.stopping"
    with refused("serve.stopping"):
        scheduler.submit([request([5], 4)])
    assert scheduler.num_waiting == 0


def test_an_own_mixer_is_checked_before_it_is_served(tmp_path):
    """One that rotates all rows by the position of the longest."""
    path = ROOT / "train_configs" / "mixers" / "mla.py"
    code = path.read_text()
    wrong = tmp_path / "wrong.py"
    wrong.write_text(code.replace("= start + torch", "= torch.as_tensor(start).max() + torch"))
    assert wrong.read_text() != code

    def scheduler_with(file):
        mixer = f"{file}:LatentAttention"
        args = replace(BASE, mixer=mixer, position="nope", rope_theta=10.0)
        return scheduler_of(build(args).eval())

    scheduler_with(path).check_rows()
    scheduler_of(build(BASE).eval()).check_rows()
    with refused("serve.rows_differ", mixers=[f"{wrong}:LatentAttention"]):
        scheduler_with(wrong).check_rows()

    # and one that can only count from a number
    failing = tmp_path / "failing.py"
    failing.write_text(code.replace("= start + torch", "= int(start) + torch"))
    assert failing.read_text() != code
    with refused("serve.rows_fail", mixers=[f"{failing}:LatentAttention"]):
        scheduler_with(failing).check_rows()

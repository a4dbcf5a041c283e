"""What scoring and batches of answers stand on: logits at chosen places, caches that branch, and
prompts that are read in parts."""

import torch

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.decode import generate
from tests.variants import build, every_variant, random_tokens


@every_variant
def test_logits_at_places_are_those_of_all_places(args: ModelArgs) -> None:
    model, tokens = build(args), random_tokens(args, 3, 11)
    places = torch.tensor([0, 32, 7, 7, 21])
    with torch.no_grad():
        whole = model(tokens).flatten(0, 1)
        torch.testing.assert_close(
            model(tokens, logits_at_M=places), whole[places], rtol=1e-5, atol=1e-5
        )
        assert model(tokens, logits_at_M=places[:0]).shape == (0, args.vocab_size)


@every_variant
def test_branches_go_on_apart_from_one_prompt(args: ModelArgs) -> None:
    """Each as one pass over prompt and continuation; the trunk can be continued afterwards."""
    model = build(args)
    prompts, more = random_tokens(args, 2, 9), random_tokens(args, 5, 4, seed=1)
    rows = torch.tensor([1, 0, 0, 1, 1])
    with torch.no_grad():
        trunk = Cache(args.num_layers, capacity=13)
        model(prompts, cache=trunk)
        for part in (slice(0, 3), slice(3, 5)):
            found = model(more[part], cache=trunk.branch(rows[part]))
            whole = model(torch.cat((prompts[rows[part]], more[part]), dim=1))[:, 9:]
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
        found = model(more[:2], cache=trunk)
        whole = model(torch.cat((prompts, more[:2]), dim=1))[:, 9:]
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


@every_variant
def test_prompts_read_in_parts_are_continued_alike(args: ModelArgs) -> None:
    """A pass reads `read_tokens` at most, padding included, and a token of each row at least."""
    model = build(args)
    prompts = [random_tokens(args, 1, n, seed=n)[0].tolist() for n in (40, 33, 1, 12)]
    expected = generate(model, prompts, max_new_tokens=5)
    for read_tokens in (1, 30):
        sizes: list[int] = []
        handle = model.register_forward_hook(lambda *given, s=sizes: s.append(given[1][0].numel()))
        found = generate(model, prompts, max_new_tokens=5, read_tokens=read_tokens)
        handle.remove()
        assert found == expected
        assert max(sizes) <= max(read_tokens, len(prompts))

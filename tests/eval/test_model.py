"""Loading for evaluation: checkpoints and exports, dtypes, and faster products."""

import torch

from canon_pretrain.model.attention import rope_tables
from canon_pretrain.model.cache import Cache
from eval.model.target import FastLinear, load_model, use_fast_linear
from tests.hf_exports import plant_run
from tests.variants import VARIANTS, build, every_variant, random_tokens

CPU = torch.device("cpu")


def test_bfloat16_rounds_weights_and_keeps_the_rotary_tables(tmp_path):
    model = build(VARIANTS["rope ABCD k2 standard gqa"]).eval()
    checkpoint = plant_run(tmp_path / "run", model)
    loaded = load_model(checkpoint, CPU, max_length=700, dtype=torch.bfloat16)
    assert loaded.rope is not None
    cos, sin = rope_tables(700, model.args.rope_dim, model.args.rope_theta)
    assert torch.equal(loaded.rope.cos_TR, cos) and torch.equal(loaded.rope.sin_TR, sin)
    for name, weight in loaded.named_parameters():
        expected = dict(model.named_parameters())[name].to(torch.bfloat16)
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, expected)


@every_variant
def test_faster_products_give_the_same_numbers(args):
    model, tokens = build(args).eval(), random_tokens(args, 3, 20)
    with torch.inference_mode():
        whole = model(tokens)
        use_fast_linear(model)
        torch.testing.assert_close(model(tokens), whole, rtol=1e-4, atol=1e-4)
        cache = Cache(args.num_layers)
        parts = [model(tokens[:, part], cache=cache) for part in (slice(0, 19), slice(19, 20))]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    count = sum(isinstance(module, FastLinear) for module in model.modules())
    assert count == args.num_layers * (7 if args.ffn == "gated" else 6) + 1

"""Load exports where canon_pretrain can't be imported; run by tests/hf/test_clean.py.

    python -I hf_clean_process.py REQUEST.json ANSWER.json

Imports only torch, transformers and safetensors, like a machine without this package. REQUEST maps
names to export folders, ANSWER to what was found; logits are compared with those in
FOLDER/../expected.safetensors.
"""

import json
import sys
from pathlib import Path

# it may be installed in this environment
sys.modules["canon_pretrain"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

PROMPT, NEW = 9, 7


def check_model(folder: Path, is_last: bool) -> dict[str, object]:
    expected = load_file(folder.parent / "expected.safetensors")
    tokens_BT = expected["tokens"]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    prompts_BT = tokens_BT[:, :PROMPT]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(prompts_BT)  # otherwise 0 is taken for padding
    with torch.no_grad():
        logits_BTV = model(tokens_BT).logits
        cached, uncached = (
            model.generate(prompts_BT, use_cache=use_cache, **options).tolist()
            for use_cache in (True, False)
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return {
        "saved again": save_again(model, tokens_BT) if is_last else {},
        "type": type(model).__name__,
        "difference": float((logits_BTV - expected["logits"]).abs().max()),
        "scale": float(expected["logits"].abs().max()),
        "greedy": cached == uncached,
        "names": sorted(model.state_dict()),
        "frozen": sorted(n for n, p in model.named_parameters() if not p.requires_grad),
        "architectures": config.architectures,
        "canon_set": getattr(config, "canon_set", ""),
        "num_layers": config.num_hidden_layers,
    }


def save_again(model: PreTrainedModel, tokens_BT: torch.Tensor) -> dict[str, float]:
    """Save and load the model in two dtypes; return the differences of the logits."""
    differences = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        model.save_pretrained(copy := f"copy-{dtype}")  # in the working directory
        again = AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True, dtype="auto")
        assert again.dtype == dtype
        with torch.no_grad():
            one, other = model(tokens_BT).logits, again(tokens_BT).logits
        differences[str(dtype)] = float((one - other).abs().max())
    return differences


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    folders = json.loads(asked.read_text())
    answer = {n: check_model(Path(f), n == [*folders][-1]) for n, f in folders.items()}
    answered.write_text(json.dumps(answer))

"""Opens exports where canon_pretrain can't be imported; run by tests/hf_exports.py, with -I.

    python -I hf_clean_process.py REQUEST.json ANSWER.json

Only torch, transformers and safetensors here: what a machine has that never heard of this package.
"""

import json
import sys
from pathlib import Path
from typing import Any

# it may be installed in this environment
sys.modules["canon_pretrain"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: E402

PROMPT, NEW = 9, 7


def main(request: dict[str, Any]) -> dict[str, Any]:
    """`models`: what each folder by name gives; its logits beside FOLDER/../expected.safetensors.

    The last one is saved and loaded again too. `tokenizers`: what each folder makes of `texts`.
    """
    *_, last = request["models"]
    models = {n: _check_model(Path(f), n == last) for n, f in request["models"].items()}
    texts, folders = request["texts"], request["tokenizers"]
    return {"models": models, "tokenizers": {n: _encode(f, texts) for n, f in folders.items()}}


def _check_model(folder: Path, is_last: bool) -> dict[str, object]:
    expected = load_file(folder.parent / "expected.safetensors")
    tokens_BT = expected["tokens"]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    prompts_BT = tokens_BT[:, :PROMPT]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(prompts_BT)  # else every 0 is taken for padding
    with torch.no_grad():
        logits_BTV = model(tokens_BT).logits
        cached, uncached = (
            model.generate(prompts_BT, use_cache=use_cache, **options).tolist()
            for use_cache in (True, False)
        )
        tokens_BN = prompts_BT
        for _ in range(NEW):
            best_B1 = model(tokens_BN, use_cache=False).logits[:, -1:].argmax(-1)
            tokens_BN = torch.cat((tokens_BN, best_B1), dim=1)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return {
        "saved again": _save_again(model, tokens_BT) if is_last else {},
        "type": type(model).__name__,
        "dtype": str(model.dtype),
        "difference": float((logits_BTV - expected["logits"]).abs().max()),
        "scale": float(expected["logits"].abs().max()),
        "greedy": cached == uncached == tokens_BN.tolist(),
        "names": sorted(model.state_dict()),
        "frozen": sorted(n for n, p in model.named_parameters() if not p.requires_grad),
        "architectures": config.architectures,
        "canon_set": getattr(config, "canon_set", ""),
        "num_layers": config.num_hidden_layers,
    }


def _save_again(model: PreTrainedModel, tokens_BT: torch.Tensor) -> dict[str, float]:
    differences = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        copy = f"copy-{dtype}"  # in the scratch folder that this process stands in
        model.save_pretrained(copy)
        again = AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True, dtype="auto")
        assert again.dtype == dtype
        with torch.no_grad():
            one, other = model(tokens_BT).logits, again(tokens_BT).logits
        differences[str(dtype)] = float((one - other).abs().max())
    return differences


def _encode(folder: str, texts: list[str]) -> dict[str, object]:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    tokenizer.save_pretrained(f"{folder}-copy")
    again = AutoTokenizer.from_pretrained(f"{folder}-copy", use_fast=True)
    end = [tokenizer.eos_token_id]
    offsets = tokenizer(texts[0], return_offsets_mapping=True)["offset_mapping"]
    return {
        "ids": plain,
        "others": [
            [tokenizer.encode(text) for text in texts],
            [tokenizer(text)["input_ids"] for text in texts],
            tokenizer(texts)["input_ids"],
            [again.encode(text) for text in texts],
        ],
        "texts": [tokenizer.decode(ids + end, skip_special_tokens=True) for ids in plain],
        "offsets": ["".join(texts[0][start:stop] for start, stop in offsets), texts[0]],
        "special": [tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id],
        "facts": [len(tokenizer), tokenizer.is_fast, tokenizer.model_max_length],
        "keys": sorted(tokenizer("a")),
    }


if __name__ == "__main__":
    try:
        import canon_pretrain  # noqa: F401
    except ImportError:
        pass
    else:
        raise SystemExit("canon_pretrain can be imported: this process proves nothing")
    asked, answered = map(Path, sys.argv[1:])
    answered.write_text(json.dumps(main(json.loads(asked.read_text()))))

"""The released linear models: tables of their tensors, and small ones with weights of a formula.

released_linear.json was written by the released classes themselves, with the stand-ins of
release_classes.py: for each of the 48 recipes (canon_linear_recipes of PhysicsLM4) `model` of its
params.json and the names and shapes of its tensors, and for small models also logits.

    python -m tests.hf.released_linear CLONE    # write it again
"""

import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_suffix(".json")
RECIPES = "canon_linear_recipes"
SUFFIX = "_model_lingua.json"
SEQ_LEN = 32
TOKENS = torch.arange(24).view(1, 24) ** 2 % 40
NUM_LOGITS = 4
"""Of each token, the first ones are recorded."""

SMALL = {"dim": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 40, "max_seqlen": SEQ_LEN}
OPTIONS: dict[str, dict[str, Any]] = {
    "GLA5 Canon": {"model_name": "GLA5", "canon_set": "AbbCD"},
    "GLA5 conv": {"model_name": "GLA5", "canon_set": "bb"},
    "GLA5 8B": {
        "model_name": "GLA5",
        "canon_set": "AbbCD",
        "hidden_dim": 24,
        "zeyuan_layernorm": True,
    },
    "GLA5 tied": {
        "model_name": "GLA5",
        "canon_set": "bCA",
        "weight_tying": True,
        "canon_activation": True,
        "canon_residual": False,
        "norm_eps": 1e-3,
    },
    "GDN2 Canon": {"model_name": "GDN2", "canon_set": "AbbCD"},
    "GDN2 conv": {"model_name": "GDN2", "canon_set": "bb", "hidden_dim": 24},
    "GDN2 ACD": {"model_name": "GDN2", "canon_set": "ACD", "canon_kernel": 3},
    "GDN2 tied": {
        "model_name": "GDN2",
        "canon_set": "bD",
        "weight_tying": True,
        "zeyuan_layernorm": True,
        "norm_eps": 1e-3,
    },
    "Mamba2 Canon": {
        "model_name": "Mamba2",
        "canon_set": "AbbCD",
        "mamba_ssm": 128,
        "mlp_type": "mlp10",
    },
    "Mamba2 conv": {
        "model_name": "Mamba2",
        "canon_set": "bb",
        "mamba_ssm": 64,
        "mlp_type": "mlp10",
        "hidden_dim": 24,
    },
    "Mamba2 no conv": {
        "model_name": "Mamba2",
        "canon_set": "ABCD",
        "canon_kernel": 3,
        "mlp_type": "mlp10",
    },
    "Mamba2 no MLP": {
        "model_name": "Mamba2",
        "canon_set": "AbC",
        "mamba_ssm": 64,
        "weight_tying": True,
    },
}
"""What small models change in a recipe's `model`."""


@dataclass(frozen=True)
class Recorded:
    """A released model: `model` of params.json, and the shapes of its tensors by name."""

    model: dict[str, Any]
    shapes: dict[str, torch.Size]
    logits: Tensor | None
    """Of TOKENS, [1, T, NUM_LOGITS], with `weights`."""

    @property
    def params(self) -> dict[str, Any]:
        seq_len = self.model["max_seqlen"]
        return {"name": "x", "model": self.model, "data": {"seq_len": seq_len, "add_bos": True}}

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return weights of the formula by name; a tied head is the embedding."""
        weights = {name: planted(name, shape) for name, shape in self.shapes.items()}
        if self.model["weight_tying"]:
            (embedding,) = (name for name in weights if name.endswith("embeddings.weight"))
            weights["trans.lm_head.weight"] = weights[embedding]
        # the class has a conv1d that it does not use, of zeros
        if self.model["model_name"] == "Mamba2" and "b" not in self.model["canon_set"]:
            for name in weights:
                if name.endswith("conv1d.weight"):
                    weights[name] = torch.zeros(self.shapes[name])
        return weights


def planted(name: str, shape: torch.Size) -> Tensor:
    """Return weights that depend on the name and the place only, of a usual size."""
    # Numbers in [-1, 1) by integer arithmetic, which is the same everywhere.
    number = torch.arange(shape.numel()) + zlib.crc32(name.encode()) % 2**28
    for _ in range(2):
        number = (number ^ number >> 16) * 0x45D9F3B % 2**32
    uniform = (number.double() / 2**31 - 1).float().view(shape)

    if "norm" in name:
        return 1 + uniform / 4
    is_matrix = uniform.ndim == 2 and "embeddings" not in name
    return uniform * (3 / shape[-1]) ** 0.5 if is_matrix else uniform / 2


def write_folder(folder: Path, params: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """Write default/params.json and default/consolidated.pth, as on the hub."""
    (folder / "default").mkdir(parents=True)
    (folder / "default" / "params.json").write_text(json.dumps(params))
    torch.save({"model": dict(weights)}, folder / "default" / "consolidated.pth")
    return folder


# -- the recorded tables ------------------------------------------------------------------------


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


def recipes() -> dict[str, Recorded]:
    """Return the released models by name, such as GLA5Canon-1B-Nemo-1T-lr0.002."""
    found = {}
    for entry in _content()["recipes"]:
        for name in entry["names"]:
            found[name] = _recorded(entry)
    return found


def small_models() -> dict[str, Recorded]:
    """Return small models by their names in OPTIONS."""
    return {name: _recorded(entry) for name, entry in _content()["small"].items()}


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    model = _content()["common"] | entry["model"]
    shapes = {}
    for name, shape in entry["tensors"].items():
        for number in range(model["n_layers"]) if "#" in name else (0,):
            shapes[name.replace("#", str(number))] = torch.Size(shape)
    logits = torch.tensor(entry["logits"]) if "logits" in entry else None
    return Recorded(model, shapes, logits)


# -- their writer -------------------------------------------------------------------------------


def read_recipes(clone: Path) -> dict[str, dict[str, Any]]:
    """Return `model` of each recipe of the clone, by its name."""
    paths = sorted((clone / RECIPES).glob(f"*{SUFFIX}"))
    return {path.name.removesuffix(SUFFIX): json.loads(path.read_text()) for path in paths}


def _table(shapes: Mapping[str, torch.Size], num_layers: int) -> dict[str, list[int]]:
    """Return the shapes with # for the number of a layer; all layers must be equal."""
    table: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        before, mark, after = name.partition(".layers.")
        if mark:
            name = f"{before}{mark}#.{after.partition('.')[2]}"
        assert table.setdefault(name, list(shape)) == list(shape)
        counts[name] = counts.get(name, 0) + 1
    assert all(count == (num_layers if "#" in name else 1) for name, count in counts.items())
    return table


def write(clone: Path) -> None:
    """Write released_linear.json from the classes in the clone."""
    from tests.hf.release_classes import released_classes

    models = read_recipes(clone)
    first = next(iter(models.values()))
    common = {
        name: value
        for name, value in first.items()
        if all(name in model and model[name] == value for model in models.values())
    }
    common |= {"hidden_dim": None, "mlp_type": None, "mamba_ssm": None}

    recipe_entries: list[dict[str, Any]] = []
    small_entries = {}
    with released_classes(clone) as released:
        for name, model in models.items():
            changed = {key: value for key, value in model.items() if common.get(key, ...) != value}
            same = [entry for entry in recipe_entries if entry["model"] == changed]
            if same:
                same[0]["names"].append(name)
                continue
            with torch.device("meta"):
                state = released.LMTransformer(released.LMTransformerArgs(**model)).state_dict()
            shapes = {name: tensor.shape for name, tensor in state.items()}
            table = _table(shapes, model["n_layers"])
            recipe_entries.append({"names": [name], "model": changed, "tensors": table})

        for name, options in OPTIONS.items():
            changed = SMALL | options
            model = common | changed
            built = released.LMTransformer(released.LMTransformerArgs(**model)).eval()
            shapes = {name: tensor.shape for name, tensor in built.state_dict().items()}
            built.load_state_dict(Recorded(model, shapes, None).weights)
            with torch.no_grad():
                logits = built(TOKENS)[..., :NUM_LOGITS]
            small_entries[name] = {
                "model": changed,
                "tensors": _table(shapes, model["n_layers"]),
                "logits": [[[round(x, 5) for x in token] for token in logits[0].tolist()]],
            }

    # one line for each part of an entry
    compact = {"recipes": recipe_entries, "small": list(small_entries.items())}
    FILE.write_text(_lines(common, compact))


def _lines(common: Mapping[str, Any], entries: Mapping[str, list[Any]]) -> str:
    """Return JSON with a line for each value of an entry."""

    def lines_of(entry: Mapping[str, Any]) -> str:
        values = [f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in entry.items()]
        return "{\n" + ",\n".join(values) + "\n  }"

    recipe_texts = [f"  {lines_of(entry)}" for entry in entries["recipes"]]
    small_texts = [f"  {json.dumps(name)}: {lines_of(entry)}" for name, entry in entries["small"]]
    return (
        f'{{\n "common": {json.dumps(common)},\n "recipes": [\n'
        + ",\n".join(recipe_texts)
        + '\n ],\n "small": {\n'
        + ",\n".join(small_texts)
        + "\n }\n}\n"
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))

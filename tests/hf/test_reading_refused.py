"""Import: what is refused, each by its name, and an import that is whole or not there."""

import json
import os
import pickle
import shutil
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.core.errors import UserError
from canon_pretrain.hf import reading
from canon_pretrain.hf.reading import import_folder
from tests.hf_folders import BASE, FORKED, a_folder, check, quick, refused  # noqa: F401
from tests.llama_canon import NO_POSITIONS, random_state, write_folder

SMOLLM3: dict[str, Any] = {"model_type": "smollm3", "tie_word_embeddings": False}
UNSUPPORTED: list[dict[str, Any]] = [
    {"attention_bias": True}, {"mlp_bias": True}, {"attention_dropout": 0.1},
    {"sliding_window": 8}, {"hidden_act": "gelu"}, {"head_dim": 64},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_dim": 7}, {"rope_dim": 48}, {"rope_dim": 0}, {"partial_rotary_factor": 0.25},
    {"rope_version": "other"}, {"qk_norm": "per_head"}, {"canon_set": "AE"},
    {"canon_kernel": 17, "canon_set": "A"}, {"model_type": "qwen2"},
    {"layer_types": ["sliding_attention"]}, {"rms_norm_eps": 10**400},
    {"canon_pretrain": {"position": 3}}, {"canon_pretrain": {"dropout": 0.1}},
    {"no_rope_layers": [0, 1], **SMOLLM3}, {"no_rope_layers": 3, **SMOLLM3},
    # not known at all
    {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"embedding_multiplier": 12.0},
]  # fmt: skip


def test_fields_that_are_no_model_of_ours_or_that_the_caller_knows(tmp_path):
    for k, fields in enumerate(UNSUPPORTED):
        refused(a_folder(tmp_path / str(k), **fields), next(iter(fields)))
    folder = a_folder(tmp_path, embedding_multiplier=1.0, model_type="granite")
    refused(folder, "--ignore model_type")
    refused(folder, "--ignore embedding_multiplier$", ignore=["model_type"])
    names = ["model_type", "embedding_multiplier"]
    assert import_folder(folder, tmp_path / "out", ignore=names).checkpoint.is_dir()
    # transformers 5 has rope_parameters, 4 rope_scaling: a folder with both may contradict it
    rope, still = {"rope_type": "default", "rope_theta": 100.0}, NO_POSITIONS
    both = a_folder(tmp_path / "two", rope_scaling=still, rope_parameters=rope)
    refused(both, "rope_parameters")
    own = {"rope_scaling": still, "rope_parameters": still | {"rope_theta": 100.0}}
    found = import_folder(a_folder(tmp_path / "both", **own), tmp_path / "nope")
    assert found.args.position == "nope"


def test_a_claim_of_ten_million_layers(tmp_path):
    """Issue 17, item 23: refused before a model, or a table for its positions, is built."""
    import_folder(a_folder(tmp_path / "good"), tmp_path / "good" / "out")  # what it imports
    tracemalloc.start()
    for claim, size in (("num_hidden_layers", 10**7), ("vocab_size", 10**12)):
        refused(a_folder(tmp_path / claim, **{claim: size}), "describes .*; the folder holds")
    # no weight says otherwise, and nothing is as long
    import_folder(a_folder(tmp_path, max_position_embeddings=10**12), tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_links_out_of_the_folder_and_of_the_hubs_cache(tmp_path):
    """Issue 17, item 20: no file of the user's comes into OUT, or is read, by a planted link."""
    secret = tmp_path / "id_rsa"
    secret.write_text("{}")
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        folder = a_folder(tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        refused(folder, f"{name} is a link out of")
    folder = a_folder(tmp_path / "pipes")
    os.mkfifo(folder / "tokenizer.model")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "model.safetensors is not a regular file|has neither")
    several = write_folder(tmp_path / "several", BASE, random_state(BASE), num_files=2)
    (shard,) = several.glob("*00001-of*")
    shutil.move(shard, tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")
    refused(several, "00001-of-00002.safetensors is a link out of")
    cache = tmp_path / "models--a--b"  # a snapshot there is links to blobs beside it
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    snapshot = a_folder(tmp_path).rename(cache / "snapshots" / "0123abcd")
    for path in list(snapshot.iterdir()):
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(Path("..", "..", "blobs", path.name))
    assert import_folder(snapshot, tmp_path / "out").checkpoint.is_dir()


def test_tensors_that_are_not_the_models(tmp_path):
    config = BASE | {"num_hidden_layers": 1}
    good = random_state(config)
    q = "model.layers.0.self_attn.q_proj.weight"
    several = r"lacks model\.layers\.1\.\S+, .* and 4 more: it is not the model"
    cases: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        ({n: t for n, t in good.items() if n != q}, {}, f"lacks {q}:"),
        (good | {"score.weight": torch.ones(2, 128)}, {}, r"beside the model score\.weight:"),
        (good, {"canon_set": "A"}, r"lacks model\.layers\.0\.canonA\.weight"),
        (good, {"num_hidden_layers": 2}, several),
        (good | {q: torch.ones(128, 9)}, {}, rf"{q} has the shape \(128, 9\).*\(128, 128\)"),
        (good | {q: torch.ones(128, 128, dtype=torch.int8)}, {}, f"{q} is int8"),
    ]
    for k, (state, fields, match) in enumerate(cases):
        refused(write_folder(tmp_path / str(k), config | fields, state), match)
    # old Llamas store a table that follows from the config
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    check(tmp_path / "table", config, good | table)


def test_files_that_are_not_whole(tmp_path):
    refused(tmp_path / "absent", "config.json is missing")
    config = BASE | {"num_hidden_layers": 1}
    state = random_state(config)
    one = write_folder(tmp_path / "one", config, state)
    weights = one / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        refused(one, "model.safetensors cannot be read")
    weights.unlink()
    refused(one, "has neither model.safetensors nor")

    several = write_folder(tmp_path / "several", config, state, num_files=3)
    index = several / "model.safetensors.index.json"
    record = index.read_text()
    places = json.loads(record)["weight_map"]
    name, outside = next(iter(places)), tmp_path / "outside.safetensors"
    other = next(file for file in places.values() if file != places[name])
    save_file({name: state[name]}, outside)
    spoiled: list[tuple[Any, str]] = [
        *(
            (places | {name: p}, f"puts {name} into")
            for p in (f"../{outside.name}", str(outside), 3)
        ),
        (places | {name: other}, f"{other} lacks {name}"),
        ({}, "index.json"),
        (3, "index.json"),
    ]
    for weight_map, match in spoiled:
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(several, match)
    index.write_text("{")
    refused(several, "index.json")
    index.write_text(record)
    (several / other).unlink()
    refused(several, f"{other} cannot be read")


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_of_the_folder_is_run(tmp_path):
    marker = tmp_path / "it-ran"
    auto_map = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    folder = a_folder(tmp_path, auto_map=auto_map)
    for name in ("modeling_x.py", "__init__.py", "torch.py"):
        (folder / name).write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    for name in ("pytorch_model.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(_Marker(marker)))
    import_folder(folder, tmp_path / "out")
    (folder / "model.safetensors").unlink()
    refused(folder, r"pickled weights.*save_pretrained")
    # one in the clothes of the other
    shutil.copy(folder / "pytorch_model.bin", folder / "model.safetensors")
    refused(folder, "model.safetensors cannot be read")
    assert not marker.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists()  # it would have


def _killed_import(folder: Path, out: Path) -> None:
    def kill(path: Path, content: bytes) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    reading.write_atomic = kill  # type: ignore[assignment]
    import_folder(folder, out)


def test_an_import_is_whole_or_not_there(tmp_path, monkeypatch):
    """On a full disk; and killed: the next one takes its files away."""
    folder, out = a_folder(tmp_path), tmp_path / "out"

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", str(out))

    with monkeypatch.context() as patch:
        patch.setattr(reading, "write_atomic", full)
        with pytest.raises(OSError, match="No space left"):
            import_folder(folder, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    killed = FORKED.Process(target=_killed_import, args=(folder, out))
    killed.start()
    killed.join(60)
    left = tmp_path / ".out.importing"
    assert killed.exitcode == -signal.SIGKILL
    assert not out.exists() and (left / "step-0").is_dir()
    # Llama-2's folder has both; a data folder with both is refused (data/tokenizer.py)
    for name in ("tokenizer.json", "tokenizer.model"):
        (folder / name).write_text("{}")
    found = import_folder(folder, out, step=7)
    assert found.checkpoint == out / "step-7" and Manifest.read(found.checkpoint).step == 7
    assert not left.exists() and (out / "tokenizer.model").read_text() == "{}"
    assert not (out / "tokenizer.json").exists()
    taken = tmp_path / "taken"
    taken.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="taken exists"):
        import_folder(folder, taken)
    with pytest.raises(UserError, match="step = -1"):
        import_folder(folder, tmp_path / "new", step=-1)
    (folder / "tokenizer.model").unlink()
    import_folder(folder, tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep" / "tokenizer.json").is_file()

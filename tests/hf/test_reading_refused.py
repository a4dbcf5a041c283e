"""Import: errors of folders that are damaged, unsupported or malicious; atomicity."""

import json
import os
import pickle
import shutil
import signal
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.hf import reading
from canon_pretrain.hf.reading import import_folder
from tests.checkpoint_folders import Plant, run_forked
from tests.hf_exports import BASE, check, check_refused, small_folder
from tests.hf_exports import quick as quick
from tests.llama_canon import NO_POSITIONS, random_state, write_folder
from tests.support import refused

SMOLLM3: dict[str, Any] = {"model_type": "smollm3", "tie_word_embeddings": False}
UNSUPPORTED: list[dict[str, Any]] = [
    {"attention_bias": True}, {"mlp_bias": True}, {"attention_dropout": 0.1},
    {"sliding_window": 8}, {"hidden_act": "gelu"}, {"head_dim": 64},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_dim": 7}, {"rope_dim": 48}, {"rope_dim": 0}, {"partial_rotary_factor": 0.25},
    {"rope_version": "other"}, {"qk_norm": "per_head"}, {"canon_set": "AE"},
    {"canon_kernel": 17, "canon_set": "A"},
    {"layer_types": ["sliding_attention"]}, {"rms_norm_eps": 10**400},
    {"canon_pretrain": {"position": 3}}, {"canon_pretrain": {"dropout": 0.1}},
    {"no_rope_layers": [0, 1], **SMOLLM3}, {"no_rope_layers": 3, **SMOLLM3},
]  # fmt: skip
UNKNOWN = [{"quantization_config": {"quant_method": "gptq"}}, {"embedding_multiplier": 12.0}]


def test_unsupported_and_unknown_fields(tmp_path):
    for k, fields in enumerate(UNSUPPORTED):
        check_refused(small_folder(tmp_path / str(k), **fields), "hf.unsupported_field")
    for k, fields in enumerate(UNKNOWN):
        folder = small_folder(tmp_path / f"unknown-{k}", **fields)
        check_refused(folder, "hf.unknown_fields", names=[*fields])
    folder = small_folder(tmp_path, embedding_multiplier=1.0, model_type="granite")
    check_refused(folder, "hf.model_type", given="granite")
    check_refused(folder, "hf.unknown_fields", options={"ignore": ["model_type"]})
    names = ["model_type", "embedding_multiplier"]
    assert import_folder(folder, tmp_path / "out", ignore=names).checkpoint.is_dir()
    # transformers 5 writes rope_parameters, 4 rope_scaling: they may contradict each other
    rope, nope = {"rope_type": "default", "rope_theta": 100.0}, NO_POSITIONS
    both = small_folder(tmp_path / "two", rope_scaling=nope, rope_parameters=rope)
    check_refused(both, "hf.unsupported_field", name="rope_parameters")
    own = {"rope_scaling": nope, "rope_parameters": nope | {"rope_theta": 100.0}}
    found = import_folder(small_folder(tmp_path / "both", **own), tmp_path / "nope")
    assert found.args.position == "nope"


def test_a_claim_of_ten_million_layers(tmp_path):
    """Refused before a model or a table of positions is created."""
    import_folder(small_folder(tmp_path / "good"), tmp_path / "good" / "out")  # lazy imports
    tracemalloc.start()
    for claim, size in (("num_hidden_layers", 10**7), ("vocab_size", 10**12)):
        check_refused(small_folder(tmp_path / claim, **{claim: size}), "hf.missing_tensors")
    # contradicted by no weight, and nothing of that size is created
    import_folder(small_folder(tmp_path, max_position_embeddings=10**12), tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_links_out_of_the_folder_and_of_the_hubs_cache(tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("{}")
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        folder = small_folder(tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        check_refused(folder, "hf.outside_link", path=folder / name)
    folder = small_folder(tmp_path / "pipes")
    os.mkfifo(folder / "tokenizer.model")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    check_refused(folder, "hf.no_weights")
    several = write_folder(tmp_path / "several", BASE, random_state(BASE), num_files=2)
    (shard,) = several.glob("*00001-of*")
    shutil.move(shard, tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")
    check_refused(several, "hf.outside_link", path=shard)
    cache = tmp_path / "models--a--b"  # a snapshot consists of links to blobs
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    snapshot = small_folder(tmp_path).rename(cache / "snapshots" / "0123abcd")
    for path in list(snapshot.iterdir()):
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(Path("..", "..", "blobs", path.name))
    assert import_folder(snapshot, tmp_path / "out").checkpoint.is_dir()


def test_tensors_of_another_model(tmp_path):
    config = BASE | {"num_hidden_layers": 1}
    good = random_state(config)
    q = "model.layers.0.self_attn.q_proj.weight"
    missing, extra = "hf.missing_tensors", torch.ones(2, 128)
    cases: list[tuple[dict[str, Tensor], dict[str, Any], str, dict[str, Any]]] = [
        ({n: t for n, t in good.items() if n != q}, {}, missing, {"names": [q]}),
        (good | {"score.weight": extra}, {}, "hf.unknown_tensors", {"names": ["score.weight"]}),
        (good, {"canon_set": "A"}, missing, {"names": ["model.layers.0.canonA.weight"]}),
        (good, {"num_hidden_layers": 2}, missing, {}),
        (good | {q: torch.ones(128, 9)}, {}, "hf.tensor_shape", {"name": q, "given": (128, 9)}),
        (good | {q: torch.ones(128, 128, dtype=torch.int8)}, {}, "hf.tensor_dtype", {"name": q}),
    ]
    for k, (state, fields, code, named) in enumerate(cases):
        check_refused(write_folder(tmp_path / str(k), config | fields, state), code, **named)
    # old Llama checkpoints contain a table that follows from the config
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    check(tmp_path / "table", config, good | table)


def test_damaged_files(tmp_path):
    check_refused(tmp_path / "absent", "file.unreadable")
    config = BASE | {"num_hidden_layers": 1}
    state = random_state(config)
    one = write_folder(tmp_path / "one", config, state)
    weights = one / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        check_refused(one, "hf.unreadable_weights", path=weights)
    weights.unlink()
    check_refused(one, "hf.no_weights", path=one)

    several = write_folder(tmp_path / "several", config, state, num_files=3)
    index = several / "model.safetensors.index.json"
    record = index.read_text()
    places = json.loads(record)["weight_map"]
    name, outside = next(iter(places)), tmp_path / "outside.safetensors"
    other = next(file for file in places.values() if file != places[name])
    save_file({name: state[name]}, outside)
    wrong = [places | {name: file} for file in (f"../{outside.name}", str(outside), 3, other)]
    for weight_map in (*wrong, {}, 3):
        index.write_text(json.dumps({"weight_map": weight_map}))
        check_refused(several, "hf.damaged_index")
    index.write_text("{")
    check_refused(several, "file.unreadable", path=index)
    index.write_text(record)
    (several / other).unlink()
    check_refused(several, "hf.unreadable_weights", path=several / other)


def test_nothing_of_the_folder_is_run(tmp_path):
    marker = tmp_path / "it-ran"
    auto_map = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    folder = small_folder(tmp_path, auto_map=auto_map)
    for name in ("modeling_x.py", "__init__.py", "torch.py"):
        (folder / name).write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    for name in ("pytorch_model.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Plant(os.mkdir, str(marker))))
    import_folder(folder, tmp_path / "out")
    (folder / "model.safetensors").unlink()
    check_refused(folder, "hf.pickled_weights")
    shutil.copy(folder / "pytorch_model.bin", folder / "model.safetensors")
    check_refused(folder, "hf.unreadable_weights")
    assert not marker.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists()  # it would have been run


def test_an_import_is_atomic(tmp_path, monkeypatch):
    """On a full disk, and killed: the next one removes its files."""
    folder, out = small_folder(tmp_path), tmp_path / "out"

    with monkeypatch.context() as patch:
        patch.setattr(reading, "write_atomic", mock.Mock(side_effect=OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            import_folder(folder, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    left = tmp_path / ".out.importing"
    with monkeypatch.context() as patch:
        patch.setattr(reading, "write_atomic", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert run_forked(lambda: import_folder(folder, out)) == -signal.SIGKILL
    assert not out.exists() and (left / "step-0").is_dir()
    # Llama-2's folder has both; data/tokenizer.py rejects both
    for name in ("tokenizer.json", "tokenizer.model"):
        (folder / name).write_text("{}")
    found = import_folder(folder, out, step=7)
    assert found.checkpoint == out / "step-7" and Manifest.read(found.checkpoint).step == 7
    assert not left.exists() and (out / "tokenizer.model").read_text() == "{}"
    assert not (out / "tokenizer.json").exists()
    taken = tmp_path / "taken"
    taken.symlink_to(tmp_path / "nowhere")
    with refused("hf.out_exists", path=taken):
        import_folder(folder, taken)
    with refused("hf.negative_step", given=-1):
        import_folder(folder, tmp_path / "new", step=-1)
    (folder / "tokenizer.model").unlink()
    import_folder(folder, tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep" / "tokenizer.json").is_file()

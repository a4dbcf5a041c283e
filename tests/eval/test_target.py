"""The model to evaluate, a checkpoint or an export: data, tokenizers, dtype, fast layers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from canon_pretrain.data.tokenizer import load_tokenizer
from canon_pretrain.hf.export import export
from canon_pretrain.hf.loading import FastLinear, load_model, use_fast_linear
from canon_pretrain.hf.reading import import_folder
from canon_pretrain.hf.tokenizer_files import tokenizer_files
from canon_pretrain.model.attention import rope_tables
from canon_pretrain.model.cache import Cache
from canon_pretrain.run.results import question_of
from data_prep.planning import train_tokenizer
from eval.model.lm import CanonLM
from eval.model.target import EvalTarget
from eval.task_tokenizer import task_tokenizer
from eval.tasks.jrt.documents import cut
from eval.validation import model_loss
from tests.data_folders import sentence, tokenizer
from tests.eval_text_runs import MAX_LENGTH, write_run
from tests.hf_exports import plant_run
from tests.support import refused, write_data
from tests.variants import VARIANTS, build, every_variant, random_tokens

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A data folder, a run on it with a checkpoint, and the checkpoint's export."""
    base = tmp_path_factory.mktemp("target")
    write_run(base)
    export(base / "run" / "checkpoint" / "step-3", base / "out")
    return base


@pytest.fixture
def copy(base, tmp_path):
    return Path(shutil.copytree(base / "out", tmp_path / "out"))


def test_a_checkpoint_and_its_export_are_one_question(base, copy):
    of_run = EvalTarget.open(base / "run" / "checkpoint" / "step-3")
    (copy / "tokenizer.model").unlink()  # an export of an earlier version has only its conversion
    exported, other = EvalTarget.open(base / "out"), EvalTarget.open(copy)
    assert (of_run.step, of_run.seq_len) == (3, MAX_LENGTH)
    assert (exported.step, exported.seq_len) == (3, 1000)
    assert of_run.evals == base / "run" / "evals" and exported.evals is None
    text = sentence(3, 20)
    ids = of_run.tokenizer.encode(text).tolist()
    assert exported.tokenizer.encode(text).tolist() == ids
    assert other.tokenizer.encode(text).tolist() == ids
    # that file differs, but it was made from the training tokenizer
    assert exported.tokenizer.sha256 == of_run.tokenizer.sha256 != other.tokenizer.sha256
    for each in (exported, other):
        assert each.identity["tokenizer_sha256"] == of_run.identity["tokenizer_sha256"]
    # another path, the same question until a weight changes
    assert exported.identity != other.identity
    assert question_of(exported.identity) == question_of(other.identity)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert other.identity["content"] != EvalTarget.open(copy).identity["content"]


def test_an_export_needs_data_for_validation(base):
    with refused("eval.no_data"):
        EvalTarget.open(base / "out").check_held_out()
    with_data = EvalTarget.open(base / "out", base / "data")
    with_data.check_held_out()
    losses = []
    for target in (with_data, EvalTarget.open(base / "run" / "checkpoint" / "step-3")):
        lm = CanonLM(target.load(CPU), None, max_length=40)
        losses.append(model_loss(lm, target.held_out_shards, seq_len=40)[0].nats_per_token)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_missing_data_and_other_tokenizers_are_refused(base, copy, tmp_path):
    """An import's config.json names no data (issue 17, item 9)."""
    imported = import_folder(copy, tmp_path / "imported").checkpoint
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.model").unlink()
    (copy / "canon_pretrain.json").unlink()  # not our export
    foreign = EvalTarget.open(copy)  # validation needs neither
    assert foreign.step is None and foreign.identity["tokenizer_sha256"] is None
    text, step = tmp_path / "text", base / "run" / "checkpoint" / "step-3"
    write_data(text)  # shards without a tokenizer
    data = Path(shutil.copytree(base / "data", tmp_path / "data"))
    (data / "tokenizer.model").write_bytes(train_tokenizer([sentence(1, 999)], 290))
    for code, call in (
        ("eval.no_tokenizer", lambda: foreign.tokenizer),
        ("eval.no_data", lambda: EvalTarget.open(imported, None)),
        ("eval.no_data", lambda: EvalTarget.open(imported.parent, None)),
        ("eval.mismatch", lambda: EvalTarget.open(base / "out", text)),
        ("eval.mismatch", lambda: EvalTarget.open(step, held_out=text).check_held_out()),
        ("eval.mismatch", lambda: EvalTarget.open(step, data).tokenizer),
    ):
        with refused(code) as caught:
            call()
        assert caught.value.fields.get("what", "tokenizer") == "tokenizer"


def test_bfloat16_keeps_the_rotary_tables(tmp_path):
    model = build(VARIANTS["rope ABCD k2 standard gqa"]).eval()
    checkpoint = plant_run(tmp_path / "run", model)
    loaded = load_model(checkpoint, CPU, max_length=700, dtype=torch.bfloat16)
    rope = loaded.layers["0"].attention.rope
    cos, sin = rope_tables(700, model.args.rope_dim, model.args.rope_theta)
    assert torch.equal(rope.cos_TR, cos) and torch.equal(rope.sin_TR, sin)
    for name, weight in loaded.named_parameters():
        expected = dict(model.named_parameters())[name].to(torch.bfloat16)
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, expected)


@every_variant
def test_fast_linear_gives_the_same_numbers(args):
    model, tokens = build(args).eval(), random_tokens(args, 3, 20)
    linear = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    with torch.inference_mode():
        whole = model(tokens)
        use_fast_linear(model)
        torch.testing.assert_close(model(tokens), whole, rtol=1e-4, atol=1e-4)
        for rows in (3, 1):  # one row takes torch's own layer
            parts, cache = (slice(0, 19), slice(19, 20)), Cache(args.num_layers)
            found = torch.cat([model(tokens[:rows, part], cache=cache) for part in parts], dim=1)
            torch.testing.assert_close(found, whole[:rows], rtol=1e-4, atol=1e-4)
    count = sum(isinstance(module, FastLinear) for module in model.modules())
    assert count == linear + args.tie_embeddings


# ---- tokenizers in tasks: the ids, texts and cuts of training

# characters of one to four bytes, tokens of the vocabulary, and names of special tokens
WORDS = [*"aß€🙂", "the", "of", "which", "</s>", "<s>", "\n", " ", "  ", "\t", "Ada", "\ufffd", "é"]
texts = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=60).map("".join),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60),
)


@pytest.fixture(scope="module")
def tokenizers(base):
    """That of training, and those of tasks on the data and on the export."""
    ours = task_tokenizer({"tokenizer": str(base / "data"), "pretrained": "of no matter"})
    theirs = task_tokenizer({"pretrained": str(base / "out"), "dtype": "float32"})
    return load_tokenizer(base / "data"), ours, theirs


@given(texts, st.integers(2, 30), st.integers(0, 40), st.integers(1, 9))
@example("aaaß\ufffd", 2, 4, 1)  # half of its last character decodes to U+FFFD
@example("\ufffdß", 3, 1, 1)
@settings(max_examples=300, deadline=None)
def test_ids_and_cuts_are_those_of_training(tokenizers, text, limit, start, length):
    training, *pair = tokenizers
    expected = training.encode(text).tolist()
    assert training.eos_id not in expected and training.bos_id not in expected
    for found in pair:
        assert found.encode(text) == expected
        assert found.decode(expected) == text
    answer = text[start : start + length]
    ours, theirs = (cut(text, [answer], found, limit=limit) for found in pair)
    assert ours == theirs
    assert ours.text in text  # no partial character, no added space


def test_no_prompt_to_run_the_models_code(copy, monkeypatch):
    """An export's config.json names the model's code, which its tokenizer does not need."""
    assert "auto_map" in json.loads((copy / "config.json").read_text())
    options = json.loads((copy / "tokenizer_config.json").read_text())
    del options["tokenizer_class"]  # as in older versions; transformers then reads config.json
    (copy / "tokenizer_config.json").write_text(json.dumps(options))
    asked = []  # transformers catches a prompt that fails
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "n")
    found = task_tokenizer({"tokenizer": str(copy)})
    assert found.decode(found.encode("the of")) == "the of"
    assert not asked


def test_missing_tokenizers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for metadata in ({}, {"tokenizer": str(tmp_path)}, {"pretrained": "nobody/nothing"}):
        with refused("eval.task_tokenizer"):
            task_tokenizer(metadata)


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model"])
def test_tokenizers_of_tasks_draw_no_split(kind, tmp_path):
    """BPE dropout of a tokenizer.json, sampling of SentencePiece in a tokenizer_config.json."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    model = tokenizer().model
    if kind == "tokenizer.json":
        content = tokenizer_files(tokenizer(), 64)["tokenizer.json"]
        content["model"]["dropout"] = 0.5
        (tmp_path / kind).write_text(json.dumps(content))
    else:
        config = {"tokenizer_class": "BertGenerationTokenizer"}
        config["sp_model_kwargs"] = {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1}
        (tmp_path / "spiece.model").write_bytes(model)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found, text = task_tokenizer({"tokenizer": str(tmp_path)}), "the of which Ada " * 30
    assert len({tuple(found.encode(text)) for _ in range(8)}) == 1

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
    """A copy of the export."""
    return Path(shutil.copytree(base / "out", tmp_path / "out"))


def test_a_checkpoint_and_its_export_are_one_question(base, copy):
    (copy / "tokenizer.model").unlink()  # an export of an earlier version has only its conversion
    of_run = EvalTarget.open(base / "run" / "checkpoint" / "step-3")
    exported = EvalTarget.open(base / "out")
    older = EvalTarget.open(copy)

    assert (of_run.step, of_run.seq_len) == (3, MAX_LENGTH)
    assert (exported.step, exported.seq_len) == (3, 1000)
    assert of_run.evals == base / "run" / "evals"
    assert exported.evals is None

    text = sentence(3, 20)
    ids = of_run.tokenizer.encode(text).tolist()
    assert exported.tokenizer.encode(text).tolist() == ids
    assert older.tokenizer.encode(text).tolist() == ids

    # the conversion is another file, but it was made from the training tokenizer
    assert exported.tokenizer.sha256 == of_run.tokenizer.sha256
    assert older.tokenizer.sha256 != of_run.tokenizer.sha256
    tokenizer_sha256 = of_run.identity["tokenizer_sha256"]
    assert exported.identity["tokenizer_sha256"] == tokenizer_sha256
    assert older.identity["tokenizer_sha256"] == tokenizer_sha256


def test_other_weights_are_another_question(base, copy):
    exported = EvalTarget.open(base / "out")
    copied = EvalTarget.open(copy)
    assert exported.identity != copied.identity
    assert question_of(exported.identity) == question_of(copied.identity)

    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert copied.identity["content"] != EvalTarget.open(copy).identity["content"]


def loss_of(target):
    """Return the held-out loss of a target in nats per token."""
    lm = CanonLM(target.load(CPU), None, max_length=40)
    loss, _ = model_loss(lm, target.held_out_shards, seq_len=40)
    return loss.nats_per_token


def test_an_export_needs_data_for_validation(base):
    with refused("eval.no_data"):
        EvalTarget.open(base / "out").check_held_out()

    exported = EvalTarget.open(base / "out", base / "data")
    exported.check_held_out()

    of_run = EvalTarget.open(base / "run" / "checkpoint" / "step-3")
    assert loss_of(exported) == pytest.approx(loss_of(of_run), rel=1e-6)


def test_missing_data_is_refused(base, copy, tmp_path):
    """An import's config.json names no data (issue 17, item 9)."""
    imported = import_folder(copy, tmp_path / "imported").checkpoint
    for path in (imported, imported.parent):
        with refused("eval.no_data") as caught:
            EvalTarget.open(path, None)
        assert caught.value.fields.get("what", "tokenizer") == "tokenizer"


def test_a_foreign_export_without_a_tokenizer_is_refused(copy):
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.model").unlink()
    (copy / "canon_pretrain.json").unlink()  # not our export
    foreign = EvalTarget.open(copy)  # validation needs neither

    assert foreign.step is None
    assert foreign.identity["tokenizer_sha256"] is None
    with refused("eval.no_tokenizer"):
        _ = foreign.tokenizer


def test_other_tokenizers_are_refused(base, tmp_path):
    step = base / "run" / "checkpoint" / "step-3"
    without_tokenizer = tmp_path / "text"
    write_data(without_tokenizer)
    with_other = Path(shutil.copytree(base / "data", tmp_path / "data"))
    (with_other / "tokenizer.model").write_bytes(train_tokenizer([sentence(1, 999)], 290))

    for call in (
        lambda: EvalTarget.open(base / "out", without_tokenizer),
        lambda: EvalTarget.open(step, held_out=without_tokenizer).check_held_out(),
        lambda: EvalTarget.open(step, with_other).tokenizer,
    ):
        with refused("eval.mismatch") as caught:
            call()
        assert caught.value.fields.get("what", "tokenizer") == "tokenizer"


def test_bfloat16_keeps_the_rotary_tables(tmp_path):
    model = build(VARIANTS["rope ABCD k2 standard gqa"]).eval()
    checkpoint = plant_run(tmp_path / "run", model)

    loaded = load_model(checkpoint, CPU, max_length=700, dtype=torch.bfloat16)

    rope = loaded.layers["0"].attention.rope
    cos, sin = rope_tables(700, model.args.rope_dim, model.args.rope_theta)
    assert torch.equal(rope.cos_TR, cos)
    assert torch.equal(rope.sin_TR, sin)
    weights = dict(model.named_parameters())
    for name, weight in loaded.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, weights[name].to(torch.bfloat16))


@every_variant
def test_fast_linear_gives_the_same_numbers(args):
    model = build(args).eval()
    tokens = random_tokens(args, 3, 20)
    num_linear = sum(isinstance(module, torch.nn.Linear) for module in model.modules())

    with torch.inference_mode():
        expected = model(tokens)
        use_fast_linear(model)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)

        # decode the last token; one row takes torch's own layer
        for rows in (3, 1):
            cache = Cache.of(args)
            prompt = model(tokens[:rows, :19], cache=cache)
            last = model(tokens[:rows, 19:], cache=cache)
            logits = torch.cat([prompt, last], dim=1)
            torch.testing.assert_close(logits, expected[:rows], rtol=1e-4, atol=1e-4)

    num_fast = sum(isinstance(module, FastLinear) for module in model.modules())
    assert num_fast == num_linear + args.tie_embeddings


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
    training, of_data, of_export = tokenizers
    ids = training.encode(text).tolist()
    assert training.eos_id not in ids
    assert training.bos_id not in ids

    for of_task in (of_data, of_export):
        assert of_task.encode(text) == ids
        assert of_task.decode(ids) == text

    answer = text[start : start + length]
    cut_of_data = cut(text, [answer], of_data, limit=limit)
    assert cut_of_data == cut(text, [answer], of_export, limit=limit)
    assert cut_of_data.text in text  # no partial character, no added space


def test_no_prompt_to_run_the_models_code(copy, monkeypatch):
    """An export's config.json names the model's code, which its tokenizer does not need."""
    assert "auto_map" in json.loads((copy / "config.json").read_text())
    config_path = copy / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    del config["tokenizer_class"]  # as in older versions; transformers then reads config.json
    config_path.write_text(json.dumps(config))
    prompts = []  # transformers catches a prompt that fails
    monkeypatch.setattr("builtins.input", lambda *texts: prompts.append(texts) or "n")

    of_export = task_tokenizer({"tokenizer": str(copy)})

    assert of_export.decode(of_export.encode("the of")) == "the of"
    assert not prompts


def test_missing_tokenizers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for metadata in ({}, {"tokenizer": str(tmp_path)}, {"pretrained": "nobody/nothing"}):
        with refused("eval.task_tokenizer"):
            task_tokenizer(metadata)


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model"])
def test_tokenizers_of_tasks_draw_no_split(kind, tmp_path):
    """BPE dropout of a tokenizer.json, sampling of SentencePiece in a tokenizer_config.json."""
    if kind == "tokenizer.json":
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        content = tokenizer_files(tokenizer(), 64)["tokenizer.json"]
        content["model"]["dropout"] = 0.5
        (tmp_path / kind).write_text(json.dumps(content))
    else:
        config = {
            "tokenizer_class": "BertGenerationTokenizer",
            "sp_model_kwargs": {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1},
        }
        (tmp_path / "spiece.model").write_bytes(tokenizer().model)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    of_task = task_tokenizer({"tokenizer": str(tmp_path)})

    text = "the of which Ada " * 30
    assert len({tuple(of_task.encode(text)) for _ in range(8)}) == 1

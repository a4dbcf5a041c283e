"""Our lm_eval model on a checkpoint and on its export equals `lm_eval --model hf` on the export.

The reference is lm_eval's own class on the exported folder, as a user's command makes it.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from canon_pretrain.data.tokenizer import load_tokenizer
from canon_pretrain.hf.export import export
from canon_pretrain.hf.loading import load_model
from canon_pretrain.run.results import read_samples
from eval.model.lm import CanonLM
from tests.data_folders import make_data_folder, sentence
from tests.eval_fixtures import stage_fixtures
from tests.hf_exports import hub_environment, isolate_remote_code, plant_run
from tests.support import ROOT
from tests.variants import build, variant

MAX_LENGTH = 48
NO_TEXT = 3 + 256  # <unk>, <s>, </s> and the bytes come first
UNICODE = "Zürich 2024 \U0001f642, naïve café: 日本"
NAMES = (
    "nope ABCD",
    "rope",
    "alibi gqa",
    "partial_rope_c ABCD qk_full",
    "nope ABCD k2 no_res act standard documents",
    "rope AC k3 gqa documents",
    "gla AC conv gate_rank documents",
    "mamba2 conv",
    "mamba2_mlp ABC moe",
    "gdn ABCD",
)
OTHERS = [*((name, False) for name in NAMES[1:]), (NAMES[0], True), (NAMES[5], True)]
every_model = pytest.mark.parametrize(
    ("name", "add_bos"),
    [(NAMES[0], False), *(pytest.param(*case, marks=pytest.mark.system) for case in OTHERS)],
)


@dataclass
class Models:
    """One model over its checkpoint, over its export, and as lm_eval's class."""

    ours: CanonLM
    exported: CanonLM
    theirs: HFLM

    def answers(self, kind, inputs):
        """Our answers, equal for checkpoint and export, and lm_eval's."""
        requests = [Instance(kind, {}, arguments, index) for index, arguments in enumerate(inputs)]
        ours = getattr(self.ours, kind)(requests, disable_tqdm=True)
        exported = getattr(self.exported, kind)(requests, disable_tqdm=True)
        theirs = getattr(self.theirs, kind)(requests, disable_tqdm=True)
        assert not differences(exported, ours)
        return ours, theirs


def differences(ours, theirs):
    """Answers that differ by more than 1e-4 (sums: and 1e-4 of it), or are not equal."""
    differing = []
    for index, (our_answer, their_answer) in enumerate(zip(ours, theirs, strict=True)):
        expected = their_answer
        if isinstance(their_answer, float):
            expected = pytest.approx(their_answer, rel=1e-4, abs=1e-4)
        elif isinstance(their_answer, tuple):
            score, is_greedy = their_answer
            expected = (pytest.approx(score, rel=0, abs=1e-4), is_greedy)
        if our_answer != expected:
            differing.append((index, our_answer, their_answer))
    return differing


def text_model(name, **changes):
    """A model whose likeliest tokens are text: tokenizers decode partial bytes differently."""
    model = build(replace(variant(name), vocab_size=300, **changes))
    with torch.no_grad():
        model.output.weight[[i for i in range(NO_TEXT) if i != 2]] = 0.0
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the function that makes the three models of a variant."""
    folder = tmp_path_factory.mktemp("equal")
    make_data(folder / "data")

    def make_ours(path, tokenizer, add_bos):
        return CanonLM(
            load_model(path, torch.device("cpu")),
            load_tokenizer(tokenizer, eos=2),
            max_length=MAX_LENGTH,
            batch_tokens=150,
            add_bos=add_bos,
        )

    @functools.cache
    def make(name, add_bos):
        base = folder / f"{name}-{add_bos}"
        out = base / "out"
        checkpoint = plant_run(base / "run", text_model(name), data=folder / "data")
        export(checkpoint, out)
        theirs = HFLM(
            pretrained=str(out),
            device="cpu",
            dtype="float32",
            prefix_token_id=2,
            batch_size=5,
            max_length=MAX_LENGTH,
            trust_remote_code=True,
            add_bos_token=add_bos,
        )
        return Models(
            make_ours(checkpoint, folder / "data", add_bos),
            make_ours(out, out / "tokenizer.json", add_bos),
            theirs,
        )

    with pytest.MonkeyPatch.context() as patch:
        isolate_remote_code(patch, folder / "modules")
        yield make


def make_data(folder):
    """Write a data folder with a tokenizer."""
    make_data_folder(folder, [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])


def pairs():
    """Contexts and continuations of every form."""
    # multiple choice: one context, choices of different lengths
    multiple_choice = []
    for seed in range(4):
        context = sentence(seed, 3 + 7 * seed)
        for n in range(1, 4):
            multiple_choice.append((context, f" {sentence(10 * seed + n, 1 + 3 * n)}"))

    long_text = sentence(3, 400)
    return [
        *multiple_choice,
        # one token each
        ("is it so", " to"),
        ("is it so", " in"),
        ("is it so", " by"),
        ("is it so", " to"),
        (UNICODE, f" {UNICODE[::-1]}"),
        ("the café", " naïve"),
        ("\U0001f642", "\U0001f642"),
        ("the of ", "a space moves"),
        ("the\n\n", " lines"),
        ("a </s> is text", " as </s>"),
        ("", " nothing before it"),
        ("", "the"),
        ("", UNICODE),
        # these are cut at the beginning
        (long_text, " of the"),
        (long_text, long_text[:90]),
        (long_text[:30], long_text[30:100]),
    ]


@every_model
def test_loglikelihoods(models, name, add_bos):
    """BOS is before every text except an empty context, and is cut first."""
    lms = models(name, add_bos)
    assert lms.ours.tok_encode("the") == lms.theirs.tok_encode("the") != []
    # continuations that the model itself generates are greedy
    contexts = [sentence(seed, 4) for seed in range(9)]
    options = {"until": [], "max_gen_toks": 1}
    likeliest = lms.ours.generate_until(
        [Instance("generate_until", {}, (context, options), 0) for context in contexts]
    )

    ours, theirs = lms.answers("loglikelihood", [*pairs(), *zip(contexts, likeliest, strict=True)])

    assert not differences(ours, theirs)
    assert {is_greedy for _, is_greedy in ours} == {True, False}


@every_model
def test_rolling_loglikelihoods(models, name, add_bos):
    """In windows around max_length."""
    lms = models(name, add_bos)
    # not periodic: lm_eval's answers differ from explicit loops then
    text = sentence(5, 300)
    texts = ["a", UNICODE, f"{UNICODE}{sentence(7, 40)}{UNICODE}", text, "the of\n\nand to\n", ""]
    num_tokens = [len(lms.ours.tok_encode(text[:end])) for end in range(len(text))]
    for size in (MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1, 2 * MAX_LENGTH):
        texts.append(text[: num_tokens.index(size)])

    ours, theirs = lms.answers("loglikelihood_rolling", [(text,) for text in texts])

    assert not differences(ours, theirs)


def prompts():
    """Prompts of different lengths, hence left-padded, with and without stop strings."""
    contexts = [sentence(seed, words) for seed, words in enumerate((1, 2, 9, 17, 30, 200))]
    contexts += [UNICODE, "the of ", "to be </s>\n\nAnswer me:"]
    requests = []
    for until in ([], ["he"], ["\n", "a"]):  # mostly within a token
        requests += [(context, {"until": until, "max_gen_toks": 9}) for context in contexts]
    requests += [(context, {"until": "t", "max_gen_toks": 1}) for context in contexts]
    requests += [(context, {"until": [" zz"], "max_gen_toks": 21}) for context in contexts[3:]]
    return requests


@every_model
def test_generations(models, name, add_bos):
    """lm_eval decodes answers alone: SentencePiece drops their first space."""
    lms = models(name, add_bos)
    inputs = prompts()
    if add_bos:
        inputs.append(("", {"until": [], "max_gen_toks": 9}))

    ours, theirs = lms.answers("generate_until", inputs)

    assert [answer.removeprefix(" ") for answer in ours] == theirs
    assert len({len(lms.ours.tok_encode(answer)) for answer in ours}) > 2


SUITES = ("discriminative", "jrt_squad", "babilong_qa1_0k", "1-hop-0")
LIMIT = ("--limit", "12")  # all items of the fixtures, and some of the 1,000 probes


def run_both_commands(folder):
    """Run `eval run` and `lm_eval --model hf` on an export, in `folder`."""
    out = folder / "out"
    staged = stage_fixtures(folder / "staged")
    make_data(folder / "data")
    model = text_model("nope ABCD", max_seq_len=2048)
    export(plant_run(folder / "run", model, data=folder / "data"), out)
    environment = hub_environment(folder) | {"CANON_EVAL_DATA": str(staged)}
    environment["PYTHONPATH"] = str(ROOT)

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=600,
        )
        assert done.returncode == 0, done
        assert "y/N" not in done.stdout + done.stderr, done

    run(
        *("eval", "run"),
        *("--checkpoint", out),
        *("--suite", ",".join(SUITES)),
        *("--out", folder),
        *("--max_length", 2048),
        *LIMIT,
    )
    run(
        *("lm_eval", "--model", "hf"),
        "--model_args",
        f"pretrained={out},trust_remote_code=True,dtype=float32,add_bos_token=False",
        *("--device", "cpu"),
        *("--include_path", ROOT / "eval" / "tasks"),
        *("--tasks", ",".join(SUITES)),
        *("--metadata", json.dumps({"probes": str(folder / "1-hop-0" / "probes")})),
        *("--batch_size", "3"),
        *("--log_samples", "--output_path", folder / "theirs"),
        *LIMIT,
    )


def assert_equal_answer(ours, theirs):
    """Compare an answer with lm_eval's, which has numbers as text."""
    if isinstance(ours, str):
        assert ours.removeprefix(" ") == theirs
    elif isinstance(ours, list):
        assert ours[0] == pytest.approx(float(theirs[0]), abs=2e-4, rel=1e-6)
        assert str(ours[1]) == theirs[1]
    else:
        assert ours == pytest.approx(float(theirs), rel=1e-4)


@pytest.mark.system
def test_the_commands(tmp_path):
    """`eval run` and `lm_eval --model hf`: the same items, prompts, answers and scores."""
    run_both_commands(tmp_path)

    samples = {}
    for suite in SUITES:
        samples |= read_samples(tmp_path / suite)
    assert samples.keys() > {"piqa", "hellaswag", "boolq", "lambada_openai", "wikitext"}
    for task, rows in samples.items():
        (path,) = (tmp_path / "theirs").glob(f"*{os.sep}samples_{task}_*.jsonl")
        their_rows = [json.loads(line) for line in path.read_text().splitlines()]
        theirs = {row["doc_id"]: row for row in their_rows}
        assert len(rows) == len(theirs) > 0
        for row in rows:
            sample = theirs[row["doc_id"]]
            assert row["doc_hash"] == sample["doc_hash"]
            assert row["prompt_hash"] == sample["prompt_hash"]
            for ours, answer in zip(row["answers"], sample["filtered_resps"], strict=True):
                assert_equal_answer(ours, answer)
            for metric in sample["metrics"]:
                assert row[metric] == pytest.approx(sample[metric], rel=1e-4), metric

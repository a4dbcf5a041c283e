"""Our lm_eval model on a checkpoint and on its export equals `lm_eval --model hf` on the export.

The reference is lm_eval's own class on the exported folder, as a user's command makes it.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

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
others = [pytest.param(*case, marks=pytest.mark.system) for case in OTHERS]
every_model = pytest.mark.parametrize(("name", "add_bos"), [(NAMES[0], False), *others])


@dataclass
class Models:
    """One model over its checkpoint, over its export, and as lm_eval's class."""

    ours: CanonLM
    exported: CanonLM
    theirs: HFLM

    def answers(self, kind, inputs):
        """Our answers, equal for checkpoint and export, and lm_eval's."""
        requests = [Instance(kind, {}, given, index) for index, given in enumerate(inputs)]
        ours, exported, theirs = (
            getattr(lm, kind)(requests, disable_tqdm=True)
            for lm in (self.ours, self.exported, self.theirs)
        )
        assert not differences(exported, ours)
        return ours, theirs


def differences(found, expected):
    """Answers that differ by more than 1e-4 (sums: and 1e-4 of it), or are not equal."""
    differing = []
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        wanted = other
        if isinstance(other, float):
            wanted = pytest.approx(other, rel=1e-4, abs=1e-4)
        elif isinstance(other, tuple):
            wanted = (pytest.approx(other[0], rel=0, abs=1e-4), other[1])
        if one != wanted:
            differing.append((index, one, other))
    return differing


def text_model(name, **changes):
    """A model whose likeliest tokens are text: tokenizers decode partial bytes differently."""
    model = build(replace(variant(name), vocab_size=300, **changes))
    with torch.no_grad():
        model.output.weight[[i for i in range(NO_TEXT) if i != 2]] = 0.0
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equal")
    make_data(folder / "data")

    @functools.cache
    def make(name, add_bos):
        base, ours = folder / f"{name}-{add_bos}", list[CanonLM]()
        checkpoint = plant_run(base / "run", text_model(name), data=folder / "data")
        out = base / "out"
        export(checkpoint, out)
        given: Any = {"max_length": MAX_LENGTH, "batch_tokens": 150, "add_bos": add_bos}
        for path, tokenizer in ((checkpoint, folder / "data"), (out, out / "tokenizer.json")):
            model, text = load_model(path, torch.device("cpu")), load_tokenizer(tokenizer, eos=2)
            ours.append(CanonLM(model, text, **given))
        given = {"device": "cpu", "dtype": "float32", "prefix_token_id": 2, "batch_size": 5}
        given |= {"max_length": MAX_LENGTH, "trust_remote_code": True, "add_bos_token": add_bos}
        return Models(*ours, HFLM(pretrained=str(out), **given))

    with pytest.MonkeyPatch.context() as patch:
        isolate_remote_code(patch, folder / "modules")
        yield make


def make_data(folder):
    make_data_folder(folder, [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])


def pairs():
    """Contexts and continuations of every form."""
    text, found = sentence(3, 400), []
    for seed in range(4):  # multiple choice: one context, choices of different lengths
        context = sentence(seed, 3 + 7 * seed)
        found += [(context, f" {sentence(10 * seed + n, 1 + 3 * n)}") for n in range(1, 4)]
    found += [("is it so", choice) for choice in (" to", " in", " by", " to")]  # one token each
    found += [(UNICODE, f" {UNICODE[::-1]}"), ("the café", " naïve"), ("\U0001f642", "\U0001f642")]
    found += [("the of ", "a space moves"), ("the\n\n", " lines"), ("a </s> is text", " as </s>")]
    found += [("", " nothing before it"), ("", "the"), ("", UNICODE)]
    # these are cut at the beginning
    return [*found, (text, " of the"), (text, text[:90]), (text[:30], text[30:100])]


@every_model
def test_loglikelihoods(models, name, add_bos):
    """BOS is before every text except an empty context, and is cut first."""
    each = models(name, add_bos)
    assert each.ours.tok_encode("the") == each.theirs.tok_encode("the") != []
    contexts = [(sentence(seed, 4), {"until": [], "max_gen_toks": 1}) for seed in range(9)]
    requests = [Instance("generate_until", {}, given, 0) for given in contexts]
    likeliest = each.ours.generate_until(requests)
    inputs = pairs() + [(c, text) for (c, _), text in zip(contexts, likeliest, strict=True)]
    found, expected = each.answers("loglikelihood", inputs)
    assert not differences(found, expected)
    assert {is_greedy for _, is_greedy in found} == {True, False}
    # rolling, in windows around max_length
    text = sentence(5, 300)
    # not periodic: lm_eval's answers differ from explicit loops then
    texts = ["a", UNICODE, f"{UNICODE}{sentence(7, 40)}{UNICODE}", text, "the of\n\nand to\n", ""]
    ids = [each.ours.tok_encode(text[:end]) for end in range(len(text))]
    for size in (MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1, 2 * MAX_LENGTH):
        texts.append(next(text[:end] for end in range(len(text)) if len(ids[end]) == size))
    assert not differences(*each.answers("loglikelihood_rolling", [(text,) for text in texts]))


def prompts():
    """Prompts of different lengths, hence left-padded, with and without stop strings."""
    contexts = [sentence(seed, words) for seed, words in enumerate((1, 2, 9, 17, 30, 200))]
    contexts += [UNICODE, "the of ", "to be </s>\n\nAnswer me:"]
    found = []
    for until in ([], ["he"], ["\n", "a"]):  # mostly within a token
        found += [(context, {"until": until, "max_gen_toks": 9}) for context in contexts]
    found += [(context, {"until": "t", "max_gen_toks": 1}) for context in contexts]
    return [*found, *((c, {"until": [" zz"], "max_gen_toks": 21}) for c in contexts[3:])]


@every_model
def test_generations(models, name, add_bos):
    """lm_eval decodes answers alone: SentencePiece drops their first space."""
    each, empty = models(name, add_bos), ("", {"until": [], "max_gen_toks": 9})
    found, expected = each.answers("generate_until", [*prompts(), *[empty] * add_bos])
    assert [answer.removeprefix(" ") for answer in found] == expected
    assert len({len(each.ours.tok_encode(text)) for text in found}) > 2


SUITES = ("discriminative", "jrt_squad", "babilong_qa1_0k", "1-hop-0")
LIMIT = ("--limit", "12")  # all items of the fixtures, and some of the 1,000 probes


@pytest.mark.system
def test_the_commands(tmp_path):
    """`eval run` and `lm_eval --model hf`: the same items, prompts, answers and scores."""
    out, staged = tmp_path / "out", stage_fixtures(tmp_path / "staged")
    make_data(tmp_path / "data")
    model = text_model("nope ABCD", max_seq_len=2048)
    export(plant_run(tmp_path / "run", model, data=tmp_path / "data"), out)
    environment = hub_environment(tmp_path) | {"CANON_EVAL_DATA": str(staged)}
    environment["PYTHONPATH"] = str(ROOT)
    options = f"pretrained={out},trust_remote_code=True,dtype=float32,add_bos_token=False"

    def run(*words):
        given: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        given |= {"cwd": tmp_path, "env": environment, "timeout": 600}
        done = subprocess.run([sys.executable, "-m", *map(str, words)], **given)
        assert done.returncode == 0 and "y/N" not in done.stdout + done.stderr, done

    words = ("eval", "run", "--checkpoint", out, "--suite", ",".join(SUITES), "--out", tmp_path)
    run(*words, "--max_length", 2048, *LIMIT)
    theirs = ["lm_eval", "--model", "hf", "--model_args", options, "--device", "cpu"]
    theirs += ["--include_path", ROOT / "eval" / "tasks", "--tasks", ",".join(SUITES)]
    theirs += ["--metadata", json.dumps({"probes": str(tmp_path / "1-hop-0" / "probes")})]
    theirs += ["--batch_size", "3", "--log_samples", "--output_path", tmp_path / "theirs", *LIMIT]
    run(*theirs)

    samples = {t: rows for suite in SUITES for t, rows in read_samples(tmp_path / suite).items()}
    assert samples.keys() > {"piqa", "hellaswag", "boolq", "lambada_openai", "wikitext"}
    for task, rows in samples.items():
        (path,) = (tmp_path / "theirs").glob(f"*{os.sep}samples_{task}_*.jsonl")
        other = {r["doc_id"]: r for r in map(json.loads, path.read_text().splitlines())}
        assert len(rows) == len(other) > 0
        for row in rows:
            sample = other[row["doc_id"]]
            assert [row[key] == sample[key] for key in ("doc_hash", "prompt_hash")] == [True] * 2
            for answer, given in zip(row["answers"], sample["filtered_resps"], strict=True):
                if isinstance(answer, str):
                    assert answer.removeprefix(" ") == given
                elif isinstance(answer, list):
                    assert answer[0] == pytest.approx(float(given[0]), abs=2e-4, rel=1e-6)
                    assert str(answer[1]) == given[1]
                else:
                    assert answer == pytest.approx(float(given), rel=1e-4)
            for metric in sample["metrics"]:
                assert row[metric] == pytest.approx(sample[metric], rel=1e-4), metric

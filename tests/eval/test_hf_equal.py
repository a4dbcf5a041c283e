"""Our lm_eval model over a checkpoint, and `lm_eval --model hf` on its export: the same numbers.

The reference is the harness's own class, which opens the exported folder as a user's command makes
it do. Where it differs from what is right, a test of its own says so.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from canon_pretrain.data.tokenizer import load_tokenizer
from canon_pretrain.hf.export import export
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.results import read_samples
from eval.model.lm import CanonLM
from eval.model.target import load_model
from tests.data_folders import make_data_folder, sentence
from tests.eval_fixtures import stage_fixtures
from tests.hf_exports import hub_environment, plant_run
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
)


@dataclass
class Pair:
    """One model, as each side has it."""

    ours: CanonLM
    exported: CanonLM
    theirs: HFLM

    def ask(self, kind: str, asked: list[tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
        """Our answers over the checkpoint, equal to those over the export, and theirs."""
        requests = [Instance(kind, {}, given, index) for index, given in enumerate(asked)]
        ours, exported, theirs = (
            getattr(lm, kind)(requests, disable_tqdm=True)
            for lm in (self.ours, self.exported, self.theirs)
        )
        assert not differences(exported, ours)
        return ours, theirs


def differences(found: list[Any], expected: list[Any]) -> list[tuple[int, Any, Any]]:
    """Those answers that are further apart than 1e-4 (of sums: and 1e-4 of it), or not equal."""
    apart = []
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        wanted = other
        if isinstance(other, float):
            wanted = pytest.approx(other, rel=1e-4, abs=1e-4)
        elif isinstance(other, tuple):
            wanted = (pytest.approx(other[0], rel=0, abs=1e-4), other[1])
        if one != wanted:
            apart.append((index, one, other))
    return apart


def opinionated(name: str, **changes: Any) -> Transformer:
    """A model whose likeliest tokens are text; other bytes each tokenizer writes in its own way."""
    model = build(replace(variant(name), vocab_size=300, **changes))
    with torch.no_grad():
        model.output.weight[[i for i in range(NO_TEXT) if i != 2]] = 0.0
    return model


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    folder = tmp_path_factory.mktemp("equal")
    data = folder / "data"
    make_data_folder(data, [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])
    with pytest.MonkeyPatch.context() as patch:
        # the code that travels with an export is copied there, by default below the home folder
        modules = str(folder / "modules")
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patch.syspath_prepend(modules)
        yield {name: make_pair(name, folder / name.replace(" ", "-"), data) for name in NAMES}


def make_pair(name: str, folder: Path, data: Path) -> Pair:
    checkpoint = plant_run(folder / "run", opinionated(name), data=data)
    export(checkpoint, folder / "out")
    theirs = their_model(folder / "out", add_bos=False)
    return Pair(*our_models(checkpoint, folder / "out", data), theirs)


def our_models(checkpoint: Path, out: Path, data: Path, **options: Any) -> Iterator[CanonLM]:
    """Ours over the checkpoint and over its export, each with the tokenizer that it has."""
    tokenizers = load_tokenizer(data, eos=2), load_tokenizer(out / "tokenizer.json", eos=2)
    for path, tokenizer in zip((checkpoint, out), tokenizers, strict=True):
        model = load_model(path, torch.device("cpu"))
        yield CanonLM(model, tokenizer, max_length=MAX_LENGTH, batch_tokens=150, **options)


def their_model(folder: Path, *, add_bos: bool) -> HFLM:
    """What `lm_eval --model hf --model_args pretrained=FOLDER,...` makes."""
    given = {"device": "cpu", "dtype": "float32", "max_length": MAX_LENGTH, "prefix_token_id": 2}
    given["batch_size"] = 5
    return HFLM(pretrained=str(folder), trust_remote_code=True, add_bos_token=add_bos, **given)


def scored() -> list[tuple[str, str]]:
    """Contexts and continuations of every shape that a suite may ask for."""
    text = sentence(3, 400)
    asked = []
    for seed in range(4):  # multiple choice: one context, choices of unequal lengths
        context = sentence(seed, 3 + 7 * seed)
        asked += [(context, f" {sentence(10 * seed + n, 1 + 3 * n)}") for n in range(1, 4)]
    asked += [("is it so", choice) for choice in (" to", " in", " by", " to")]  # one token each
    asked += [(UNICODE, f" {UNICODE[::-1]}"), ("the café", " naïve"), ("\U0001f642", "\U0001f642")]
    asked += [("the of ", "a space moves"), ("the\n\n", " lines"), ("a </s> is text", " as </s>")]
    asked += [("", " nothing before it"), ("", "the"), ("", UNICODE)]
    # these lose their beginning
    return [*asked, (text, " of the"), (text, text[:90]), (text[:30], text[30:100])]


def test_loglikelihoods(pairs):
    for name, pair in pairs.items():
        contexts = [(sentence(seed, 4), {"until": [], "max_gen_toks": 1}) for seed in range(9)]
        requests = [Instance("generate_until", {}, given, 0) for given in contexts]
        likeliest = pair.ours.generate_until(requests)
        asked = scored() + [(c, text) for (c, _), text in zip(contexts, likeliest, strict=True)]
        found, expected = pair.ask("loglikelihood", asked)
        assert not differences(found, expected), name
        assert {is_greedy for _, is_greedy in found} == {True, False}


def test_rolling_loglikelihoods(pairs):
    text = sentence(5, 300)
    for name, pair in pairs.items():
        texts = ["a", UNICODE, UNICODE * 6, text, "the of\n\nand to\n", ""]
        ids = [pair.ours.tok_encode(text[:end]) for end in range(len(text))]
        for size in (MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1, 2 * MAX_LENGTH):
            texts.append(next(text[:end] for end in range(len(text)) if len(ids[end]) == size))
        found, expected = pair.ask("loglikelihood_rolling", [(text,) for text in texts])
        assert not differences(found, expected), name


def questions() -> list[tuple[str, dict[str, Any]]]:
    """Prompts of unequal lengths, so padded on the left, with and without what ends an answer."""
    contexts = [sentence(seed, words) for seed, words in enumerate((1, 2, 9, 17, 30, 200))]
    contexts += [UNICODE, "the of ", "to be </s>\n\nAnswer me:"]
    asked = []
    for until in ([], ["he"], ["\n", "a"]):  # in the middle of a token, most of them
        asked += [(context, {"until": until, "max_gen_toks": 9}) for context in contexts]
    asked += [(context, {"until": "t", "max_gen_toks": 1}) for context in contexts]
    return [*asked, *((c, {"until": [" zz"], "max_gen_toks": 21}) for c in contexts[3:])]


def test_generations(pairs):
    """Theirs are decoded without what stands before: SentencePiece drops their first space."""
    lengths = set()
    for name, pair in pairs.items():
        found, expected = pair.ask("generate_until", questions())
        assert [answer.removeprefix(" ") for answer in found] == expected, name
        lengths |= {len(pair.ours.tok_encode(text)) for text in found}
    assert {0, 1} < lengths


@pytest.mark.parametrize("name", [NAMES[0], NAMES[5]])
def test_with_bos(pairs, name):
    """Before every text then, an empty context excepted, and the first to go where it is long."""
    folder = Path(pairs[name].theirs.pretrained)
    data = folder.parents[1] / "data"
    checkpoint = folder.parent / "run" / "checkpoint" / "step-3"
    ours = our_models(checkpoint, folder, data, add_bos=True)
    pair = Pair(*ours, their_model(folder, add_bos=True))
    assert pair.ours.tok_encode("the") == pair.theirs.tok_encode("the") != []
    for kind, asked in (
        ("loglikelihood", scored()),
        ("loglikelihood_rolling", [(sentence(n, n),) for n in (1, 12, 90)]),
        ("generate_until", [*questions()[:9], ("", {"until": [], "max_gen_toks": 9})]),
    ):
        found, expected = pair.ask(kind, asked)
        if kind == "generate_until":
            found = [text.removeprefix(" ") for text in found]
        assert not differences(found, expected), kind


SUITES = ("discriminative", "jrt_squad", "babilong_qa1_0k", "1-hop-0")
LIMIT = ("--limit", "12")  # all of the fixtures' items; of the 1,000 probes so many


@pytest.mark.system
def test_the_commands(tmp_path):
    """`eval run` and `lm_eval --model hf`: the same items, prompts, answers and scores."""
    data, out, staged = tmp_path / "data", tmp_path / "out", tmp_path / "staged"
    make_data_folder(data, [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])
    model = opinionated("nope ABCD", max_seq_len=2048)
    export(plant_run(tmp_path / "run", model, data=data), out)
    stage_fixtures(staged)
    environment = hub_environment(tmp_path) | {"CANON_EVAL_DATA": str(staged)}
    environment["PYTHONPATH"] = str(ROOT)
    options = f"pretrained={out},trust_remote_code=True,dtype=float32,add_bos_token=False"
    for suite in SUITES:
        words = ["eval", "run", "--checkpoint", out, "--suite", suite, "--out", tmp_path / suite]
        run(environment, tmp_path, [*words, "--max_length", 2048, *LIMIT])
    theirs = ["lm_eval", "--model", "hf", "--model_args", options, "--device", "cpu"]
    theirs += ["--include_path", ROOT / "eval" / "tasks", "--tasks", ",".join(SUITES)]
    theirs += ["--metadata", json.dumps({"probes": str(tmp_path / "1-hop-0" / "probes")})]
    theirs += ["--batch_size", "3", "--log_samples", "--output_path", tmp_path / "theirs", *LIMIT]
    run(environment, tmp_path, theirs)

    samples = {t: rows for suite in SUITES for t, rows in read_samples(tmp_path / suite).items()}
    assert samples.keys() > {"piqa", "hellaswag", "boolq", "lambada_openai", "wikitext"}
    for task, rows in samples.items():
        (path,) = (tmp_path / "theirs").glob(f"*{os.sep}samples_{task}_*.jsonl")
        other = {r["doc_id"]: r for r in map(json.loads, path.read_text().splitlines())}
        assert len(rows) == len(other) > 0
        for row in rows:
            same_sample(task, row, other[row["doc_id"]])


def run(environment: dict[str, str], folder: Path, words: list[Any]) -> None:
    command = [sys.executable, "-m", *map(str, words)]
    told = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=folder, env=environment, **told)
    assert done.returncode == 0 and "y/N" not in done.stdout + done.stderr, done


def same_sample(task: str, row: dict[str, Any], other: dict[str, Any]) -> None:
    """The same item and prompt, the same answers, and the same score of it."""
    assert (row["doc_hash"], row["prompt_hash"]) == (other["doc_hash"], other["prompt_hash"])
    for answer, given in zip(row["answers"], other["filtered_resps"], strict=True):
        if isinstance(answer, str):
            assert answer.removeprefix(" ") == given
        elif isinstance(answer, list):
            assert answer[0] == pytest.approx(float(given[0]), abs=2e-4, rel=1e-6)
            assert str(answer[1]) == given[1]
        else:
            assert answer == pytest.approx(float(given), rel=1e-4)
    for metric in other["metrics"]:
        assert row[metric] == pytest.approx(other[metric], rel=1e-4), (task, metric)

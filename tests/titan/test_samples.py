"""Samples while training: against full passes, equal at any world size, without effect on it."""

import json
import math
import shutil
import sys
import time

import pytest
import torch
import torch.distributed as dist

from canon_pretrain import data, titan
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.report import content as report_content
from canon_pretrain.report import sections
from canon_pretrain.report.content import SampleRow, SampleText
from canon_pretrain.report.record import unix_time
from canon_pretrain.run.sections import Samples
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import open_data
from canon_pretrain.titan.samples import TextSamples
from tests.data_folders import make_data_folder, sentence, tokenizer
from tests.fault_runs import wrap
from tests.ranks import assert_refused, assert_same_run, events, launch
from tests.support import debug_run, refused
from tests.variants import prefer_ids_from

REPLICAS = ["--parallelism.data_parallel_replicate_degree", 2]
PROMPTS = ["the of and", "", "Zürich\n\tfrom"]
EVERY_4 = ["--samples.interval", 4, "--samples.max_tokens", 12, "--samples.prompts", *PROMPTS]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of text with its tokenizer, vocab_size 300."""
    folder = tmp_path_factory.mktemp("text") / "data"
    make_data_folder(folder, [[sentence(seed, 90) for seed in range(60)]], [sentence(99, 400)])
    return folder


def job_of(text, prompts=PROMPTS, *more, **settings):
    job = parse_job([*map(str, debug_run(text, text / "no-run")), *more])
    job.samples = Samples(interval=4, prompts=prompts, **{"max_tokens": 12} | settings)
    return job


def model_of(job):
    open_data(job)  # sets vocab_size
    model = Transformer(job.model_args)
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that the most likely token is not always the same
    return model.train()


@pytest.fixture
def written(monkeypatch):
    """Return a function: a job and a model -> what it writes at a step."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def write(job, model, step):
        opened = open_data(job)
        fields = TextSamples(job, opened.training, opened.prompts).write(model, step)
        assert model.training and fields.pop("seconds") > 0
        return fields

    return write


@torch.no_grad()
def continued(model, ids, generator, temperature, max_tokens=12):
    """Return the tokens after `ids` by full passes and a loop over the cumulative sum."""
    draws, found = torch.rand(max_tokens, dtype=torch.float64, generator=generator), []
    for draw in draws.tolist():
        logits = model(torch.tensor([[*ids, *found]]))[0, -1].double()
        token = int(logits.argmax())
        if temperature:
            total, token = 0.0, -1
            for each in (logits / temperature).softmax(-1).tolist():
                total, token = total + each, token + 1
                if total > draw:
                    break
        if token == tokenizer().eos_id:
            break
        found.append(token)
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_full_passes(text, written, temperature):
    """Also: a prompt's text depends on no other prompt, and global random numbers are not used."""
    model, before = model_of(job := job_of(text, temperature=temperature)), torch.get_rng_state()
    fields = written(job, model, 8)
    assert torch.equal(torch.get_rng_state(), before)
    known = tokenizer()
    for k, (prompt, sample) in enumerate(zip(PROMPTS, fields["samples"], strict=True)):
        ids = known.encode(prompt).tolist() or [known.eos_id]
        generator = torch.Generator().manual_seed(8 * 2**20 + k)
        found = continued(model.eval(), ids, generator, temperature)
        whole = known.decode(ids + found)
        start = len(known.decode(ids))
        assert sample == {"prompt": prompt, "text": whole[start:], "tokens": len(found)}
        assert whole[:start] == prompt
    assert len({sample["text"] for sample in fields["samples"]}) == 3
    (alone,) = written(job_of(text, PROMPTS[:1], temperature=temperature), model, 8)["samples"]
    assert alone == fields["samples"][0]
    (later,) = written(job_of(text, PROMPTS[:1], temperature=temperature), model, 12)["samples"]
    assert (later == alone) is not bool(temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_has_diverged_has_a_reason(text, written, temperature):
    model = model_of(job := job_of(text, temperature=temperature))
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    fields = written(job, model, 8)
    assert fields["reason"] == "not finite"
    assert fields["samples"] == [{"prompt": each, "text": "", "tokens": 0} for each in PROMPTS]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_that_pad_the_vocabulary_are_not_written(text, written, temperature):
    job = job_of(text, PROMPTS, "--model.vocab_size", "340", temperature=temperature)
    model = model_of(job)
    prefer_ids_from(model, 300)
    fields = written(job, model, 8)
    known = tokenizer()
    for k, (prompt, sample) in enumerate(zip(PROMPTS, fields["samples"], strict=True)):
        ids = known.encode(prompt).tolist() or [known.eos_id]
        cut = lambda tokens_BT: model(tokens_BT)[..., :300]  # noqa: E731
        generator = torch.Generator().manual_seed(8 * 2**20 + k)
        found = continued(cut, ids, generator, temperature)
        assert sample["tokens"] == len(found)
        assert sample["text"] == known.decode(ids + found)[len(known.decode(ids)) :]


def test_experts_drop_no_tokens(text, written):
    words = "--model.ffn moe --model.canon_set A --model.moe_capacity 0.25".split()
    model, modes = model_of(job := job_of(text, PROMPTS, *words)), set()
    model.register_forward_pre_hook(lambda module, _: modes.add(module.training))
    written(job, model, 8)
    assert modes == {False}


def test_what_cannot_be_sampled_is_refused_at_the_start(text, tmp_path, data_folder):
    known = tokenizer()
    (size,) = (len(known.encode(prompt)) for prompt in PROMPTS[:1])
    fits = 64 + 1 - size  # the last token is not read
    opened = open_data(job_of(text, PROMPTS[:2], max_tokens=fits))
    assert opened.prompts == [known.encode(PROMPTS[0]).tolist(), [known.eos_id]]
    with refused("samples.too_long", prompt=0, num_tokens=size):
        open_data(job_of(text, PROMPTS[:2], max_tokens=fits + 1))
    with refused("samples.tokenizer", folder=data_folder):  # ids without a tokenizer
        open_data(job_of(data_folder))
    other = tmp_path / "other"
    shutil.copytree(text, other)
    (other / known.file_name).write_bytes(known.model + b"\0")
    with refused("samples.tokenizer", folder=other):
        open_data(job_of(other))
    job = job_of(other)
    job.samples = Samples(prompts=PROMPTS)  # off
    assert open_data(job).prompts == []


def test_a_prompt_is_listed_once(text):
    """Reports have one row of texts per prompt."""
    with refused("config.conflict", key="samples.prompts"):
        job_of(text, PROMPTS, "--samples.interval", "4", "--samples.prompts", "a", "b", "a")


def test_a_report_keeps_the_spaces_of_a_text():
    rows = [SampleRow(k, [SampleText(each)]) for k, each in enumerate((" the\n", " \n"))]
    table = sections.samples(report_content.Samples("", 2, rows), ["run"])
    assert [text.text for _, text in table.rows] == [" the\n", "(no text)"]


def forbid_samples(rank):
    """Fail a launch that imports what samples need."""
    for package, name in ((titan, "samples"), (data, "tokenizer")):
        if hasattr(package, name):
            delattr(package, name)
        sys.modules[f"{package.__name__}.{name}"] = None  # type: ignore[assignment]


def slow_answers(rank):
    from canon_pretrain.titan import samples

    wrap(samples, "generate", before=lambda *_: time.sleep(3))


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory):
    """A finished run of two ranks without samples."""
    folder = tmp_path_factory.mktemp("plain")
    launch(*debug_run(text, folder / "run"), output=folder / "out", before=forbid_samples)
    return folder / "run"


def written_by(run):
    return {event["step"]: event["samples"] for event in events(run, "samples")}


@pytest.mark.system
def test_samples_do_not_change_training(text, plain, tmp_path):
    """Switched on at a resume, stopped where samples are due; the last line lost, then again."""
    run, options = tmp_path / "run", {"output": tmp_path / "out"}
    words = debug_run(text, run)
    launch(*words, "--run.stop_at", 3, **options)
    launch(*words, *EVERY_4, "--run.stop_at", 8, **options)
    first = written_by(run)

    # switched on: a change that the log records
    assert [*first] == [4, 8]
    (changed,) = events(run, "changed")
    assert {x for x in changed["config"] if x.startswith("samples.")} == {
        "samples.interval",
        "samples.max_tokens",
        "samples.prompts",
    }

    # the last samples are lost: the next launch writes them again, the one after it does not
    log = run / "log.jsonl"
    lines = [x for x in log.read_text().splitlines() if (8, "samples") != at_and_name(x)]
    log.write_text("\n".join(lines) + "\n")
    for _ in range(2):
        launch(*words, *EVERY_4, **options)

    assert [event["step"] for event in events(run, "samples")] == [4, 8, 12]
    assert written_by(run)[8] == first[8]
    (last,) = (event for event in events(run, "samples") if event["step"] == 12)
    assert last["tokens"] == 12 * 12 * 64
    assert_same_run(run, plain, step=12)


def at_and_name(line):
    event = json.loads(line)
    return event.get("step"), event["event"]


@pytest.mark.system
def test_the_same_samples_at_any_world_size(text, plain, tmp_path):
    """Written by launches of a finished run, also compiled and with replicated weights."""
    found = []
    for ranks, more in ((1, []), (2, []), (2, REPLICAS), (2, ["--compile.enable"]), (3, [])):
        run = tmp_path / f"run-{len(found)}"
        shutil.copytree(plain, run)
        launch(*debug_run(text, run), *EVERY_4, *more, ranks=ranks, output=tmp_path / "out")
        found.append(written_by(run))
    assert [*found[0]] == [12] and all(each == found[0] for each in found)
    ended = launch(
        *debug_run(text, tmp_path / "new"),
        *EVERY_4,
        "--samples.max_tokens",
        65,
        check=False,
        output=tmp_path / "out",
    )
    assert_refused(ended, "samples.too_long")


@pytest.mark.system
def test_speed_leaves_samples_out(text, plain, tmp_path):
    """The time between two logged steps is that of samples, 3 s at least, and of the step."""
    run = tmp_path / "run"
    launch(*debug_run(text, run), *EVERY_4, output=tmp_path / "out", before=slow_answers)
    lines = {event["step"]: event for event in events(run, "step")}
    for at in (4, 8):
        (paused,) = (event["seconds"] for event in events(run, "samples") if event["step"] == at)
        begin, end = (unix_time(lines[step]["time"]) for step in (at, at + 1))
        assert paused > 3
        assert lines[at + 1]["seconds_per_step"] == pytest.approx(end - begin - paused, abs=1)
    assert_same_run(run, plain, step=12)

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
    documents = [sentence(seed, 90) for seed in range(60)]
    make_data_folder(folder, [documents], [sentence(99, 400)])
    return folder


def job_of(text, *options, prompts=PROMPTS, max_tokens=12, temperature=0.0):
    """Return a debug job that samples at every fourth step."""
    job = parse_job([*map(str, debug_run(text, text / "no-run")), *options])
    job.samples = Samples(
        interval=4, prompts=prompts, max_tokens=max_tokens, temperature=temperature
    )
    return job


def model_of(job):
    """Return a model with the vocabulary of the job's data, in training mode."""
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
    eos_id = tokenizer().eos_id
    draws = torch.rand(max_tokens, dtype=torch.float64, generator=generator).tolist()
    new_ids = []
    for draw in draws:
        logits = model(torch.tensor([[*ids, *new_ids]]))[0, -1].double()
        token = drawn(logits / temperature, draw) if temperature else int(logits.argmax())
        if token == eos_id:
            break
        new_ids.append(token)
    return new_ids


def drawn(logits, draw):
    """Return the first id at which the cumulative probability is over `draw`, else the last."""
    total = 0.0
    for token, probability in enumerate(logits.softmax(-1).tolist()):
        total += probability
        if total > draw:
            return token
    return len(logits) - 1


def expected_sample(model, prompt, number, temperature):
    """Return what a sample of step 8 has for the prompt of this number."""
    text_tokenizer = tokenizer()
    ids = text_tokenizer.encode(prompt).tolist() or [text_tokenizer.eos_id]
    generator = torch.Generator().manual_seed(8 * 2**20 + number)
    new_ids = continued(model, ids, generator, temperature)
    whole = text_tokenizer.decode(ids + new_ids)
    start = len(text_tokenizer.decode(ids))
    assert whole[:start] == prompt
    return {"prompt": prompt, "text": whole[start:], "tokens": len(new_ids)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_full_passes(text, written, temperature):
    job = job_of(text, temperature=temperature)
    model = model_of(job)
    before = torch.get_rng_state()

    samples = written(job, model, 8)["samples"]

    assert torch.equal(torch.get_rng_state(), before)  # global random numbers are not used
    model.eval()
    for number, (prompt, sample) in enumerate(zip(PROMPTS, samples, strict=True)):
        assert sample == expected_sample(model, prompt, number, temperature)
    assert len({sample["text"] for sample in samples}) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_depends_on_the_step_and_no_other_prompt(text, written, temperature):
    job = job_of(text, temperature=temperature)
    job_alone = job_of(text, prompts=PROMPTS[:1], temperature=temperature)
    model = model_of(job)

    first, *_ = written(job, model, 8)["samples"]
    (alone,) = written(job_alone, model, 8)["samples"]
    (later,) = written(job_alone, model, 12)["samples"]

    assert alone == first
    assert (later != alone) is bool(temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_has_diverged_has_a_reason(text, written, temperature):
    job = job_of(text, temperature=temperature)
    model = model_of(job)
    with torch.no_grad():
        model.norm.weight[0] = math.nan

    fields = written(job, model, 8)

    assert fields["reason"] == "not finite"
    for prompt, sample in zip(PROMPTS, fields["samples"], strict=True):
        assert sample == {"prompt": prompt, "text": "", "tokens": 0}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_that_pad_the_vocabulary_are_not_written(text, written, temperature):
    job = job_of(text, "--model.vocab_size", "340", temperature=temperature)
    model = model_of(job)
    prefer_ids_from(model, 300)

    def without_padding(tokens_BT):
        return model(tokens_BT)[..., :300]

    samples = written(job, model, 8)["samples"]

    for number, (prompt, sample) in enumerate(zip(PROMPTS, samples, strict=True)):
        assert sample == expected_sample(without_padding, prompt, number, temperature)


def test_experts_drop_no_tokens(text, written):
    """In training mode they do; `written` checks that the model is in that mode again."""
    options = "--model.ffn moe --model.canon_set A --model.moe_capacity 0.25".split()
    job = job_of(text, *options)
    model = model_of(job)
    modes = set()
    model.register_forward_pre_hook(lambda module, _: modes.add(module.training))

    written(job, model, 8)

    assert modes == {False}


def test_a_prompt_and_its_text_fit_into_the_context(text):
    text_tokenizer = tokenizer()
    prompt_ids = text_tokenizer.encode(PROMPTS[0]).tolist()
    max_tokens = 64 + 1 - len(prompt_ids)  # the last token is not read

    opened = open_data(job_of(text, prompts=PROMPTS[:2], max_tokens=max_tokens))
    assert opened.prompts == [prompt_ids, [text_tokenizer.eos_id]]

    with refused("samples.too_long", prompt=0, num_tokens=len(prompt_ids)):
        open_data(job_of(text, prompts=PROMPTS[:2], max_tokens=max_tokens + 1))


def test_samples_need_the_tokenizer_of_the_data(text, tmp_path, data_folder):
    # ids without a tokenizer
    with refused("samples.tokenizer", folder=data_folder):
        open_data(job_of(data_folder))

    # another tokenizer
    other = tmp_path / "other"
    shutil.copytree(text, other)
    text_tokenizer = tokenizer()
    (other / text_tokenizer.file_name).write_bytes(text_tokenizer.model + b"\0")
    job = job_of(other)
    with refused("samples.tokenizer", folder=other):
        open_data(job)

    # without samples it is not read
    job.samples = Samples(prompts=PROMPTS)
    assert open_data(job).prompts == []


def test_a_prompt_is_listed_once(text):
    """Reports have one row of texts per prompt."""
    with refused("config.conflict", key="samples.prompts"):
        job_of(text, "--samples.interval", "4", "--samples.prompts", "a", "b", "a")


def test_a_report_keeps_the_spaces_of_a_text():
    rows = [SampleRow(0, [SampleText(" the\n")]), SampleRow(1, [SampleText(" \n")])]
    table = sections.samples(report_content.Samples("", 2, rows), ["run"])
    assert [text.text for _, text in table.rows] == [" the\n", "(no text)"]


def forbid_samples(rank):
    """Fail a launch that imports what samples need."""
    for package, name in ((titan, "samples"), (data, "tokenizer")):
        if hasattr(package, name):
            delattr(package, name)
        sys.modules[f"{package.__name__}.{name}"] = None  # type: ignore[assignment]


def slow_answers(rank):
    """Let each sampling take 3 s."""
    from canon_pretrain.titan import samples

    wrap(samples, "generate", before=lambda *_: time.sleep(3))


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory):
    """A finished run of two ranks without samples."""
    folder = tmp_path_factory.mktemp("plain")
    launch(*debug_run(text, folder / "run"), output=folder / "out", before=forbid_samples)
    return folder / "run"


def written_by(run):
    """Return the samples in a run's log by step."""
    return {event["step"]: event["samples"] for event in events(run, "samples")}


@pytest.mark.system
def test_samples_do_not_change_training(text, plain, tmp_path):
    """Switched on at a resume, stopped where samples are due; the last line lost, then again."""
    run = tmp_path / "run"
    command = debug_run(text, run)
    output = tmp_path / "out"
    launch(*command, "--run.stop_at", 3, output=output)
    launch(*command, *EVERY_4, "--run.stop_at", 8, output=output)
    samples_before = written_by(run)

    # switched on: a change that the log records
    assert [*samples_before] == [4, 8]
    (change,) = events(run, "changed")
    assert {key for key in change["config"] if key.startswith("samples.")} == {
        "samples.interval",
        "samples.max_tokens",
        "samples.prompts",
    }

    # the last samples are lost: the next launch writes them again, the one after it does not
    remove_samples(run / "log.jsonl", step=8)
    for _ in range(2):
        launch(*command, *EVERY_4, output=output)

    logged = events(run, "samples")
    assert [event["step"] for event in logged] == [4, 8, 12]
    assert written_by(run)[8] == samples_before[8]
    assert logged[-1]["tokens"] == 12 * 12 * 64
    assert_same_run(run, plain, step=12)


def remove_samples(log, step):
    """Remove the samples of a step from a log."""
    kept = []
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if (event["event"], event.get("step")) != ("samples", step):
            kept.append(line)
    log.write_text("\n".join(kept) + "\n")


@pytest.mark.system
def test_the_same_samples_at_any_world_size(text, plain, tmp_path):
    """Written by launches of a finished run, also compiled and with replicated weights."""
    samples_of_runs = []
    for ranks, options in ((1, []), (2, []), (2, REPLICAS), (2, ["--compile.enable"]), (3, [])):
        run = tmp_path / f"run-{len(samples_of_runs)}"
        shutil.copytree(plain, run)
        launch(*debug_run(text, run), *EVERY_4, *options, ranks=ranks, output=tmp_path / "out")
        samples_of_runs.append(written_by(run))

    assert [*samples_of_runs[0]] == [12]
    for samples in samples_of_runs:
        assert samples == samples_of_runs[0]


@pytest.mark.system
def test_samples_that_do_not_fit_are_refused_by_all_ranks(text, tmp_path):
    ended = launch(
        *debug_run(text, tmp_path / "run"),
        *EVERY_4,
        *("--samples.max_tokens", 65),
        check=False,
        output=tmp_path / "out",
    )
    assert_refused(ended, "samples.too_long")


@pytest.mark.system
def test_speed_leaves_samples_out(text, plain, tmp_path):
    """The time between two logged steps is that of samples, 3 s at least, and of the step."""
    run = tmp_path / "run"
    launch(*debug_run(text, run), *EVERY_4, output=tmp_path / "out", before=slow_answers)

    steps = {event["step"]: event for event in events(run, "step")}
    pauses = {event["step"]: event["seconds"] for event in events(run, "samples")}
    assert len(events(run, "samples")) == len(pauses)
    for step in (4, 8):
        begin = unix_time(steps[step]["time"])
        end = unix_time(steps[step + 1]["time"])
        trained = end - begin - pauses[step]
        assert pauses[step] > 3
        assert steps[step + 1]["seconds_per_step"] == pytest.approx(trained, abs=1)
    assert_same_run(run, plain, step=12)

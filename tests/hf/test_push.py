"""Pushes to a stand-in of the hub, over real HTTP: what is published, and each refusal."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from canon_pretrain.hf.export import RECORD
from tests.fake_model_hub import USER, model_hub
from tests.hf_exports import isolate_remote_code, plant_run
from tests.hf_exports import quick as quick
from tests.support import ROOT, canon_stage, error_codes
from tests.variants import VARIANTS, build, random_tokens

main = canon_stage("hf")

# httpx on huggingface_hub's way to send large files
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPO = f"{USER}/model"
ERRORS = {
    "whoami": {401: "hub.no_access", 500: "hub.http_error"},
    "repos/create": {403: "hub.no_access", 402: "hub.http_error"},
    "validate-yaml": {400: "hub.rejected"},
    "preupload": {401: "hub.no_access", 429: "hub.http_error"},
    "lfs/objects/batch": {403: "hub.no_access", 500: "hub.http_error"},
    "PUT /large": {403: "hub.no_access", 503: "hub.http_error"},
    "POST /api/models/me/model/commit": {409: "hub.conflict", 412: "hub.conflict", 500: None},
}


@pytest.fixture(scope="module")
def model():
    return build(VARIANTS["nope ABCD"])


@pytest.fixture
def checkpoint(model, tmp_path):
    return plant_run(tmp_path / "run", model)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with model_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


def push(*words):
    main(["push", *map(str, words)])


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as left:
        push(*words)
    assert left.value.code == 2
    return error_codes(capsys.readouterr().err)


@pytest.mark.system
def test_a_push_loads_from_the_hub(hub, checkpoint, model, tmp_path, capsys, monkeypatch):
    isolate_remote_code(monkeypatch, tmp_path / "modules")
    push(checkpoint, "model", "--private", "--no-tokenizer", "--license", "apache-2.0")
    assert hub.private == {REPO} and len(hub.models[REPO]["main"]) == 2
    assert f"{hub.url}/{REPO}/commit/" in capsys.readouterr().out
    files = hub.files()
    record = json.loads(files[RECORD])
    assert set(record["files"]) == set(files) - {".gitattributes"}
    assert record["checkpoint"] == "run/checkpoint/step-3"
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    card = files["README.md"].decode()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "apache-2.0"
    assert f'from_pretrained("{REPO}", trust_remote_code=True)' in card
    (tmp_path / "got").mkdir()
    for name, content in files.items():
        (tmp_path / "got" / name).write_bytes(content)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "got", trust_remote_code=True)
    tokens_BT = random_tokens(model.args, rows=1, num_tokens=12)
    assert (opened(tokens_BT).logits - model(tokens_BT)).abs().max() < 1e-4
    # an export has the same bytes, but for names
    main(["export", str(checkpoint), str(tmp_path / "out"), "--no-tokenizer"])
    same = set(record["files"]) - {RECORD, "README.md"}
    assert all((tmp_path / "out" / name).read_bytes() == files[name] for name in same)


def test_a_second_push_replaces_the_files_of_the_first(hub, checkpoint, tmp_path):
    main(["export", str(checkpoint), str(tmp_path / "out"), "--no-tokenizer"])
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    (tmp_path / "out" / "old.py").write_text("1")
    (tmp_path / "out" / RECORD).write_text(
        json.dumps(record | {"files": [*record["files"], "old.py"]})
    )
    (tmp_path / "out" / "mine.txt").write_text("not of the export")
    push(tmp_path / "out", REPO)
    assert hub.files()["old.py"] == b"1" and "mine.txt" not in hub.files()
    hub.files()["notes.txt"] = b"kept"
    push(checkpoint, REPO, "--no-tokenizer", "--dtype", "bfloat16", "--revision", "step-3")
    assert "old.py" in hub.files()  # another branch
    branch = hub.files(REPO, "step-3")
    assert branch["notes.txt"] == b"kept" and "old.py" not in branch
    (tmp_path / "w").write_bytes(branch["model.safetensors"])
    assert {t.dtype for t in load_file(tmp_path / "w").values()} == {torch.bfloat16}


def test_a_dry_run_uses_no_network(checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    push(checkpoint, "someone/model", "--dry_run", "--no-tokenizer")
    printed = capsys.readouterr().out
    main(["export", str(checkpoint), str(tmp_path / "out"), "--no-tokenizer"])
    for path in (tmp_path / "out").iterdir():
        assert f"  {path.name}\n" in printed
    with pytest.raises(SystemExit, match="2"):
        push(checkpoint, "someone/model", "--no-tokenizer", "--dry")  # options are not abbreviated
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.replace("THIS_FOLDER", "someone/model") in printed
    push(checkpoint, "someone/model", "--dry_run", "--no-tokenizer", "--revision", "step-3")
    printed = capsys.readouterr().out
    assert 'from_pretrained("someone/model", revision="step-3", ' in printed
    assert "pretrained=someone/model,revision=step-3," in printed and "THIS_FOLDER" not in printed


def test_a_card_that_was_edited_on_the_hub_is_kept(hub, checkpoint, capsys):
    words = checkpoint, REPO, "--no-tokenizer"
    push(*words)
    push(*words, "--license", "mit")
    assert b"license: mit" in hub.files()["README.md"]
    hub.files()["README.md"] = b"mine"
    capsys.readouterr()
    push(*words, "--dtype", "bfloat16")
    assert hub.files()["README.md"] == b"mine" and "README.md" in capsys.readouterr().err
    assert json.loads(hub.files()[RECORD])["dtype"] == "bfloat16"


@pytest.mark.parametrize("at", ERRORS)
def test_refusals_of_the_hub_publish_nothing(at, hub, checkpoint, capsys):
    words = (checkpoint, REPO, "--no-tokenizer")
    for status, code in ERRORS[at].items():
        hub.statuses = {at: status}
        assert refusal(capsys, *words) == [code or "hub.http_error"]
        assert len(hub.models.get(REPO, {"main": [0]})["main"]) == 1
    hub.statuses = {}
    push(*words)
    assert RECORD in hub.files()


def test_an_interrupted_upload_publishes_nothing(hub, checkpoint, capsys):
    hub.cut = 1000
    assert refusal(capsys, checkpoint, REPO, "--no-tokenizer") == ["hub.unavailable"]
    assert len(hub.models[REPO]["main"]) == 1 and not hub.large
    hub.cut = None
    push(checkpoint, REPO, "--no-tokenizer")
    assert "model.safetensors" in hub.files()


def test_names_that_are_taken_or_of_others(hub, checkpoint, capsys, monkeypatch, tmp_path):
    words = (checkpoint, REPO, "--no-tokenizer")
    hub.models[REPO] = {"main": [{"config.json": b"{}", "README.md": b"mine"}]}
    assert refusal(capsys, *words) == ["hub.name_taken"]
    assert hub.files() == {"config.json": b"{}", "README.md": b"mine"}
    hub.models[REPO] = {"main": [{"README.md": b"mine"}]}
    assert refusal(capsys, *words, "--private") == ["hub.public_repo"]
    assert refusal(capsys, checkpoint, "other/model", "--no-tokenizer") == ["hub.no_access"]
    assert refusal(capsys, checkpoint, "a/b/c") == ["hub.repo_name"]
    main(["export", str(checkpoint), str(tmp_path / "out"), "--no-tokenizer"])
    assert refusal(capsys, tmp_path / "out", REPO, "--dtype", "float16") == ["option.conflict"]
    (tmp_path / "out" / "config.json").unlink()
    assert refusal(capsys, tmp_path / "out", REPO) == ["hf.incomplete_export"]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refusal(capsys, *words) == ["hub.no_access"]


def test_links_are_never_uploaded(hub, checkpoint, tmp_path, capsys):
    secret = tmp_path / "secret.txt"
    out = tmp_path / "out"
    main(["export", str(checkpoint), str(out), "--no-tokenizer"])
    record = json.loads((out / RECORD).read_text())

    # a file of the export that was replaced by a link
    for name in ("notes.txt", "README.md", "config.json", RECORD):
        content = (out / name).read_bytes() if (out / name).exists() else b""
        (out / name).unlink(missing_ok=True)
        secret.write_bytes(content or b"mine")
        (out / name).symlink_to(secret)
        if name == "notes.txt":
            files = [*record["files"], name]
            (out / RECORD).write_text(json.dumps(record | {"files": files}))
        assert refusal(capsys, out, REPO) == ["hf.not_an_export"]
        assert refusal(capsys, out, REPO, "--dry_run") == ["hf.not_an_export"]
        (out / name).unlink()
        (out / name).write_bytes(content)

    # a record that lists a file elsewhere
    for name in ("../secret.txt", str(secret), ".."):
        (out / RECORD).write_text(json.dumps(record | {"files": [*record["files"], name]}))
        assert refusal(capsys, out, REPO) in (["hf.not_an_export"], ["hf.incomplete_export"])
    assert not hub.models


PAGE = b"<html>Log in to the network</html>"


def test_a_page_of_another_server_is_no_refusal(hub, checkpoint, capsys):
    for status, at in ((200, "whoami"), (403, "whoami"), (404, "repos/create"), (200, "preupload")):
        hub.answers = {at: (status, PAGE, "text/html")}
        assert refusal(capsys, checkpoint, REPO, "--no-tokenizer") == ["hub.unexpected"]
        assert len(hub.models.get(REPO, {"main": [0]})["main"]) == 1


def test_an_answer_without_a_name(hub, checkpoint, capsys):
    for answer in ({}, [], None, {"name": None}, {"name": 5}):
        hub.answers = {"whoami": (200, json.dumps(answer).encode(), "application/json")}
        for repo in (REPO, "model"):
            assert refusal(capsys, checkpoint, repo, "--no-tokenizer") == ["hub.unexpected"]
    assert not hub.models


@pytest.mark.system
def test_no_token_or_no_network_fails_before_exporting(checkpoint, tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "canon_pretrain", "hf", "push", str(checkpoint), REPO]
    for more, code in (({}, "hub.no_token"), ({"HF_TOKEN": "hf_x"}, "hub.unavailable")):
        ended = subprocess.run(command, env=env | more, cwd=ROOT, capture_output=True, text=True)
        assert (ended.returncode, error_codes(ended.stderr)) == (2, [code])
        assert "Traceback" not in ended.stderr

"""Pushes to a stand-in of the hub, over real HTTP: what is published, and each refusal."""

import json
import os
import shutil
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
from tests.support import ROOT, canon_stage, command_error, error_codes
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
    "POST /api/models/me/model/commit": {
        409: "hub.conflict",
        412: "hub.conflict",
        500: "hub.http_error",
    },
}


@pytest.fixture(scope="module")
def model():
    """A small model."""
    return build(VARIANTS["nope ABCD"])


@pytest.fixture
def checkpoint(model, tmp_path):
    """A checkpoint of the model."""
    return plant_run(tmp_path / "run", model)


@pytest.fixture
def out(checkpoint, tmp_path):
    """An export of the checkpoint."""
    main(["export", str(checkpoint), str(tmp_path / "out"), "--no-tokenizer"])
    return tmp_path / "out"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The stand-in of the hub."""
    with model_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


def push(*words):
    """Run `canon hf push`."""
    main(["push", *map(str, words)])


def refusal(capsys, *words):
    """Push, expecting a failure; return the code of its error."""
    return command_error(capsys, push, *words)


def read_record(folder):
    """Return the record of an export."""
    return json.loads((folder / RECORD).read_text())


def write_record(folder, record):
    """Replace the record of an export."""
    (folder / RECORD).write_text(json.dumps(record))


@pytest.mark.system
def test_a_push_loads_from_the_hub(hub, checkpoint, model, tmp_path, capsys, monkeypatch):
    isolate_remote_code(monkeypatch, tmp_path / "modules")

    push(checkpoint, "model", "--private", "--no-tokenizer", "--license", "apache-2.0")

    assert hub.private == {REPO}
    assert len(hub.models[REPO]["main"]) == 2
    assert f"{hub.url}/{REPO}/commit/" in capsys.readouterr().out
    downloaded = tmp_path / "got"
    downloaded.mkdir()
    for name, content in hub.files().items():
        (downloaded / name).write_bytes(content)
    opened = AutoModelForCausalLM.from_pretrained(downloaded, trust_remote_code=True)
    tokens_BT = random_tokens(model.args, rows=1, num_tokens=12)
    assert (opened(tokens_BT).logits - model(tokens_BT)).abs().max() < 1e-4


@pytest.mark.system
def test_a_push_has_the_files_of_an_export(hub, checkpoint, out, tmp_path):
    push(checkpoint, "model", "--private", "--no-tokenizer", "--license", "apache-2.0")

    files = hub.files()
    record = json.loads(files[RECORD])
    assert set(record["files"]) == set(files) - {".gitattributes"}
    assert record["checkpoint"] == "run/checkpoint/step-3"
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]

    card = files["README.md"].decode()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "apache-2.0"
    assert f'from_pretrained("{REPO}", trust_remote_code=True)' in card

    # an export has the same bytes, but for names
    for name in set(record["files"]) - {RECORD, "README.md"}:
        assert (out / name).read_bytes() == files[name]


def test_a_second_push_replaces_the_files_of_the_first(hub, checkpoint, out, tmp_path):
    record = read_record(out)
    write_record(out, record | {"files": [*record["files"], "old.py"]})
    (out / "old.py").write_text("1")
    (out / "mine.txt").write_text("not of the export")
    push(out, REPO)
    assert hub.files()["old.py"] == b"1"
    assert "mine.txt" not in hub.files()

    hub.files()["notes.txt"] = b"kept"
    push(checkpoint, REPO, "--no-tokenizer", "--dtype", "bfloat16", "--revision", "step-3")

    assert "old.py" in hub.files()  # another branch
    branch = hub.files(REPO, "step-3")
    assert branch["notes.txt"] == b"kept"
    assert "old.py" not in branch
    (tmp_path / "weights").write_bytes(branch["model.safetensors"])
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "weights").values()}
    assert dtypes == {torch.bfloat16}


@pytest.fixture
def no_network(monkeypatch):
    """No hub, and no token for it."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_TOKEN", raising=False)


def test_a_dry_run_uses_no_network(checkpoint, out, capsys, no_network):
    capsys.readouterr()

    push(checkpoint, "someone/model", "--dry_run", "--no-tokenizer")

    printed = capsys.readouterr().out
    for path in out.iterdir():
        assert f"  {path.name}\n" in printed
    card = (out / "README.md").read_text()
    assert card.replace("THIS_FOLDER", "someone/model") in printed


def test_a_dry_run_of_a_branch(checkpoint, capsys, no_network):
    push(checkpoint, "someone/model", "--dry_run", "--no-tokenizer", "--revision", "step-3")

    printed = capsys.readouterr().out
    assert 'from_pretrained("someone/model", revision="step-3", ' in printed
    assert "pretrained=someone/model,revision=step-3," in printed
    assert "THIS_FOLDER" not in printed


def test_options_are_not_abbreviated(checkpoint, no_network):
    with pytest.raises(SystemExit, match="2"):
        push(checkpoint, "someone/model", "--no-tokenizer", "--dry")


def test_a_card_that_was_edited_on_the_hub_is_kept(hub, checkpoint, capsys):
    push(checkpoint, REPO, "--no-tokenizer")
    push(checkpoint, REPO, "--no-tokenizer", "--license", "mit")
    assert b"license: mit" in hub.files()["README.md"]

    hub.files()["README.md"] = b"mine"
    capsys.readouterr()
    push(checkpoint, REPO, "--no-tokenizer", "--dtype", "bfloat16")

    assert hub.files()["README.md"] == b"mine"
    assert "README.md" in capsys.readouterr().err
    assert json.loads(hub.files()[RECORD])["dtype"] == "bfloat16"


def num_commits(hub):
    """Return the number of commits of the repository; 1 if there is none."""
    return len(hub.models[REPO]["main"]) if REPO in hub.models else 1


@pytest.mark.parametrize("at", ERRORS)
def test_refusals_of_the_hub_publish_nothing(at, hub, checkpoint, capsys):
    for status, code in ERRORS[at].items():
        hub.statuses = {at: status}
        assert refusal(capsys, checkpoint, REPO, "--no-tokenizer") == code
        assert num_commits(hub) == 1

    hub.statuses = {}
    push(checkpoint, REPO, "--no-tokenizer")
    assert RECORD in hub.files()


def test_an_interrupted_upload_publishes_nothing(hub, checkpoint, capsys):
    hub.cut = 1000
    assert refusal(capsys, checkpoint, REPO, "--no-tokenizer") == "hub.unavailable"
    assert len(hub.models[REPO]["main"]) == 1
    assert not hub.large

    hub.cut = None
    push(checkpoint, REPO, "--no-tokenizer")
    assert "model.safetensors" in hub.files()


def test_names_that_are_taken_or_of_others(hub, checkpoint, capsys):
    taken = {"config.json": b"{}", "README.md": b"mine"}
    hub.models[REPO] = {"main": [dict(taken)]}
    assert refusal(capsys, checkpoint, REPO, "--no-tokenizer") == "hub.name_taken"
    assert hub.files() == taken

    hub.models[REPO] = {"main": [{"README.md": b"mine"}]}
    code = refusal(capsys, checkpoint, REPO, "--no-tokenizer", "--private")
    assert code == "hub.public_repo"

    assert refusal(capsys, checkpoint, "other/model", "--no-tokenizer") == "hub.no_access"
    assert refusal(capsys, checkpoint, "a/b/c") == "hub.repo_name"


PAGE = b"<html>Log in to the network</html>"


def test_exports_that_cannot_be_pushed(hub, out, capsys):
    assert refusal(capsys, out, REPO, "--dtype", "float16") == "option.conflict"

    (out / "config.json").unlink()
    assert refusal(capsys, out, REPO) == "hf.incomplete_export"


def test_a_wrong_token_has_no_access(hub, checkpoint, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub.models[REPO] = {"main": [{"README.md": b"mine"}]}

    assert refusal(capsys, checkpoint, REPO, "--no-tokenizer") == "hub.no_access"


@pytest.mark.parametrize("name", ["notes.txt", "README.md", "config.json", RECORD])
def test_files_that_are_links_are_never_uploaded(hub, out, tmp_path, capsys, name):
    secret = tmp_path / "secret.txt"
    if name == "notes.txt":
        secret.write_bytes(b"mine")
        record = read_record(out)
        write_record(out, record | {"files": [*record["files"], name]})
    else:
        shutil.move(out / name, secret)
    (out / name).symlink_to(secret)

    assert refusal(capsys, out, REPO) == "hf.not_an_export"
    assert refusal(capsys, out, REPO, "--dry_run") == "hf.not_an_export"
    assert not hub.models


def test_files_elsewhere_are_never_uploaded(hub, out, tmp_path, capsys):
    secret = tmp_path / "secret.txt"
    secret.write_bytes(b"mine")
    record = read_record(out)

    for name in ("../secret.txt", str(secret), ".."):
        write_record(out, record | {"files": [*record["files"], name]})
        assert refusal(capsys, out, REPO) in ("hf.not_an_export", "hf.incomplete_export")

    assert not hub.models


def test_a_page_of_another_server_is_no_refusal(hub, checkpoint, capsys):
    for status, at in ((200, "whoami"), (403, "whoami"), (404, "repos/create"), (200, "preupload")):
        hub.answers = {at: (status, PAGE, "text/html")}
        assert refusal(capsys, checkpoint, REPO, "--no-tokenizer") == "hub.unexpected"
        assert num_commits(hub) == 1


def test_an_answer_without_a_name(hub, checkpoint, capsys):
    for answer in ({}, [], None, {"name": None}, {"name": 5}):
        hub.answers = {"whoami": (200, json.dumps(answer).encode(), "application/json")}
        for repo in (REPO, "model"):
            assert refusal(capsys, checkpoint, repo, "--no-tokenizer") == "hub.unexpected"

    assert not hub.models


@pytest.mark.system
@pytest.mark.parametrize(
    ("token", "code"),
    [({}, "hub.no_token"), ({"HF_TOKEN": "hf_x"}, "hub.unavailable")],
    ids=["no-token", "no-network"],
)
def test_no_token_or_no_network_fails_before_exporting(checkpoint, tmp_path, token, code):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "canon_pretrain", "hf", "push", str(checkpoint), REPO]

    ended = subprocess.run(command, env=env | token, cwd=ROOT, capture_output=True, text=True)

    assert ended.returncode == 2
    assert error_codes(ended.stderr) == [code]
    assert "Traceback" not in ended.stderr

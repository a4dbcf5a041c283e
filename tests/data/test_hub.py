"""Answers about data sets that are not the hub's."""

import json

import pytest

from canon_pretrain.data import hub as hubs
from tests.fake_model_hub import model_hub
from tests.support import refused


@pytest.mark.parametrize("answer", [{}, [], None, 5, {"sha": None}, {"id": "user/data"}], ids=str)
def test_a_revision_without_its_fields(hub, answer):
    hub.answers = {"/api/datasets/": (200, json.dumps(answer).encode(), "application/json")}
    with refused("hub.unexpected"):
        hubs.find_commit("user/data", None, HINTS)


@pytest.mark.parametrize(
    "answer", [None, 5, [5], [{}], [{"type": "file"}], [{"type": "file", "path": "a"}]], ids=str
)
def test_a_listing_without_its_fields(hub, answer):
    hub.answers = {"/api/datasets/": (200, json.dumps(answer).encode(), "application/json")}
    with refused("hub.unexpected"):
        hubs.list_files("user/data", "1" * 40, "train", HINTS)


HINTS = hubs.HubHints("give another revision", "or give the files")
PAGE = b"<html>Log in to the network</html>"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with model_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.mark.parametrize("status", [200, 401, 403, 404])
def test_a_page_is_not_the_hub(status, hub):
    hub.answers = {"/api/datasets/": (status, PAGE, "text/html; charset=utf-8")}
    with refused("hub.unexpected"):
        hubs.find_commit("user/data", None, HINTS)
    with refused("hub.unexpected"):
        hubs.list_files("user/data", "1" * 40, "train", HINTS)

"""The command `canon serve`, as far as it goes without a server."""

import importlib.util
import socket
from argparse import Namespace
from pathlib import Path

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.serve import commands
from tests.support import refused


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("serve.not_installed", missing=["starlette", "uvicorn"]):
        commands.run(Namespace())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_any_free_port_is_taken(host):
    try:
        listener = commands._listen(host, 0)
    except UserError:
        pytest.skip(f"no {host} here")
    with listener, socket.create_connection(listener.getsockname()[:2], timeout=30):
        pass


@pytest.mark.parametrize("host", ["256.0.0.1", "no such host", "a" * 300, ""])
def test_an_address_that_is_not_ours_is_refused(host):
    with refused("serve.address", host=host):
        commands._listen(host, 0)


def test_a_model_is_called_by_its_folder():
    assert commands.model_name(Path("/a/run/checkpoint/step-3")) == "run/step-3"
    assert commands.model_name(Path("/a/export")) == "export"

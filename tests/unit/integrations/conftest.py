"""Fixtures for the loops of other frameworks."""

import importlib
import sys
from types import SimpleNamespace

import pytest
from attested_server import Server

from deltawire.attest import engine


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(engine, "PAUSE_S", 0.0)


@pytest.fixture
def serve():
    """Starts servers, which are closed at the end."""
    servers = []

    def start(*arguments, **options):
        servers.append(Server(*arguments, **options))
        return servers[-1]

    yield start
    for one in servers:
        one.close()


@pytest.fixture
def ray_here(monkeypatch):
    """Ray whose calls were made when they are waited for."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda found: found))


@pytest.fixture
def integration(monkeypatch):
    """Imports an integration again, for the pretended modules of its framework."""

    def load(name):
        name = f"deltawire.integrations.{name}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load

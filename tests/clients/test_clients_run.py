"""Runs each client of the registry against deltawire: its own code at the installed release, or our
imitation where the registry says so."""

import importlib.metadata

import pytest
from client_registry import CLIENTS, release_of, run

# `make test` and the short drills run the same tests once; this is what fills docs/CLIENTS.md.
pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_a_client_runs(client):
    try:
        release_of(client)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{client.package or client.name} is not installed")
    passed, output = run(client)
    assert passed, output

"""Each client's own code runs against deltawire, at the release that is installed."""

import importlib.metadata

import pytest
from client_registry import CLIENTS, release_of, run

pytestmark = [pytest.mark.drills, pytest.mark.timeout(900)]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_a_client_runs(client):
    try:
        release_of(client)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{client.package} is not installed")
    passed, output = run(client)
    assert passed, output

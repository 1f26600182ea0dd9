"""A trained run that several modules look at; none of them changes it."""

import pytest

from benchmarks.branches.planted_groups import planted_run


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    """A run of four versions with one bad group."""
    return planted_run(tmp_path_factory.mktemp("planted"), 3, versions=4)

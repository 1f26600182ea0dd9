"""The garbage collector while a process imports its libraries."""

import gc
import sys

import pytest

from deltawire.runtime.imports import importing


@pytest.fixture
def without_torch(monkeypatch):
    """A process that has not imported torch; objects that it exempts can be collected again."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    frozen = gc.get_freeze_count()
    yield frozen
    gc.unfreeze()
    if frozen:
        gc.freeze()


def test_no_collection_runs_between_imports_and_none_visits_them_later(without_torch):
    with importing():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= without_torch + len(made)


def test_a_failed_import_leaves_the_collector_on(without_torch):
    with pytest.raises(ModuleNotFoundError), importing():
        raise ModuleNotFoundError
    assert gc.isenabled()


def test_what_a_process_made_since_its_imports_stays_collectable(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    frozen = gc.get_freeze_count()
    with importing():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen

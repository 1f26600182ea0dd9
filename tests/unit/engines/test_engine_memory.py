"""The embedded engine's cache grows with what runs, and stays within the memory there is."""

import pytest

from deltawire.config import parse_config
from deltawire.engines import cache_size
from deltawire.engines.base import Sampling
from deltawire.engines.transformers import TransformersEngine
from deltawire.engines.transformers import engine as engine_module
from deltawire.errors import InputError
from deltawire.launch import session
from deltawire.store import open_bucket


def allocated(engine):
    """The bytes of keys and values that the engine holds."""
    layers = engine._cache.slot_layers
    held = [states for layer in layers for states in (layer.keys, layer.values)]
    return sum(states.nbytes for states in held if states is not None)


def opened(model, **options):
    return TransformersEngine(model, stop_tokens=(), seed=0, **options)


def row_bytes(engine, tokens):
    return engine._token_bytes * tokens


def drain(engine, requests, *, watch=lambda: None):
    """Completions of (prompt, new tokens) pairs, in order."""
    done = {}
    for number, (prompt, tokens) in enumerate(requests):
        engine.submit(prompt, Sampling(tokens, 0.0), lambda c, n=number: done.update({n: c.tokens}))
    while engine.active:
        engine.step()
        watch()
    return [done[number] for number in range(len(requests))]


REQUESTS = [([n + 1, n + 2, n + 3][: 1 + n % 3], 3 + 7 * (n % 4)) for n in range(12)]


def test_what_does_not_run_takes_no_memory(tiny):
    """256 slots of 4,096 tokens are a bound; one short request needs one row."""
    engine = opened(tiny, slots=256, capacity=4096)
    drain(engine, [([1, 2, 3], 5)])
    assert allocated(engine) == row_bytes(engine, engine_module.WIDTH_STEP)


def test_the_estimate_is_what_is_allocated(tiny):
    engine = opened(tiny, slots=4, capacity=128)
    drain(engine, [([1], 5)])
    assert engine._cache.token_bytes == engine._token_bytes


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12])
def test_a_small_cache_delays_requests_and_changes_none(tiny, rows):
    roomy = opened(tiny, slots=12, capacity=64, cache_bytes=1 << 40)
    expected = drain(roomy, REQUESTS)
    limit = row_bytes(roomy, 64) * rows
    engine = opened(tiny, slots=12, capacity=64, cache_bytes=limit)
    peaks = []
    assert drain(engine, REQUESTS, watch=lambda: peaks.append(allocated(engine))) == expected
    assert 0 < max(peaks) <= limit


def test_a_wide_request_drops_parked_rows_for_its_own(tiny):
    engine = opened(tiny, slots=8, capacity=512)
    engine._cache_bytes = row_bytes(engine, 512)
    drain(engine, [([1, 2], 4), ([3, 4], 4)])
    drain(engine, [([5] * 300, 200)])
    assert allocated(engine) <= engine._cache_bytes
    narrow = drain(engine, [([1, 2], 4), ([3, 4], 4)])
    assert narrow == drain(opened(tiny, slots=8, capacity=512), [([1, 2], 4), ([3, 4], 4)])
    assert allocated(engine) <= engine._cache_bytes


def test_a_request_that_could_never_fit_is_refused(tiny):
    engine = opened(tiny, slots=8, capacity=512)
    engine._cache_bytes = row_bytes(engine, 128)
    with pytest.raises(InputError, match=r"the keys and values of 300 tokens need \d+ bytes"):
        engine.submit([1] * 200, Sampling(100), print)
    engine.submit([1] * 28, Sampling(100), print)


def test_the_limit_follows_from_the_memory_of_the_machine(tiny, monkeypatch):
    engine = opened(tiny, slots=12, capacity=64)
    free = int(row_bytes(engine, 64) * 4 / cache_size.SHARE)
    monkeypatch.setattr(engine_module, "available_bytes", lambda device: free - allocated(engine))
    peaks = []
    drain(engine, REQUESTS, watch=lambda: peaks.append(allocated(engine)))
    assert row_bytes(engine, 64) * 4 <= max(peaks) < row_bytes(engine, 64) * 8
    assert cache_size.available_bytes(engine._device) > 0


class Recorded:
    """A supervisor that starts nothing."""

    def __init__(self):
        self.names = []

    def add(self, name, role, arguments):
        self.names.append(name)

    def check(self):
        return True


@pytest.mark.parametrize("every", [0, 20])
def test_the_evaluator_can_be_switched_off(tmp_path, every):
    config = parse_config({"name": "run", "evaluate": {"every": every}}, source="s")
    bucket = open_bucket(str(tmp_path), create=True)
    job = session.Job(config, tmp_path / "c.toml", None, tmp_path, bucket)
    supervisor = Recorded()
    session._start_all(job, supervisor, None, [])
    assert ("evaluator" in supervisor.names) == (every > 0)

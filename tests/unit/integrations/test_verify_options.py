"""Options of ``verify``, and the framework's own call, which stays as it was."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
import torch
from loops import pretend

from deltawire.errors import InputError

PLACES = {
    "areal": ("areal.engine.fsdp_engine", "FSDPEngine", "update_weights"),
    "nemo_rl": ("nemo_rl.algorithms.grpo", "", "refit_policy_generation"),
    "prime_rl": ("prime_rl.utils.client", "InferencePool", "update_weights"),
    "skyrl": (
        "skyrl.backends.skyrl_train.workers.worker_dispatch",
        "WorkerDispatch",
        "save_weights_for_sampler",
    ),
    "trl": ("trl.generation.vllm_generation", "VLLMGeneration", "sync_weights"),
    "verl": ("verl.checkpoint_engine.base", "CheckpointEngineManager", "update_weights"),
}
AWAITED = ("prime_rl", "skyrl")
TAKES = {
    "nemo_rl": {"every", "dtype"},
    "prime_rl": {"every"},
    "skyrl": {"every", "token"},
}
"""Options of ``verify``; all others take each."""


@pytest.fixture(params=PLACES)
def framework(request, monkeypatch, integration):
    """An integration, and its framework's call, which returns what it was given."""
    place, owner, name = PLACES[request.param]

    def plain(*args, **kwargs):
        return args, kwargs

    async def awaited(*args, **kwargs):
        return args, kwargs

    call = awaited if request.param in AWAITED else plain
    kind = type(owner, (), {name: call}) if owner else None
    members = {owner: kind} if owner else {name: call}
    module = pretend(monkeypatch, place, **members)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    target = kind or module
    return SimpleNamespace(
        name=request.param,
        module=integration(request.param),
        takes=TAKES.get(request.param, {"every", "dtype", "token"}),
        held=lambda: getattr(target, name),
        call=lambda *args, **kwargs: _finished(getattr(target, name)(*args, **kwargs)),
    )


def _finished(found):
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def test_the_options_are_those_of_the_check(framework):
    check = framework.module.verify()
    assert framework.held()._deltawire_check is check
    dtype = None if framework.name == "prime_rl" else "bfloat16"
    assert (check.on_mismatch, check.dtype, check.token) == ("warn", dtype, "")
    assert [check.due() for _ in range(3)] == [True] * 3
    given = {"every": 3, "dtype": "float16", "token": "key"}
    given = {name: value for name, value in given.items() if name in framework.takes}
    check = framework.module.verify("stop", **given)
    assert framework.held()._deltawire_check is check, "it takes the earlier one's place"
    assert check.on_mismatch == "stop"
    assert [check.due() for _ in range(4)] == [True, False, False, True]
    assert check.dtype == given.get("dtype", dtype)
    assert check.token == given.get("token", "")
    with pytest.raises(InputError, match="on_mismatch"):
        framework.module.verify("ignore")
    with pytest.raises(InputError, match="every"):
        framework.module.verify(every=0)
    assert framework.held()._deltawire_check is check


def test_the_framework_s_call_gets_what_it_got_and_returns_what_it_returned(framework, caplog):
    check = framework.module.verify("stop", every=2)
    own = SimpleNamespace()
    given = ((own, "a"), {"meta": "b"})
    assert framework.call(own, "a", meta="b") == given
    assert "nothing was compared" in caplog.text, "another version of the framework"
    assert len(caplog.records) == 1
    caplog.clear()
    assert framework.call(own, "a", meta="b") == given
    assert not caplog.records, "an update that is not due asks nobody"
    assert (check.updates, check.last) == (2, {})

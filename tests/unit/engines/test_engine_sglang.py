"""SGLang's adapter without SGLang: settings, refusals, what a swap does to requests, answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from deltawire.engines.base import Sampling, Truncation
from deltawire.engines.following import http_calls as engine_calls
from deltawire.engines.following.http_calls import Refusing
from deltawire.engines.following.parameter_sums import changes_after_loading, observed
from deltawire.engines.following.refusals import refuse_changed, refuse_untested
from deltawire.engines.following.replicated_controller import Command
from deltawire.engines.following.settings import from_environment
from deltawire.engines.registry import check_tensors
from deltawire.engines.sglang import FOLLOW, hooks, http_calls, plugin, refusals
from deltawire.engines.sglang.in_flight import DONE, InFlight
from deltawire.engines.sglang.sampler import SglangSampler
from deltawire.errors import CorruptError, InputError, ResyncError
from deltawire.wire.run import TensorSpec


def test_the_environment_names_a_bucket_or_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLLOW, "s3://bucket/run")
    assert from_environment(FOLLOW).run == "s3://bucket/run"
    monkeypatch.setenv(FOLLOW, json.dumps({"run": "memory:///", "follow": False}))
    assert not from_environment(FOLLOW).follow


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("", FOLLOW),
        ('{"run": "memory:///"', "no JSON object"),
        ('{"run": "memory:///", "flow": true}', "flow"),
        ('{"run": ""}', "length"),
        ('{"run": "memory:///", "in_flight": "abort"}', "abort"),
        ("{" + "[" * 60_000, "no JSON object"),
        ("s3://" + "b" * (1 << 16), "characters"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(
    given: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLLOW, given)
    with pytest.raises(InputError, match=named):
        from_environment(FOLLOW)


def test_a_plugin_that_fails_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs exceptions of plugins, and serves on; it does not catch `SystemExit`."""

    def fail() -> None:
        raise ImportError("no such module")

    monkeypatch.setattr(hooks, "install", fail)
    monkeypatch.delenv(FOLLOW, raising=False)
    plugin.register()  # No run is named: as if the plugin were not installed.
    monkeypatch.setenv(FOLLOW, "memory:///")
    with pytest.raises(SystemExit, match="cannot follow the run: no such module"):
        plugin.register()


def test_hooks_that_were_not_applied_end_the_process() -> None:
    class Registry:
        _patched: ClassVar[set[str]] = {"a.b"}

        @classmethod
        def apply_hooks(cls) -> None:
            cls._patched |= {"a.c"}

    hooks.require_applied(Registry, ["a.b", "a.c"], version="1")
    Registry.apply_hooks()
    hooks.require_applied(Registry, ["a.b", "a.d"], version="1")
    with pytest.raises(SystemExit, match=r"a\.d"):
        Registry.apply_hooks()


@pytest.mark.parametrize(("version", "fits"), [("0.5.18", False), ("0.5.21", True), ("1.0", True)])
def test_versions_without_spans_are_refused(version: str, fits: bool) -> None:
    if fits:
        refusals.refuse_version(version)
        return
    with pytest.raises(InputError, match=f"SGLang {version}"):
        refusals.refuse_version(version)


ARGUMENTS = {"pp_size": 1, "dp_size": 1, "speculative_algorithm": None}


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"dp_size": 2}, "--dp-size"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"weight_cache_mode": "daemon"}, "--weight-cache-mode"),
        ({"cpu_offload_gb": 2}, "--cpu-offload-gb"),
    ],
)
def test_arguments_that_were_not_tested_are_refused_by_name(
    changed: dict[str, Any], flag: str
) -> None:
    refuse_untested("SGLang", SimpleNamespace(**ARGUMENTS), refusals.TESTED)
    with pytest.raises(InputError, match=rf"SGLang's {flag}(?![\w-])"):
        refuse_untested("SGLang", SimpleNamespace(**ARGUMENTS | changed), refusals.TESTED)


def test_weights_that_change_after_loading_are_noticed() -> None:
    model = torch.nn.Linear(4, 4)
    assert changes_after_loading(model) is None

    def exchange(model: torch.nn.Module) -> None:
        model.weight.data = model.weight.data[[1, 0, 2, 3]]

    observed(exchange, model)
    assert "weight" in (changes_after_loading(model) or {})
    hooks.after_random_weights(None, model)
    hooks.after_random_load(model)
    assert changes_after_loading(model) == {}
    with pytest.raises(InputError, match="was not observed"):
        refuse_changed(None, engine="SGLang", hint="")


def test_an_adapter_is_refused_before_a_server_starts() -> None:
    check_tensors("sglang", [TensorSpec("model.norm.weight", (4,), "BF16")])
    with pytest.raises(InputError, match=r"q_proj\.lora_A"):
        check_tensors("sglang", [TensorSpec("q_proj.lora_A.weight", (4, 4), "BF16")])


class Scheduler:
    """As much of SGLang's scheduler as a swap touches."""

    def __init__(self) -> None:
        self.running: set[Any] = set()
        self.waiting_queue: list[Any] = []
        self.chunked_req = None
        self.result_queue: deque[Any] = deque()
        self.labels: list[str] = []
        self.done: list[Any] = []
        self._engine_paused = False

    def collect_inflight_reqs(self) -> set[Any]:
        return self.running

    def record_weight_version_change(self, *, new_version: str) -> None:
        self.labels.append(new_version)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        hooks.around_result(lambda _, *one: self.done.append(one), self, batch, result)


class Request:
    """A request of SGLang's, hashable as it is there."""

    def __init__(self, *, holds: bool = False, key: str | None = None) -> None:
        self.kv = SimpleNamespace(holds_kv=holds)
        self.extra_key = key
        self.ended = False

    def finished(self) -> bool:
        return self.ended


def test_cached_prefixes_are_keyed_by_version_and_by_the_clients_own_key() -> None:
    scheduler = Scheduler()
    waiting, own, running = Request(), Request(key="mine"), Request(holds=True)
    scheduler.waiting_queue = [waiting, own, running]
    in_flight = InFlight(scheduler, "keep")
    in_flight.relabel("7", "1 7")
    assert scheduler.labels == ["7"]
    assert (waiting.extra_key, own.extra_key) == ("deltawire 1 7 ", "deltawire 1 7 mine")
    assert running.extra_key is None, "it has keys and values already"
    in_flight.relabel("8", "2 8")
    assert own.extra_key == "deltawire 2 8 mine"
    running.kv.holds_kv = False  # Retracted: computed again, with the weights of now.
    in_flight.salt(running)
    assert running.extra_key == "deltawire 2 8 "


def test_a_step_in_flight_is_processed_once_before_the_label_changes() -> None:
    scheduler = Scheduler()
    scheduler.result_queue.append(("batch", "result"))
    in_flight = InFlight(scheduler, "keep")
    assert in_flight.ready()
    assert in_flight.ready()
    assert scheduler.done == [("batch", "result")]
    assert list(scheduler.result_queue) == [("batch", DONE)]
    scheduler.process_batch_result(*scheduler.result_queue.popleft())
    assert scheduler.done == [("batch", "result")]


def test_a_drained_swap_waits_for_sequences_and_starts_none() -> None:
    scheduler = Scheduler()
    one = Request(holds=True)
    scheduler.running = {one}
    in_flight = InFlight(scheduler, "drain")
    assert not in_flight.ready()
    assert in_flight.draining
    one.ended = True
    assert in_flight.ready()


def test_a_prompt_in_chunks_goes_on_alone_while_a_swap_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler: Any = Scheduler()
    scheduler.waiting_queue, scheduler.chunked_req = ["waits"], "chunked"
    controller: Any = SimpleNamespace(in_flight=SimpleNamespace(draining=True))
    monkeypatch.setattr(hooks, "_held", [controller])

    def batch_of(scheduler: Any, _running: Any) -> list[Any]:
        started = [scheduler.chunked_req, *scheduler.waiting_queue]
        scheduler.waiting_queue = ["preempted"]
        return started

    assert hooks.around_prefill(batch_of, scheduler, None) == ["chunked"]
    assert scheduler.waiting_queue == ["waits", "preempted"]
    controller.in_flight.draining = False
    assert hooks.around_prefill(batch_of, scheduler, None) == ["chunked", "waits", "preempted"]


def test_commands_are_taken_out_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[Command] = []
    controller: Any = SimpleNamespace(handle=handled.append, commands=lambda: [Command(3, False)])
    scheduler = object()
    assert hooks.around_pull(lambda _: ["a"], None) == ["a"]
    monkeypatch.setattr(hooks, "_held", [controller])
    assert hooks.around_pull(lambda _: None, None) is None, "only rank 0 reads requests"
    requests = hooks.around_pull(lambda _: ["a"], None)
    assert requests == [Command(3, False), "a"]
    assert hooks.before_requests(scheduler, requests) == ((scheduler, ["a"]), {})
    assert handled == [Command(3, False)]
    assert hooks.before_requests(scheduler, ["a"]) is None


def test_calls_that_would_relabel_tokens_answer_with_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []

    def refusal(_content: Any, status: int) -> Any:
        async def refuse(scope: Any, _receive: Any, _send: Any) -> None:
            sent.append((scope["path"], status))

        return refuse

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append(scope["path"])

    refusing = Refusing(app, http_calls.FORBIDDEN)
    monkeypatch.setattr(engine_calls, "_json", refusal)  # Starlette is the engine's.
    label = "/update_weight_version"
    for path, root in [("/generate", ""), (label, ""), (f"/api{label}", "/api"), (label, "/api")]:
        scope = {"type": "http", "path": path, "root_path": root}
        asyncio.run(refusing(scope, None, None))
    assert sent == ["/generate", (label, 409), (f"/api{label}", 409), (label, 409)]
    assert {"/update_weight_version", "/release_memory_occupation"} <= http_calls.FORBIDDEN


SAMPLER = {"stop_tokens": [2], "slots": 2, "capacity": 64, "version": 3}


def answer(**changes: Any) -> bytes:
    """SGLang's answer to a request for four tokens, two by each of two versions."""
    about = {
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_versions": [
            {"version": "8", "start": 0, "end": 2},
            {"version": "9", "start": 2, "end": 4},
        ],
        "output_token_logprobs": [[-0.5, token, None] for token in (5, 6, 7, 2)],
        **changes,
    }
    return json.dumps({"output_ids": [5, 6, 7, 2], "meta_info": about}).encode()


def test_an_answer_is_read_with_its_versions() -> None:
    sampler = SglangSampler("/nowhere", **SAMPLER)  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=4, temperature=0.5, truncation=Truncation(top_p=0.9), seed=1)
    found = sampler.completion(answer(), [1], sampling)
    assert found.tokens == [5, 6, 7, 2]
    assert found.logprobs == [-0.5] * 4
    assert found.versions == [8, 8, 9, 9]
    assert found.finish == "stop"
    body = sampler.body([1, 2], sampling)
    assert body["input_ids"] == [1, 2]
    assert body["return_logprob"]
    assert body["sampling_params"] == {
        "max_new_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.0,
        "stop_token_ids": [2],
    }  # fmt: skip


ROUTES = np.array([[[1, 0], [2, 3]]] * 4, "<i4")


def test_expert_choices_are_read() -> None:
    sampler = SglangSampler("/nowhere", experts=(4, 2), **SAMPLER)  # type: ignore[arg-type]
    told = base64.b64encode(ROUTES.tobytes()).decode()
    sampling = Sampling(max_tokens=4)
    assert sampler.body([1], sampling)["return_routed_experts"]
    found = sampler.completion(answer(routed_experts=told), [1], sampling)
    assert [part.tolist() for part in found.routes] == [ROUTES.tolist()]
    assert found.experts == 4
    for wrong, error, named in [
        (None, InputError, "SGLang does not return"),
        (told[:-12], CorruptError, "cannot be read"),
        (base64.b64encode((ROUTES + 3).tobytes()).decode(), CorruptError, "outside"),
        (base64.b64encode((ROUTES * 0).tobytes()).decode(), CorruptError, "twice"),
    ]:
        with pytest.raises(error, match=named):
            sampler.completion(answer(routed_experts=wrong), [1], sampling)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"finish_reason": {"type": "abort"}}, ResyncError, "abort"),
        ({"weight_versions": []}, CorruptError, "do not cover"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 4}]}, CorruptError, "read"),
        ({"weight_versions": [{"version": "8", "start": 1, "end": 4}]}, CorruptError, "in order"),
        ({"output_token_logprobs": [[-0.5, 5, None]]}, CorruptError, "not those of its tokens"),
        ({"output_token_logprobs": [[-0.5, 9, None]] * 4}, CorruptError, "not those of its tokens"),
        ({"output_token_logprobs": "x"}, CorruptError, "cannot be read"),
    ],
)
def test_answers_that_contradict_themselves_are_refused(
    changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    sampler = SglangSampler("/nowhere", **SAMPLER)  # type: ignore[arg-type]
    with pytest.raises(error, match=named):
        sampler.completion(answer(**changes), [1], Sampling(max_tokens=4))

"""The vLLM client: answers of a server, requests to it, and what remains when it ends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from transformers import Qwen3Config, Qwen3MoeConfig

from deltawire.codec import Digest
from deltawire.engines.base import Completion, Sampling, Truncation
from deltawire.engines.following import engine_client, environment, remote_sampler
from deltawire.engines.following.engine_client import EngineClient, RemoteWeights
from deltawire.engines.following.engine_server import ServedModel
from deltawire.engines.following.routed_experts import experts_of
from deltawire.engines.vllm import server
from deltawire.engines.vllm.opening import logprobs_mode
from deltawire.engines.vllm.sampler import VllmSampler
from deltawire.errors import CorruptError, DeltawireError, InputError, ResyncError
from deltawire.parity.routes import RouteShape, pack_parts, unpack_routes

GREEDY = Sampling(max_tokens=4, temperature=0.0)


def digest_of(version: int) -> Digest:
    return Digest(version, 7)


def answer(**changes: Any) -> dict[str, Any]:
    """vLLM's answer to a request for four tokens, two by each of two versions."""
    choice = {
        "index": 0,
        "token_ids": [5, 6, 7, 2],
        "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in (5, 6, 7, 2)]},
        "weight_versions": [
            {"version": "8", "start": 0, "end": 2},
            {"version": "9", "start": 2, "end": 4},
        ],
        "finish_reason": "stop",
    }
    return {"choices": [{**choice, **changes}]}


class FakeEngine:
    """The calls of a vLLM server, over nothing: ``cannot`` are versions that it fails to reach,
    ``lies`` those whose digest it has wrong."""

    def __init__(self) -> None:
        self.version = 0
        self.wanted: list[int] = []
        self.failure = ""
        self.cannot: set[int] = set()
        self.lies: set[int] = set()
        self.sound = True
        self.says: Any = answer()
        self.status = 200
        self.asked: list[dict[str, Any]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.gone = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    def digest(self) -> str:
        return "f" * 32 if self.version in self.lies else digest_of(self.version).hex()

    async def rpc(self, request: web.Request) -> web.Response:
        call = await request.json()
        await self.answers.wait()
        state: dict[str, Any] = {"phase": "serving"}
        if call["method"] == "deltawire_want":
            version = int(*call["args"])
            self.wanted.append(version)
            failed = version in self.cannot
            self.failure = "a blob is damaged" if failed else ""
            self.version = self.version if failed else version
        elif call["method"] == "deltawire_attest":
            failure = "" if self.sound else "rank 0: a bit is wrong"
            state = {"sound": self.sound, "ranks": [{"digest": self.digest(), "failure": failure}]}
        state |= {"version": self.version, "failure": self.failure, "digest": self.digest()}
        return web.json_response({"results": [state]})

    async def generate(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.gone.set()
            raise
        return web.json_response(self.says, status=self.status)


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/collective_rpc", engine.rpc)
    app.router.add_post("/inference/v1/generate", engine.generate)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/http"
        await web.UnixSite(runner, path).start()
        try:
            yield path
        finally:
            await runner.cleanup()


@asynccontextmanager
async def sampling(engine: FakeEngine, **settings: Any) -> AsyncIterator[VllmSampler]:
    async with serving(engine) as path:
        sampler = VllmSampler(path, stop_tokens=[2], slots=4, capacity=16, version=8, **settings)
        try:
            yield sampler
        finally:
            await sampler.close()


def test_every_token_keeps_its_version_and_the_temperature_is_passed_on() -> None:
    async def main() -> None:
        engine, heard = FakeEngine(), []
        async with sampling(engine) as sampler:
            tempered = Sampling(max_tokens=4, temperature=0.7)
            found = await sampler.generate([1, 3], tempered, on_token=heard.append)
        assert (found.tokens, found.versions) == ([5, 6, 7, 2], [8, 8, 9, 9])
        assert (found.logprobs, found.finish, heard) == ([-0.5] * 4, "stop", found.tokens)
        asked = engine.asked[0]
        assert asked["token_ids"] == [1, 3]
        told = asked["sampling_params"]
        assert (told["temperature"], told["max_tokens"], told["logprobs"]) == (0.7, 4, 0)
        assert (told["top_p"], told["top_k"], told["stop_token_ids"]) == (1.0, 0, [2])

    asyncio.run(main())


def test_a_truncation_is_passed_on_with_log_probabilities_of_the_full_softmax() -> None:
    async def main() -> None:
        engine = FakeEngine()
        async with sampling(engine) as sampler:
            await sampler.generate([1], Sampling(4, 1.0, Truncation(top_p=0.9, top_k=20)))
        told = engine.asked[0]["sampling_params"]
        assert (told["top_p"], told["top_k"], told["min_p"]) == (0.9, 20, 0.0)

    asyncio.run(main())
    # vLLM's processed ones are those of what was drawn from, its raw ones know no temperature.
    assert logprobs_mode(Truncation(), 0.7) == "processed_logprobs"
    assert logprobs_mode(Truncation(min_p=0.1), 1.0) == "raw_logprobs"
    with pytest.raises(InputError, match=r"full softmax at temperature 0\.7"):
        logprobs_mode(Truncation(top_k=5), 0.7)


def npy(routes: Any) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


ROUTES = np.array([[[p % 4, 3 - p % 3], [(p + 1) % 4, (p + 2) % 4]] for p in range(5)], np.uint8)
ROUTES[:, 0, 1] = (ROUTES[:, 0, 0] + 1) % 4
"""The choices of a prompt of two tokens and an answer of four: 2 of 4 experts in 2 layers."""


async def routed(told: Any) -> Completion:
    engine = FakeEngine()
    engine.says = answer(routed_experts=told) if told != "" else answer()
    async with sampling(engine, experts=(4, 2)) as sampler:
        return await sampler.generate([1, 3], GREEDY)


def test_expert_choices_that_the_server_tells_go_into_the_completion() -> None:
    found = asyncio.run(routed(npy(ROUTES)))
    assert found.experts == 4
    assert [part.tolist() for part in found.routes] == [ROUTES.tolist()]
    assert found.routes[0].dtype == np.int32
    packed = pack_parts(found.routes, positions=5, experts=found.experts)
    unpacked = unpack_routes(packed, RouteShape(2, 4, 2), positions=5)
    assert unpacked.tolist() == ROUTES.tolist()


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ("", InputError, "vLLM does not return its expert choices"),
        (None, InputError, "vLLM does not return its expert choices"),
        ("%%%", CorruptError, "cannot be read"),
        (base64.b64encode(b"no numpy").decode(), CorruptError, "cannot be read"),
        (npy(np.array([{}], object)), CorruptError, "cannot be read"),
        (npy(ROUTES[:4]), CorruptError, r"the shape \(4, 2, 2\), not \[5, layers, 2\]"),
        (npy(ROUTES[:, :, :1]), CorruptError, "the shape"),
        (npy(ROUTES.astype(np.float32)), CorruptError, "the shape"),
        (npy(ROUTES + 1), CorruptError, "an expert outside the model's 4"),
        (npy(ROUTES * 0), CorruptError, "an expert twice"),
    ],
)
def test_expert_choices_that_are_none_are_refused(told: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(routed(told))


def test_a_models_experts_are_those_of_its_configuration() -> None:
    moe = Qwen3MoeConfig(num_experts=16, num_experts_per_tok=3)
    assert experts_of(moe) == (16, 3)
    with pytest.raises(InputError, match="names no experts"):
        experts_of(Qwen3Config())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_hanging_engine_is_distinguished_from_a_slow_one(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests have no time limit; without new versions nothing else would contact the server."""
    monkeypatch.setattr(remote_sampler, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(remote_sampler, "ANSWER_WITHIN_S", 0.5)

    async def forever(sampler: VllmSampler) -> None:
        while True:
            await sampler.advance()

    async def main() -> None:
        engine = FakeEngine()
        engine.hold.clear()
        async with sampling(engine) as sampler:
            request = asyncio.ensure_future(sampler.generate([1], GREEDY))
            while not engine.asked:
                await sampler.advance()
            if not hangs:
                for _ in range(30):
                    await sampler.advance()
                engine.hold.set()
                assert (await request).tokens == [5, 6, 7, 2]
                return
            engine.answers.clear()
            with pytest.raises(ResyncError, match="no longer reports its status"):
                await asyncio.wait_for(forever(sampler), 120)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("all_at_once", [False, True])
def test_a_request_that_is_cancelled_is_closed_and_frees_its_place(all_at_once: bool) -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.hold.clear()
        async with sampling(engine) as sampler:
            waiting = asyncio.create_task(sampler.generate([1], GREEDY))
            while not engine.asked:
                assert await sampler.advance() == 0
            assert sampler.active == 1
            if all_at_once:
                sampler.cancel_all()
            else:
                waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert sampler.active == 0
            await asyncio.wait_for(engine.gone.wait(), 120)

    asyncio.run(main())


def test_advance_counts_each_token_once() -> None:
    async def main() -> None:
        engine = FakeEngine()
        async with sampling(engine) as sampler:
            waiting = [asyncio.create_task(sampler.generate([1], GREEDY)) for _ in range(3)]
            drawn = 0
            while not all(task.done() for task in waiting):
                drawn += await sampler.advance()
            assert drawn + await sampler.advance() == 12
            assert await sampler.advance() == 0

    asyncio.run(main())


TOLD = answer()["choices"][0]["logprobs"]["content"]
SPAN = {"version": "8", "start": 0, "end": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": []},
        {"token_ids": [5, 6, 7]},
        {"token_ids": [5, 6, 7, -2]},
        {"token_ids": [5, 6, 7, 2, 2]},
        {"logprobs": None},
        {"logprobs": {"content": TOLD[:3]}},
        {"logprobs": {"content": [*TOLD[:3], {"token_id": 2, "logprob": -9999.0}]}},
        {"logprobs": {"content": [*TOLD[:3], {"token_id": 3, "logprob": -0.5}]}},
        {"weight_versions": None},
        {"weight_versions": []},
        {"weight_versions": [{**SPAN, "end": 3}]},
        {"weight_versions": [{**SPAN, "end": 2**30}]},
        {"weight_versions": [{**SPAN, "start": 1}]},
        {"weight_versions": [SPAN, {**SPAN, "start": 4}]},
        {"weight_versions": [{**SPAN, "version": "newest"}]},
        {"weight_versions": [{**SPAN, "version": "-1"}]},
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.says = answer(**changes)
        async with sampling(engine) as sampler:
            with pytest.raises(CorruptError):
                await sampler.generate([1], GREEDY)

    asyncio.run(main())


def test_refusals_and_failures_quote_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = FakeEngine()
        async with sampling(engine) as sampler:
            for prompt in ([], [1] * 13):
                with pytest.raises(InputError):
                    await sampler.generate(prompt, GREEDY)
            assert engine.asked == []
            engine.says = answer(finish_reason="abort")
            with pytest.raises(ResyncError, match="abort"):
                await sampler.generate([1], GREEDY)
            engine.status, engine.says = 400, "no such token"
            with pytest.raises(InputError, match="no such token"):
                await sampler.generate([1], GREEDY)
            engine.status = 500
            with pytest.raises(ResyncError, match="500"):
                await sampler.generate([1], GREEDY)
            monkeypatch.setattr(remote_sampler, "MAX_ANSWER_BYTES", 0)
            monkeypatch.setattr(remote_sampler, "BYTES_A_TOKEN", 1)
            engine.status, engine.says = 200, answer()
            with pytest.raises(CorruptError, match="exceeds 4 bytes"):
                await sampler.generate([1], GREEDY)

    asyncio.run(main())


def test_a_server_that_exited_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "missing")
        sampler = VllmSampler(path, stop_tokens=[], slots=4, capacity=16, version=0)
        with pytest.raises(ResyncError, match="does not answer"):
            await sampler.generate([1], GREEDY)
        await sampler.close()
        with pytest.raises(ResyncError, match="does not answer"):
            RemoteWeights(EngineClient(path)).swap({}, 1, digest_of(1))

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cannot", "lies"])
def test_a_failed_swap_keeps_the_old_version(how: str) -> None:
    async def main() -> None:
        engine = FakeEngine()
        async with serving(engine) as path:
            weights = RemoteWeights(EngineClient(path))
            await asyncio.to_thread(weights.swap, {}, 3, digest_of(3))
            assert (weights.version, weights.digest) == (3, digest_of(3))
            getattr(engine, how).add(4)
            with pytest.raises(ResyncError) as failure:
                await asyncio.to_thread(weights.swap, {}, 4, digest_of(4))
            assert ("damaged" if how == "cannot" else "f" * 32) in str(failure.value)
            assert (weights.version, weights.digest) == (3, digest_of(3))
            assert engine.wanted == [3, 4, 3]
            assert engine.version == 3
            assert await asyncio.to_thread(weights.attest) == digest_of(3)
            await asyncio.to_thread(weights.swap, {}, 5, digest_of(5))
            assert weights.version == engine.version == 5

    asyncio.run(main())


def test_a_swap_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "SWAP_WITHIN_S", 0.05)

    async def main() -> None:
        engine = FakeEngine()

        async def never(request: web.Request) -> web.Response:
            call = await request.json()
            engine.wanted += map(int, call["args"])
            status = {"version": 0, "phase": "preparing", "failure": "", "digest": ""}
            return web.json_response({"results": [status]})

        engine.rpc = never  # type: ignore[method-assign]
        async with serving(engine) as path:
            weights = RemoteWeights(EngineClient(path))
            weights.version = 0
            with pytest.raises(ResyncError, match="still preparing"):
                await asyncio.to_thread(weights.swap, {}, 1, digest_of(1))
            assert engine.wanted == [1, 0]

    asyncio.run(main())


def test_live_bits_that_differ_from_the_version_fail_attestation() -> None:
    async def main() -> None:
        engine = FakeEngine()
        async with serving(engine) as path:
            weights = RemoteWeights(EngineClient(path))
            await asyncio.to_thread(weights.swap, {}, 2, digest_of(2))
            engine.sound = False
            with pytest.raises(CorruptError, match="a bit is wrong"):
                await asyncio.to_thread(weights.attest)
            engine.sound, engine.version = True, 1
            with pytest.raises(CorruptError, match="serves another one"):
                await asyncio.to_thread(weights.attest)

    asyncio.run(main())


PROCESS_TREE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """True if a process runs; one that has ended may not be reaped yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return Path("/proc/self").exists() is False


@pytest.fixture
def starter() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def test_a_guarded_command_ends_with_its_parent_however_that_dies(
    tmp_path: Path, starter: list[subprocess.Popen[bytes]]
) -> None:
    told = tmp_path / "pids"
    command = [
        sys.executable,
        "-m",
        "deltawire.runtime.guard",
        sys.executable,
        "-c",
        PROCESS_TREE,
    ]
    source = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen({[*command, str(told)]!r}, stdin=subprocess.PIPE,\n"
        "    start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", source], start_new_session=True)
    starter.append(process)
    deadline = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = [int(pid) for pid in told.read_text().split()]
    assert all(map(alive, pids))
    process.kill()
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


SLOTS = {"slots": 1, "capacity": 8, "precision": "float32", "seed": 0, "threads": 1}


def test_a_server_that_does_not_start_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho the cause lies here\nhead -c 9000 /dev/zero\n"
        "echo this machine has no such kernel >&2\nexit 9\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv("DELTAWIRE_VLLM_PYTHON", str(python))
    model = ServedModel(tmp_path, "memory:///", **SLOTS)  # type: ignore[arg-type]
    started = server.VllmServer(model, cache_bytes=1 << 20)
    with pytest.raises(InputError, match="no such kernel"):
        started.wait_until_up(stopping=lambda: False)
    started.close()
    assert "the cause lies here" in capsys.readouterr().err
    assert not Path(started.socket).parent.exists()


def test_without_an_environment_for_vllm_the_error_names_the_way_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAWIRE_VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(DeltawireError, match="make engines"):
        environment.engine_python("vllm")
    monkeypatch.delenv("DELTAWIRE_VLLM_PYTHON")
    monkeypatch.setattr(environment.sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(DeltawireError, match="make engines"):
        environment.engine_python("vllm")
    sibling = tmp_path / ".venv-vllm" / "bin" / "python"
    sibling.parent.mkdir(parents=True)
    sibling.symlink_to(sys.executable)
    assert environment.engine_python("vllm") == str(sibling)

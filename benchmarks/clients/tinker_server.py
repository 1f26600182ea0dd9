"""``tinker_recipe_overhead`` and ``tinker_restart_lost``: Tinker's client on `deltawire tinker`.

The loop is that of the cookbook's RL recipes: publish, sample groups, forward_backward with
importance sampling, optim_step. The library runs the same loop with the same sizes. Both compute
with the same number of threads, the server in a separate process. The server is killed by SIGKILL
in the middle of two steps; what is counted is results that were lost or changed, against a loop
that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.training.keys import Measured, Options
from deltawire import train
from deltawire.config import BuildConfig
from deltawire.errors import InputError
from deltawire.export.models import save_model
from deltawire.train.build import build_model, byte_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 256, "layers": 6, "head_size": 32, "feed_forward_size": 768, "context": 128
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 32, "layers": 2, "head_size": 16, "feed_forward_size": 48, "context": 128
}  # fmt: skip
PROMPT = list(b"What is 43 + 57? Answer with a number: ")
GROUPS, GROUP_SIZE, TOKENS = 8, 8, 24
KEY = "tml-bench"
WARM_UP = 1
LOSS_STEPS = 12
KILL_AT = (4, 8)
WAIT_S = 300


class _Server:
    """``deltawire tinker`` in a process."""

    def __init__(self, bucket: Path, model: Path) -> None:
        self.url = ""
        self._command = [sys.executable, "-m", "deltawire", "tinker", str(bucket)]
        self._command += ["--model", str(model), "--name", "bench"]
        self._command += ["--context", "128", "--checkpoint-every", "4"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, again on the port that it had."""
        port = self.url.rpartition(":")[2] or "0"
        env = os.environ | {"DELTAWIRE_TOKEN": KEY}
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [*self._command, "--port", port], env=env, stderr=subprocess.PIPE
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline().decode()
        self.url = line.rpartition(" on ")[2].strip()
        if not self.url.startswith("http://"):
            raise InputError(f"the server did not start: {line.strip()}")

    def restart(self) -> None:
        self.kill()
        self.start()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def _served(sizes: dict[str, Any], seed: int) -> Iterator[tuple[_Server, Any]]:
    """A server, and a session of Tinker's client on it."""
    import tinker

    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as folder:
        place = Path(folder)
        save_model(build_model(BuildConfig(**sizes), seed=seed), byte_tokenizer(), place / "model")
        server = _Server(place / "bucket", place / "model")
        server.start()
        try:
            yield server, tinker.ServiceClient(base_url=server.url, api_key=KEY)
        finally:
            server.kill()


def measure(options: Options) -> Measured:
    """Times both loops, and checks that nothing is lost over two restarts."""
    os.environ["TINKER_TELEMETRY"] = "0"
    ours, theirs = _overhead(options)
    lost, details = _restarts(options)
    ratio = median(one / other for one, other in zip(theirs, ours, strict=True))
    values = {"tinker_recipe_overhead": round(ratio, 3), "tinker_restart_lost": lost}
    return Measured(values, {"library_step_s": ours, "client_step_s": theirs, **details})


def _overhead(options: Options) -> tuple[list[float], list[float]]:
    """Seconds of each step, by the library and by Tinker's client, in turns."""
    import tinker

    ours: list[float] = []
    theirs: list[float] = []
    with contextlib.ExitStack() as stack:
        _, service = stack.enter_context(_served(SIZES, options.seed))
        client = service.create_lora_training_client(base_model="bench", rank=8).result(WAIT_S)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-bench-")))
        built = build_model(BuildConfig(**SIZES), seed=options.seed)
        save_model(built, byte_tokenizer(), place / "model")
        library = train.TrainingClient.create(str(place / "bucket"), place / "model")
        stack.enter_context(library)

        def sampler() -> Any:
            return library.save_weights_and_get_sampling_client(context=128)

        for _ in range(WARM_UP + options.repeats):
            theirs.append(_step(tinker, client, lambda: _sampler_of(client)))
            ours.append(_step(train, library, sampler))
    return ours[WARM_UP:], theirs[WARM_UP:]


def _sampler_of(client: Any) -> Any:
    return client.save_weights_and_get_sampling_client().result(WAIT_S)


def _step(names: Any, client: Any, sampler_of: Any) -> float:
    """Takes a recipe's step with the classes of ``names``, the SDK's or the library's; returns its
    seconds."""
    prompt = names.ModelInput.from_ints(PROMPT)
    params = names.SamplingParams(max_tokens=TOKENS, temperature=1.0)
    started = time.perf_counter()
    sampler = sampler_of()
    groups = [sampler.sample(prompt, GROUP_SIZE, params) for _ in range(GROUPS)]
    data = []
    for group in groups:
        for place, one in enumerate(group.result(WAIT_S).sequences):
            whole = PROMPT + list(one.tokens)
            blank = [0.0] * (len(PROMPT) - 1)
            inputs = {
                "target_tokens": whole[1:],
                "logprobs": blank + list(one.logprobs),
                "advantages": blank + [place / GROUP_SIZE - 0.5] * len(one.tokens),
            }
            data.append(
                names.Datum(
                    model_input=names.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs
                )
            )
    forward = client.forward_backward(data, "importance_sampling")
    step = client.optim_step(names.AdamParams(learning_rate=1e-5))
    forward.result(WAIT_S)
    step.result(WAIT_S)
    spent = time.perf_counter() - started
    if hasattr(sampler, "close"):
        sampler.close()
    return spent


def _restarts(options: Options) -> tuple[int, dict[str, Any]]:
    """Returns how many of a loop's results a server lost or changed that was killed twice."""
    calm = _losses(options.seed, ())
    killed = _losses(options.seed, KILL_AT)
    lost = sum(before != after for before, after in zip(calm, killed, strict=True))
    return lost, {"results": len(calm), "kills": len(KILL_AT)}


def _losses(seed: int, kills: tuple[int, ...]) -> list[float]:
    import tinker

    tokens = PROMPT + list(b"100")
    inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
    )
    found = []
    with _served(SMALL, seed) as (server, service):
        client = service.create_lora_training_client(base_model="bench", rank=8).result(WAIT_S)
        for step in range(LOSS_STEPS):
            forward = client.forward_backward([datum] * 4, "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=1e-3))
            restart = threading.Thread(target=server.restart if step in kills else int)
            restart.start()
            found.append(float(forward.result(WAIT_S).metrics["loss:sum"]))
            restart.join()
            if step % 3 == 2:
                client.save_weights_for_sampler(f"{step}").result(WAIT_S)
        found.append(
            float(client.forward([datum], "cross_entropy").result(WAIT_S).metrics["loss:sum"])
        )
    return found

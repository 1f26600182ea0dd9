"""Starts a vLLM server for this process, waits for it, and ends it with this process.

The server listens on a socket in a folder that only this user can enter. There is no port to guess
or to race for, and other users cannot make the calls that vLLM does not protect by its key, such as
``/collective_rpc``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deltawire.engines.vllm.environment import vllm_python
from deltawire.engines.vllm.remote import EngineClient
from deltawire.engines.vllm.routed_experts import FLAG
from deltawire.errors import InputError, ResyncError
from deltawire.runtime.guard import guarded

ARGUMENTS = "DELTAWIRE_VLLM_ARGS"
START_WITHIN_S = 600.0
STOP_WITHIN_S = 20.0
TAIL_BYTES = 2000
MAX_LOG_BYTES = 1 << 20


class VllmServer:
    """A ``vllm serve`` process for the model files in ``folder``, with weights from the run.

    ``slot`` are the arguments for a run with an adapter. Call `wait_until_up` first. The server
    ends when this process ends, for any reason; it writes to the file ``log``. The environment
    variable `ARGUMENTS` adds to its command line.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        public_key: str = "",
        slots: int,
        capacity: int,
        cache_bytes: int,
        precision: str,
        seed: int,
        threads: int,
        logprobs_mode: str = "processed_logprobs",
        routes: bool = False,
        slot: Sequence[str] = (),
    ) -> None:
        python = vllm_python()
        self._folder = tempfile.TemporaryDirectory(prefix="dw-vllm-")
        self.socket = str(Path(self._folder.name) / "http")
        self.log = Path(self._folder.name) / "log"
        settings = json.dumps(
            {"deltawire": {"run": run, "public_key": public_key, "follow": False}}
        )
        command = [
            python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
            "--uds", self.socket, "--load-format", "dummy", "--skip-tokenizer-init",
            "--generation-config", "vllm", "--dtype", precision, "--enforce-eager",
            "--max-model-len", str(capacity), "--max-num-seqs", str(slots),
            "--kv-cache-memory-bytes", str(cache_bytes), "--seed", str(seed % 2**32),
            "--logprobs-mode", logprobs_mode, "--enable-scale-out",
            "--disable-log-stats", "--uvicorn-log-level", "warning",
            "--additional-config", settings, *([FLAG] if routes else []), *slot,
            *shlex.split(os.environ.get(ARGUMENTS, "")),
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                guarded(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment(threads),
            )
        self.calls = EngineClient(self.socket)

    def wait_until_up(self, *, stopping: Callable[[], bool]) -> None:
        """Waits until it serves a version; raises `InputError` with the end of its log if it never
        does."""
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            if (code := self._process.poll()) is not None:
                raise InputError(f"vLLM exited with code {code} while starting: {self.tail()}")
            if stopping() or time.monotonic() > deadline:
                raise InputError(f"vLLM did not start in time: {self.tail()}")
            try:
                if self.calls.status().version >= 0:
                    return
            except ResyncError:
                pass  # It is not listening yet.
            time.sleep(0.2)

    def tail(self, most: int = TAIL_BYTES) -> str:
        """Returns the end of its log, at most ``most`` bytes."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - most))
            return log.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Ends it and every process it started. If it had already exited, copies its log to this
        process's standard error."""
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            sys.stderr.write(self.tail(MAX_LOG_BYTES) + "\n")
        self._process.stdin.close()
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()


def _environment(threads: int) -> dict[str, str]:
    """Returns the server's environment: no network use, and no compiler, as it runs eagerly."""
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_HOST_IP": "127.0.0.1",  # where its own processes connect
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return {**defaults, **os.environ, **own}

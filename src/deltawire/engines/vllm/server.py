"""A vLLM server of one's own: started, waited for, and gone when its starter is.

It listens on a socket in a folder that only this user may enter: no port to guess or to race for,
and calls that vLLM does not guard by its key, ``/collective_rpc`` among them, are nobody else's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from deltawire.engines.vllm.remote import Calls
from deltawire.errors import InputError, ResyncError

PYTHON = "DELTAWIRE_VLLM_PYTHON"
ARGUMENTS = "DELTAWIRE_VLLM_ARGS"
START_WITHIN_S = 600.0
STOP_WITHIN_S = 20.0
TAIL_BYTES = 2000
MAX_LOG_BYTES = 1 << 20
HINT = (
    f"make engines builds the environment; {PYTHON} names the Python of another one with vllm "
    "and deltawire in it"
)


def vllm_python() -> str:
    """The Python that runs vLLM: `PYTHON` in the environment, or this one if it has vLLM, or that
    of the ``.venv-vllm`` beside this one's environment.

    It is never taken from a run's configuration, which comes out of a bucket. Raises `InputError`
    if there is none.
    """
    if named := os.environ.get(PYTHON, ""):
        if not os.access(named, os.X_OK):
            raise InputError(f"{PYTHON} is {named}, which cannot be run", hint=HINT)
        return named
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    beside = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    if not os.access(beside, os.X_OK):
        raise InputError("there is no environment with vLLM", hint=HINT)
    return str(beside)


class Server:
    """``vllm serve`` of the model files in ``folder``, whose weights come from the run.

    Call `wait_until_up` before the first call. It dies with this process, however that ends; where
    it says what it does is its ``log``. What `ARGUMENTS` in the environment holds is added to its
    command line.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        slots: int,
        capacity: int,
        cache_bytes: int,
        precision: str,
        seed: int,
        threads: int,
    ) -> None:
        python = vllm_python()
        self._place = tempfile.TemporaryDirectory(prefix="dw-vllm-")
        self.socket = str(Path(self._place.name) / "http")
        self.log = Path(self._place.name) / "log"
        told = json.dumps({"deltawire": {"run": run, "follow": False}})
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
            "--uds", self.socket, "--load-format", "dummy", "--skip-tokenizer-init",
            "--generation-config", "vllm", "--dtype", precision, "--enforce-eager",
            "--max-model-len", str(capacity), "--max-num-seqs", str(slots),
            "--kv-cache-memory-bytes", str(cache_bytes), "--seed", str(seed % 2**32),
            "--logprobs-mode", "processed_logprobs", "--enable-scale-out",
            "--disable-log-stats", "--uvicorn-log-level", "warning",
            "--additional-config", told, *shlex.split(os.environ.get(ARGUMENTS, "")),
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                [sys.executable, "-m", "deltawire.engines.vllm.guard", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment(threads),
            )
        self.calls = Calls(self.socket)

    def wait_until_up(self, *, stopping: Callable[[], bool]) -> None:
        """Raises `InputError` with the end of its log if it does not come up."""
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            if (code := self._process.poll()) is not None:
                raise InputError(f"vLLM ended with {code} while it started: {self.tail()}")
            if stopping() or time.monotonic() > deadline:
                raise InputError(f"vLLM did not come up: {self.tail()}")
            try:
                if self.calls.status().version >= 0:
                    return
            except ResyncError:
                pass  # It does not listen yet.
            time.sleep(0.2)

    def tail(self, most: int = TAIL_BYTES) -> str:
        """The end of its log, so many bytes at most."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - most))
            return log.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End it, and all that it started. If it ended by itself, its log goes to this process's
        standard error."""
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            sys.stderr.write(self.tail(MAX_LOG_BYTES) + "\n")
        self._process.stdin.close()
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._place.cleanup()


def _environment(threads: int) -> dict[str, str]:
    """The server's: no talk with others, and no compiler for an engine that runs eagerly."""
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_HOST_IP": "127.0.0.1",  # where its processes meet
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return {**defaults, **os.environ, **own}

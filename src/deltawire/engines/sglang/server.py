"""Starts an SGLang server for this process."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from deltawire.engines.following.engine_server import EngineServer
from deltawire.engines.following.environment import engine_python
from deltawire.engines.sglang import FOLLOW

ARGUMENTS = "DELTAWIRE_SGLANG_ARGS"

ROOM = 8
"""Tokens of a sequence that SGLang keeps for itself, more than it does."""

CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
    "--disable-overlap-schedule",
)  # fmt: skip
"""Arguments for a machine without an accelerator, where SGLang's kernels may be missing."""


class SglangServer(EngineServer):
    """An SGLang server for the model files in ``folder``, with weights from the run.

    The environment variable `ARGUMENTS` adds to its command line. See `EngineServer`.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        public_key: str = "",
        slots: int,
        capacity: int,
        precision: str,
        seed: int,
        threads: int,
        on_cpu: bool,
    ) -> None:
        python = engine_python("sglang")
        super().__init__("SGLang")
        tokens = slots * (capacity + ROOM)
        command = [
            python, "-P", "-m", "deltawire.engines.sglang.private_server", self.socket,
            "--model-path", str(folder), "--load-format", "dummy", "--skip-tokenizer-init",
            "--grammar-backend", "none", "--skip-server-warmup", "--sleep-on-idle",
            "--dtype", precision, "--context-length", str(capacity + ROOM),
            "--max-running-requests", str(slots), "--max-total-tokens", str(tokens),
            "--random-seed", str(seed % 2**31), "--log-level", "warning",
            *(CPU if on_cpu else ()), *shlex.split(os.environ.get(ARGUMENTS, "")),
        ]  # fmt: skip
        settings = json.dumps({"run": run, "public_key": public_key, "follow": False})
        self.start(command, _environment(threads, settings, on_cpu=on_cpu))


def _environment(threads: int, settings: str, *, on_cpu: bool) -> dict[str, str]:
    """Returns the server's environment: no network use."""
    own = {
        FOLLOW: settings,
        "HF_HUB_OFFLINE": "1",
        # The room that SGLang keeps may exceed the model's positions; no sequence reaches it.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if on_cpu:
        own["SGLANG_USE_CPU_ENGINE"] = "1"
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **own}

"""Starts an SGLang server for this process."""

from __future__ import annotations

import os

from deltawire.engines.following.engine_server import EngineServer, ServedModel
from deltawire.engines.following.routed_experts import FLAG
from deltawire.engines.sglang import FOLLOW

ROOM = 8
"""Tokens of a sequence that SGLang keeps for itself, more than it does."""

CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
    "--disable-overlap-schedule",
)  # fmt: skip
"""Arguments for a machine without an accelerator, where SGLang's kernels may be missing."""


class SglangServer(EngineServer):
    """An SGLang server for ``model``. See `EngineServer`."""

    def __init__(self, model: ServedModel, *, on_cpu: bool) -> None:
        super().__init__("SGLang", "sglang", model)
        capacity = model.capacity + ROOM
        tokens = model.slots * capacity
        command = [
            self.python, "-P", "-m", "deltawire.engines.sglang.private_server", self.socket,
            "--model-path", str(model.folder), "--load-format", "dummy", "--skip-tokenizer-init",
            "--grammar-backend", "none", "--skip-server-warmup", "--sleep-on-idle",
            "--dtype", model.precision, "--context-length", str(capacity),
            "--max-running-requests", str(model.slots), "--max-total-tokens", str(tokens),
            "--random-seed", str(model.seed % 2**31), "--log-level", "warning",
            *(CPU if on_cpu else ()), *([FLAG] if model.routes else []), *self.more,
        ]  # fmt: skip
        own = {
            FOLLOW: self.settings,
            "HF_HUB_OFFLINE": "1",
            # The room that SGLang keeps may exceed the model's positions; no sequence reaches it.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            **({"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {}),
        }
        self.start(command, {"OMP_NUM_THREADS": str(model.threads), **os.environ, **own})

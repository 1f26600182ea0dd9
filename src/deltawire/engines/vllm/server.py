"""Starts a vLLM server for this process."""

from __future__ import annotations

import os
from collections.abc import Sequence

from deltawire.engines.following.engine_server import EngineServer, ServedModel
from deltawire.engines.following.routed_experts import FLAG
from deltawire.engines.vllm.settings import SECTION


class VllmServer(EngineServer):
    """A ``vllm serve`` process for ``model``.

    ``slot`` are the arguments for a run with an adapter. See `EngineServer`.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        cache_bytes: int,
        logprobs_mode: str = "processed_logprobs",
        slot: Sequence[str] = (),
    ) -> None:
        super().__init__("vLLM", "vllm", model)
        command = [
            self.python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--uds", self.socket,
            "--model", str(model.folder), "--load-format", "dummy", "--skip-tokenizer-init",
            "--generation-config", "vllm", "--dtype", model.precision, "--enforce-eager",
            "--max-model-len", str(model.capacity), "--max-num-seqs", str(model.slots),
            "--kv-cache-memory-bytes", str(cache_bytes), "--seed", str(model.seed % 2**32),
            "--logprobs-mode", logprobs_mode, "--enable-scale-out",
            "--disable-log-stats", "--uvicorn-log-level", "warning",
            "--additional-config", f'{{"{SECTION}": {self.settings}}}',
            *([FLAG] if model.routes else []), *slot, *self.more,
        ]  # fmt: skip
        self.start(command, _environment(model.threads))


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

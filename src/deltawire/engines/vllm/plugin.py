"""The entry point ``vllm.general_plugins``, which vLLM runs once in each of its processes."""

from __future__ import annotations

BACKEND = "deltawire"


def register() -> None:
    """Make the backend ``deltawire`` known, and be there when an engine starts.

    An engine that was not told to use deltawire runs as if it were not installed.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(
        BACKEND, "deltawire.engines.vllm.transfer", "DeltawireTransferEngine"
    )
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from deltawire.engines.vllm import unpacked_cpu_kernels

        unpacked_cpu_kernels.keep_plain()
    from deltawire.engines.vllm import postprocess_check, swap_controller

    postprocess_check.watch()
    swap_controller.hook()

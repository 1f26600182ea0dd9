"""The plugin's entry point (``vllm.general_plugins``), run once in each of vLLM's processes."""

from __future__ import annotations

from deltawire.engines.live_parts import attests_here

BACKEND = "deltawire"


def register() -> None:
    """Registers the weight-transfer backend ``deltawire`` and the hooks into engine start.

    An engine that is not configured to use deltawire runs as if the plugin were not installed.
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

        unpacked_cpu_kernels.install()
    from deltawire.engines.vllm import core_controller, postprocess_check

    postprocess_check.install()
    core_controller.hook()
    if attests_here():
        from vllm.v1.worker.worker_base import WorkerBase

        from deltawire.engines.vllm.attesting import AttestWorker, OnInstances

        method = OnInstances(AttestWorker.deltawire_live_digests)
        WorkerBase.deltawire_live_digests = method

"""A weight transfer of vLLM's own kind that reads files: what a framework's worker extension does.

It loads layer by layer, as vLLM's transfers for accelerators do, so parameters have no memory in
the middle of an update.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A file, and which of its tensors are left out."""

    file: str
    without: list[str] = field(default_factory=list)


class FolderTransferEngine(WeightTransferEngine):
    """Loads tensors of a file through the model's own loader."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self):
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info):
        with safe_open(update_info.file, "pt") as held:
            names = [name for name in held.keys() if name not in update_info.without]  # noqa: SIM118
            self.model.load_weights((name, held.get_tensor(name)) for name in names)

    def shutdown(self):
        pass


WeightTransferEngineFactory.register_engine("folder", "folder_transfer", "FolderTransferEngine")


class FolderWorker:
    """A worker extension that has nothing to do with deltawire."""

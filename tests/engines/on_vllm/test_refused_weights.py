"""A vLLM that reorders weights for its kernels is refused."""

import pytest
import torch
from engine import Engine
from shapes import Trainer, build

from deltawire.store import open_bucket

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(params=["qwen3_moe"])
def trainer(tmp_path, request, ranks):
    assert ranks == 1, "what is planted must be in this process"
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    trainer = Trainer(bucket, build(request.param, tmp_path / "model"))
    yield trainer
    trainer.close()


def test_experts_whose_halves_vllm_exchanges_are_refused(trainer, monkeypatch):
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31

    original = method.UnquantizedFusedMoEMethod.process_weights_after_loading

    def exchange(self, layer):
        original(self, layer)
        layer.w13_weight.data.copy_(swap_w13_to_w31(layer.w13_weight.data))

    monkeypatch.setattr(method.UnquantizedFusedMoEMethod, "process_weights_after_loading", exchange)
    with pytest.raises(
        Exception, match=r"w13_weight holds different bits, or in a different order"
    ):
        Engine(trainer.model, run=trainer.publisher.bucket.url)
    assert torch.distributed.is_initialized()  # It got as far as to load the model.

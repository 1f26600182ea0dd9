"""Several adapters whose base is sharded: each rank's rows lie in memory once."""

import gc

import pytest
import torch
from adapter_lines import DENSE, EXPERTS, LINES, PACKED, config_of, start

from deltawire.export.adapter import PREFIX
from deltawire.export.lines import holds_base
from deltawire.export.shards import local_part
from deltawire.placement.live import publish_only
from deltawire.rl.trainer.lines import LinesTrainer
from deltawire.runtime.process import Process
from deltawire.sync import load_mirror, read_run


def frozen_of(model):
    """The memory of each frozen parameter by its name without the adapter's wrapper."""
    return {
        name.replace(".base_layer.", "."): local_part(one).data_ptr()
        for name, one in model.named_parameters()
        if not one.requires_grad
    }


@pytest.mark.parametrize(
    ("adapters", "sizes"), [(LINES, DENSE), (PACKED, EXPERTS)], ids=["dense", "packed"]
)
def test_the_shards_of_the_base_lie_in_memory_once(tmp_path, adapters, sizes):
    """A mesh of one rank shards by the code of many."""
    torch.set_num_threads(1)
    config = config_of(tmp_path, adapters, compute="bfloat16")
    bucket = start(tmp_path, config, sizes)
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with process.registered(), LinesTrainer(process, config, changed=True) as trainer:
        models = [one.masters.model for one in trainer.trainers.values()]
        assert not any(holds_base(one) for one in models), "no rank reads all of the base"
        first, second = (frozen_of(one) for one in models)
        assert first == second
        assert len(first) > 5
        trainer.loop()
        assert frozen_of(models[0]) == frozen_of(models[1]), "also once the models computed"
        base = load_mirror(bucket, read_run(bucket), at=0)
        publish_only(models[1], "")
        source = trainer.trainers["words"].masters.source
        for name, tensor in source_bits(models[1]).items():
            assert tensor.tobytes() == base.tensors[name].tobytes(), name
        assert all(spec.name.startswith(PREFIX) for spec in source.specs())
        del first, second, models, source
    del trainer
    gc.collect()


def source_bits(model):
    """The bits of what is not the adapter's, as the base's run has them."""
    from deltawire.export.source import bits_of, open_source

    found = bits_of(open_source("bf16", model))
    return {name: bits for name, bits in found.items() if not name.startswith(PREFIX)}

"""The tracker of roles, and that states in host memory do not count as the device's."""

import gc

import pytest
import torch

from benchmarks.training.offload import QWEN3_30B_A3B, RoleTracker, device_peak
from benchmarks.training_memory import Case


def test_bytes_are_counted_by_role_while_storages_live():
    with RoleTracker() as tracker:
        states = torch.zeros(1000)
        view = states[10:].view(-1)
        work = torch.ones(500)
        assert tracker.bytes == {"device": 6000, "host": 0}
        tracker.mark_host([view])
        assert tracker.bytes == {"device": 2000, "host": 4000}
        assert tracker.peak == 6000
        tracker.reset_peak()
        double = work * 2
        del work
        gc.collect()
        assert (tracker.bytes["device"], tracker.peak) == (2000, 4000)
        double.untyped_storage().resize_(0)
        assert tracker.bytes == {"device": 0, "host": 4000}
        double.untyped_storage().resize_(8000)
        assert (tracker.bytes["device"], tracker.peak) == (8000, 8000)


@pytest.mark.drills
@pytest.mark.long
def test_offload_takes_the_states_off_the_device():
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    small = {**QWEN3_30B_A3B, **sizes, "num_experts": 8, "vocab_size": 512}
    case = Case(config=small, ranks=2, context=64, checkpointing="full")
    resident, streamed = device_peak(case, "none"), device_peak(case, "optimizer")
    assert streamed["host"] == resident["device"] - streamed["device"]
    parameters = streamed["device"]
    assert abs(streamed["host"] - 2 * parameters) < 0.01 * parameters, "two float32 states each"
    assert streamed["peak"] < resident["peak"]

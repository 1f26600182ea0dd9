"""slime's own update of weights by disk, with deltawire's hook, and slime's own loader of the hook.

Needs slime's source on the path (`scripts/client_environment.sh`). Replaced is what needs Megatron:
the two modules that read its parameters. slime's class numbers and removes the directories, writes
the files, waits for its ranks and calls the hook.
"""

from __future__ import annotations

import shutil
import sys
import types
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import deltawire.slime
from deltawire import codec
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, newest_version, read_run

OWN = "slime.backends.megatron_utils.update_weight"
update = pytest.importorskip(f"{OWN}.update_weight_from_disk", reason="slime is not installed")
pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Makes slime's updater as a job does, on one rank of gloo; its weights are those of `held`."""
    import slime.utils.distributed_utils as groups

    class Iterator:
        def __init__(self, **_options):
            pass

        def get_hf_weight_chunks(self, _local, **_options):
            for name, tensor in held.items():
                yield [(name, tensor)]

    common = types.ModuleType(f"{OWN}.common")
    common.named_params_and_buffers = lambda *_args, **_options: []
    direct = types.ModuleType(f"{OWN}.hf_weight_iterator_direct")
    direct.HfWeightIteratorDirect = Iterator
    for module in (common, direct):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(groups, "GLOO_GROUP", None)
    groups.init_gloo_group()
    monkeypatch.setenv("DELTAWIRE_RUN", str(tmp_path / "run"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen3"}')
    held = {}
    arguments = Namespace(
        update_weight_disk_dir=str(tmp_path / "updates"),
        hf_checkpoint=str(tmp_path / "hf"),
        model_name=None,
    )

    def start(hook="deltawire.slime.publish"):
        arguments.custom_update_weight_post_write_path = hook
        return update.UpdateWeightFromDisk(
            arguments, [], dict, model_name="qwen3", quantization_config=None
        )

    yield start, held
    deltawire.slime.close()
    dist.destroy_process_group()


def weights(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "model.embed_tokens.weight": torch.randn(16, 8, generator=generator).bfloat16(),
        "model.norm.weight": torch.full((8,), float(step)).bfloat16(),
    }


def newest(url):
    bucket = open_bucket(str(url))
    return load_mirror(bucket, read_run(bucket), at=newest_version(bucket))


def test_each_update_of_slime_is_a_version_and_a_restarted_job_goes_on(job, tmp_path):
    start, held = job
    version = -1
    for steps in ((1, 2, 3), (7, 8)):  # The second job counts from 1 again.
        updater = start()
        for step in steps:
            held.update(weights(step))
            updater.update_weights()
            # slime removes it once its engines have loaded it.
            shutil.rmtree(tmp_path / "updates" / f"weight_v{updater.weight_version:06d}")
            version += 1
            mirror = newest(tmp_path / "run")
            assert mirror.version == version
            for name, tensor in held.items():
                bits = codec.bits_of(tensor, "BF16").reshape(-1)
                assert (mirror.tensors[name] == bits).all(), (step, name)
        deltawire.slime.close()
    files = {file.name for file in read_run(open_bucket(str(tmp_path / "run"))).model_files}
    assert "config.json" in files


def test_engines_are_scored_against_the_version_that_slime_wrote_before(job, monkeypatch):
    """The hook of `deltawire.integrations.slime`; what scores is replaced."""
    import deltawire.integrations.slime as attested
    from deltawire.errors import StoppedError
    from deltawire.integrations.checking import WeightCheck

    class Box:
        def __init__(self, options, _trust):
            folder, found = Path(options.against), {}
            for file in folder.glob("*.safetensors"):
                found |= load_file(file)
            assert (folder / "config.json").is_file()
            asked.append((options.url, found["model.norm.weight"][0].item()))

        def check(self):
            return types.SimpleNamespace(verdict=verdicts.pop(0))

    asked, verdicts = [], ["same", "different"]
    monkeypatch.setattr(attested, "BlackBox", Box)
    monkeypatch.setattr(attested, "check", attested.Hook(WeightCheck("stop")))
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get=lambda found: found))
    start, held = job
    updater = start("deltawire.integrations.slime.check")
    engine = types.SimpleNamespace(get_url=types.SimpleNamespace(remote=lambda: "http://engine:1"))
    updater.connect_rollout_engines([engine], None)
    for step in (1, 2):
        held |= weights(step)
        updater.update_weights()
    held |= weights(3)
    with pytest.raises(StoppedError, match="other weights than weight_v000002"):
        updater.update_weights()
    assert asked == [("http://engine:1", 1.0), ("http://engine:1", 2.0)]

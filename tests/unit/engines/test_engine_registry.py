"""Engines by name, and that a new one needs a folder and a line."""

import asyncio
from pathlib import Path

import pytest
import torch

from deltawire.config import parse_config
from deltawire.engines import sglang
from deltawire.engines.base import Sampling
from deltawire.engines.registry import ENGINES, check_engine
from deltawire.errors import InputError
from deltawire.export.models import save_model
from deltawire.export.source import bits_of, open_source
from deltawire.rl.rollout.policy_server import follow, serve_policy, swap
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.runtime.process import Process
from deltawire.store import open_bucket
from deltawire.sync import Publisher, load_mirror
from deltawire.train.build import byte_tokenizer


def test_an_unknown_engine_is_named():
    with pytest.raises(InputError, match="no engine 'llama'") as caught:
        check_engine("llama")
    assert "sglang, transformers, vllm" in str(caught.value)


@pytest.mark.parametrize("engine", ["transformers", "echo"])
def test_a_worker_serves_and_follows_with_any_engine_of_the_registry(
    tmp_path, tiny, monkeypatch, engine
):
    monkeypatch.setitem(ENGINES, "echo", "echo_engine")
    config = parse_config(
        {"name": "run", "model": {"path": "x"}, "rollout": {"engine": engine, "slots": 3}},
        source="s",
    )
    save_model(tiny, byte_tokenizer(), tmp_path / "model")
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    run = start_run(bucket, config, tmp_path / "model")
    process = Process(bucket, "w0", "worker", supervised=False)
    served, steps = serve_policy(process, run, config, engine=config.rollout.engine, seed=0)
    assert (served.live.version, served.engine.version, served.engine.slots) == (0, 0, 3)

    async def sample():
        task = asyncio.create_task(served.engine.generate([5, 6, 7], Sampling(3, 0.0)))
        while not task.done():
            await served.engine.advance()
            await asyncio.sleep(0)
        return task.result()

    completion = asyncio.run(sample())
    assert completion.versions == [0] * len(completion.tokens)
    assert engine == "transformers" or completion.tokens == [7, 6, 5]
    with torch.no_grad():
        next(tiny.parameters()).mul_(1.5)
    source = open_source("bf16", tiny)
    publisher = Publisher(bucket, run, load_mirror(bucket, run), epoch=1)
    publisher.publish(source.tensors())
    publisher.close()
    follower = follow(steps, served)
    follower.start()
    try:
        while served.live.version < 1:
            swap(served, follower, process)
            process.wait(0.01)
    finally:
        follower.close()
    assert served.engine.version == 1
    assert served.live.attest() == publisher.digest
    assert bits_of(source).keys() == {spec.name for spec in run.tensors}
    asyncio.run(served.close())


def test_an_engine_that_follows_a_run_is_a_small_folder():
    """Code that several engines need lies above their folders. Attesting follows no run."""
    folder = Path(sglang.__file__).parent
    following = [file for file in folder.glob("*.py") if file.name != "attesting.py"]
    assert sum(len(file.read_text().splitlines()) for file in following) <= 600

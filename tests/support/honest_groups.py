"""A small run in memory, and groups that an honest worker of it samples."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import torch

from deltawire.chat.text import Text
from deltawire.config import parse_config
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import open_tasks
from deltawire.export.models import save_model
from deltawire.export.source import open_source
from deltawire.parity.routes import RouteShape, pack_routes, unpack_routes
from deltawire.rl.control.challenges import nonce_of, stream_of
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of, with_budget
from deltawire.rl.rollout.reuse import play_group
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.store import open_bucket
from deltawire.sync import load_mirror
from deltawire.sync.publish.sources import open_publisher
from deltawire.train.build import build_model, byte_tokenizer

SECRET = "5e" * 16
CONFIG = {
    "name": "judged",
    "model": {
        "build": {
            "hidden_size": 32, "layers": 1, "head_size": 16, "feed_forward_size": 64,
            "context": 128,
        }
    },
    "task": {"heldout": 4, "options": {"min_word_len": 3, "max_word_len": 4}},
    "rollout": {"group_size": 4, "max_tokens": 6, "slots": 16, "context": 96},
    "train": {"groups_per_step": 4, "max_staleness": 2},
}  # fmt: skip


@dataclass
class HonestRun:
    """The run, its parts, and what samples from its newest version."""

    folder: object
    raw: dict = field(default_factory=lambda: CONFIG)
    place: str = "memory://"
    capacity: int = 96

    def __post_init__(self):
        self.config = parse_config(self.raw, source="test")
        self.bucket = open_bucket(self.place, create=True)
        model = build_model(self.config.model.build, seed=0)
        self.tokenizer = byte_tokenizer()
        save_model(model, self.tokenizer, self.folder)
        self.run = start_run(self.bucket, self.config, self.folder)
        self.text = Text(self.tokenizer)
        self.tasks = open_tasks(self.config.task, seed=self.config.seed)
        self.model = model
        self.source = open_source(self.config.train.exporter, model)
        self.follow()

    def follow(self):
        """Sample from the newest version from now on."""
        mirror = load_mirror(self.bucket, self.run)
        self.source.restore(mirror)
        self.version = mirror.version
        self.model.eval()

    def step(self, size=0.05):
        """Publish a version with other weights."""
        with torch.no_grad():
            for weights in self.model.parameters():
                weights.add_(size * torch.randn_like(weights))
        publisher = open_publisher(self.bucket, self.source.tensors(), specs=self.source.specs())
        publisher.publish(self.source.tensors())
        publisher.close()
        self.follow()

    def engine(self):
        """A sampler of the version that is followed."""
        return TransformersEngine(
            self.model,
            stop_tokens=[256],
            slots=16,
            capacity=self.capacity,
            seed=3,
            version=self.version,
        )

    def group(self, number=0, worker="w0", secret=SECRET, lease=0):
        """The ``number``-th group as an honest worker delivers it."""
        task = self.tasks.draw(stream_of(worker, secret, lease), number)
        engine, rollout = self.engine(), self.config.rollout
        nonce = nonce_of(secret, lease, number)

        def limits(episode):
            return with_budget(
                EpisodeLimits.of(rollout), version=self.version,
                group=f"{nonce}/{task.identity}", episode=episode,
            )  # fmt: skip

        async def played():
            every = [limits(episode) for episode in range(rollout.group_size)]
            playing = asyncio.ensure_future(
                play_group(engine, lambda: self.tasks.open(task), self.text, rollout, every)
            )
            while not playing.done():
                await engine.advance()
            return playing.result()

        episodes = asyncio.run(played())
        return group_of(worker, nonce, task, rollout.temperature, episodes)

    def judged(self, checker, group, number=0, secret=SECRET):
        """The verdict on a group."""
        return checker.check(BufferedGroup(number, group), lease=0, number=number, secret=secret)


class RoutedRun(HonestRun):
    """A run of a mixture of experts whose worker records the experts it chose."""

    @classmethod
    def with_routes(cls, folder, mode="replay", place="memory://"):
        """The run, with ``parity.routes`` set to ``mode``."""
        build = CONFIG["model"]["build"] | {
            "family": "qwen3_moe", "layers": 2, "experts": 8, "experts_per_token": 2,
        }  # fmt: skip
        return cls(folder, CONFIG | {"model": {"build": build}, "parity": {"routes": mode}}, place)

    def engine(self):
        """A sampler that records."""
        return TransformersEngine(
            self.model, stop_tokens=[256], slots=16, capacity=96, seed=3, version=self.version,
            record_routes=True,
        )  # fmt: skip

    def rerouted(self, group, token):
        """The group with other experts in the last layer where its first answer's ``token`` was
        drawn."""
        one = group.trajectories[0]
        prompt = len(group.prompt_of(one))
        shape = RouteShape.of(one.routes)
        routes = unpack_routes(one.routes, shape, positions=prompt + len(one.tokens_T) - 1)
        place = prompt + token - 1
        routes[place, 1] = sorted(set(range(8)) - set(routes[place, 1].tolist()))[:2]
        packed = replace(one, routes=pack_routes(routes, experts=8))
        return replace(group, trajectories=[packed, *group.trajectories[1:]])

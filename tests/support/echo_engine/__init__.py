"""An engine as a stranger would add one: it answers a prompt with its own tokens, reversed."""

import asyncio

from deltawire.engines.base import Completion, OpenEngine
from deltawire.placement.live import LiveWeights
from deltawire.sync import Subscriber, load_mirror


class EchoSampler:
    """A sampler that reads no weights, but says which version it serves."""

    def __init__(self, version, slots, capacity):
        self.version, self.slots, self.capacity, self.active = version, slots, capacity, 0

    async def generate(self, prompt, sampling, *, on_token=None):
        tokens = list(reversed(prompt))[: sampling.max_tokens]
        await asyncio.sleep(0)
        return Completion(tokens, [0.0] * len(tokens), [self.version] * len(tokens))

    async def advance(self):
        await asyncio.sleep(0)
        return 0

    def cancel_all(self):
        pass


def check_machine():
    pass


def check_tensors(tensors):
    pass


def open_engine(request):
    weights = LiveWeights(request.build_model(), request.run.tensors)
    mirror = load_mirror(request.bucket, request.run, at=request.version)
    weights.load(mirror)
    return OpenEngine(
        sampler=EchoSampler(mirror.version, request.slots, request.capacity),
        weights=weights,
        steps=Subscriber(request.bucket, request.run, mirror),
    )

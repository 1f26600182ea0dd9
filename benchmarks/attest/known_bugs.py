"""Bugs of others' weight synchronization, rebuilt small.

Each function is one bug: with ``broken`` it makes the mistake of the threads that it cites, without
it does the same correctly. It returns what deltawire's own functions say: by tensor (or by what was
examined) the verdict and the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.attest.cached_endpoint import VOCABULARY, CachedEndpoint, Recurrent
from benchmarks.attest.engines import (
    Weights,
    attest_engine,
    attest_tensors,
    drawn,
    fleet,
    load,
    side,
    stepped,
)
from benchmarks.attest.sharded import Sharded
from deltawire.attest.verdicts import WeightReport
from deltawire.launch.black_box.checking import SEQUENCES
from deltawire.launch.black_box.judging import check_endpoint
from deltawire.parity.dump import DumpModel, examine
from deltawire.parity.dump_rows import DumpRow

Named = dict[str, tuple[str, str]]
"""Verdict and cause, by name."""


class KnownBug(NamedTuple):
    """A rebuilt bug: its ``threads``, ``rebuilt(broken)``, and what must be ``named``."""

    threads: tuple[str, ...]
    rebuilt: Callable[[bool], Named]
    named: Named


def _named(report: WeightReport) -> Named:
    return {
        tensor.name: (tensor.verdict, tensor.cause)
        for tensor in report.tensors
        if tensor.verdict != "equal"
    }


class MultiTokenHead(torch.nn.Module):
    """A draft of one layer that is loaded from the model's own checkpoint."""

    def __init__(self, embed: torch.nn.Parameter) -> None:
        super().__init__()
        self.embed = embed  # The model's own parameter, as engines share it.
        hidden = Sharded.HIDDEN
        self.projection = torch.nn.Parameter(torch.empty(hidden, 2 * hidden, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.empty(hidden, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the tensors of the head."""
        for name, weight in weights:
            if name.startswith("mtp."):
                getattr(self, name.removeprefix("mtp.")).data.copy_(weight)


def stale_multi_token_head(broken: bool) -> Named:
    """An update over the network reaches the model, but not its multi-token head."""
    hidden = Sharded.HIDDEN
    old = drawn(0, more={"mtp.projection": (hidden, 2 * hidden), "mtp.norm": (hidden,)})
    new = stepped(old, 1)
    module = Sharded(0, 1)
    head = MultiTokenHead(module.embed)

    def update(weights: Weights, receivers: list[torch.nn.Module]) -> None:
        for receiver in receivers:
            # The model's own loader leaves out the names of the head, as engines' loaders do.
            mine = receiver is head
            load(receiver, {n: w for n, w in weights.items() if n.startswith("mtp.") == mine})

    update(old, [module, head])
    update(new, [module] if broken else [module, head])
    module.__dict__["load_weights"] = lambda weights: Sharded.load_weights(
        module, ((n, w) for n, w in weights if not n.startswith("mtp."))
    )
    return _named(
        attest_engine([module], side(new, "version 1"), side(old, "version 0"), draft=head)
    )


def doubly_transposed_experts(broken: bool) -> Named:
    """A fused tensor of experts is turned for each expert in a loop that keeps the turned one."""
    old = drawn(0, experts=True)
    new = stepped(old, 1)
    (module,) = fleet(1, old)
    load(module, {name: tensor for name, tensor in new.items() if not name.endswith(".down")})
    experts = range(Sharded.EXPERTS)
    fused = torch.stack([new[f"experts.{number}.down"].T for number in experts])
    for number in experts:
        turned = fused.transpose(1, 2)
        if broken:
            fused = turned
        expert = turned[number].contiguous()
        module.w2.data[number].copy_(expert.reshape(module.w2.shape[1:]))
    return _named(attest_engine([module], side(new, "version 1"), side(old, "version 0")))


def dropped_chunk(broken: bool) -> Named:
    """The engine fails to apply one chunk of an update, and the trainer does not look."""
    old = drawn(0)
    new = stepped(old, 1)
    (module,) = fleet(1, old)
    sent = []

    def apply(name: str, first: int, rows: Tensor) -> None:
        sent.append(name)
        if broken and (name, first) == ("up", 8):
            raise ConnectionError("the engine was restarting")
        live[name][first : first + len(rows)] = rows

    live = {name: weight.clone() for name, weight in old.items()}
    for name, weight in new.items():
        for first in range(0, len(weight), 8):
            with suppress(ConnectionError):
                apply(name, first, weight[first : first + 8])
    load(module, live)
    return _named(attest_engine([module], side(new, "version 1"), side(old, "version 0")))


class AdapterCache:
    """Adapters of an engine by name: ``staged`` as they were sent, and a few that are resident.

    Loading folds the adapter's scale into its second matrix, as vLLM does.
    """

    def __init__(self, *, resident: int = 2, in_place: bool = False, reuse: bool = False) -> None:
        self.staged: dict[str, tuple[Weights, float]] = {}
        self.resident: dict[str, Weights] = {}
        self._most = resident
        self._in_place = in_place
        self._reuse = reuse

    def send(self, name: str, adapter: Weights, scale: float) -> None:
        """Takes the adapter of a new version under its name."""
        self.staged[name] = ({n: tensor.clone() for n, tensor in adapter.items()}, scale)
        if not self._reuse:
            self.resident.pop(name, None)

    def serve(self, name: str) -> Weights:
        """Returns what requests with this name compute with."""
        if name not in self.resident:
            adapter, scale = self.staged[name]
            if not self._in_place:
                adapter = {n: tensor.clone() for n, tensor in adapter.items()}
            adapter["q.lora_B.weight"].mul_(scale)
            while len(self.resident) >= self._most:
                self.resident.pop(next(iter(self.resident)))
            self.resident[name] = adapter
        return self.resident[name]


def _adapter(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q.lora_A.weight": (4, 16), "q.lora_B.weight": (16, 4)}
    return {n: torch.randn(shape, generator=generator).bfloat16() for n, shape in shapes.items()}


def _served(adapter: Weights, scale: float) -> Weights:
    return adapter | {"q.lora_B.weight": adapter["q.lora_B.weight"] * scale}


def adapter_scaled_twice(broken: bool) -> Named:
    """An evicted adapter is loaded again from tensors that its first load had scaled in place."""
    cache = AdapterCache(resident=1, in_place=broken)
    cache.send("policy", _adapter(0), 2.0)
    cache.send("other", _adapter(1), 2.0)
    cache.serve("policy")
    cache.serve("other")
    found = cache.serve("policy")
    return _named(attest_tensors(found, side(_served(_adapter(0), 2.0), "version 1")))


def adapter_of_a_stale_cache(broken: bool) -> Named:
    """A new adapter under the name of the one before finds the resident one, and is not loaded."""
    cache = AdapterCache(reuse=broken)
    cache.send("policy", _adapter(0), 2.0)
    cache.serve("policy")
    cache.send("policy", _adapter(1), 2.0)
    found = cache.serve("policy")
    old, new = (side(_served(_adapter(seed), 2.0), f"version {seed}") for seed in (0, 1))
    return _named(attest_tensors(found, new, old))


def base_under_an_adapters_name(broken: bool) -> Named:
    """The engine is told to adapt other modules than the adapter has, and serves the base."""
    base = {name: tensor for name, tensor in drawn(0).items() if name in ("q", "out")}
    adapter = _adapter(0)
    delta = adapter["q.lora_B.weight"].float() @ adapter["q.lora_A.weight"].float()
    targets = {"out"} if broken else {"q", "out"}

    def merged(targets: set[str]) -> Weights:
        change = {"q": delta} if "q" in targets else {}
        return {n: (tensor.float() + change.get(n, 0)).bfloat16() for n, tensor in base.items()}

    reference = side(merged({"q"}), "version 1")
    return _named(attest_tensors(merged(targets), reference, side(base, "the base")))


def shard_of_another_rank(broken: bool) -> Named:
    """Loaders of merged columns read the rank from an argument, whose default is 0."""
    old = drawn(0)
    new = stepped(old, 1)
    modules = fleet(2, old)
    for module in modules:
        for name, weight in new.items():
            rank = module.rank
            module.rank = 0 if broken and name in ("gate", "up") else rank
            load(module, {name: weight})
            module.rank = rank
    return _named(attest_engine(modules, side(new, "version 1"), side(old, "version 0")))


def untied_head(broken: bool) -> Named:
    """A head that was loaded as a copy of the embedding does not follow its updates."""
    old = drawn(0)
    new = stepped(old, 1)
    modules = fleet(1, old | {"head": old["embed"]}, tied=False)
    for module in modules:
        load(module, new if broken else new | {"head": new["embed"]})
    aliases = {"head": "embed"}
    reference = side(new, "version 1", aliases)
    return _named(attest_engine(modules, reference, side(old, "version 0", aliases)))


def scales_of_the_last_version(broken: bool) -> Named:
    """An update without the scales of fp8 blocks keeps those that were saved before it."""

    def quantized(weights: Weights) -> Weights:
        tensor = weights["down"].float()
        scale = tensor.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        codes = (tensor / scale).to(torch.float8_e4m3fn)
        return {"down.weight": codes, "down.weight_scale_inv": scale}

    old = drawn(0)
    new = quantized(stepped(old, 1))
    live = quantized(old)
    saved = live["down.weight_scale_inv"]
    live = new | ({"down.weight_scale_inv": saved} if broken else {})
    return _named(attest_tensors(live, side(new, "version 1"), side(quantized(old), "version 0")))


def experts_exchanged_between_ranks(broken: bool) -> Named:
    """The first and the last expert of a rank are passed in each other's places, so that each of
    two ranks takes the experts of the other one."""
    old = drawn(0, experts=True)
    new = stepped(old, 1)
    modules = fleet(2, old, ep=True)
    for module in modules:
        rank = module.rank
        module.rank = 1 - rank if broken else rank
        load(module, {name: tensor for name, tensor in new.items() if name.startswith("experts.")})
        module.rank = rank
        load(module, {name: tensor for name, tensor in new.items() if "experts." not in name})
    return _named(attest_engine(modules, side(new, "version 1"), side(old, "version 0")))


def zero_filled_logprobs(broken: bool) -> Named:
    """Log-probabilities that the engine did not return stay at the zero that the tensor was
    allocated with."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((64, 64)).astype(np.float32)

    def logits(prompt: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        return table[[*prompt[-1:], *tokens[:-1]]]

    model = DumpModel("version 1", logits, 64)
    prompt, tokens = rng.integers(0, 64, 8).tolist(), rng.integers(0, 64, 40).tolist()
    wide = logits(prompt, tokens).astype(np.float64)
    own = wide[np.arange(40), tokens] - np.log(np.exp(wide).sum(1))
    returned: Mapping[int, float] = {
        place: value for place, value in enumerate(own) if not broken or place % 4
    }
    recorded = np.zeros(40)
    for place, value in returned.items():
        recorded[place] = value
    row = DumpRow(1, "plain", prompt, tokens, recorded, np.ones(40, np.bool_), 1.0)
    report = examine([row], model)
    return {f"row {row}": ("not sound", cause) for cause, row in report.first_rows.items()}


def prefix_cache_of_old_weights(broken: bool) -> Named:
    """An update leaves the states of cached prompts as the weights before it computed them."""
    old = Recurrent(0)
    new = old.stepped(1, 0.1)
    endpoint = CachedEndpoint(old, clears=not broken)
    rng = np.random.default_rng(3)
    prompts = rng.integers(0, VOCABULARY, (SEQUENCES, 12)).tolist()
    for weights in (old, new):
        endpoint.update(weights)
        report = check_endpoint(
            endpoint,
            [weights.version("the version")],
            prompts,
            name="the endpoint",
            fresh=iter(rng.integers(0, VOCABULARY, SEQUENCES).tolist()),
            vocabulary=VOCABULARY,
            error=0.01,
        )
        if report.verdict != "same":
            return {f"at version {int(weights is new)}": (report.verdict, report.cause)}
    return {}


BUGS = {
    "stale multi-token head": KnownBug(
        ("sgl-project/sglang#27718", "verl-project/verl#6947"),
        stale_multi_token_head,
        dict.fromkeys(("mtp.norm", "mtp.projection"), ("differs", "version")),
    ),
    "doubly transposed experts": KnownBug(
        ("vllm-project/vllm#47874", "sgl-project/sglang#28963"),
        doubly_transposed_experts,
        {f"experts.{number}.down": ("differs", "transposed") for number in (1, 3)},
    ),
    "dropped chunk": KnownBug(("THUDM/slime#2104",), dropped_chunk, {"up": ("differs", "version")}),
    "adapter scaled twice": KnownBug(
        ("NovaSky-AI/SkyRL#2250",),
        adapter_scaled_twice,
        {"q.lora_B.weight": ("differs", "scaled")},
    ),
    "another rank's shard": KnownBug(
        ("vllm-project/vllm-gguf-plugin#103",),
        shard_of_another_rank,
        dict.fromkeys(("gate", "up"), ("differs", "rank")),
    ),
    "adapter of the same name, stale cache": KnownBug(
        ("sgl-project/sglang#8263",),
        adapter_of_a_stale_cache,
        dict.fromkeys(("q.lora_A.weight", "q.lora_B.weight"), ("differs", "version")),
    ),
    "untied head": KnownBug(
        ("vllm-project/vllm#51665",), untied_head, {"embed": ("copies disagree", "untied")}
    ),
    "base under an adapter's name": KnownBug(
        ("vllm-project/vllm#55193",),
        base_under_an_adapters_name,
        {"q": ("differs", "version")},
    ),
    "fp8 scales of the last version": KnownBug(
        ("vllm-project/vllm#45835",),
        scales_of_the_last_version,
        {"down.weight_scale_inv": ("differs", "scales")},
    ),
    "experts exchanged between ranks": KnownBug(
        ("vllm-project/vllm#28715",),
        experts_exchanged_between_ranks,
        {
            f"experts.{number}.{part}": ("differs", "exchanged")
            for number in range(4)
            for part in ("gate", "up", "down")
        },
    ),
    "prefix cache from old weights": KnownBug(
        ("InternLM/lmdeploy#4917", "vllm-project/vllm#42125"),
        prefix_cache_of_old_weights,
        {"at version 1": ("different", "prefix cache")},
    ),
    "log-probabilities filled with zeros": KnownBug(
        ("NVIDIA-NeMo/RL#4218",), zero_filled_logprobs, {"row 1": ("not sound", "zero-filled")}
    ),
}
"""Every bug, and what names it."""

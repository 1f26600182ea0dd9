"""Packed attention against one block after another, and a packed batch against padded rows."""

import copy

import families
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.engines.routers import Routers
from deltawire.parity.router_replay import RouteReplay, route_shape
from deltawire.parity.routes import pack_routes
from deltawire.train import packing
from deltawire.train.batch import collate
from deltawire.train.packing import Block, attend, bucketed, pack, shares_prompt, tokens_of
from deltawire.train.policy import TrainedPolicy, packable
from deltawire.wire.rollouts import Group, Trajectory

DENSE = ["qwen3", "gemma2", "cohere2", "granite"]


def rows_of(sizes):
    """A row of prompts, each followed by the blocks that share it."""
    blocks, start = [], 0
    for prompt, rest in sizes:
        origin = start
        blocks.append(Block(start, prompt))
        start += prompt
        for count in rest:
            blocks.append(Block(start, count, origin, prompt))
            start += count
    return blocks


def naive(q, k, v, blocks, *, window=0, softcap=None, sinks=None):
    """Query by query, in float64: [T, heads, size]."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    repeats = q.shape[1] // k.shape[1]
    for block in blocks:
        own = list(range(block.start, block.start + block.tokens))
        prefix = list(range(block.prefix, block.prefix + block.prefix_tokens))
        for place, row in enumerate(own):
            keys = prefix + own[: place + 1]
            keys = keys[-window:] if window else keys
            for head in range(q.shape[1]):
                scores = k[keys, head // repeats].double() @ q[row, head].double()
                scores = scores / q.shape[2] ** 0.5
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = scores.softmax(0)[: len(keys)]
                out[row, head] = weights @ v[keys, head // repeats].double()
    return out


SIZES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), max_size=4)), min_size=1, max_size=4
)


@settings(max_examples=40, deadline=None)
@given(
    sizes=SIZES,
    window=st.sampled_from([0, 1, 4]),
    kind=st.sampled_from(["plain", "capped", "sinks"]),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    per_call=st.sampled_from([0, 40, 4096]),
)
def test_attention_is_that_of_each_block(sizes, window, kind, heads, per_call):
    blocks = rows_of(sizes)
    total = sum(block.tokens for block in blocks)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (
        torch.randn(total, n, size, generator=generator)
        for n, size in ((heads[0], 8), (heads[1], 8), (heads[1], 6))
    )
    sinks = torch.randn(heads[0], generator=generator) if kind == "sinks" else None
    softcap = 5.0 if kind == "capped" else None
    before, packing.PAIRS_PER_CALL = packing.PAIRS_PER_CALL, per_call
    try:
        packed = pack(blocks)
    finally:
        packing.PAIRS_PER_CALL = before
    out, _ = attend(
        None, *(x.transpose(0, 1)[None] for x in (q, k, v)), None,
        sliding_window=window or None, softcap=softcap, s_aux=sinks, packing=packed,
    )  # fmt: skip
    expected = naive(q, k, v, blocks, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    sizes=SIZES,
    window=st.sampled_from([0, 3]),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    groups=st.booleans(),
)
def test_variable_length_attention_gets_the_same_blocks(sizes, window, heads, groups):
    """The call for GPUs, with a twin of torch's kernel in its place: one that takes grouped
    queries, and that of torch 2.11, which does not."""
    blocks = rows_of(sizes)
    total = sum(block.tokens for block in blocks)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (torch.randn(total, n, 8, generator=generator) for n in (heads[0], *heads[1:] * 2))

    def twin(q, k, v, ends_q, ends_k, max_q, max_k, *, scale, window_size, **options):
        assert options == ({"enable_gqa": True} if groups and heads[0] > heads[1] else {})
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        assert (scale, window_size[1]) == (None, 0)
        parts = []
        for n in range(len(ends_q) - 1):
            rows, keys = slice(ends_q[n], ends_q[n + 1]), slice(ends_k[n], ends_k[n + 1])
            size_q, size_k = len(q[rows]), len(k[keys])
            assert size_q <= max_q
            assert size_k <= max_k
            ends = torch.arange(size_q)[:, None] + size_k - size_q
            mask = torch.arange(size_k) <= ends
            if window_size[0] >= 0:
                mask &= torch.arange(size_k) >= ends - window_size[0]
            scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) / q.shape[2] ** 0.5
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v[keys]))
        return torch.cat(parts)

    taken = packing.VARLEN | {"enable_gqa"} if groups else packing.VARLEN - {"enable_gqa"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "varlen_attn", twin)
        patch.setattr(packing, "takes_varlen", lambda query, value: True)
        patch.setattr(packing, "VARLEN", taken)
        out, _ = attend(
            None, *(x.transpose(0, 1)[None] for x in (q, k, v)), None,
            sliding_window=window or None, packing=pack(blocks),
        )  # fmt: skip
    expected = naive(q, k, v, blocks, window=window)
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), min_size=1, max_size=20))
def test_buckets_hold_every_block_once_and_waste_little(sizes):
    buckets = bucketed(sizes)
    assert sorted(n for bucket in buckets for n in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        own = max(sizes[n][0] for n in bucket)
        prefix = max(sizes[n][1] for n in bucket)
        assert len({sizes[n][1] > 0 for n in bucket}) == 1
        waste = sum(own * (own + prefix) - sizes[n][0] * sum(sizes[n]) for n in bucket)
        assert waste <= packing.PAIRS_PER_CALL


def test_long_prompts_are_shared_and_short_ones_before_long_answers_are_not():
    assert shares_prompt(500, [40] * 8)
    assert not shares_prompt(50, [8000] * 8)
    assert not shares_prompt(500, [40])
    assert tokens_of(500, [40] * 8) == 500 + 8 * 39
    assert tokens_of(50, [8000] * 8) == 8 * (50 + 7999)


def sampled(seed, *, routes=None, prompts=(11, 4)):
    """Groups with shared prompts, an own prompt, several turns, and recorded experts."""
    rng = np.random.default_rng(seed)
    groups = []

    def chosen(rng, positions):
        every = np.tile(np.arange(routes.experts), (positions, routes.layers, 1))
        return rng.permuted(every, axis=2)[..., : routes.chosen].astype(np.int32)

    for length in prompts:
        prompt = rng.integers(0, 60, length).astype(np.int32)
        members = []
        for place, count in enumerate((7, 1, 12, 5)):
            mask = np.ones(count, np.uint8)
            mask[count // 3 : count // 2] = 0
            own = rng.integers(0, 60, 3).astype(np.int32) if place == 3 else None
            packed = b""
            if routes is not None and place != 3:
                # One prompt has one choice: whoever computes it chooses the same experts.
                before = chosen(np.random.default_rng(length), length if own is None else 3)
                packed = pack_routes(
                    np.concatenate([before, chosen(rng, count - 1)]), experts=routes.experts
                )
            members.append(
                Trajectory(
                    rng.integers(0, 60, count).astype(np.int32),
                    -rng.random(count).astype(np.float32),
                    np.zeros(count, np.int32),
                    mask,
                    float(place % 2),
                    "stop",
                    prompt=own,
                    routes=packed,
                )
            )
        groups.append(Group("w", "n", "t", 0.8, prompt, members))
    return groups


def losses(model, groups, *, packing, replayed):
    """The loss and its gradients over a batch."""
    batch = collate(groups)
    replay = RouteReplay(Routers(model)) if replayed else None
    policy = TrainedPolicy(model, packing=packing, entropy_gradient=True)
    weights = torch.linspace(-1, 1, batch.tokens_NC.numel()).view_as(batch.tokens_NC)
    with policy.terms(batch, replay) as terms:
        loss = (terms.logprobs * weights).mean() + 0.1 * terms.entropies.mean()
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), gradients, policy.packs


@pytest.mark.parametrize("family", [*DENSE, *families.QUICK, "cohere2_moe", "exaone_moe"])
def test_packed_losses_are_the_unpacked_ones(family):
    model = families.build(family)
    routed = family not in DENSE
    groups = sampled(3, routes=route_shape(Routers(model)) if routed else None)
    for replayed in {False, routed}:
        one, packed_gradients, packed = losses(model, groups, packing=True, replayed=replayed)
        two, gradients, padded = losses(model, groups, packing=False, replayed=replayed)
        assert (packed, padded) == (True, False)
        assert one == pytest.approx(two, abs=1e-6)
        for name, gradient in gradients.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(
                packed_gradients[name], gradient, rtol=1e-3, atol=1e-4 * scale + 1e-9
            )


@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "nemotron_h", "deepseek_v32"])
def test_recurrent_and_indexed_layers_are_not_packed(family):
    model = families.build(family)
    assert not packable(model)
    groups = sampled(4)
    _, _, packed = losses(model, groups, packing=True, replayed=False)
    assert not packed


def test_rows_that_are_not_packed_are_each_trajectorys_own():
    """A padded row of a recurrent model has the log-probabilities of the row without padding."""
    model = families.build("qwen3_next")
    groups = sampled(5)
    with torch.no_grad(), TrainedPolicy(model).terms(batch := collate(groups)) as together:
        for n, member in enumerate(batch.members_N):
            with TrainedPolicy(model).terms(collate(groups, [member])) as alone:
                count = alone.logprobs.shape[1]
                torch.testing.assert_close(
                    together.logprobs[n, :count], alone.logprobs[0], rtol=1e-4, atol=1e-5
                )


def test_the_models_attention_is_as_before():
    model = families.build("qwen3_moe")
    before = copy.deepcopy(model.config.to_dict())
    implementation = model.config._attn_implementation
    with TrainedPolicy(model).terms(collate(sampled(6))):
        assert model.config._attn_implementation == packing.PACKED
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == before

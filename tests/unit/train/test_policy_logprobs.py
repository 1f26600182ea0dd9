"""The trainer's shared-prompt forward against one plain forward a trajectory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from deltawire.errors import BugError
from deltawire.train.batch import collate
from deltawire.train.policy import token_logprobs
from deltawire.wire.rollouts import Group, Trajectory

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}


def windowed():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=16))


def experts():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))


@pytest.fixture(params=["tiny", windowed, experts], ids=["qwen3", "windowed", "experts"])
def model(request, sharp):
    if request.param == "tiny":
        return request.getfixturevalue("tiny")
    return sharp(request.param())


def group(rng, prompt, lengths, *, temperature=1.0, turns=False):
    """A group of random tokens; with ``turns``, the middle of each trajectory is not the
    model's."""
    trajectories = []
    for length in lengths:
        mask = np.ones(length, np.uint8)
        if turns:
            mask[length // 3 : length // 2] = 0
        trajectories.append(
            Trajectory(
                rng.integers(0, 64, length).astype(np.int32),
                -rng.random(length).astype(np.float32),
                np.zeros(length, np.int32),
                mask,
                float(rng.random()),
                "stop",
            )
        )
    tokens = rng.integers(0, 64, prompt).astype(np.int32)
    return Group("w", "n", "t", temperature, tokens, trajectories)


def segmented(rng, prompt, segments):
    """A group whose episodes are several segments each, some after a shared prompt."""
    whole = group(rng, prompt, [n for lengths in segments for n in lengths])
    again = rng.integers(0, 64, prompt + 2).astype(np.int32)
    numbers = [e for e, lengths in enumerate(segments) for _ in lengths]
    trajectories = []
    for place, (t, episode) in enumerate(zip(whole.trajectories, numbers, strict=True)):
        first = place == numbers.index(episode)
        own = None if first else again if place % 2 else rng.integers(0, 64, 3).astype(np.int32)
        reward = whole.trajectories[numbers.index(episode)].reward
        trajectories.append(replace(t, prompt=own, episode=episode, reward=reward))
    return replace(whole, trajectories=trajectories)


BATCHES = {
    "one": lambda rng: [group(rng, 5, [4])],
    "one token": lambda rng: [group(rng, 3, [1, 1])],
    "prompts differ": lambda rng: [group(rng, n, [3, 7, 1]) for n in (9, 2, 14, 1)],
    "sizes differ": lambda rng: [group(rng, 4, [5]), group(rng, 8, [2, 6, 9, 3])],
    "turns": lambda rng: [group(rng, n, [12, 6, 9], turns=True) for n in (3, 11)],
    "segments": lambda rng: [segmented(rng, 5, [[4, 3, 2], [6], [1, 5]]), group(rng, 2, [3, 3])],
    "tempered": lambda rng: [group(rng, n, [4, 8], temperature=0.6) for n in (7, 3)],
}


def naive(model, groups):
    """log π of every token: for each trajectory a forward over its prompt and itself."""
    found = []
    for member in groups:
        for trajectory in member.trajectories:
            prompt = member.prompt_of(trajectory)
            ids = np.concatenate([prompt, trajectory.tokens_T])
            logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits.float() / member.temperature, dim=-1)
            places = torch.arange(len(prompt) - 1, len(ids) - 1)
            found.append(logprobs[places, torch.from_numpy(trajectory.tokens_T).long()])
    return found


@pytest.fixture(params=BATCHES)
def groups(request):
    return BATCHES[request.param](np.random.default_rng(3))


def test_logprobs_and_gradients_are_the_plain_ones(model, groups):
    batch = collate(groups)
    weights = torch.rand(batch.tokens_NC.shape, generator=torch.Generator().manual_seed(0))
    weights *= batch.loss_mask_NC

    found = token_logprobs(model, batch)
    (found * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    expected = naive(model, groups)
    sum((row * weights[n, : len(row)]).sum() for n, row in enumerate(expected)).backward()

    assert found.dtype == torch.float32
    assert found.shape == batch.tokens_NC.shape
    for n, row in enumerate(expected):
        drawn = batch.loss_mask_NC[n, : len(row)]
        torch.testing.assert_close(found[n, : len(row)], row * drawn, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            gradients[name], parameter.grad, atol=1e-4 * max(largest, 1e-3), rtol=1e-3
        )


def test_padding_changes_nothing(tiny):
    """A group's log-probabilities do not depend on what it is batched with."""
    rng = np.random.default_rng(4)
    short, long = group(rng, 2, [3, 5]), group(rng, 40, [30, 1])
    with torch.no_grad():
        separate = token_logprobs(tiny, collate([short]))
        together = token_logprobs(tiny, collate([long, short]))
    for n, length in enumerate([3, 5]):
        torch.testing.assert_close(
            together[2 + n, :length], separate[n, :length], atol=1e-4, rtol=1e-4
        )


def test_collate_puts_everything_in_its_place(groups):
    batch = collate(groups)
    row = 0
    for number, member in enumerate(groups):
        for place, t in enumerate(member.trajectories):
            prompt, length = member.prompt_of(t), len(t.tokens_T)
            where, count = int(batch.prompts_N[row]), len(prompt)
            assert batch.members_N[row] == (number, place)
            assert batch.prompt_mask_GP[where].sum() == count
            assert batch.prompt_mask_GP[where, -count:].all()
            assert batch.prompts_GP[where, -count:].tolist() == prompt.tolist()
            assert batch.token_mask_NC[row].tolist() == [
                int(i < length) for i in range(batch.tokens_NC.shape[1])
            ]
            assert batch.tokens_NC[row, :length].tolist() == t.tokens_T.tolist()
            assert batch.loss_mask_NC[row, :length].tolist() == t.mask_T.tolist()
            assert not batch.loss_mask_NC[row, length:].any()
            drawn = t.mask_T == 1
            logprobs = np.where(drawn, t.logprobs_T, 0)
            assert batch.sampler_logprobs_NC[row, :length].tolist() == logprobs.tolist()
            versions = np.where(drawn, t.versions_T, -1)
            assert batch.versions_NC[row, :length].tolist() == versions.tolist()
            assert (batch.versions_NC[row, length:] == -1).all()
            episode = batch.episodes_N[row]
            assert float(batch.rewards_E[episode]) == np.float32(t.reward)
            assert int(batch.groups_E[episode]) == number
            row += 1
    assert row == len(batch.tokens_NC)
    assert len(batch.rewards_E) == sum(len(set(member.episodes)) for member in groups)
    distinct = {member.prompt_of(t).tobytes() for member in groups for t in member.trajectories}
    assert len(batch.prompts_GP) == len(distinct)
    assert batch.temperature == groups[0].temperature


def test_segments_share_a_reward_and_count_once():
    member = segmented(np.random.default_rng(1), 4, [[3, 3, 3], [2]])
    batch = collate([member])
    assert batch.episodes_N.tolist() == [0, 0, 0, 1]
    assert batch.groups_E.tolist() == [0, 0]
    assert len(batch.rewards_E) == 2


def test_an_episode_with_a_cause_is_nowhere_in_the_batch():
    """Not its other segments either: the reward of an episode that failed says nothing."""
    member = segmented(np.random.default_rng(2), 4, [[3, 3], [2], [5, 1]])
    member.trajectories[4] = replace(member.trajectories[4], cause="timeout")
    batch = collate([member])
    assert batch.members_N == [(0, 0), (0, 1), (0, 2)]
    assert batch.rewards_E.tolist() == [
        np.float32(member.trajectories[0].reward),
        np.float32(member.trajectories[2].reward),
    ]
    failed = [replace(t, cause="timeout") for t in member.trajectories]
    with pytest.raises(BugError):
        collate([replace(member, trajectories=failed)])


def test_equal_prompts_of_two_groups_are_computed_once():
    rng = np.random.default_rng(5)
    first, second = group(rng, 6, [3, 4]), group(rng, 6, [2, 5])
    batch = collate([first, replace(second, prompt=first.prompt)])
    assert len(batch.prompts_GP) == 1
    assert batch.groups_E.tolist() == [0, 0, 1, 1]


def test_what_the_environment_wrote_cannot_poison_the_loss():
    """Log-probabilities hold only where the model drew; elsewhere there may be anything."""
    (member,) = [group(np.random.default_rng(0), 3, [9], turns=True)]
    trajectory = member.trajectories[0]
    trajectory.logprobs_T[trajectory.mask_T == 0] = np.nan
    assert torch.isfinite(collate([member]).sampler_logprobs_NC).all()


def test_collate_owns_its_memory(groups):
    batch = collate(groups)
    groups[0].prompt[:] = 0
    groups[0].trajectories[0].logprobs_T[:] = 9
    assert batch.prompts_GP[0].any()
    assert not (batch.sampler_logprobs_NC == 9).any()

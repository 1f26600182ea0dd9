"""An edit that a user sends to a gateway becomes a pair, on which a pretrained model's next step
trains. Trainer, replica, gateway and learner are the commands of a deployment."""

import json
import logging
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from deltawire.config import load_config
from deltawire.events import Step
from deltawire.launch.branches.versioned_model import logprobs_of, open_model_of
from deltawire.launch.simulate import LiveStack, SimulationOptions
from deltawire.live.feedback.client import FeedbackClient, receipt_of
from deltawire.rl.control.lineages import read_lineages
from deltawire.runtime.event_tail import events_of
from deltawire.store import open_bucket
from deltawire.sync import newest_version, read_manifest, read_run
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.rollouts import decode_group

MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m"
LOG = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.drills,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not MODEL.is_dir(), reason="needs models/smollm2-135m: make real-model writes it"
    ),
]

STEPS, GROUP = 3, 4
CONFIG = """
name = "edits"
threads = 2
[model]
path = "{model}"
[rollout]
workers = 0
group_size = {group}
max_tokens = 24
slots = 8
context = 128
[train]
versions = {steps}
groups_per_step = 1
max_staleness = 100
checkpoint_every = 1000
optimizer.learning_rate = 2e-5
schedule.warmup_steps = 0
loss.advantage = "given"
loss.policy_coefficient = {policy}
[train.loss.preference]
kind = "{kind}"
[trust]
rescore_share = 0.0
[evaluate]
every = 0
[live]
settle_s = 1.0
window_s = 600.0
"""
EDITS = {
    "What is the capital of France?": "Paris.",
    "Name a fruit that is yellow.": "A banana is yellow, and so is a lemon.",
    "How many days has a week?": "A week has seven days.",
    "Say hello to a new user.": "Hello! I am glad that you are here. What may I help you with?",
}
"""Questions of users, and the answers that they would have liked."""
PATIENCE_S = 900.0


def ask(stack, question, user):
    body = {"model": "edits", "messages": [{"role": "user", "content": question}]}
    headers = {
        "Authorization": f"Bearer {stack.token}", "Content-Type": "application/json",
        "x-deltawire-user": user, "x-deltawire-capture": "true",
    }  # fmt: skip
    url = f"{stack.gateway_url}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return receipt_of(json.loads(answer.read()))


def serve_users(stack, *, pairs_only):
    """Each user asks one question and corrects the answer. Unless only pairs are trained on, every
    other one judges it instead, half of those well. Returns the better answers."""
    client, edited = FeedbackClient(stack.gateway_url, stack.token), []
    for number in range(STEPS * GROUP):
        question, better = list(EDITS.items())[number % len(EDITS)]
        receipt = ask(stack, question, f"user {number}")
        if pairs_only or number % 2:
            client.send(receipt, "edit", text=better)
            edited.append(better)
        else:
            client.send(receipt, "accept" if number % 4 else "reject")
    return edited


def margins(bucket, groups, version):
    """log π of each better answer less that of the served one."""
    pairs = [t for group in groups for t in group.trajectories if t.better is not None]
    found = []
    with open_model_of(bucket) as model:
        model.move_to(version)
        for t in pairs:
            both = [[*t.prompt, *t.better.tokens_T], [*t.prompt, *t.tokens_T]]
            sums = [0.0, 0.0]
            for numbers, logprobs in logprobs_of(model.module, both):
                for number, one in zip(numbers, logprobs, strict=True):
                    sums[number] = float(one.detach()[len(t.prompt) - 1 :].sum())
            found.append(sums[0] - sums[1])
    return np.array(found)


@pytest.mark.parametrize(
    ("kind", "policy"), [("dpo", 0.0), ("supervised", 1.0)], ids=["dpo alone", "supervised next to"]
)
def test_an_edit_at_a_gateway_moves_the_next_version_towards_it(tmp_path, kind, policy):
    text = CONFIG.format(model=MODEL, group=GROUP, steps=STEPS, kind=kind, policy=policy)
    (tmp_path / "edits.toml").write_text(text)
    options = SimulationOptions(out=tmp_path / "out")
    bucket = open_bucket(str(tmp_path / "out" / "bucket"), create=True)
    with LiveStack(load_config(tmp_path / "edits.toml"), tmp_path / "edits.toml", options) as stack:
        edited = serve_users(stack, pairs_only=not policy)
        deadline = time.monotonic() + PATIENCE_S
        while newest_version(bucket) < STEPS:
            assert time.monotonic() < deadline, "nothing was trained"
            time.sleep(0.5)
    run = read_run(bucket)
    groups = []
    for version in range(1, STEPS + 1):
        step = CommitMetadata.of(read_manifest(bucket, run, version).metadata, run="", version=1)
        for worker, number in step.consumed:
            key = keys.rollout(worker, number)
            groups.append(decode_group(bucket.get(key, limit=1 << 28), run="", key=key))
    better = [t.better for group in groups for t in group.trajectories if t.better is not None]
    assert len(better) == len(edited)
    named = [one.edit for line in read_lineages(bucket) for one in line.answers if one.edit]
    assert len(set(named)) == len(edited), "each edit is named by one lineage"
    with open_model_of(bucket) as model:
        texts = [model.text.decode(one.tokens_T[:-1].tolist()) for one in better]
    assert sorted(texts) == sorted(edited)
    steps = [e for e in events_of(bucket, "trainer") if isinstance(e, Step)]
    assert sum(step.pairs for step in steps) == len(edited)
    assert all(step.grad_norm for step in steps)
    before, after = (margins(bucket, groups, version) for version in (0, STEPS))
    LOG.info("%s: margins in nats %s, then %s", kind, before.round(2), after.round(2))
    assert (after - before).mean() > 0
    assert (after > before).mean() > 0.75

"""Training on users' judgments with a pretrained model, here and by TRL's trainers, step by step.

Both start from the same weights, take the same answers, pairs and learning rate, and keep their
float32 weights from step to step. The served answers are drawn by the embedded engine, the better
ones are written here.
"""

import copy
import gc
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

pytest.importorskip("trl")

from datasets import Dataset
from tiny_trainers import SETTINGS

from deltawire.config import (
    KtoConfig,
    LossConfig,
    OptimizerConfig,
    PreferenceConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from deltawire.engines.base import Sampling
from deltawire.engines.transformers import TransformersEngine
from deltawire.train.masters import MasterWeights
from deltawire.train.reference import SleepingCopy
from deltawire.train.step import train_step
from deltawire.wire.rollouts import BetterAnswer, Group, Trajectory

MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m"
pytestmark = [
    pytest.mark.drills,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not MODEL.is_dir(), reason="needs models/smollm2-135m: make real-model writes it"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

LOG = logging.getLogger(__name__)
STEPS, RATE, BETA2 = 3, 2e-5, 0.99
MOST_TOKENS = 24
REWARDS = (1.0, -0.5, 0.25, -1.0)
CLIP = 0.2
EDITS = {
    "What is the capital of France?": "Paris.",
    "Name a fruit that is yellow.": "A banana is yellow, and so is a lemon.",
    "How many days has a week?": "A week has seven days.",
    "Say hello to a new user.": "Hello! I am glad that you are here. What may I help you with?",
}
"""Questions of users, and the answers that they would have liked."""
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3


@dataclass
class Steps:
    """The loss and the gradient of each optimizer step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(one, other):
    """The norm of the difference of two gradients over that of the second."""
    assert one.keys() == other.keys()
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (apart / sum(float(g.double().square().sum()) for g in other.values())) ** 0.5


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def pretrained():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def group(pretrained, tokenizer):
    """An answer to each question, with its log-probabilities, its reward and a better answer."""
    engine = TransformersEngine(
        copy.deepcopy(pretrained), stop_tokens=[tokenizer.eos_token_id], slots=4, capacity=256,
        seed=5, version=0,
    )  # fmt: skip
    prompts, served = [], {}
    for place, question in enumerate(EDITS):
        said = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
        prompts.append(np.array(ids, np.int32))
        engine.submit(ids, Sampling(MOST_TOKENS, 1.0), partial(served.__setitem__, place))
    while engine.active:
        engine.step()
    trajectories = []
    for place, edit in enumerate(EDITS.values()):
        tokens = [*tokenizer.encode(edit, add_special_tokens=False), tokenizer.eos_token_id]
        drawn = served[place]
        trajectories.append(
            Trajectory(
                np.array(drawn.tokens, np.int32), np.array(drawn.logprobs, np.float32),
                np.zeros(len(drawn.tokens), np.int32), np.ones(len(drawn.tokens), np.uint8),
                REWARDS[place], drawn.finish, episode=place, prompt=prompts[place],
                better=BetterAnswer(np.array(tokens, np.int32), 1.0),
            )
        )  # fmt: skip
    assert len({len(t.better.tokens_T) for t in trajectories}) > 2, "lengths should differ"
    return Group("live", "n", "t", 1.0, prompts[0], trajectories)


def own_steps(pretrained, group, loss, theirs):
    """Trains with deltawire's step on float32 weights; returns the losses, and how far the gradient
    of each step is from TRL's, as a share of its norm."""
    train = TrainConfig(
        exporter="f32", loss=loss, schedule=ScheduleConfig(warmup_steps=0),
        optimizer=OptimizerConfig(learning_rate=RATE, beta2=BETA2, max_grad_norm=1e9),
    )  # fmt: skip
    config = RunConfig(name="t", train=train)
    masters = MasterWeights(copy.deepcopy(pretrained), train)
    reference = SleepingCopy(copy.deepcopy(pretrained), train, device=torch.device("cpu"))
    step, apart = masters.step, []

    def compared(*args):
        apart.append(distance(gradients_of(masters.model), theirs.gradients[len(apart)]))
        return step(*args)

    masters.step = compared
    losses = [train_step(masters, [group], config, reference=reference).loss for _ in range(STEPS)]
    return losses, apart


class Recorder(TrainerCallback):
    """Keeps the gradients with which TRL's optimizer steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.steps.gradients.append(gradients_of(model))


def settings_of(folder, **settings):
    return {
        **SETTINGS, "output_dir": str(folder), "max_steps": STEPS, "learning_rate": RATE,
        "lr_scheduler_type": "constant", "adam_beta2": BETA2, "weight_decay": 0.0,
        "max_grad_norm": 0.0, "optim": "adamw_torch", "gradient_checkpointing": False, **settings,
    }  # fmt: skip


def trl_steps(trainer_class, config, pretrained, tokenizer, rows, policy=None):
    """Trains with a trainer of TRL on rows of tokens. ``policy`` adds to the loss."""
    found, part = Steps(), []

    class Recorded(trainer_class):
        def _prepare_dataset(self, dataset, *_):
            return dataset  # Text that is encoded again may have other tokens than were drawn.

        def compute_loss(self, model, *args, **kwargs):
            loss = super().compute_loss(model, *args, **kwargs)
            if policy is not None:
                loss = loss + policy(model)
            part.append(float(loss.detach()))
            return loss

    trainer = Recorded(
        copy.deepcopy(pretrained), copy.deepcopy(pretrained), args=config,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Recorder(found)],
    )  # fmt: skip
    trainer.train()
    trainer.accelerator.free_memory()
    del trainer
    gc.collect()  # Its cycles hold four copies of the weights.
    found.losses += np.reshape(part, (STEPS, -1)).mean(1).tolist()
    return found


def trl_policy(group):
    """The loss of TRL's GRPOTrainer on the served answers, with their sampler's probabilities."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    def padded(rows, *, left=False):
        width = max(len(row) for row in rows)
        spare = [[0] * (width - len(row)) for row in rows]
        pairs = zip(spare, rows, strict=True)
        return torch.tensor([[*s, *row] if left else [*row, *s] for s, row in pairs])

    served = group.trajectories
    prompts = [t.prompt.tolist() for t in served]
    inputs = {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([[1] * len(row) for row in prompts], left=True),
        "completion_ids": padded([t.tokens_T.tolist() for t in served]),
        "completion_mask": padded([[1] * len(t.tokens_T) for t in served]),
        "old_per_token_logps": padded([t.logprobs_T.tolist() for t in served]),
        "advantages": torch.tensor([t.reward for t in served]),
    }
    from accelerate import Accelerator

    members = SimpleNamespace(
        accelerator=Accelerator(cpu=True), aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
        loss_type="grpo", epsilon_low=CLIP, epsilon_high=CLIP, use_vllm=False,
        args=SimpleNamespace(delta=None), current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False, _metrics=_Sink(),
    )  # fmt: skip
    members._get_per_token_logps_and_entropies = partial(
        GRPOTrainer._get_per_token_logps_and_entropies, members
    )

    def loss(model):
        members.model = model
        return GRPOTrainer._compute_loss(members, model, inputs)

    return loss


class _Sink(dict):
    """Takes any metric."""

    def __missing__(self, key):
        return _Sink()

    def append(self, value):
        pass


def check(pretrained, group, loss, theirs):
    """The same losses and the same gradients, step by step."""
    losses, apart = own_steps(pretrained, group, loss, theirs)
    LOG.info("losses of TRL %s, here %s; gradients apart by %s", theirs.losses, losses, apart)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(theirs.losses, rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE)
    assert max(apart) < GRADIENT_TOLERANCE


PAIR_KINDS = [
    ("dpo", "sigmoid", 0.1),
    ("dpo_norm", "sigmoid_norm", 5.0),
    ("supervised", "sft", 0.1),
]


@pytest.mark.parametrize("policy", [0.0, 1.0], ids=["alone", "next to the policy"])
@pytest.mark.parametrize(("kind", "name", "beta"), PAIR_KINDS, ids=[k for k, *_ in PAIR_KINDS])
def test_pairs_train_as_in_trl(tmp_path, pretrained, tokenizer, group, kind, name, beta, policy):
    from trl import DPOConfig, DPOTrainer

    loss = LossConfig(
        advantage="given", surrogate="ppo", clip_low=CLIP, clip_high=CLIP, dual_clip=0.0,
        aggregation="seq_mean_token_mean", policy_coefficient=policy,
        preference=PreferenceConfig(kind=kind, beta=beta),
    )  # fmt: skip
    rows = [
        {
            "prompt_ids": t.prompt.tolist(), "chosen_ids": t.better.tokens_T.tolist(),
            "rejected_ids": t.tokens_T.tolist(),
        }
        for t in group.trajectories
    ]  # fmt: skip
    # TRL's supervised loss weighs tokens within a batch: one pair a batch weighs answers.
    batch = 1 if kind == "supervised" else len(rows)
    config = DPOConfig(
        loss_type=[name], beta=beta,
        **settings_of(
            tmp_path, per_device_train_batch_size=batch,
            gradient_accumulation_steps=len(rows) // batch,
        ),
    )  # fmt: skip
    theirs = trl_steps(
        DPOTrainer, config, pretrained, tokenizer, rows, trl_policy(group) if policy else None
    )
    check(pretrained, group, loss, theirs)


def test_good_and_bad_answers_train_as_in_trl(tmp_path, pretrained, tokenizer, group):
    """TRL gets the answers themselves where it takes other ones, so the reference points agree."""
    from trl import KTOConfig, KTOTrainer

    judged = [replace(t, reward=float(np.sign(t.reward))) for t in group.trajectories]
    loss = LossConfig(
        advantage="given", surrogate="kto", aggregation="seq_mean_token_mean",
        kto=KtoConfig(beta=0.3, undesirable_weight=1.5),
    )  # fmt: skip
    rows = [
        {
            "prompt_ids": t.prompt.tolist(), "completion_ids": t.tokens_T.tolist(),
            "KL_completion_ids": t.tokens_T.tolist(), "label": t.reward > 0,
        }
        for t in judged
    ]  # fmt: skip
    config = KTOConfig(
        beta=0.3, undesirable_weight=1.5,
        **settings_of(tmp_path, per_device_train_batch_size=len(rows)),
    )  # fmt: skip
    theirs = trl_steps(KTOTrainer, config, pretrained, tokenizer, rows)
    check(pretrained, replace(group, trajectories=judged), loss, theirs)

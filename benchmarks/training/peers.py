"""``step_speedup_vs_trl``: a whole step of TRL's GRPO trainer over one of ours.

The same model, groups, lengths, log-probabilities of the sampler, advantages, clip bounds, float32,
no recomputation, clipping and AdamW; generation is excluded. TRL computes its own loss
(`GRPOTrainer._compute_loss`, ``dapo``: the mean over the step's tokens) over padded completions of
one group at a time. ``huggingface`` in the details is a plain step: the model's own logits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.training.keys import Measured, Options
from benchmarks.training.workload import (
    GROUP,
    copy_of,
    log_normal,
    make_groups,
    run_config,
    seconds,
    small_model,
)
from deltawire.config import RunConfig
from deltawire.train.batch import TokenBatch, collate
from deltawire.train.build import byte_tokenizer
from deltawire.train.masters import MasterWeights
from deltawire.train.step import advantages_of, totals_of, train_step
from deltawire.wire.rollouts import Group

GROUPS = 6
PROMPT = 64
CLIP = (0.2, 0.28)


class Peer:
    """A separate model with torch's AdamW, stepped by a loss over padded rows."""

    def __init__(self, model: Any, groups: Sequence[Group], config: RunConfig) -> None:
        self.model = copy_of(model)
        self.config = config
        settings = config.train.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        advantages = advantages_of(groups, config)
        self.tokens = totals_of(groups, config).tokens
        self.rows = []
        for number, group in enumerate(groups):
            batch = collate([group])
            values = [advantages[number, episode] for _, episode in batch.episodes_E]
            self.rows.append((batch, torch.tensor(values)))

    def loss(self, batch: TokenBatch, advantages: Tensor) -> Tensor:
        """One micro-batch's part of the loss."""
        raise NotImplementedError

    def __call__(self) -> float:
        """Takes a step; returns the loss."""
        total = 0.0
        for batch, advantages in self.rows:
            part = self.loss(batch, advantages)
            part.backward()  # type: ignore[no-untyped-call]
            total += float(part.detach())
        limit = self.config.train.optimizer.max_grad_norm
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class HuggingFace(Peer):
    """A plain step."""

    def loss(self, batch: TokenBatch, advantages: Tensor) -> Tensor:
        """PPO's loss from the model's own logits of the completions."""
        count = batch.tokens_NC.shape[1]
        prompts = batch.prompts_GP[batch.prompts_N]
        ids = torch.cat([prompts, batch.tokens_NC], 1)
        mask = torch.cat([batch.prompt_mask_GP[batch.prompts_N], batch.token_mask_NC], 1)
        logits = self.model(input_ids=ids, attention_mask=mask, logits_to_keep=count + 1).logits
        logps = torch.log_softmax(logits[:, :-1].float(), -1)
        logps = logps.gather(2, batch.tokens_NC[..., None])[..., 0]
        ratio = (logps - batch.sampler_logprobs_NC).exp()
        held = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
        gain = torch.minimum(ratio * advantages[:, None], held * advantages[:, None])
        return -(gain * batch.loss_mask_NC).sum() / self.tokens


class Trl(Peer):
    """TRL's GRPO trainer with its own loss."""

    def __init__(self, model: Any, groups: Sequence[Group], config: RunConfig) -> None:
        super().__init__(model, groups, config)
        # Imported as untyped modules: neither is needed but here.
        datasets, trl = import_module("datasets"), import_module("trl")

        folder = tempfile.mkdtemp(prefix="deltawire-bench-")
        self.trainer = trl.GRPOTrainer(
            model=self.model,
            processing_class=byte_tokenizer(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 8}),
            args=trl.GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                report_to=[],
                loss_type="dapo",
                epsilon=CLIP[0],
                epsilon_high=CLIP[1],
                beta=0.0,
                num_generations=GROUP,
                per_device_train_batch_size=GROUP,
                gradient_accumulation_steps=1,
                gradient_checkpointing=False,
                bf16=False,
                temperature=1.0,
            ),
        )
        self.trainer.current_gradient_accumulation_steps = 1

    def loss(self, batch: TokenBatch, advantages: Tensor) -> Tensor:
        """`GRPOTrainer._compute_loss` on a padded group."""
        inputs = {
            "prompt_ids": batch.prompts_GP[batch.prompts_N],
            "prompt_mask": batch.prompt_mask_GP[batch.prompts_N],
            "completion_ids": batch.tokens_NC,
            "completion_mask": batch.token_mask_NC,
            "advantages": advantages,
            "old_per_token_logps": batch.sampler_logprobs_NC,
            "num_items_in_batch": torch.tensor(self.tokens),
        }
        loss: Tensor = self.trainer._compute_loss(self.trainer.model, inputs)
        return loss


def measure(options: Options) -> Measured:
    """Compares a first step's losses, then times steps in turns."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = small_model()
    lengths = log_normal(GROUPS * GROUP, options.seed)
    groups = make_groups(lengths, model=model, prompt=PROMPT, shared=True, seed=options.seed)
    config = run_config()
    masters = MasterWeights(copy_of(model), config.train)
    peers: dict[str, Peer] = {
        "trl": Trl(model, groups, config),
        "huggingface": HuggingFace(model, groups, config),
    }
    losses = {"deltawire": train_step(masters, groups, config).loss}
    losses |= {name: peer() for name, peer in peers.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise AssertionError(f"the losses differ: {losses}")
    spent = seconds(
        {"deltawire": lambda: train_step(masters, groups, config), **peers}, options.repeats
    )
    ratios = {name: round(spent[name] / spent["deltawire"], 3) for name in peers}
    return Measured(
        {"step_speedup_vs_trl": ratios["trl"]},
        {"seconds": spent, "speedup": ratios, "losses": losses, "tokens": sum(lengths)},
    )

"""Prices the three ways to compute a reference for a policy's layout: memory and time.

A policy with a reference (``train.loss.kl``) needs one more forward pass over every
micro-batch, of a frozen model:

- ``adapter_off``: the policy without its adapter, only for LoRA. It takes the workspace of a
  forward pass, while no activations of the policy exist.
- ``sleeping``: a frozen copy. A trainer of one rank keeps it in host memory as bf16 and streams it
  to the device layer by layer, one layer ahead; several ranks shard it over their devices as fp32,
  like masters.
- ``process``: ``deltawire reference`` on further accelerators. It scores groups while others are
  sampled and trained on; the trainer waits only if scoring is slower than a step.

These are formulas, as in `deltawire.plan.memory`; times are the estimates of
`deltawire.plan.step_time`.
"""

from __future__ import annotations

import dataclasses

from deltawire.plan.accelerators import Accelerator
from deltawire.plan.architecture import Model
from deltawire.plan.layout import TrainingLayout
from deltawire.plan.memory import ALLOWANCE, COMPUTE, MASTER, all_phases, host_bytes
from deltawire.plan.profile import ReferencePrice
from deltawire.plan.step_time import LINK_UTILIZATION, estimate_step

GIB = 2.0**30


def price_references(
    model: Model,
    layout: TrainingLayout,
    accelerator: Accelerator,
    process: TrainingLayout | None = None,
) -> list[ReferencePrice]:
    """Prices every way to compute the reference of a policy's layout; the first is the choice.

    ``process`` is the layout of the smallest reference process, None if none fits. The choice is
    the way that fits with the fewest further accelerators; ties go to the fastest, then to the one
    that takes the least memory. Empty for a layout that is a reference's itself.
    """
    if layout.mode == "reference":
        return []
    prices = [_sleeping(model, layout, accelerator)]
    if layout.mode == "lora":
        prices.append(_adapter_off(model, layout, accelerator))
    if process is not None:
        prices.append(_process(model, layout, accelerator, process))
    return sorted(
        prices,
        key=lambda price: (
            not price.fits,
            price.accelerators,
            price.estimated_seconds_per_step,
            price.device_bytes + price.host_bytes,
        ),
    )


def _adapter_off(model: Model, layout: TrainingLayout, accelerator: Accelerator) -> ReferencePrice:
    time = estimate_step(model, forward_only(layout), accelerator)
    return _on_trainer(
        model,
        layout,
        accelerator,
        "the policy without its adapter: a forward pass and no weights",
        ReferencePrice(
            mode="adapter_off",
            device_bytes=round(_rise(model, layout)),
            estimated_seconds_per_step=round(time.seconds, 4),
        ),
    )


def _sleeping(model: Model, layout: TrainingLayout, accelerator: Accelerator) -> ReferencePrice:
    seconds = estimate_step(model, forward_only(layout), accelerator).seconds
    if layout.ranks > 1:
        shard = MASTER * model.parameters / (layout.shards * layout.tensor * layout.pipeline)
        device, host = _rise(model, layout, held=shard), 0
        note = "a frozen copy, sharded over the ranks as fp32"
    else:
        widest = max(layer.parameters for layer in model.layers)
        outside = model.embedding + model.head + model.outside
        device = _rise(model, layout, streamed=COMPUTE * (2 * widest + outside))
        host = COMPUTE * model.parameters
        seconds = max(seconds, host / (accelerator.host_link_gb_s * 1e9 * LINK_UTILIZATION))
        note = "a frozen bf16 copy in host memory, streamed layer by layer"
    return _on_trainer(
        model,
        layout,
        accelerator,
        note,
        ReferencePrice(
            mode="sleeping",
            device_bytes=round(device),
            host_bytes=host,
            estimated_seconds_per_step=round(seconds, 4),
        ),
    )


def _process(
    model: Model, layout: TrainingLayout, accelerator: Accelerator, process: TrainingLayout
) -> ReferencePrice:
    policy = estimate_step(model, layout, accelerator)
    speed = estimate_step(model, process, accelerator).tokens_per_second
    peak = max(phase.with_allowance for phase in all_phases(model, process))
    return ReferencePrice(
        mode="process",
        accelerators=process.ranks,
        estimated_seconds_per_step=round(max(0.0, policy.tokens / speed - policy.seconds), 4),
        note=f"a process on further accelerators, {peak / GIB:,.1f} GiB on each; its time is what "
        "the trainer waits for it",
    )


def _on_trainer(
    model: Model,
    layout: TrainingLayout,
    accelerator: Accelerator,
    note: str,
    price: ReferencePrice,
) -> ReferencePrice:
    """Completes a price with a note, and with whether trainer and reference fit together."""
    peak = max(phase.with_allowance for phase in all_phases(model, layout)) + price.device_bytes
    host = host_bytes(model, layout) + price.host_bytes
    obstacle = ""
    if peak > accelerator.usable_bytes:
        obstacle = (
            f"{peak / GIB:,.1f} of {accelerator.usable_bytes / GIB:,.1f} GiB of device memory"
        )
    elif host > accelerator.host_bytes:
        obstacle = f"{host / GIB:,.1f} of {accelerator.host_bytes / GIB:,.1f} GiB of host memory"
    return ReferencePrice(
        mode=price.mode,
        device_bytes=price.device_bytes,
        host_bytes=price.host_bytes,
        estimated_seconds_per_step=price.estimated_seconds_per_step,
        fits=not obstacle,
        note=f"{note}; does not fit: {obstacle}" if obstacle else note,
    )


def forward_only(layout: TrainingLayout) -> TrainingLayout:
    """Returns the same ranks and micro-batch for a forward pass of a frozen model."""
    return dataclasses.replace(
        layout,
        mode="reference",
        checkpointing="none",
        offload="none",
        accumulate=False,
        lora_rank=0,
        lora_experts=False,
    )


def _rise(
    model: Model, layout: TrainingLayout, *, held: float = 0.0, streamed: float = 0.0
) -> float:
    """Returns the bytes by which a reference raises the peak of a rank.

    ``held`` bytes are there all the time. During the reference's pass there are ``streamed`` bytes
    too, its own workspace, and of the policy parameters, optimizer states and gradients, but no
    activations: that moment may lie below the policy's peak.
    """
    phases = all_phases(model, layout)
    first = phases[0]
    passing = max(phase.transient for phase in all_phases(model, forward_only(layout)))
    during = first.parameters + first.optimizer + first.gradients
    during += (1 + ALLOWANCE) * (passing + streamed)
    return held + max(0.0, during - max(phase.with_allowance for phase in phases))

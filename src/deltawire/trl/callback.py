"""A callback that publishes the weights of any Hugging Face trainer, TRL's included.

Concurrency::

    trainer ── on_step_end: cast, copy ──▶ next step
                                │ (waits here only while the version before is under way)
    background thread           ▼
                        encode ▶ upload ▶ commit {"global_step": N}
"""

from __future__ import annotations

import logging
from typing import Any, Unpack, get_args

from transformers import TrainerCallback

from deltawire.errors import InputError
from deltawire.export.tensors import unwrapped
from deltawire.sync.publish.commit import STEP_RECORD
from deltawire.sync.publish.options import HookOptions, check_options
from deltawire.trl.gathered import AdapterForm, GatheredWriter
from deltawire.trl.ranks import RunWriter
from deltawire.trl.sharded import ShardedWriter, check_shard_options

logger = logging.getLogger(__name__)


class Publish(TrainerCallback):
    """Publishes the model of a trainer to the run at ``url``: at the start, every ``every`` steps,
    and at the end.

    Weights are rounded to ``dtype``, whatever the trainer holds; None keeps each dtype. They have
    the names of checkpoints, tied ones occur once, and a LoRA adapter is added to its base without
    changing it. A new run carries the model's configuration and tokenizer. A run that is there is
    continued: if the trainer starts from other weights than its newest version, as after resuming
    from an earlier checkpoint, these become the next version. Each version's commit metadata has
    the trainer's ``global_step``.

    With ``adapter="separate"`` a LoRA is published as it is instead, under the names of PEFT's
    files: version 0 has base and adapter, later ones change the adapter only, and vLLM swaps it in
    a slot.

    Shards of FSDP version 2 are gathered and published by rank 0. With ``sharded``, each rank
    publishes its own rows, and no rank holds a whole tensor. ``options`` go to
    `deltawire.open_publisher`, or with ``sharded`` to `deltawire.sync.ShardPublisher`.

    While the store is away, training goes on: a version that could not be committed is superseded
    by the next, and the last one is waited for at the end. ``max_outage`` seconds end that with
    `RetryError`; None is no limit. The figures are in the trainer's log. With ``sharded``, steps
    are left out until the version that waits is committed. ``retain`` keeps the newest versions and
    prunes older ones; 0 keeps all.

    Training stops with `InputError` if the run holds another model or dtype, and with `FencedError`
    if another process publishes to it.

    Example::

        from deltawire.trl import Publish

        trainer = SFTTrainer(model, train_dataset=data, callbacks=[Publish("s3://bucket/run")])
        trainer.train()
    """

    def __init__(
        self,
        url: str,
        *,
        every: int = 1,
        dtype: str | None = "bfloat16",
        sharded: bool = False,
        adapter: AdapterForm = "merged",
        max_outage: float | None = None,
        retain: int = 0,
        **options: Unpack[HookOptions],
    ) -> None:
        if not isinstance(url, str):
            raise InputError(
                f"Publish takes a run's location, not a {type(url).__name__}",
                hint='for example Publish("s3://bucket/run")',
            )
        if every < 1:
            raise InputError(f"every={every}", hint="publish every 1 or more steps")
        if retain < 0:
            raise InputError(f"retain={retain}", hint="keep 0, which is all, or more versions")
        if adapter not in get_args(AdapterForm):
            raise InputError(f"adapter={adapter!r}", hint='"merged" or "separate"')
        if sharded and adapter == "separate":
            raise InputError(
                "an adapter cannot be published by rows", hint="publish with sharded=False"
            )
        check = check_shard_options if sharded else check_options
        check(options)
        self.url = url
        self.every = every
        self._dtype = dtype
        self._sharded = sharded
        self._options: dict[str, Any] = {"max_outage": max_outage, "retain": retain, **options}
        if adapter == "separate":
            self._options["adapter"] = adapter
        self._writer: RunWriter | None = None
        self._step = -1
        """The step that was published last."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the run and publishes the weights that the trainer starts from."""
        del args, control
        self._close()
        model = unwrapped(kwargs["model"])
        kind = ShardedWriter if self._sharded else GatheredWriter
        self._writer = kind(
            self.url,
            model,
            tokenizer=kwargs.get("processing_class"),
            dtype=self._dtype,
            metadata={STEP_RECORD: state.global_step},
            **self._options,
        )
        self._step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publishes every ``every`` steps."""
        del args, control
        if state.global_step % self.every == 0 and self._writer is not None:
            model = unwrapped(kwargs["model"])
            if self._writer.publish(model, {STEP_RECORD: state.global_step}):
                self._step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds the figures of an outage to the trainer's log, if there was one."""
        del args, control
        outage = None if self._writer is None else self._writer.outage
        if outage is None or not (outage.seconds or outage.superseded):
            return
        figures = {
            "deltawire/outage_s": round(outage.seconds, 1),
            "deltawire/versions_superseded": outage.superseded,
        }
        for log in (kwargs.get("logs"), state.log_history[-1] if state.log_history else None):
            if log is not None:
                log.update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publishes the last weights unless they are published, and waits until they are
        committed."""
        del control
        if self._writer is None:
            return
        best = getattr(args, "load_best_model_at_end", False) and state.best_global_step
        try:
            if best or state.global_step != self._step:
                step = best or state.global_step
                model = unwrapped(kwargs["model"])
                self._writer.publish(model, {STEP_RECORD: step}, unless_held=True)
        finally:
            self._close()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            logger.info("published up to version %d of %s", writer.version, self.url)

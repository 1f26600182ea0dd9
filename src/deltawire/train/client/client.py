"""Trains a run with a loop of the caller's own: Tinker's verbs over a bucket.

Operations run one after another, in the order of the calls, in one thread::

    caller                          operations' thread        trainer: here, or in N processes
      forward_backward(data) ─────▶   Evaluate ───────────────▶ gradients add up
      optim_step(params) ─────────▶   TakeStep ───────────────▶ one optimizer step on them
      save_weights…() ────────────▶   PublishWeights ─────────▶ publish a version, and commit it
      ◀──────── future.result() ───   ◀────────────────────────

A save publishes a version through the bucket like any trainer, so that workers, readers and
`deltawire run` see an ordinary run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import msgspec
import torch
from torch import Tensor

from deltawire.config import ModelConfig, RunConfig
from deltawire.errors import InputError
from deltawire.export.models import fetch_model_files, load_tokenizer
from deltawire.runtime.process import open_run
from deltawire.runtime.trusted import open_as_trainer
from deltawire.store import Bucket, open_bucket
from deltawire.train.client.hosted import HostedTrainer
from deltawire.train.client.losses import check_loss
from deltawire.train.client.operations import (
    Evaluate,
    Evaluation,
    Opened,
    Operation,
    PreparedDatum,
    PublishWeights,
    Restore,
    Result,
    Saved,
    SaveState,
    Stepped,
    TakeStep,
    check_record,
    prepare,
)
from deltawire.train.client.ranks import LeadingTrainer, OpenSettings, configured, follow
from deltawire.train.client.sampling import Kind, SamplingClient
from deltawire.train.client.session import LostState, new_run
from deltawire.train.client.types import (
    AdamParams,
    APIFuture,
    ForwardBackwardOutput,
    OptimStepResponse,
    SaveResponse,
)
from deltawire.train.parallel.ranks import world_of
from deltawire.train.rank_agent import ending_at_once
from deltawire.wire.roles import pin_of
from deltawire.wire.run import Run
from deltawire.wire.signing import Ed25519Signer

T = TypeVar("T")
CustomLoss = Callable[[Sequence[Any], list[Tensor]], tuple[Any, Mapping[str, float]]]


class ClientTrainer(Protocol):
    """Carries out a client's operations: in this process, or in others."""

    opened: Opened

    def run(self, operation: Operation) -> Result:
        """Carries out an operation; raises its error."""
        ...

    def close(self) -> None:
        """Releases the run; changes that are not saved are dropped."""
        ...


class TrainingClient:
    """A trainer whose loop the caller writes.

    Open it with `create`, which starts a run, or with `load`, which continues one, however it was
    started. Gradients add up until `optim_step`; losses are unnormalized sums. `close` saves the
    state, so that ``deltawire run`` or another client continues to the same bits.

    An operation that fails leaves the weights as they were and is raised by its future; later
    operations run.

    Example::

        with TrainingClient.create("runs/mine/bucket", "models/qwen3-0.6b") as client:
            for batch in batches:
                client.forward_backward(batch, "cross_entropy")
                client.optim_step(AdamParams(learning_rate=1e-5)).result()
            sampler = client.save_weights_and_get_sampling_client()
    """

    def __init__(self, trainer: ClientTrainer, bucket: Bucket, run: Run) -> None:
        self._trainer = trainer
        self._bucket, self._run = bucket, run
        self._version = trainer.opened.version
        self._tokenizer: Any = None
        self._closed = False
        self._samplers: list[SamplingClient] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="training-client")

    @classmethod
    def create(
        cls,
        run_url: str,
        model: str | Path,
        *,
        config: RunConfig | None = None,
        name: str = "client",
        key: str | Path = "",
        ranks: int | None = None,
        hosted: bool = False,
    ) -> TrainingClient:
        """Starts a run from a model directory: its version 0 is that model.

        ``config`` is what ``deltawire run`` would use to continue it. ``key`` is a file that
        ``deltawire keygen`` made: the run is then signed, and `pin` is what readers insist on.
        ``ranks`` and ``hosted`` are those of `load`; the run keeps the number of ranks. Raises
        `InputError` if the bucket holds a run, or the model cannot be loaded.
        """
        asked = _asked_ranks(ranks, hosted=hosted)
        if world_of()[0]:  # Rank 0 creates the run.
            return cls.load(run_url, key=key, ranks=ranks, hosted=hosted)
        signer = Ed25519Signer.read(Path(key)) if key else None
        bucket = open_as_trainer(open_bucket(run_url, create=True), signer)
        run_id = bucket.pin.run_id if bucket.pin else ""
        config = config or RunConfig(name=name, model=ModelConfig(path=str(model)))
        ranks = asked or config.train.ranks
        train = msgspec.structs.replace(config.train, ranks=ranks)
        if found := train.layout_contradiction(ranks):
            raise InputError(f"train: {found[0]}", hint=found[1], run=bucket.url)
        config = msgspec.structs.replace(config, train=train)
        new_run(bucket, Path(model), config, signer=signer, run_id=run_id)
        return cls.load(
            run_url, key=key, public_key=str(bucket.pin or ""), ranks=ranks, hosted=hosted
        )

    @classmethod
    def load(
        cls,
        run_url: str,
        *,
        lost_state: LostState = "refuse",
        take_over: bool = False,
        key: str | Path = "",
        public_key: str = "",
        ranks: int | None = None,
        hosted: bool = False,
    ) -> TrainingClient:
        """Continues a run from its newest version, with its optimizer state.

        The state is that of the newest checkpoint. If versions were published after it,
        ``lost_state = "refuse"`` raises `InputError`, ``"reset"`` takes the newest weights with a
        new optimizer state, and ``"repeat"`` takes the checkpoint's weights and state (version 0's
        without one): the caller repeats the calls made since, and a save whose weights are
        published already finds its version again. A run has one trainer: `FencedError` is raised
        if one is alive, unless ``take_over`` asks to replace it.

        A signed run needs the file of its owner's ``key``; with ``public_key``, which may name the
        run's id after a colon, another run is refused.

        ``ranks`` processes compute, by default as many as the run's configuration says. More than
        one are started on this machine, and so is a single one if ``hosted``; otherwise this
        process computes. In a script that ``torchrun`` or another launcher started, its processes
        are the ranks: rank 0 gets the client, and the others carry out its operations, then raise
        `SystemExit`. With another number of ranks than the state was saved with, `notice` says
        that later bits may differ.
        """
        if lost_state not in ("refuse", "reset", "repeat"):
            raise InputError(
                f"lost_state is {lost_state[:40]!r}", hint='give "refuse", "reset" or "repeat"'
            )
        settings = OpenSettings(
            url=run_url,
            ranks=_asked_ranks(ranks, hosted=hosted),
            lost_state=lost_state,
            take_over=take_over,
            key=str(key),
            public_key=public_key,
        )
        rank, started = world_of()
        if rank:
            with ending_at_once(supervised=False):
                follow(settings)
            raise SystemExit(0)
        bucket = settings.open_bucket()
        run, config = open_run(bucket, role="trainer")
        if not settings.ranks:
            settings = msgspec.structs.replace(settings, ranks=config.train.ranks)
        configured(bucket, settings)
        if hosted or settings.ranks > started:
            return cls(HostedTrainer.open(settings), bucket, run)
        trainer = LeadingTrainer.open(settings)
        trainer.keep_alive()
        return cls(trainer, bucket, run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(save=kind is None)

    @property
    def bucket(self) -> Bucket:
        """The run's bucket."""
        return self._bucket

    @property
    def pin(self) -> str:
        """The ``--public-key`` of this run for readers, empty if the run is not signed."""
        return pin_of(self._run)

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return self._version

    @property
    def ranks(self) -> int:
        """The number of processes that compute."""
        return self._trainer.opened.ranks

    @property
    def notice(self) -> str:
        """Returns what to know about the state that was loaded, such as another number of ranks
        that saved it; empty if there is nothing."""
        return self._trainer.opened.notice

    @property
    def state_record(self) -> Mapping[str, Any]:
        """The ``record`` of the save that the state was loaded from, with its ``step`` and
        ``name``; empty if no client saved it."""
        return self._trainer.opened.state_record

    def get_tokenizer(self) -> Any:
        """Returns the run's tokenizer."""
        if self._tokenizer is None:
            with fetch_model_files(self._bucket, self._run) as folder:
                self._tokenizer = load_tokenizer(Path(folder))
        return self._tokenizer

    def forward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Computes the loss and the log-probabilities of ``data``, without gradients."""
        return self._submit(self._checked(data, loss_fn, loss_fn_config, backward=False))

    def forward_backward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Adds the gradients of a loss of ``data`` to those of earlier calls.

        ``loss_fn`` is one of `deltawire.train.client.losses.LOSSES`. Raises `InputError` at once
        for data that do not fit it.
        """
        return self._submit(self._checked(data, loss_fn, loss_fn_config, backward=True))

    def forward_backward_custom(
        self, data: Sequence[Any], loss_fn: CustomLoss
    ) -> APIFuture[ForwardBackwardOutput]:
        """Adds the gradients of the caller's own loss.

        ``loss_fn(data, logprobs)`` gets a leaf tensor of log-probabilities for each datum, of the
        shape of its targets, and returns a scalar and metrics. It is called once, in the
        operations' thread, over all data.
        """
        bare = self._prepared(data, "custom")

        def run() -> ForwardBackwardOutput:
            found = self._evaluated(bare, "cross_entropy", {}, backward=False)
            leaves = [one.clone().requires_grad_() for one in found.logprobs]
            loss, metrics = loss_fn(data, leaves)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise InputError("a custom loss must return a scalar tensor and metrics")
            slopes: Sequence[Tensor | None] = torch.autograd.grad(loss, leaves, allow_unused=True)
            # The sum of -w·x has the gradient of the loss where w is its negative slope.
            weighted = [
                PreparedDatum(
                    tokens=one.tokens,
                    inputs=one.inputs
                    | {"weights": torch.zeros_like(leaf) if slope is None else -slope},
                )
                for one, leaf, slope in zip(bare, leaves, slopes, strict=True)
            ]
            self._evaluated(weighted, "cross_entropy", {}, backward=True)
            outputs = [{"logprobs": one} for one in found.logprobs]
            named = {_reduced(name): float(value) for name, value in metrics.items()}
            return ForwardBackwardOutput(outputs, {"loss:sum": float(loss.detach()), **named})

        return self._submit(run)

    def optim_step(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """Takes one step on the gradients that have added up, and clears them.

        A gradient that is not finite changes no weight; the metric ``skipped`` is then 1.
        """
        params = AdamParams(**{name: getattr(adam_params, name) for name in _ADAM})
        for name in _ADAM:
            value = getattr(params, name)
            if not 0 <= value < (1 if name.startswith("beta") else float("inf")):
                raise InputError(f"AdamParams.{name} is {value}", hint="it must not be negative")

        def run() -> OptimStepResponse:
            answer = self._trainer.run(TakeStep(params=params))
            assert isinstance(answer, Stepped)
            return OptimStepResponse(answer.metrics)

        return self._submit(run)

    def save_weights_for_sampler(
        self, name: str = "", *, record: Mapping[str, Any] | None = None
    ) -> APIFuture[SaveResponse]:
        """Publishes the weights as a version and waits for its commit; weights that are published
        already keep their version. ``name`` and ``record``, a small JSON object, are stored with
        the version."""
        operation = PublishWeights(name=name, record=check_record(record))
        return self._submit(lambda: self._save(operation))

    def save_state(
        self, name: str = "", *, keep: bool = False, record: Mapping[str, Any] | None = None
    ) -> APIFuture[SaveResponse]:
        """Publishes the weights and stores the optimizer's state for that version. Of the states
        the last two are kept, and those saved with ``keep``."""
        operation = SaveState(name=name, record=check_record(record), keep=keep)
        return self._submit(lambda: self._save(operation))

    def load_state(
        self, path: str | SaveResponse, *, optimizer: bool = True
    ) -> APIFuture[SaveResponse]:
        """Restores weights and optimizer state of a `save_state`, of this run or of another one
        with the same model; the next save publishes them as a new version.

        ``path`` is ``RUN_URL@VERSION``. Without ``optimizer``, the optimizer starts again. Raises
        `InputError` if there is no such state.
        """
        where = path if isinstance(path, str) else path.path

        def run() -> SaveResponse:
            self._trainer.run(Restore(path=where, optimizer=optimizer))
            return SaveResponse(where, self._version)

        return self._submit(run)

    def save_weights_and_get_sampling_client(
        self, name: str = "", *, kind: Kind = "snapshot", **options: Any
    ) -> SamplingClient:
        """Publishes the weights, and opens a sampling client on that version.

        ``kind = "inflight"`` follows later saves too. ``options`` are those of `SamplingClient`.
        The client is closed with this one.
        """
        saved = self.save_weights_for_sampler(name).result()
        return self.create_sampling_client(saved, kind=kind, **options)

    def create_sampling_client(
        self, saved: SaveResponse | int, *, kind: Kind = "snapshot", **options: Any
    ) -> SamplingClient:
        """Opens a sampling client on a version that was saved."""
        version = saved if isinstance(saved, int) else saved.version
        sampler = SamplingClient(self.bucket, self._run, version=version, kind=kind, **options)
        self._samplers.append(sampler)
        return sampler

    def close(self, *, save: bool = True) -> None:
        """Finishes all operations, saves the state (unless told not to), and releases the run.
        Gradients without a step are dropped.
        """
        if self._closed:
            return
        try:
            if save:
                self.save_state().result()
        finally:
            self._closed = True
            self._pool.shutdown()
            for sampler in self._samplers:
                sampler.close()
            self._trainer.close()

    def _save(self, operation: PublishWeights | SaveState) -> SaveResponse:
        answer = self._trainer.run(operation)
        assert isinstance(answer, Saved)
        self._version = answer.newest
        return SaveResponse(f"{self.bucket.url}@{answer.version}", answer.version)

    def _submit(self, run: Callable[[], T]) -> APIFuture[T]:
        if self._closed:
            raise InputError("the training client is closed", hint="open the run again")
        future: Future[T] = self._pool.submit(run)
        return APIFuture(future)

    def _checked(
        self,
        data: Sequence[Any],
        loss_fn: str,
        settings: Mapping[str, Any] | None,
        *,
        backward: bool,
    ) -> Callable[[], ForwardBackwardOutput]:
        values = check_loss(loss_fn, settings)
        prepared = self._prepared(data, loss_fn)

        def run() -> ForwardBackwardOutput:
            found = self._evaluated(prepared, loss_fn, values, backward=backward)
            outputs = [{"logprobs": one} for one in found.logprobs]
            return ForwardBackwardOutput(outputs, {"loss:sum": found.loss})

        return run

    def _prepared(self, data: Sequence[Any], loss_fn: str) -> list[PreparedDatum]:
        if not data:
            raise InputError("the list of data is empty", hint="give at least one datum")
        vocabulary = self._trainer.opened.vocabulary
        return [prepare(datum, loss_fn, vocabulary=vocabulary) for datum in data]

    def _evaluated(
        self,
        data: list[PreparedDatum],
        loss: str,
        settings: dict[str, float],
        *,
        backward: bool,
    ) -> Evaluation:
        operation = Evaluate(data=data, loss=loss, settings=settings, backward=backward)
        answer = self._trainer.run(operation)
        assert isinstance(answer, Evaluation)
        return answer


_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


def _asked_ranks(ranks: int | None, *, hosted: bool) -> int:
    """Returns the number of ranks that a caller asks for, 0 for that of the run. Raises
    `InputError` if it is not the number that a launcher has started."""
    _, started = world_of()
    if ranks is not None and not 1 <= ranks <= 65536:
        raise InputError(f"ranks is {ranks}", hint="give 1 or more")
    if started == 1:
        return ranks or 0
    if hosted or ranks not in (None, started):
        asked = "hosted=True" if hosted else f"ranks={ranks}"
        raise InputError(
            f"this script runs in {started} processes that a launcher started, and asks for "
            f"{asked}",
            hint="leave both out, or start the script as one process",
        )
    return started


def _reduced(name: str) -> str:
    """Returns a metric's name with its reduction."""
    return name if ":" in name else f"{name}:mean"

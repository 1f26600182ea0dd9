"""Trains a run with a loop of the caller's own: Tinker's verbs over a bucket.

Operations run one after another, in the order of the calls, in one thread::

    caller                          operations' thread
      forward_backward(data) ─────▶   gradients add up
      optim_step(params) ─────────▶   one optimizer step on them
      save_weights…() ────────────▶   publish a version, wait for its commit
      ◀──────── future.result() ───

A save publishes a version through the bucket like any trainer, so that workers, readers and
`deltawire run` see an ordinary run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.runtime.process import Process
from deltawire.runtime.trusted import ANY, ReaderTrust, open_as_trainer
from deltawire.store import Bucket, open_bucket
from deltawire.train.client.forward import check_tokens
from deltawire.train.client.losses import LOSSES, check_inputs, check_loss
from deltawire.train.client.sampling import Kind, SamplingClient
from deltawire.train.client.session import LostState, TrainingSession, new_run
from deltawire.train.client.types import (
    AdamParams,
    APIFuture,
    Datum,
    ForwardBackwardOutput,
    OptimStepResponse,
    SaveResponse,
    tensor_of,
    tokens_of,
)
from deltawire.train.head import TokenTerms
from deltawire.wire.roles import Pin, pin_of
from deltawire.wire.signing import Ed25519Signer

T = TypeVar("T")
CustomLoss = Callable[[Sequence[Any], list[Tensor]], tuple[Any, Mapping[str, float]]]


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

    def __init__(self, session: TrainingSession, process: Process) -> None:
        self._session = session
        self._process = process
        self._stack = contextlib.ExitStack()
        self._closed = False
        self._samplers: list[SamplingClient] = []
        self._stack.enter_context(process.registered())
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
    ) -> TrainingClient:
        """Starts a run from a model directory: its version 0 is that model.

        ``config`` is what ``deltawire run`` would use to continue it. ``key`` is a file that
        ``deltawire keygen`` made: the run is then signed, and `pin` is what readers insist on.
        Raises `InputError` if the bucket holds a run, or the model cannot be loaded.
        """
        signer = Ed25519Signer.read(Path(key)) if key else None
        bucket = open_as_trainer(open_bucket(run_url, create=True), signer)
        run_id = bucket.pin.run_id if bucket.pin else ""
        new_run(bucket, Path(model), config, name=name, signer=signer, run_id=run_id)
        return cls.load(run_url, key=key, public_key=str(bucket.pin or ""))

    @classmethod
    def load(
        cls,
        run_url: str,
        *,
        lost_state: LostState = "refuse",
        take_over: bool = False,
        key: str | Path = "",
        public_key: str = "",
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
        """
        if lost_state not in ("refuse", "reset", "repeat"):
            raise InputError(
                f"lost_state is {lost_state[:40]!r}", hint='give "refuse", "reset" or "repeat"'
            )
        signer = Ed25519Signer.read(Path(key)) if key else None
        trust = ReaderTrust(Pin.parse(public_key)) if public_key else ANY
        bucket = open_as_trainer(open_bucket(run_url), signer, trust)
        process = Process(bucket, "trainer", "trainer", supervised=False)
        if not take_over:
            process.refuse_live_namesake()
        session = TrainingSession.open(
            process.bucket, process.lease, lost_state=lost_state, signer=signer
        )
        return cls(session, process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(save=kind is None)

    @property
    def bucket(self) -> Bucket:
        """The run's bucket."""
        return self._session.bucket

    @property
    def pin(self) -> str:
        """The ``--public-key`` of this run for readers, empty if the run is not signed."""
        return pin_of(self._session.run)

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return self._session.version

    @property
    def state_record(self) -> Mapping[str, Any]:
        """The ``record`` of the save that the state was loaded from, with its ``step`` and
        ``name``; empty if no client saved it."""
        return self._session.state_record

    def get_tokenizer(self) -> Any:
        """Returns the run's tokenizer."""
        return self._session.tokenizer

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
        prepared = [_Prepared(self._session.model, "custom", datum) for datum in data]
        _require(prepared)

        def run() -> ForwardBackwardOutput:
            with torch.no_grad():
                logprobs = self._logprobs(prepared)
            leaves = [one.detach().cpu().requires_grad_() for one in logprobs]
            loss, metrics = loss_fn(data, leaves)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise InputError("a custom loss must return a scalar tensor and metrics")
            slopes: list[Tensor | None] = list(torch.autograd.grad(loss, leaves, allow_unused=True))

            def surrogate(one: _Prepared, values: Tensor, place: int) -> Tensor:
                del one
                slope = slopes[place]
                return values.sum() * 0 if slope is None else (values * slope.to(values)).sum()

            self._backward(prepared, surrogate)
            outputs = [{"logprobs": one.detach()} for one in leaves]
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
            return OptimStepResponse(self._session.step(params))

        return self._submit(run)

    def save_weights_for_sampler(
        self, name: str = "", *, record: Mapping[str, Any] | None = None
    ) -> APIFuture[SaveResponse]:
        """Publishes the weights as a version and waits for its commit; weights that are published
        already keep their version. ``name`` and ``record``, a small JSON object, are stored with
        the version."""
        return self._submit(lambda: self._saved(self._session.publish(name, record)))

    def save_state(
        self, name: str = "", *, keep: bool = False, record: Mapping[str, Any] | None = None
    ) -> APIFuture[SaveResponse]:
        """Publishes the weights and stores the optimizer's state for that version. Of the states
        the last two are kept, and those saved with ``keep``."""

        def run() -> SaveResponse:
            version = self._session.publish(name, record)
            self._session.save(keep=keep)
            return self._saved(version)

        return self._submit(run)

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
            self._session.restore(where, optimizer=optimizer)
            return SaveResponse(where, self._session.version)

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
        sampler = SamplingClient(
            self.bucket, self._session.run, version=version, kind=kind, **options
        )
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
            self._session.close()
            self._stack.close()

    def _saved(self, version: int) -> SaveResponse:
        return SaveResponse(f"{self.bucket.url}@{version}", version)

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
        prepared = [_Prepared(self._session.model, loss_fn, datum) for datum in data]
        _require(prepared)
        loss = LOSSES[loss_fn]

        def evaluate(one: _Prepared, logprobs: Tensor, place: int) -> Tensor:
            del place
            inputs = {name: value.to(logprobs.device) for name, value in one.inputs.items()}
            return loss(logprobs, inputs, values)

        def run() -> ForwardBackwardOutput:
            if backward:
                logprobs, total = self._backward(prepared, evaluate)
            else:
                with torch.no_grad():
                    logprobs = self._logprobs(prepared)
                    total = sum(
                        float(evaluate(one, found, place))
                        for place, (one, found) in enumerate(zip(prepared, logprobs, strict=True))
                    )
            outputs = [{"logprobs": one.detach().cpu()} for one in logprobs]
            return ForwardBackwardOutput(outputs, {"loss:sum": total})

        return run

    def _logprobs(self, prepared: Sequence[_Prepared]) -> list[Tensor]:
        found: list[Tensor] = []
        for part in self._parts(prepared):
            with self._terms(part) as terms:
                found += [one.logprobs for one in terms]
        return found

    def _terms(self, part: Sequence[_Prepared]) -> AbstractContextManager[list[TokenTerms]]:
        policy = self._session.policy
        return policy.sequence_terms([one.tokens for one in part], [one.targets for one in part])

    def _backward(
        self, prepared: Sequence[_Prepared], loss: Callable[[_Prepared, Tensor, int], Tensor]
    ) -> tuple[list[Tensor], float]:
        """Adds the gradients, one part of the data after another; a failure adds no gradients."""
        found: list[Tensor] = []
        total = 0.0
        with self._session.gradients():
            for part in self._parts(prepared):
                with self._terms(part) as terms:
                    values = [
                        loss(one, term.logprobs, len(found) + place)
                        for place, (one, term) in enumerate(zip(part, terms, strict=True))
                    ]
                    summed = torch.stack(values).sum()
                    summed.backward()  # type: ignore[no-untyped-call]
                total += float(summed.detach())
                found += [one.logprobs.detach() for one in terms]
        return found, total

    def _parts(self, prepared: Sequence[_Prepared]) -> list[list[_Prepared]]:
        """Divides the data, in their order, into passes within the run's budget of tokens."""
        budget, packed = self._session.budget, self._session.policy.packs
        parts: list[list[_Prepared]] = []
        rows = tokens = longest = 0
        for one in prepared:
            length = len(one.tokens)
            rows, tokens, longest = rows + 1, tokens + length, max(longest, length)
            if not parts or (tokens if packed else rows * longest) > budget:
                parts.append([])
                rows, tokens, longest = 1, length, length
            parts[-1].append(one)
        return parts


_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


class _Prepared:
    """A datum, checked: its tokens int64[L], its loss inputs, and its targets."""

    def __init__(self, model: Any, loss_fn: str, datum: Datum | Any) -> None:
        self.tokens = torch.tensor(tokens_of(datum.model_input))
        raw = {name: tensor_of(name, value) for name, value in datum.loss_fn_inputs.items()}
        self.inputs = raw
        if loss_fn != "custom":
            check_inputs(loss_fn, raw)
        elif "target_tokens" not in raw:
            raise InputError("a datum has no 'target_tokens'", hint="every loss needs them")
        self.targets = raw["target_tokens"]
        if self.targets.dim() not in (1, 2) or len(self.targets) != len(self.tokens):
            raise InputError(
                f"target_tokens has shape {list(self.targets.shape)} for {len(self.tokens)} input "
                "tokens",
                hint="give one row of targets for each input token, shifted by one",
            )
        check_tokens(model, self.tokens)
        check_tokens(model, self.targets)


def _require(prepared: Sequence[_Prepared]) -> None:
    if not prepared:
        raise InputError("there are no data", hint="give at least one datum")


def _reduced(name: str) -> str:
    """Returns a metric's name with its reduction."""
    return name if ":" in name else f"{name}:mean"

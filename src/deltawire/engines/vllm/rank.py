"""One worker's rank: its part of the weights, the mirror of that part, and the step that comes.

Who waits for whom::

    preparing thread                        the worker's own, between two steps
      fetch, verify, decode, stage ───────▶   swap: agree that all have staged the same version and
      (serving goes on)                       that their shares add up to the manifest's digest;
                                              scatter; agree that all hold it; else put it back
      the mirror follows, before the
      next is prepared

All ranks enter `Rank.swap` together, so that they can agree there among themselves, whoever calls.
An answer is a dictionary with ``failure``, empty if all is well: an exception would end vLLM's
worker, and with it serving.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from deltawire import codec
from deltawire.codec import Digest
from deltawire.engines.vllm.peers import Peers
from deltawire.engines.vllm.postprocess_check import remade
from deltawire.engines.vllm.refusals import (
    refuse_remade,
    refuse_stale_products,
    refuse_unreached,
)
from deltawire.engines.vllm.settings import Settings
from deltawire.errors import CorruptError, DeltawireError, InputError, ResyncError
from deltawire.placement.placed import PlacedWeights, Prepared
from deltawire.placement.placement import Placement, ownership, probe
from deltawire.placement.steps import step_to
from deltawire.store import RetryingBucket, open_bucket
from deltawire.sync import Mirror, Subscriber, Update, load_mirror, newest_version, require_run
from deltawire.sync.chain.objects import with_retries
from deltawire.wire.run import Run

T = TypeVar("T")
Answer = dict[str, Any]


class Rank:
    """The weights of one rank, which follow a run.

    ``context`` is entered around every call of the model's own loader. Raises `InputError` if the
    run is of another model than the engine's, or its weights lie otherwise than the loader puts
    them, and what loading the mirror raises. To be made by all ranks at once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: Settings,
        peers: Peers,
        *,
        context: AbstractContextManager[Any] | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.peers = peers
        self.last_swap: dict[str, float] = {}
        self._context = context or nullcontext()
        self._loader: Any = model.load_weights
        run, newest = self._together(self._read_run)
        version = min(peers.gather([newest]))[0]
        live: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
        live |= dict(model.named_parameters(remove_duplicate=False))
        found = self._together(lambda: probe(self._load_weights, run.tensors, live, about=about))
        placement = ownership(peers.gather_structs(found))[peers.number]
        self._together(lambda: _refuse(model, placement))
        mirror = self._together(
            lambda: load_mirror(
                self._bucket, run, at=version, wanted=placement.wanted(), threads=settings.threads
            )
        )
        assert mirror is not None
        self.placed = PlacedWeights(placement, live, load_weights=self._load_weights)
        self.subscriber = Subscriber(self._bucket, run, mirror, threads=settings.threads)
        self._update: Update | None = None
        self._prepared: Prepared | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._prepare_ms = 0.0
        self._behind: Update | None = None
        """What the live weights hold and the mirror does not yet: moving it need not be waited for
        between two steps."""
        self._digest = mirror.digest
        self.mend()

    def _read_run(self) -> tuple[Run, int]:
        """The run, and its newest version."""
        self._bucket = RetryingBucket(open_bucket(self.settings.run))
        run = require_run(self._bucket, public_key=self.settings.public_key)
        newest = newest_version(self._bucket)
        if newest is None:
            raise InputError("the run has no version yet", run=self._bucket.url)
        return run, newest

    def _together(self, work: Callable[[], T]) -> T:
        """``work``, which all ranks do and none waits in for another. If it fails anywhere, it is
        raised everywhere: nobody is left waiting for who has given up."""
        result: list[T] = []
        error: Exception | None = None
        try:
            result.append(work())
        except Exception as caught:  # Told to the others first.
            error = caught
        answers = self.peers.gather([int(error is None)])
        if error is not None:
            raise error
        if failed := [number for number, (well,) in enumerate(answers) if not well]:
            raise ResyncError(f"ranks {failed} failed")
        return result[0]

    @property
    def mirror(self) -> Mirror:
        """The host's copy of what this rank holds."""
        return self.subscriber.mirror

    @property
    def version(self) -> int:
        """The version that is served; -1 if the live weights are none."""
        return self.placed.version

    def status(self) -> Answer:
        """What this rank serves and prepares."""
        prepared = self._prepared
        return {
            "failure": self._failure,
            "rank": self.peers.number,
            "version": self.version,
            "digest": self._digest.hex(),
            "prepared": -1 if prepared is None else prepared.version,
            "preparing": self._thread is not None and self._thread.is_alive(),
            "changes": 0 if prepared is None else prepared.changes,
            "staged_bytes": 0 if prepared is None else prepared.bytes,
            "fetched_bytes": 0 if self._update is None else self._update.bytes,
            "prepare_ms": self._prepare_ms,
            "swap": self.last_swap,
            "held_bytes": sum(bits.nbytes for bits in self.mirror.tensors.values()),
            "unplaced": len(self.placed.placement.unplaced),
        }

    def prepare(self, version: int) -> None:
        """Begin to prepare ``version`` beside serving, unless that is done or under way."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._prepared is not None and self._prepared.version == version:
            return
        self._failure, self._prepared, self._update = "", None, None
        self._thread = threading.Thread(
            target=self._prepare, args=(version,), name="deltawire-prepare", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the thread that prepares has ended."""
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        """Bring the mirror to the version that is served."""
        if self._behind is not None:
            self.subscriber.commit(self._behind)
            self._behind = None

    def discard(self) -> None:
        """Forget what was prepared."""
        self.wait()
        self._prepared = self._update = None

    def _prepare(self, version: int) -> None:
        began = time.perf_counter()
        try:
            self._follow()
            update = with_retries(lambda: step_to(self.subscriber, version))
            if update is None:
                return
            self._update = update
            self._prepared = self.placed.prepare(update.patches, self.mirror, update.version)
        except DeltawireError as error:
            self._failure = str(error)
        except Exception as error:  # A thread that ends in silence would be waited for for ever.
            self._failure = f"cannot prepare: {type(error).__name__}: {error}"
        finally:
            self._prepare_ms = (time.perf_counter() - began) * 1e3

    def swap(self, version: int) -> Answer:
        """Take up the prepared ``version``, on all ranks or on none. To be entered by all."""
        began = time.perf_counter()
        failure = self._agree_before(version)
        if failure:
            return self._failed(failure)
        prepared, update = self._prepared, self._update
        assert prepared is not None
        assert update is not None
        before = (self.placed.share, self.placed.believed)
        agreed = time.perf_counter()
        try:
            with self._context:
                self.placed.swap(prepared)
        except DeltawireError as error:
            failure = str(error)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        swapped = time.perf_counter()
        if not self._all_well(failure):
            if not failure:
                failure = "another rank could not swap"
                self._take_back(prepared, *before)
            self._prepared = self._update = None
            return self._failed(failure)
        self._behind, self._digest = update, update.digest
        self._prepared = self._update = None
        self._failure = ""
        self.last_swap = {
            "version": version,
            "changes": prepared.changes,
            "staged_bytes": prepared.bytes,
            "agree_ms": (agreed - began) * 1e3,
            "scatter_ms": (swapped - agreed) * 1e3,
            "whole_ms": (time.perf_counter() - began) * 1e3,
            "prepare_ms": self._prepare_ms,
        }
        return self.status()

    def _agree_before(self, version: int) -> str:
        """Why there can be no swap, empty if all ranks are ready for the same one."""
        prepared, update = self._prepared, self._update
        ready = (
            prepared is not None
            and update is not None
            and prepared.version == version
            and prepared.base == self.version
        )
        share = prepared.share if prepared is not None and ready else codec.ZERO
        answers = self.peers.gather([int(ready), *_words(share)])
        if not all(answer[0] for answer in answers):
            behind = [number for number, answer in enumerate(answers) if not answer[0]]
            return f"version {version} is not prepared on ranks {behind}"
        assert update is not None
        total = _sum(answers)
        if total != update.digest:
            self._prepared = self._update = None
            return (
                f"the live weights' digest would be {total.hex()}, not {update.digest.hex()}, "
                f"at version {version}"
            )
        return ""

    def _all_well(self, failure: str) -> bool:
        return all(answer[0] for answer in self.peers.gather([int(not failure)]))

    def _take_back(self, prepared: Prepared, share: Digest, believed: Digest) -> None:
        """Undo a swap of this rank. If even that fails, nothing right can be served: raises."""
        self.placed.swap(reverse_of(prepared, share=share, believed=believed))

    def _failed(self, failure: str) -> Answer:
        self._failure = failure
        return self.status()

    def attest(self) -> Answer:
        """Hold all live bits against the mirror and the digest; ``sound`` says whether they hold.

        Copies that count on another rank are compared too. Reads everything once or twice.
        """
        self.wait()  # Which may be walking on the mirror.
        self._follow()
        failure = ""
        try:
            self.placed.verify(self.mirror)
            if self.placed.attest() != self.placed.share:
                raise CorruptError("the live weights have another digest than the version's")
        except CorruptError as error:
            failure = f"rank {self.peers.number}: {error}"
        return {**self.status(), "sound": not failure, "failure": failure}

    def mend(self) -> Answer:
        """Write the mirror's bits into the live weights, and attest that all ranks together hold
        the model. To be entered by all. Raises `CorruptError` if they do not."""
        self.wait()
        self._follow()
        self._prepared = self._update = None
        self._together(lambda: self.placed.load(self.mirror))
        total = _sum([[0, *words] for words in self.peers.gather(_words(self.placed.share))])
        if total != self.mirror.digest:
            raise CorruptError(
                f"the live weights' digest is {total.hex()}, not {self.mirror.digest.hex()}",
                run=self._bucket.url,
                version=self.mirror.version,
            )
        self._failure = ""
        return self.status()

    def _load_weights(self, weights: Any) -> object:
        with self._context:
            return self._loader(weights)


def _refuse(model: torch.nn.Module, placement: Placement) -> None:
    """Raises `InputError` if what is served could be something else than the run."""
    refuse_remade(remade(model))
    refuse_stale_products(placement)
    refuse_unreached(placement, model)


def reverse_of(prepared: Prepared, *, share: Digest, believed: Digest) -> Prepared:
    """The step back, to the ``share`` and what was ``believed`` before."""
    return Prepared(
        prepared.version,
        prepared.base,
        share,
        believed,
        [move.reversed() for move in prepared.moves],
        {name: (new, old) for name, (old, new) in prepared.dense.items()},
    )


def _words(digest: Digest) -> list[int]:
    """Two lanes of 64 bits as signed integers."""
    return [lane - (1 << 64) if lane >> 63 else lane for lane in (digest.lane0, digest.lane1)]


def _sum(answers: list[list[int]]) -> Digest:
    """The digest of shares that stand behind one word each."""
    total = codec.ZERO
    for _, first, second in answers:
        total += Digest(first & (1 << 64) - 1, second & (1 << 64) - 1)
    return total


# What is called on a worker, by reference: the first argument is vLLM's worker or its wrapper.

_HELD = "_deltawire_rank"
"""Where a model keeps its rank: vLLM hands some callers the worker, and some the model alone."""


def keep_rank(model: torch.nn.Module, rank: Rank) -> None:
    """Have all callers that know the model find its ``rank``."""
    model.__dict__[_HELD] = rank


def rank_of(model: torch.nn.Module) -> Rank:
    """The rank of a model; raises `InputError` if no run is open."""
    held = model.__dict__.get(_HELD)
    if held is None:
        raise InputError("no run is open on this worker")
    assert isinstance(held, Rank)
    return held


def _on(worker: Any) -> Rank:
    return rank_of((getattr(worker, "worker", None) or worker).get_model())


def _answer(question: Any) -> Answer:
    try:
        answer: Answer = question()
        return answer
    except DeltawireError as error:
        return {"failure": str(error)}


def open_run(worker: Any, settings: Settings) -> Answer:
    """Open a run on this worker and load its newest version. To be called on all of them."""
    inner = getattr(worker, "worker", None) or worker

    def question() -> Answer:
        model = inner.get_model()
        keep_rank(model, open_rank(model, inner.vllm_config, settings))
        return status(worker)

    return _answer(question)


def open_rank(model: torch.nn.Module, vllm_config: Any, settings: Settings) -> Rank:
    """The rank of this process, by vLLM's own groups."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import get_world_group

    parallel = vllm_config.parallel_config
    group = get_world_group()
    return Rank(
        model,
        settings,
        Peers(group.cpu_group, group.rank_in_group, group.world_size),
        context=_Reentered(lambda: set_current_vllm_config(vllm_config)),
        about={
            "model": type(model).__name__,
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "experts": parallel.enable_expert_parallel,
            "rank": group.rank_in_group,
        },
    )


class _Reentered(AbstractContextManager[Any]):
    """A context manager that may be entered again and again."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._held: list[Any] = []

    def __enter__(self) -> None:
        self._held.append(self._make())
        self._held[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._held.pop().__exit__(*error)


def prepare(worker: Any, version: int) -> Answer:
    """Begin to prepare ``version``."""

    def question() -> Answer:
        _on(worker).prepare(version)
        return status(worker)

    return _answer(question)


def status(worker: Any) -> Answer:
    """How the rank stands."""
    return _answer(lambda: _on(worker).status())


def swap(worker: Any, version: int) -> Answer:
    """Swap to ``version``. To be called on all workers."""
    return _answer(lambda: _on(worker).swap(version))


def attest(worker: Any) -> Answer:
    """Hold the live bits against the version's."""
    return _answer(lambda: _on(worker).attest())


def mend(worker: Any) -> Answer:
    """Write the version's bits again. To be called on all workers."""
    return _answer(lambda: _on(worker).mend())

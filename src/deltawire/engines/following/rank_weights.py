"""Holds one rank's part of the weights, its mirror, and the next version while it is prepared.

Concurrency::

    preparing thread                        the worker's thread, between two steps
      fetch, verify, decode, stage ───────▶   swap: agree that all ranks staged the same version and
      (serving continues)                     that their shares add up to the manifest's digest;
                                              scatter; agree that all hold it; else undo
      the mirror advances before the
      next version is prepared

All ranks enter `RankWeights.swap` together and agree on the result there. An answer
is a dictionary with ``failure``, empty on success: an exception would end the engine's process,
and with it serving.
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
from deltawire.engines.following.rank_group import RankGroup
from deltawire.engines.following.settings import FollowSettings
from deltawire.engines.following.slot import Slot
from deltawire.errors import CorruptError, DeltawireError, InputError, ResyncError
from deltawire.placement.placed import PlacedWeights, Prepared
from deltawire.placement.placement import Placement, assign_ownership, probe
from deltawire.placement.steps import step_to
from deltawire.store import Bucket, open_bucket
from deltawire.sync import Mirror, Subscriber, Update, load_mirror, read_run
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.wire.run import Run

T = TypeVar("T")
Answer = dict[str, Any]
OpenSlot = Callable[[Bucket, Run], Slot | None]


class RankWeights:
    """The weights of one rank, which follow a run. All ranks must construct it together.

    ``refuse`` raises `InputError` if the engine could serve weights that are not the run's.
    ``open_slot`` finds the place of the run's adapter, None if the run has none. ``context`` is
    entered around every call of the model's own loader. Raises `InputError` if the run's model is
    not the engine's, or the weights are not where the loader puts them, and the errors of loading
    the mirror.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: FollowSettings,
        peers: RankGroup,
        *,
        refuse: Callable[[Placement], None],
        open_slot: OpenSlot,
        context: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.settings = settings
        self.peers = peers
        self.last_swap: dict[str, float] = {}
        self._context = context or nullcontext()
        loader: Any = model.load_weights
        self._loader = loader
        run, newest = self._together(self._read_run)
        version = min(peers.gather([newest]))[0]
        self.slot = self._together(lambda: open_slot(self._bucket, run))
        live: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
        live |= dict(model.named_parameters(remove_duplicate=False))
        if self.slot is not None:
            self._loader = self.slot.loader(loader)
            live |= self.slot.live()
        found = self._together(
            lambda: probe(self._load_weights, run.tensors, live, aliases=run.aliases)
        )
        every = peers.gather_structs(found)
        if self.slot is not None:
            self.slot.refuse_dropped(every)  # All ranks decide from the same tables.
            every = [self.slot.scaled(one) for one in every]
        placement = assign_ownership(every)[peers.number]
        self._together(lambda: refuse(placement))
        mirror = self._together(
            lambda: load_mirror(
                self._bucket, run, at=version, wanted=placement.wanted(), threads=settings.threads
            )
        )
        self.placed = PlacedWeights(placement, live, load_weights=self._load_weights)
        self.subscriber = Subscriber(self._bucket, run, mirror, threads=settings.threads)
        self._update: Update | None = None
        self._prepared: Prepared | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._prepare_ms = 0.0
        self._uncommitted: Update | None = None
        """The update that the live weights hold and the mirror does not yet: the mirror advances
        later, so that no step waits for it."""
        self._digest = mirror.digest
        self._load_first()

    def _read_run(self) -> tuple[Run, int]:
        """Returns the run and its newest version."""
        self._bucket = open_bucket(self.settings.run)
        run = read_run(self._bucket, public_key=self.settings.public_key)
        newest = newest_readable(self._bucket, run)
        if newest is None:
            raise InputError("the run has no version yet", run=self._bucket.url)
        return run, newest.version

    def _load_first(self) -> None:
        """Loads the first version; the engine's loader may fail for a run of another model."""
        try:
            self.repair()
        except DeltawireError:
            raise
        except Exception as error:
            raise InputError(
                "the engine cannot load the run's tensors into its model: "
                f"{type(error).__name__}: {str(error)[:300]}",
                run=self._bucket.url,
                hint="serve the model that the run publishes, unquantized",
            ) from error

    def _together(self, work: Callable[[], T]) -> T:
        """Runs ``work``, which must not wait for other ranks, on all of them. A failure on one rank
        raises on all, so that none waits for a rank that has given up."""
        result: list[T] = []
        error: BaseException | None = None
        try:
            result.append(work())
        except BaseException as caught:  # Raise it after the other ranks know.
            error = caught
        answers = self.peers.gather([int(error is None)])
        if error is not None:
            raise error
        if failed := [number for number, (done,) in enumerate(answers) if not done]:
            raise ResyncError(f"ranks {failed} failed")
        return result[0]

    @property
    def mirror(self) -> Mirror:
        """The copy of this rank's weights in host memory."""
        return self.subscriber.mirror

    @property
    def version(self) -> int:
        """The version that is served; -1 if the live weights hold none."""
        return self.placed.version

    def status(self) -> Answer:
        """Returns what this rank serves and prepares."""
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
            "adapter": self.slot is not None,
            "head": self.slot is not None and self.slot.has_head,
        }

    def prepare(self, version: int) -> None:
        """Starts preparing ``version`` in a thread, unless that is done or in progress."""
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
        """Waits until the preparing thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _advance_mirror(self) -> None:
        """Advances the mirror to the version that is served."""
        if self._uncommitted is not None:
            self.subscriber.commit(self._uncommitted)
            self._uncommitted = None

    def discard(self) -> None:
        """Drops what was prepared."""
        self.wait()
        self._prepared = self._update = None

    def _prepare(self, version: int) -> None:
        began = time.perf_counter()
        try:
            self._advance_mirror()
            update = step_to(self.subscriber, version)
            if update is None:
                return
            self._update = update
            self._prepared = self.placed.prepare(update.patches, self.mirror, update.version)
        except DeltawireError as error:
            self._failure = str(error)
        except (
            BaseException
        ) as error:  # Includes a Rust panic; the callers poll `status` for the error.
            self._failure = f"cannot prepare: {type(error).__name__}: {error}"
        finally:
            self._prepare_ms = (time.perf_counter() - began) * 1e3

    def swap(self, version: int) -> Answer:
        """Swaps to the prepared ``version``, on all ranks or on none; all must enter it."""
        began = time.perf_counter()
        failure = self._agree_before(version)
        if failure:
            return self._failed(failure)
        prepared, update = self._prepared, self._update
        assert prepared is not None
        assert update is not None
        before = (self.placed.share, self.placed.mirrored)
        agreed = time.perf_counter()
        try:
            with self._context:
                self.placed.swap(prepared)
        except DeltawireError as error:
            failure = str(error)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        swapped = time.perf_counter()
        if not self._all_succeeded(failure):
            if not failure:
                failure = "another rank could not swap"
                self._undo(prepared, *before)
            self._prepared = self._update = None
            return self._failed(failure)
        self._uncommitted, self._digest = update, update.digest
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
        """Returns why there can be no swap; empty if all ranks are ready for the same one."""
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
            unready = [number for number, answer in enumerate(answers) if not answer[0]]
            return f"version {version} is not prepared on ranks {unready}"
        assert update is not None
        total = _sum(answers)
        if total != update.digest:
            self._prepared = self._update = None
            return (
                f"the live weights' digest would be {total.hex()}, not {update.digest.hex()}, "
                f"at version {version}"
            )
        return ""

    def _all_succeeded(self, failure: str) -> bool:
        return all(answer[0] for answer in self.peers.gather([int(not failure)]))

    def _undo(self, prepared: Prepared, share: Digest, mirrored: Digest) -> None:
        """Undoes a swap of this rank; raises if that fails: nothing valid can be served then."""
        self.placed.swap(reverse_of(prepared, share=share, mirrored=mirrored))

    def _failed(self, failure: str) -> Answer:
        self._failure = failure
        return self.status()

    def attest(self) -> Answer:
        """Compares all live bits with the mirror and the digest; ``sound`` says whether they agree.

        Copies of elements that another rank counts are compared too. Reads all bits once or twice.
        """
        self.wait()  # The preparing thread may be changing the mirror.
        self._advance_mirror()
        failure = ""
        try:
            self.placed.verify(self.mirror)
            if self.placed.attest() != self.placed.share:
                raise CorruptError("the live weights' digest differs from the version's")
            if self.slot is not None:
                self.slot.check_padding(self.placed)
        except CorruptError as error:
            failure = f"rank {self.peers.number}: {error}"
        return {**self.status(), "sound": not failure, "failure": failure}

    def repair(self) -> Answer:
        """Writes the mirror's bits into the live weights, and attests that all ranks together hold
        the model; all must enter it. Raises `CorruptError` if they do not."""
        self.wait()
        self._advance_mirror()
        self._prepared = self._update = None
        if self.slot is not None:
            self.slot.clear()
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


def reverse_of(prepared: Prepared, *, share: Digest, mirrored: Digest) -> Prepared:
    """Returns the step back, to the ``share`` and ``mirrored`` digests from before."""
    return Prepared(
        prepared.version,
        prepared.base,
        share,
        mirrored,
        [move.reversed() for move in prepared.moves],
        {name: (new, old) for name, (old, new) in prepared.dense.items()},
    )


def _words(digest: Digest) -> list[int]:
    """Returns a digest's two lanes as signed 64-bit integers."""
    return [lane - (1 << 64) if lane >> 63 else lane for lane in (digest.lane0, digest.lane1)]


def _sum(answers: list[list[int]]) -> Digest:
    """Adds up shares, each given as two words after a first one that is ignored."""
    total = codec.ZERO
    for _, first, second in answers:
        total += Digest(first & (1 << 64) - 1, second & (1 << 64) - 1)
    return total

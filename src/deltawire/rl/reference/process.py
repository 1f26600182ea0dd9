"""Reference process: reads finished groups, writes the log-probabilities of a frozen model.

::

    rollouts/w0/0000000007 ──▶ score ──▶ create references/w0/0000000007.json ──▶ trainer

A create acknowledges a group: a group with scores is never scored again, by this process or a
successor. The process keeps no state, so it may be killed at any moment.
"""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import torch

from deltawire.config import RunConfig
from deltawire.errors import CorruptError
from deltawire.placement.device import resolve_device
from deltawire.rl.control.rollout_reader import Bounds, read_group
from deltawire.rl.reference.models import load_reference_model
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import Process, StopAskedError
from deltawire.store.parallel import in_parallel
from deltawire.sync import newest_version
from deltawire.train.batch import collate
from deltawire.train.budget import divide
from deltawire.train.loss.preference import with_better_answers
from deltawire.train.policy import TrainedPolicy
from deltawire.wire import keys
from deltawire.wire.reference_scores import ReferenceScores, encode_scores
from deltawire.wire.rollouts import Group
from deltawire.wire.run import Run
from deltawire.wire.status import TrainerStatus

LATE = 512
"""A group that appears below others of its worker is scored if it is at most so many below the
newest."""


class GroupScorer:
    """Scores groups with a frozen model."""

    def __init__(self, process: Process, run: Run, config: RunConfig) -> None:
        self._process = process
        self._bucket = process.bucket
        self._run = run
        self._config = config
        model, digest = load_reference_model(process.bucket, run, config)
        self._digest = digest.hex()
        device = resolve_device(config.reference.device or config.device)
        self._policy = TrainedPolicy.of(model.to(device), config.train)
        self._device = device
        self._bounds = Bounds.of(config, model.get_input_embeddings().num_embeddings)
        self._handled: dict[str, set[int]] = {}
        """By worker, the newest groups that have scores, or that are damaged or too old: the
        trainer does not take those either."""

    def round(self) -> int:
        """Scores every finished group without scores; returns the number of them.

        Lists the groups after those of earlier rounds, of the workers that may have stored any.
        """
        status = read_trainer(self._bucket)
        due = [
            (name, count)
            for name, count in self._granted(status).items()
            if max(self._handled.get(name, ()), default=-1) < count - 1
        ]
        newest = 0 if status is None else status.version
        done = 0
        for (worker, _), numbers in zip(
            due, in_parallel(self._bucket, self._new_groups, due), strict=True
        ):
            if not numbers:
                continue
            handled = self._handled.setdefault(worker, set())
            scored = self._scored(worker, numbers[0])
            for number in numbers:
                self._process.heartbeat.progress("score")
                if self._process.stopping:
                    return done
                if number not in scored:
                    done += self._score(worker, number, newest=newest)
                handled.add(number)
            last = max(handled)
            self._handled[worker] = {one for one in handled if one > last - LATE}
        return done

    def _granted(self, status: TrainerStatus | None) -> dict[str, int]:
        """The credits of each worker; any number for workers of a run without a trainer yet."""
        if status is not None:
            return status.credits
        listed = filter(keys.valid_name, self._bucket.list_prefixes(keys.ROLLOUTS))
        return dict.fromkeys(listed, keys.MAX_NUMBER)

    def _new_groups(self, granted: tuple[str, int]) -> list[int]:
        """Lists the numbers of a worker's groups that were granted and not handled yet."""
        worker, count = granted
        handled = self._handled.get(worker, set())
        first = max(0, max(handled, default=0) - LATE)
        after = keys.rollout(worker, first - 1) if first else None
        listed = self._bucket.list(keys.rollouts_of(worker), after=after)
        numbers = {place[1] for key in listed if (place := keys.group_of(key)) is not None}
        return sorted(number for number in numbers - handled if number < count)

    def _scored(self, worker: str, first: int) -> set[int]:
        """Lists the numbers of a worker's groups, from ``first`` on, that have scores."""
        after = keys.reference(worker, first - 1) if first else None
        listed = self._bucket.list(keys.references_of(worker), after=after)
        return {number for key in listed if (number := keys.trailing_number(key)) is not None}

    def _score(self, worker: str, sequence: int, *, newest: int) -> int:
        try:
            found = read_group(self._bucket, worker, sequence, bounds=self._bounds)
        except CorruptError:
            return 0
        if found is None:
            return 0
        group, group_hash = found
        oldest = group.oldest_version
        if oldest < newest - self._config.train.largest_age or not any(group.trained()):
            return 0
        scores = ReferenceScores(
            run=self._run.id,
            worker=worker,
            sequence=sequence,
            group=group_hash,
            model=self._digest,
            logprobs=[values.astype("<f4").tobytes() for values in self.logprobs(group)],
        )
        place = keys.reference(worker, sequence)
        self._process.lease.confirm()
        if self._bucket.create(place, encode_scores(scores, key=place)):
            self._process.heartbeat.count_finished()
        return 1

    @torch.no_grad()
    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Log-probabilities of each trajectory, and of the better answers after them: float32[T],
        [0] for one that is not trained on."""
        (group,) = with_better_answers([group])
        found = [np.zeros(0, np.float32) for _ in group.trajectories]
        (batches,) = divide(
            [group], budget=self._config.train.max_tokens_per_batch, packed=self._policy.packs
        )
        for members in batches:
            if self._process.stopping:
                raise StopAskedError  # The next process scores the group.
            batch = collate([group], members).to(self._device)
            with self._policy.terms(batch) as terms:
                rows = terms.logprobs.float().cpu().numpy()
            for row, (_, place) in enumerate(batch.members_N):
                length = len(group.trajectories[place].tokens_T)
                found[place] = np.minimum(rows[row, :length], 0)
        return found


def run_reference(process: Process) -> None:
    """Runs a reference process until the run ends or a signal arrives.

    Raises `InputError` if the run has no penalty, or one whose reference is no separate process.
    """
    started = time.time()
    process.record_life("started")
    count = 0
    with suppress(StopAskedError):
        with process.interruptible():
            scorer = _open_scorer(process)
        process.events.span("start", started)
        while not process.stopping:
            process.heartbeat.progress("wait")
            done = scorer.round()
            count += done
            if not done:
                status = read_trainer(process.bucket)
                if status is not None and status.phase == "finished":
                    break
                process.wait(process.bucket.poll_s)
    process.record_life("stopped", f"{count} groups scored")


def _open_scorer(process: Process) -> GroupScorer:
    """Waits for the run and its version 0, and loads the model."""
    run, config = process.open_run()
    torch.set_num_threads(config.threads)
    while newest_version(process.bucket) is None:
        process.heartbeat.progress("wait")
        if process.stopping:  # Its supervisor is gone: no signal says so.
            raise StopAskedError
        process.wait(process.bucket.poll_s)
    with process.heartbeat.long_task("start"):
        return GroupScorer(process, run, config)

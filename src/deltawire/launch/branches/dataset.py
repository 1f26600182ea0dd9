"""Writes the trajectories that a run was trained on as Parquet, and reads groups back.

One row is one trajectory, in the order of training. The columns hold everything that the group's
object holds, so the object can be made again to the byte. Each file is read back before it counts:
every group in it is encoded again and compared with the hash of the object in the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from deltawire.data.rows import open_rows, require_arrow
from deltawire.errors import BugError, CorruptError, InputError
from deltawire.rl.control.lineages import erased_groups, read_lineage
from deltawire.rl.control.rollout_reader import read_group
from deltawire.rl.evaluate.audit import all_metadata
from deltawire.runtime.retained import read_retained
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.ledger import GROUP_HASH_DIGITS
from deltawire.wire.rollouts import (
    LIVE_TASK,
    BetterAnswer,
    Group,
    Reuse,
    Thinking,
    Trajectory,
    encode_group,
)
from deltawire.wire.run import Run

FILE_TOKENS = 8 << 20
"""Tokens of one Parquet file, about: a file is written once its groups have as many."""

Row = dict[str, Any]


class Exported(msgspec.Struct, kw_only=True):
    """The rows that were written. ``erased`` groups held answers of users who were forgotten,
    ``deleted`` ones are older than retention keeps; both are left out."""

    versions: int = 0
    groups: int = 0
    rows: int = 0
    tokens: int = 0
    files: list[str] = []
    erased: int = 0
    deleted: int = 0


def export_dataset(
    bucket: Bucket,
    run: Run,
    folder: Path,
    *,
    first: int = 1,
    last: int | None = None,
    file_tokens: int = FILE_TOKENS,
    progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Writes the groups that versions ``first`` to ``last`` consumed as files of ``folder``, which
    must not exist or be empty. ``progress`` gets each version that was read.

    Raises `InputError` if the folder holds something or there is no group, and `CorruptError` if a
    group is missing or damaged that is neither erased nor deleted by retention.
    """
    require_arrow()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"{folder} is not empty", hint="name a new folder")
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error
    found = Exported()
    rows: list[Row] = []
    waiting = 0
    for added in _exported_groups(bucket, found, first, last, progress):
        rows += added
        waiting += sum(len(row["tokens"]) for row in added)
        if waiting >= file_tokens:
            _write(folder, rows, found, run)
            rows, waiting = [], 0
    if rows:
        _write(folder, rows, found, run)
    if not found.rows:
        raise InputError("there is no group to write", hint="see --from and --to", run=bucket.url)
    return found


def read_groups(folder: Path) -> Iterator[tuple[Group, int, str]]:
    """Yields the groups of a folder that `export_dataset` wrote, in order, each with its sequence
    number and the hash of its object. Raises `InputError` where there are none."""
    rows = open_rows(folder)
    for (_, sequence, digest), part in groupby(
        (rows[number] for number in range(len(rows))),
        key=lambda row: (row["worker"], row["sequence"], row["group_hash"]),
    ):
        yield group_of_rows(list(part)), sequence, digest


def _exported_groups(
    bucket: Bucket,
    found: Exported,
    first: int,
    last: int | None,
    progress: Callable[[int], None],
) -> Iterator[list[Row]]:
    """Yields the rows of each group, and counts those that are left out."""
    erased = erased_groups(bucket)
    kept_from = read_retained(bucket).rollouts
    for version, metadata in all_metadata(bucket):
        if version < first or (last is not None and version > last):
            continue
        progress(version)
        found.versions += 1
        for number, (worker, sequence) in enumerate(metadata.consumed):
            if (worker, sequence) in erased:
                found.erased += 1
                continue
            expected = metadata.hashes[number] if metadata.hashes else ""
            read = read_group(bucket, worker, sequence, expected=expected)
            if read is not None:
                found.groups += 1
                answers = _answers(bucket, read[0], sequence)
                yield rows_of(read[0], version, sequence, read[1], answers)
            elif version < kept_from:
                found.deleted += 1
            else:
                raise CorruptError(
                    "a consumed group is missing",
                    run=bucket.url,
                    version=version,
                    key=keys.rollout(worker, sequence),
                )


def _answers(bucket: Bucket, group: Group, sequence: int) -> list[str]:
    """Returns the ids of the users' answers that a learner's group was made of, else none."""
    if group.task != LIVE_TASK or group.family != LIVE_TASK:
        return []
    found = read_lineage(bucket, group.worker, sequence)
    return [] if found is None else [one.answer for one in found.answers]


def rows_of(
    group: Group, version: int, sequence: int, digest: str, answers: list[str] | None = None
) -> list[Row]:
    """Returns the rows of a group that ``version`` consumed; ``answers`` are the ids of its
    lineage."""
    shared = {
        "version": version,
        "worker": group.worker,
        "sequence": sequence,
        "group_hash": digest,
        "nonce": group.nonce,
        "task": group.task,
        "family": group.family,
        "temperature": group.temperature,
    }
    return [
        {
            **shared,
            "trajectory": number,
            "answer": answers[number] if answers and number < len(answers) else None,
            "prompt": group.prompt_of(one),
            "own_prompt": one.prompt is not None,
            "tokens": one.tokens_T,
            "logprobs": one.logprobs_T,
            "versions": one.versions_T,
            "mask": one.mask_T,
            "reward": one.reward,
            "finish": one.finish,
            "episode": one.episode,
            "turns": one.turns,
            "cause": one.cause,
            "probes": [{"name": name, "value": value} for name, value in one.probes.items()],
            "routes": one.routes,
            "thinking_budget": one.thinking and one.thinking.budget,
            "thinking_turns": [
                {"thought": thought, "ended": ended}
                for thought, ended in (one.thinking.turns if one.thinking else ())
            ],
            "forced": list(chain(*one.thinking.forced)) if one.thinking else [],
            "reuse_source": one.reuse and one.reuse.source,
            "reuse_count": one.reuse and one.reuse.count,
            "better": one.better and one.better.tokens_T,
            "better_weight": one.better and one.better.weight,
            "group_prompt": group.prompt if number == 0 and one.prompt is not None else None,
        }
        for number, one in enumerate(group.trajectories)
    ]


def group_of_rows(rows: list[Row]) -> Group:
    """Makes a group of its rows, in their order."""
    first = rows[0]
    shared = next((row["prompt"] for row in rows if not row["own_prompt"]), first["group_prompt"])
    return Group(
        worker=first["worker"],
        nonce=first["nonce"],
        task=first["task"],
        temperature=first["temperature"],
        prompt=np.array(shared, np.int32),
        trajectories=[_trajectory(row) for row in rows],
        family=first["family"],
    )


def _trajectory(row: Row) -> Trajectory:
    thinking = None
    if row["thinking_budget"] is not None:
        edges = row["forced"]
        thinking = Thinking(
            row["thinking_budget"],
            tuple((turn["thought"], turn["ended"]) for turn in row["thinking_turns"]),
            tuple(zip(edges[::2], edges[1::2], strict=True)),
        )
    source = row["reuse_source"]
    return Trajectory(
        tokens_T=np.array(row["tokens"], np.int32),
        logprobs_T=np.array(row["logprobs"], np.float32),
        versions_T=np.array(row["versions"], np.int32),
        mask_T=np.array(row["mask"], np.uint8),
        reward=row["reward"],
        finish=row["finish"],
        episode=row["episode"],
        prompt=np.array(row["prompt"], np.int32) if row["own_prompt"] else None,
        turns=row["turns"],
        cause=row["cause"],
        probes={one["name"]: one["value"] for one in row["probes"]},
        routes=row["routes"],
        thinking=thinking,
        reuse=None if source is None else Reuse(source, row["reuse_count"]),
        better=None
        if row["better"] is None
        else BetterAnswer(np.array(row["better"], np.int32), row["better_weight"]),
    )


def _write(folder: Path, rows: list[Row], found: Exported, run: Run) -> None:
    """Writes one file, and counts it once what was read back equals what is in the bucket."""
    arrow = require_arrow()
    path = folder / f"train-{len(found.files):05d}.parquet"
    unfinished = folder / f".{path.name}"
    schema = _schema(arrow).with_metadata({"deltawire_run": run.id, "deltawire_name": run.name})
    try:
        arrow.parquet.write_table(
            arrow.Table.from_pylist([_as_lists(row) for row in rows], schema=schema),
            unfinished,
            compression="zstd",
            use_dictionary=["worker", "nonce", "task", "family", "finish", "cause", "group_hash"],
        )
        unfinished.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    for group, sequence, digest in read_groups(path):
        if blake3(encode_group(group)).hexdigest()[:GROUP_HASH_DIGITS] != digest:
            raise BugError(
                f"{path} does not hold group {sequence} of {group.worker} to the byte",
                hint="another release stored it in another form",
            )
    found.files.append(path.name)
    found.rows += len(rows)
    found.tokens += sum(len(row["tokens"]) for row in rows)


def _as_lists(row: Row) -> Row:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in row.items()
    }


def _schema(arrow: Any) -> Any:
    text, tokens, index = arrow.string(), arrow.list_(arrow.int32()), arrow.int64()
    turn = arrow.struct([("thought", arrow.int32()), ("ended", text)])
    probe = arrow.struct([("name", text), ("value", arrow.float64())])
    fields: Iterable[tuple[str, Any]] = {
        "version": index,
        "worker": text,
        "sequence": index,
        "trajectory": index,
        "group_hash": text,
        "task": text,
        "family": text,
        "reward": arrow.float64(),
        "finish": text,
        "cause": text,
        "probes": arrow.list_(probe),
        "prompt": tokens,
        "tokens": tokens,
        "logprobs": arrow.list_(arrow.float32()),
        "versions": tokens,
        "mask": arrow.list_(arrow.uint8()),
        "episode": arrow.int32(),
        "turns": arrow.int32(),
        "temperature": arrow.float64(),
        "answer": text,
        "own_prompt": arrow.bool_(),
        "group_prompt": tokens,
        "routes": arrow.binary(),
        "thinking_budget": arrow.int32(),
        "thinking_turns": arrow.list_(turn),
        "forced": tokens,
        "reuse_source": arrow.int32(),
        "reuse_count": arrow.int32(),
        "better": tokens,
        "better_weight": arrow.float64(),
        "nonce": text,
    }.items()
    return arrow.schema(list(fields))

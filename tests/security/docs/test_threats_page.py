"""The threat model names tests that exist, and policies that fit the keys of the bucket."""

from __future__ import annotations

import ast
import json
import re
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import pytest
from stored_lineages import compact_lineages, lineage_of, merge_early, put_checkpoint, put_lineage

from deltawire.live.compaction.compactor import StreamCompactor
from deltawire.live.compaction.lineage_rows import LineageRows
from deltawire.store import DelegatingBucket, open_bucket
from deltawire.store.probe import PROBES as STORE_PROBES
from deltawire.wire import keys
from deltawire.wire.lineage import Forgotten
from deltawire.wire.objects import encode_json

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/THREATS.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/.]+\.py)::(\w+)`", PAGE)
POLICIES = {
    name: json.loads(text)
    for name, text in re.findall(
        r"^### `(\w+)`\n.*?^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
}
HASH = "0" * 64
ACTORS = (
    "server of tools",
    *("owner", "writer", "worker", "model's answer", "client with", "client without"),
    *("another local user", "another process", "published files", "whoever reads"),
)

WEIGHTS = [
    keys.manifest(3),
    keys.blob(HASH),
    keys.compacted(1, 3),
    keys.part(3, "t", 0),
    keys.retention_floor(2),
    keys.tag("best"),
    keys.deletion_intent("t"),
    keys.CLOCK,
    keys.identities(0),
]
TRAINERS = [
    keys.TRAINER,
    keys.STATUS,
    keys.RETAINED,
    keys.PROBES,
    keys.checkpoint_commit(3),
    keys.checkpoint_part(3, 0),
    keys.archive(0),
    keys.tombstone("w0"),
    keys.challenge("w0"),
    keys.challenge("WORKER"),
]
WORKERS = [
    keys.rollout("WORKER", 0),
    keys.heartbeat("WORKER"),
    keys.lease("WORKER", 0),
    keys.events("WORKER-5f3a", 0),
]
OTHERS = [
    keys.rollout("w0", 0),
    keys.heartbeat("w0"),
    keys.lease("w0", 0),
    keys.events("w0-5f3a", 0),
]
PROCESSES = [
    key
    for name in ("trainer", "supervisor", "evaluator", "reference", "warm-start")
    for key in (keys.heartbeat(name), keys.lease(name, 0), keys.events(f"{name}-5f3a", 0))
]
EVALUATORS = [key for key in PROCESSES if "evaluator" in key]
SCORES = keys.reference("w0", 0)
REFERENCES = [SCORES, *(key for key in PROCESSES if "reference" in key)]
COMPACTED = [
    place(stream, "g0", "0")
    for stream in ("captures", "feedback")
    for place in (keys.live_compacted, keys.live_index, keys.live_compacting)
]
GATEWAYS = [
    keys.live_gateway("g0"), keys.live_captures("g0", 0), keys.live_feedback("g0", 0),
    keys.live_decision(0), keys.live_forgotten("0" * 32), keys.LIVE_DECIDER, keys.LIVE_OPERATOR,
    *COMPACTED,
]  # fmt: skip
LINEAGE = [
    keys.live_lineage("WORKER", 0), keys.live_compacted("lineage", "WORKER", "0"),
    keys.live_index("lineage", "WORKER", "0"), keys.live_compacting("lineage", "WORKER", "0"),
]  # fmt: skip
PROOFS = [keys.proof_salt("w0", 0), keys.child("try")]
EVERY = [
    keys.RUN, keys.role("trainer"), f"{STORE_PROBES}a",
    *WEIGHTS, *TRAINERS, *WORKERS, *OTHERS, *PROCESSES, SCORES, keys.TINKER_SERVER,
    *GATEWAYS, *LINEAGE, keys.readers("HOST-5f3a0c1e"), *PROOFS,
]  # fmt: skip
OWNERS = [keys.RUN, keys.role("trainer"), f"{STORE_PROBES}a", *WEIGHTS, *PROOFS]
NEVER_BY_TRAINER = {
    *PROOFS,
    keys.role("trainer"), keys.rollout("w0", 0), keys.rollout("WORKER", 0), SCORES,
    keys.TINKER_SERVER, *LINEAGE, keys.readers("HOST-5f3a0c1e"), *GATEWAYS,
}  # fmt: skip
MAY_WRITE = {
    "owner": set(OWNERS),
    "trainer": set(EVERY) - NEVER_BY_TRAINER,
    "worker": set(WORKERS),
    "evaluator": set(EVALUATORS),
    "reference": set(REFERENCES),
    "gateway": set(GATEWAYS),
    "learner": {*WORKERS, *LINEAGE},
    "reader": {keys.readers("HOST-5f3a0c1e")},
    "viewer": set(),
}
MAY_DELETE = {
    "owner": {*WEIGHTS, *PROOFS, f"{STORE_PROBES}a"},
    "worker": set(),
    "evaluator": set(),
    "reference": set(),
    # Which it merges, and rows of whom it forgets.
    "gateway": {keys.live_captures("g0", 0), keys.live_feedback("g0", 0), *COMPACTED},
    "learner": set(LINEAGE),
    "reader": set(),
    "viewer": set(),
}


@lru_cache
def _functions(path: Path) -> frozenset[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


def _section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def _claims() -> list[list[str]]:
    rows = [line for line in _section("Claims").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def _allows(policy: dict, action: str, key: str) -> bool:
    arn = f"arn:aws:s3:::BUCKET/RUN/{key}"
    return any(
        statement["Effect"] == "Allow"
        and f"s3:{action}" in statement["Action"]
        and any(fnmatchcase(arn, pattern) for pattern in statement["Resource"])
        for statement in policy["Statement"]
    )


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_exists(path, name) -> None:
    assert (ROOT / path).is_file(), f"docs/THREATS.md names {path}, which is not there"
    assert name in _functions(ROOT / path), f"docs/THREATS.md names {path}::{name}"


def test_each_claim_says_against_whom_and_names_a_test() -> None:
    claims = _claims()
    assert len(claims) >= 20
    for claim, against, tests in claims:
        assert against, claim
        assert any(actor in against.lower() for actor in ACTORS), against
        assert re.search(r"`tests/[\w/.]+\.py::test_\w+`", tests), claim


def test_the_gaps_are_stated() -> None:
    gaps = " ".join(_section("What does not hold yet").split())
    for words in (
        "The trainer holds the owner's key", "forge floors, manifests and checkpoint commits",
        "tolerance", "self-attested", "believes the key in `run.json`",
    ):  # fmt: skip
        assert words in gaps


def test_every_prefix_of_the_bucket_is_in_a_policy_and_none_is_made_up() -> None:
    patterns = {
        pattern.removeprefix("arn:aws:s3:::BUCKET/RUN/")
        for policy in POLICIES.values()
        for statement in policy["Statement"]
        for pattern in statement["Resource"]
        if pattern != "arn:aws:s3:::BUCKET"
    }
    assert all(any(fnmatchcase(key, one) for key in EVERY) for one in patterns), patterns
    prefixes = {
        value.split("/")[0] for name, value in vars(keys).items() if name.isupper()
        and isinstance(value, str)
        # Under the first two are the keys of a run again; the last begins a name.
        and value not in (keys.LINES, keys.FORKS, keys.INTERVAL_MARK)
    }  # fmt: skip
    assert prefixes <= {key.split("/")[0] for key in EVERY}


@pytest.mark.parametrize("role", MAY_WRITE)
def test_policies_allow_what_each_role_writes_and_nothing_else(role) -> None:
    policy = POLICIES[role]
    assert {key for key in EVERY if _allows(policy, "PutObject", key)} == MAY_WRITE[role]
    if role in MAY_DELETE:
        assert {key for key in EVERY if _allows(policy, "DeleteObject", key)} == MAY_DELETE[role]
    assert all(_allows(policy, "GetObject", key) for key in (keys.RUN, *WEIGHTS))
    actions = {action for one in policy["Statement"] for action in one["Action"]}
    assert not [action for action in actions if "*" in action]


class Requested(DelegatingBucket):
    """Keeps which requests came, each as a verb and a key or prefix."""

    def __init__(self, inner):
        super().__init__(inner)
        self.requests = set()

    def _call(self, verb, key, operation):
        self.requests.add((verb, key))
        return operation()


def _lists(policy: dict, prefix: str) -> bool:
    patterns = [
        pattern
        for statement in policy["Statement"]
        if "s3:ListBucket" in statement["Action"]
        for pattern in statement["Condition"]["StringLike"]["s3:prefix"]
    ]
    return any(fnmatchcase(f"RUN/{prefix}", pattern) for pattern in patterns)


def test_a_learner_may_do_what_its_maintenance_asks_of_the_bucket(monkeypatch) -> None:
    """It compacts and deletes lineages, some of a user who was forgotten."""
    merge_early(monkeypatch)
    requested = Requested(open_bucket("memory://"))
    user, worker = "b0" * 16, "WORKER"
    for n in range(6):
        put_lineage(requested.inner, lineage_of(n, [user], worker=worker), group=n == 5)
    put_checkpoint(requested.inner, 1, {worker: 6})
    record = Forgotten(run="0" * 32, user=user, at=0.0, groups=[(worker, n) for n in range(6)])
    requested.inner.put(keys.live_forgotten(user), encode_json(record))
    assert compact_lineages(requested, worker, clock=lambda: 1e12)
    one = StreamCompactor(requested, LineageRows(), worker)
    assert one.expire(1e12) == 5
    assert not one.alarm
    policy = POLICIES["learner"]
    actions = {"put": "PutObject", "create": "PutObject", "delete": "DeleteObject"}
    assert {"list", "get", "create", "delete"} <= {verb for verb, _ in requested.requests}
    assert not [
        (verb, key)
        for verb, key in requested.requests
        if not (
            _lists(policy, key)
            if verb == "list"
            else _allows(policy, actions.get(verb, "GetObject"), key)
        )
    ]


def test_a_learner_reads_no_state_of_the_trainer_but_its_commits() -> None:
    policy = POLICIES["learner"]
    assert _allows(policy, "GetObject", keys.checkpoint_commit(3))
    assert not _allows(policy, "GetObject", keys.checkpoint_part(3, 0))


@pytest.mark.parametrize(
    "key",
    [
        *(keys.STATUS, keys.archive(0), keys.lease("w0", 0), keys.heartbeat("w0")),
        *(keys.events("w0-5f3a", 0), keys.rollout("w0", 0), keys.checkpoint_commit(3), *WEIGHTS),
    ],
)
def test_the_trainer_may_delete_what_it_reaps_and_prunes(key) -> None:
    assert _allows(POLICIES["trainer"], "DeleteObject", key)


@pytest.mark.parametrize("role", ["worker", "evaluator", "reader"])
def test_checkpoints_and_the_groups_of_others_are_read_by_few(role) -> None:
    secret = [
        *(keys.checkpoint_commit(3), keys.checkpoint_part(3, 0)),
        *(keys.rollout("w0", 0), keys.challenge("w0")),
    ]
    assert not [key for key in secret if _allows(POLICIES[role], "GetObject", key)]

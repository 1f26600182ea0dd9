"""Builds and parses the keys of all objects in a bucket; no other module does."""

from __future__ import annotations

import re

from deltawire.errors import InputError

RUN = "run.json"
TRAINER = "trainer.json"
STATUS = "status.json"
RETAINED = "retained.json"
PROBES = "probes.json"
MANIFESTS = "weights/manifests/"
BLOBS = "weights/blobs/"
COMPACTED = "weights/compacted/"
PARTS = "weights/parts/"
RETENTION_FLOORS = "weights/retention-floors/"
DELETION_INTENTS = "weights/deletion-intents/"
TAGS = "weights/tags/"
CLOCK = "weights/clock"
ANNOUNCEMENT = "weights/announcement.json"
IDENTITIES = "weights/identities/"
ROLLOUTS = "rollouts/"
REFERENCES = "references/"
HEARTBEATS = "heartbeats/"
READERS = "readers/"
TOMBSTONES = "ended/"
LEASES = "leases/"
CHALLENGES = "challenges/"
CHECKPOINTS = "checkpoints/"
INTERVAL_MARK = "interval-"
"""Begins the name of a mark in a checkpoint's folder that keeps an interval."""
EVENTS = "events/"
ROLES = "roles/"
ARCHIVE = "archive/"
LINES = "lines/"
FORKS = "forks/"
CHILDREN = "children/"
PROOF_SALTS = "proofs/"
TINKER = "tinker/"
TINKER_SERVER = "tinker/server.json"
LIVE = "live/"
LIVE_GATEWAYS = "live/gateways/"
LIVE_CAPTURES = "live/captures/"
LIVE_FEEDBACK = "live/feedback/"
LIVE_LINEAGE = "live/lineage/"
LIVE_COMPACTED = "live/compacted/"
LIVE_INDEX = "live/index/"
LIVE_COMPACTING = "live/compacting/"
LINEAGE_PREFIXES = (
    LIVE_LINEAGE,
    f"{LIVE_COMPACTED}lineage/",
    f"{LIVE_INDEX}lineage/",
    f"{LIVE_COMPACTING}lineage/",
)
"""Prefixes of what a learner stores of its lineages, each followed by its name."""
LIVE_DECISIONS = "live/decisions/"
LIVE_OPERATOR = "live/operator.json"
LIVE_DECIDER = "live/decider.json"
LIVE_FORGOTTEN = "live/forgotten/"
LIVE_READMITTED = "live/readmitted/"
LIVE_SECRETS = "live/secrets/"

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
_DEVICE = re.compile(r"(?i:CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9])\Z")
_HASH = re.compile(r"^[0-9a-f]{64}\Z")
MAX_NUMBER = 10**10 - 1


def valid_name(name: str) -> bool:
    """Returns whether ``name`` may name a worker or a process: at most 63 letters, digits, ``-``
    and ``_``. Device names of Windows, such as ``CON``, are refused: a folder there cannot hold
    them.
    """
    return bool(_NAME.match(name)) and not _DEVICE.match(name)


def _number(value: int) -> str:
    if not 0 <= value <= MAX_NUMBER:
        raise InputError(f"{value} is not a number that an object key can carry")
    return f"{value:010d}"


def _checked(name: str) -> str:
    if not valid_name(name):
        raise InputError(
            f"{name[:80]!r} cannot name a process",
            hint="use letters, digits, - and _, and no name of a device such as CON",
        )
    return name


def manifest(version: int) -> str:
    """Returns the key whose creation commits ``version``."""
    return f"{MANIFESTS}{_number(version)}.json"


def blob(digest: str) -> str:
    """Returns the key of the blob whose BLAKE3 is ``digest`` (64 hex digits)."""
    if not _HASH.match(digest):
        raise InputError(f"{digest[:80]!r} is not a BLAKE3 hash")
    return f"{BLOBS}{digest}"


def compacted(base: int | None, target: int) -> str:
    """Returns the key of the compacted delta from ``base`` to ``target``, or of a later anchor if
    ``base`` is None.

    The target comes first, so that a listing that starts after the version held shows every delta
    that leads beyond it.
    """
    return f"{COMPACTED}{_number(target)}-{'anchor' if base is None else _number(base)}.json"


def compacted_of(key: str) -> tuple[int | None, int] | None:
    """Returns base and target of a compacted delta's key. None for any other key, and for one whose
    base is not below its target.
    """
    stem = key.removeprefix(COMPACTED).removesuffix(".json")
    target, _, base = stem.partition("-")
    numbers = [int(word) for word in (target, base) if re.fullmatch("[0-9]{10}", word)]
    if base == "anchor" and len(numbers) == 1:
        found: tuple[int | None, int] = (None, numbers[0])
    elif len(numbers) == 2 and numbers[1] < numbers[0]:
        found = (numbers[1], numbers[0])
    else:
        return None
    return found if key == compacted(*found) else None


def compacted_after(version: int) -> str:
    """Returns the key after which a listing holds only compacted deltas to newer versions."""
    return f"{COMPACTED}{_number(version)}-~"


def retention_floor(version: int) -> str:
    """Returns the key whose creation closes every version below ``version`` permanently."""
    return f"{RETENTION_FLOORS}{_number(version)}.json"


def identities(segment: int) -> str:
    """Returns the key of a segment of the index of versions' identities."""
    return f"{IDENTITIES}{_number(segment)}.json"


def deletion_intent(token: str) -> str:
    """Returns the key under which retention announces the blobs that it is about to delete."""
    return f"{DELETION_INTENTS}{_checked(token)}.json"


def valid_tag(name: str) -> bool:
    """Returns whether ``name`` may name a version: as a process's name, and not digits only, which
    would be a version's number."""
    return valid_name(name) and not name.isdigit()


def tag(name: str) -> str:
    """Returns the key of the object that gives a version a name and keeps it from retention."""
    if not valid_tag(name):
        raise InputError(
            f"{name[:80]!r} cannot name a version",
            hint="use letters, digits, - and _, not digits only, and no name of a device",
        )
    return f"{TAGS}{name}.json"


def tag_of(key: str) -> str | None:
    """Returns the name in a tag's key, None for any other key."""
    name = key.removeprefix(TAGS).removesuffix(".json")
    return name if key == f"{TAGS}{name}.json" and valid_tag(name) else None


def part(version: int, token: str, rank: int) -> str:
    """Returns the key under which ``rank`` announces its part of ``version``, in the attempt
    ``token``.
    """
    return f"{parts_of(version, token)}{_number(rank)}.json"


def parts_of(version: int, token: str) -> str:
    """Returns the prefix of all parts of one attempt at ``version``."""
    return f"{PARTS}{_number(version)}-{_checked(token)}/"


def anchor_part(version: int, token: str, rank: int) -> str:
    """Returns the key under which ``rank`` announces its part of the anchor of ``version``, which
    the attempt ``token`` has committed.
    """
    return f"{parts_of(version, token)}anchor-{_number(rank)}.json"


def refusal(version: int, token: str) -> str:
    """Returns the key under which a rank says why this attempt at ``version`` fails."""
    return f"{parts_of(version, token)}refused.json"


def rollout(worker: str, sequence: int) -> str:
    """Returns the key of a worker's ``sequence``-th finished group, counted from 0."""
    return f"{ROLLOUTS}{_checked(worker)}/{_number(sequence)}"


def owner_and_number(key: str, prefix: str) -> tuple[str, int] | None:
    """Returns the owner and the number of a key like ``<prefix><owner>/0000000007``; None for any
    other key, such as ``0000000007.tmp``."""
    owner, _, _ = key.removeprefix(prefix).partition("/")
    number = trailing_number(key)
    if number is None or not valid_name(owner) or key != f"{prefix}{owner}/{number:010d}":
        return None
    return owner, number


def group_of(key: str) -> tuple[str, int] | None:
    """Worker and sequence of a group's key, None for any other key."""
    return owner_and_number(key, ROLLOUTS)


def rollouts_of(worker: str) -> str:
    """Returns the prefix of all of a worker's groups."""
    return f"{ROLLOUTS}{_checked(worker)}/"


def reference(worker: str, sequence: int) -> str:
    """Returns the key of the reference's log-probabilities of a worker's ``sequence``-th group."""
    return f"{references_of(worker)}{_number(sequence)}.json"


def references_of(worker: str) -> str:
    """Returns the prefix of the log-probabilities of all of a worker's groups."""
    return f"{REFERENCES}{_checked(worker)}/"


def heartbeat(process: str) -> str:
    """Returns the key of a process's heartbeat."""
    return f"{HEARTBEATS}{_checked(process)}.json"


def tombstone(process: str) -> str:
    """Returns the key of the last heartbeat of a process that is gone."""
    return f"{TOMBSTONES}{_checked(process)}.json"


def challenge(worker: str) -> str:
    """Returns the key of the secret that the trainer gives a worker."""
    return f"{CHALLENGES}{_checked(worker)}.json"


def lease(process: str, number: int) -> str:
    """Returns the key whose creation gives a process its name, as the ``number``-th holder."""
    return f"{LEASES}{_checked(process)}/{_number(number)}"


def leases_of(process: str) -> str:
    """Returns the prefix of all leases of a process's name."""
    return f"{LEASES}{_checked(process)}/"


def process_of(key: str) -> str | None:
    """Returns the process that a heartbeat's key names, None for any other key."""
    name = key.removeprefix(HEARTBEATS).removesuffix(".json")
    return name if key == f"{HEARTBEATS}{name}.json" and valid_name(name) else None


def readers(host: str) -> str:
    """Returns the key of the report of a host's readers."""
    return f"{READERS}{_checked(host)}.json"


def host_of(key: str) -> str | None:
    """Returns the host that a report of readers names, None for any other key."""
    name = key.removeprefix(READERS).removesuffix(".json")
    return name if key == f"{READERS}{name}.json" and valid_name(name) else None


def checkpoint_commit(version: int) -> str:
    """Returns the key of the object that commits the trainer's state at ``version``."""
    return f"{CHECKPOINTS}{_number(version)}/commit.json"


def checkpoint_part(version: int, number: int) -> str:
    """Returns the key of one part of the trainer's state at ``version``."""
    return f"{CHECKPOINTS}{_number(version)}/state-{_number(number)}.bin"


def checkpoint_kept(version: int) -> str:
    """Returns the key whose object keeps the trainer's state at ``version`` from being removed."""
    return f"{CHECKPOINTS}{_number(version)}/kept"


def checkpoint_forked(version: int, fork: str) -> str:
    """Returns the key whose object keeps the trainer's state at ``version`` for a fork."""
    return f"{CHECKPOINTS}{_number(version)}/{_fork_mark(fork)}"


def checkpoint_interval(version: int, other: int) -> str:
    """Returns the key whose object keeps the trainer's state at ``version``, one end of an interval
    whose other end is ``other``, and with the same mark there the groups between them."""
    return f"{CHECKPOINTS}{_number(version)}/{INTERVAL_MARK}{_number(other)}"


def interval_of(key: str) -> tuple[int, int] | None:
    """Returns both ends of the interval that a mark keeps, the earlier one first; None for any
    other key."""
    folder, _, name = key.removeprefix(CHECKPOINTS).partition("/")
    other = trailing_number(name.removeprefix(INTERVAL_MARK))
    version = trailing_number(folder)
    if version is None or other is None or version == other:
        return None
    if key != checkpoint_interval(version, other):
        return None
    return min(version, other), max(version, other)


def proof_salt(worker: str, sequence: int) -> str:
    """Returns the key of the random bytes in the commitment to a worker's group."""
    return f"{proof_salts_of(worker)}{_number(sequence)}"


def proof_salts_of(worker: str) -> str:
    """Returns the prefix of the random bytes in the commitments to all of a worker's groups."""
    return f"{PROOF_SALTS}{_checked(worker)}/"


def child(fork: str) -> str:
    """Returns the key that notes a fork in another bucket, by its run's id."""
    return f"{CHILDREN}{_checked(fork)}.json"


def fork_tag(fork: str) -> str:
    """Returns the name of the tag that keeps the version which a fork began with."""
    return _fork_mark(fork)


def _fork_mark(fork: str) -> str:
    return _checked(f"fork-{_checked(fork)}")


def keeps_checkpoint(key: str) -> bool:
    """Returns whether an object in a checkpoint's folder keeps it from being removed."""
    name = key.rpartition("/")[2]
    return name == "kept" or name.startswith(("fork-", INTERVAL_MARK))


def role(name: str) -> str:
    """Returns the key of the grant of a role: a lower-case word, and perhaps ``-`` and a worker's
    name.
    """
    word, _, worker = name.partition("-")
    if not (word.isascii() and word.isalpha() and word.islower() and len(word) <= 32):
        raise InputError(f"{name[:80]!r} cannot name a role", hint="use trainer, or worker-NAME")
    return f"{ROLES}{word}{'-' + _checked(worker) if worker else ''}.json"


def grant(role_name: str, number: int) -> str:
    """Returns the key of the ``number``-th grant that a role was given."""
    return f"{role(role_name).removesuffix('.json')}/{_number(number)}.json"


def events(stream: str, segment: int) -> str:
    """Returns the key of one segment of a stream of events."""
    return f"{EVENTS}{_checked(stream)}/{_number(segment)}.jsonl"


def stream_of(key: str) -> str | None:
    """Returns the stream that a segment of events belongs to, None for any other key."""
    stream, _, _ = key.removeprefix(EVENTS).partition("/")
    return stream if key.startswith(f"{EVENTS}{stream}/") and valid_name(stream) else None


def process_of_stream(stream: str) -> str | None:
    """Returns the process that writes a stream of events, ``<process>-<nonce>``; None for a name
    that no stream has.
    """
    if not valid_name(stream):
        return None
    process = stream.rpartition("-")[0]
    return process if valid_name(process) else stream


def archive(number: int) -> str:
    """Returns the key of one archive of events."""
    return f"{ARCHIVE}{_number(number)}"


def tinker_sessions() -> str:
    """Returns the prefix of the sessions of Tinker's SDK."""
    return f"{TINKER}sessions/"


def tinker_session(session: str) -> str:
    """Returns the key of a session of Tinker's SDK."""
    return f"{tinker_sessions()}{_checked(session)}.json"


def tinker_samplers(session: str) -> str:
    """Returns the prefix of a session's sampling sessions."""
    return f"{TINKER}samplers/{_checked(session)}/"


def tinker_sampler(session: str, number: int) -> str:
    """Returns the key of a session's ``number``-th sampling session."""
    return f"{tinker_samplers(session)}{_number(number)}.json"


def tinker_models() -> str:
    """Returns the prefix of everything that belongs to models of Tinker's SDK."""
    return f"{TINKER}models/"


def tinker_model(name: str) -> str:
    """Returns the key of the description of a model."""
    return f"{tinker_models()}{_checked(name)}/model.json"


def tinker_requests(name: str) -> str:
    """Returns the prefix of a model's accepted requests."""
    return f"{tinker_models()}{_checked(name)}/requests/"


def tinker_request(name: str, number: int) -> str:
    """Returns the key of the request that a client numbered ``number``."""
    return f"{tinker_requests(name)}{_number(number)}"


def tinker_results(name: str) -> str:
    """Returns the prefix of the results of a model's requests."""
    return f"{tinker_models()}{_checked(name)}/results/"


def tinker_result(name: str, number: int) -> str:
    """Returns the key of the result of a request."""
    return f"{tinker_results(name)}{_number(number)}"


def tinker_saves(name: str) -> str:
    """Returns the prefix of a model's named checkpoints."""
    return f"{tinker_models()}{_checked(name)}/saves/"


def tinker_save(name: str, digest: str) -> str:
    """Returns the key of a named checkpoint, by the BLAKE3 of its kind and name (64 hex digits)."""
    if not _HASH.match(digest):
        raise InputError(f"{digest[:80]!r} is not a BLAKE3 hash")
    return f"{tinker_saves(name)}{digest}.json"


def live_gateway(name: str) -> str:
    """Returns the key of a gateway's state."""
    return f"{LIVE_GATEWAYS}{_checked(name)}.json"


def live_captures(gateway: str, number: int) -> str:
    """Returns the key of a gateway's ``number``-th segment of captures."""
    return f"{LIVE_CAPTURES}{_checked(gateway)}/{_number(number)}"


def live_feedback(gateway: str, number: int) -> str:
    """Returns the key of a gateway's ``number``-th segment of feedback."""
    return f"{LIVE_FEEDBACK}{_checked(gateway)}/{_number(number)}"


def live_lineage(worker: str, sequence: int) -> str:
    """Returns the key of the list of answers that a worker's ``sequence``-th group was made of."""
    return f"{LIVE_LINEAGE}{_checked(worker)}/{_number(sequence)}"


def lineage_of(key: str) -> tuple[str, int] | None:
    """Returns worker and sequence in the key of a lineage; None for any other key."""
    return owner_and_number(key, LIVE_LINEAGE)


def live_segments(stream: str, owner: str) -> str:
    """Returns the prefix of the segments of a stream of a gateway, or of a learner's lineages."""
    return f"{LIVE}{_checked(stream)}/{_checked(owner)}/"


def live_compacted(stream: str, owner: str, name: str = "") -> str:
    """Returns the key of a compacted segment, or without a name the prefix of those of an owner."""
    return f"{LIVE_COMPACTED}{_checked(stream)}/{_checked(owner)}/{name and _checked(name)}"


def live_index(stream: str, owner: str, name: str = "") -> str:
    """Returns the key of the index of a compacted segment, as `live_compacted`."""
    return f"{LIVE_INDEX}{_checked(stream)}/{_checked(owner)}/{name and _checked(name)}"


def live_compacting(stream: str, owner: str, name: str = "") -> str:
    """Returns the key of the object that announces a compacted segment, as `live_compacted`."""
    return f"{LIVE_COMPACTING}{_checked(stream)}/{_checked(owner)}/{name and _checked(name)}"


def live_compacted_name(first: int, last: int, nonce: str) -> str:
    """Returns the name of a compacted segment of the rows of segments ``first`` to ``last``. The
    last one comes first, so that a listing can start after a segment that was read."""
    return f"{_number(last)}-{_number(first)}-{nonce}"


def live_compacted_span(name: str) -> tuple[int, int] | None:
    """Returns the first and the last number in the name of a compacted segment; None for any other
    name."""
    found = re.fullmatch(r"([0-9]{10})-([0-9]{10})-[0-9a-f]{32}", name)
    if found is None or int(found[2]) > int(found[1]):
        return None
    return int(found[2]), int(found[1])


def live_decision(number: int) -> str:
    """Returns the key of the ``number``-th decision about which version serves."""
    return f"{LIVE_DECISIONS}{_number(number)}.json"


def live_forgotten(pseudonym: str) -> str:
    """Returns the key of the record of a user's erasure."""
    return f"{LIVE_FORGOTTEN}{_checked(pseudonym)}.json"


def live_readmitted(pseudonym: str) -> str:
    """Returns the key of the object that lets a forgotten user be stored under a new pseudonym."""
    return f"{LIVE_READMITTED}{_checked(pseudonym)}.json"


def live_secret(number: int) -> str:
    """Returns the key of the fingerprint of the deployment secret's ``number``-th generation."""
    return f"{LIVE_SECRETS}{_number(number)}.json"


def trailing_number(key: str) -> int | None:
    """Returns the version or sequence in a manifest's, rollout's or segment's key, None if it has
    none.
    """
    stem = key.rsplit("/", 1)[-1].split(".", 1)[0]
    return int(stem) if len(stem) == 10 and stem.isascii() and stem.isdigit() else None


def line(name: str) -> str:
    """Returns the prefix, without its last slash, of a further line of versions of a run: under it
    are all keys of a run.
    """
    return f"{LINES}{_checked(name)}"


def fork(name: str) -> str:
    """Returns the prefix, without its last slash, of a fork of a run: under it are all keys of a
    run."""
    return f"{FORKS}{_checked(name)}"


def split_line(url: str) -> tuple[str, str]:
    """Returns the URL of the run that a line belongs to, and the line's name, from the URL of a
    line; an empty name for any other URL.
    """
    upper, found, name = url.rstrip("/").rpartition(f"/{LINES}")
    if not found or not upper or not valid_name(name):
        return url, ""
    return upper, name

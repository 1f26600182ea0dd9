"""Writes docs/format.schema.json: the JSON Schema of every JSON object of the format.

python tests/support/format_schema.py
"""

import json
from pathlib import Path

import msgspec

from deltawire.wire.coordination import (
    Announcement,
    DeletionIntent,
    ForkNote,
    Part,
    Refusal,
    RetentionFloor,
    Tag,
)
from deltawire.wire.decisions import Decision, RestoreRecord
from deltawire.wire.identities import IdentitySegment
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.lineage import Forgotten, Lineage
from deltawire.wire.live_secret import GenerationRecord, Readmitted
from deltawire.wire.manifest import CompactedDelta, Manifest
from deltawire.wire.reference_scores import ReferenceScores
from deltawire.wire.roles import RoleGrant
from deltawire.wire.run import Run
from deltawire.wire.status import Challenge, Heartbeat, HostReaders, TrainerStatus

PATH = Path(__file__).parents[2] / "docs" / "format.schema.json"
OBJECTS = {
    "run.json": Run,
    "weights/manifests/": Manifest,
    "weights/compacted/": CompactedDelta,
    "weights/parts/": Part,
    "weights/parts/refused.json": Refusal,
    "weights/retention-floors/": RetentionFloor,
    "weights/deletion-intents/": DeletionIntent,
    "weights/tags/": Tag,
    "children/": ForkNote,
    "weights/announcement.json": Announcement,
    "weights/identities/": IdentitySegment,
    "roles/": RoleGrant,
    "references/": ReferenceScores,
    "trainer.json": TrainerStatus,
    "challenges/": Challenge,
    "heartbeats/": Heartbeat,
    "readers/": HostReaders,
    "live/lineage/": Lineage,
    "live/decisions/": Decision,
    "live/forgotten/": Forgotten,
    "live/readmitted/": Readmitted,
    "live/secrets/": GenerationRecord,
    "deltawire.step": CommitMetadata,
    "deltawire.restore": RestoreRecord,
}
SEALED = (
    Run,
    Manifest,
    CompactedDelta,
    Part,
    Refusal,
    RetentionFloor,
    DeletionIntent,
    Tag,
    Announcement,
    IdentitySegment,
    RoleGrant,
    ReferenceScores,
)
SEAL = {
    "signer": {"type": "string", "maxLength": 96},
    "signature": {"type": "string", "pattern": "^[0-9a-f]{128}$"},
    "blake3": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
}


def schema() -> str:
    """The file's text. Patterns end in ``$``, as JSON Schema writes the end of a string."""
    refs, parts = msgspec.json.schema_components(
        list(OBJECTS.values()), ref_template="#/$defs/{name}"
    )
    for kind in SEALED:
        part = parts[kind.__name__]
        part["properties"] |= SEAL
        part["required"] = sorted({*part["required"], "format", "blake3"})
    for part in parts.values():
        part.pop("description", None)  # A docstring is no part of the format.
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Objects of a deltawire run, by key (a slash ends a prefix of keys) or record",
        "objects": dict(zip(OBJECTS, refs, strict=True)),
        "$defs": parts,
    }
    return json.dumps(whole, indent=1).replace("\\\\Z", "$") + "\n"


if __name__ == "__main__":
    PATH.write_text(schema())

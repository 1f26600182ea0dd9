"""Writes statements as in-toto attestations in DSSE envelopes, and as a layout with links.

Everything is written by the libraries of these formats, which the ``prove`` extra brings. The
folder holds ``statements/`` (attestations), ``links/`` with ``root.layout`` (what `in-toto-verify`
reads), and ``key.pem``, the public key of both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from deltawire.errors import InputError
from deltawire.launch.branches.statements import Made, predicate_of
from deltawire.wire.signing import Ed25519Signer

PAYLOAD_TYPE = "application/vnd.in-toto+json"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
EXPIRES = "2100-01-01T00:00:00Z"
"""A layout needs an end, although its statements stay true."""
LAYOUT = "root.layout"


def require_libraries() -> None:
    """Raises `InputError` if a library is missing."""
    for name in ("in_toto", "in_toto_attestation", "securesystemslib"):
        try:
            import_module(name)
        except ImportError as error:
            raise InputError(
                f"statements need the package {name}", hint="pip install 'deltawire[prove]'"
            ) from error


class ProofFolder:
    """Writes signed statements into a new folder.

    Example::

        folder = ProofFolder(Path("proof"), signer)
        folder.add(made)
        folder.close([made])
    """

    def __init__(self, folder: Path, signer: Ed25519Signer) -> None:
        """Raises `InputError` if a library is missing, or the folder holds something."""
        require_libraries()
        from securesystemslib.signer import CryptoSigner

        self._folder = folder
        self._signer: Any = CryptoSigner(signer.private_key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise InputError(f"{folder} is not empty", hint="name a new folder")
            for name in ("statements", "links"):
                (folder / name).mkdir()
            (folder / "key.pem").write_bytes(_pem_of(signer))
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error

    def add(self, made: Made) -> None:
        """Writes one step: its attestation, and its link."""
        from in_toto.models.link import Link

        path = self._folder / "statements" / f"{made.name}.json"
        path.write_text(json.dumps(self._attestation(made)))
        link = Link(
            name=made.name,
            materials=made.materials,
            products=made.products,
            byproducts={},
            command=[],
            environment={},
        )
        self._write(link, f"{made.name}.{self._signer.public_key.keyid:.8}.link")

    def close(self, every: Sequence[Made]) -> None:
        """Writes the layout: which steps there are, and whose products each may use."""
        from in_toto.models.layout import Layout, Step

        key = self._signer.public_key
        steps = [
            Step(
                name=made.name,
                pubkeys=[key.keyid],
                threshold=1,
                expected_materials=_material_rules(made),
                expected_products=[*(["CREATE", name] for name in made.products), ["DISALLOW", "*"]]
                if made.products
                else [],
            )
            for made in every
        ]
        public = {key.keyid: {**key.to_dict(), "keyid": key.keyid}}
        self._write(Layout(steps=steps, keys=public, expires=EXPIRES), LAYOUT)

    def _attestation(self, made: Made) -> dict[str, Any]:
        """Returns the statement, checked by in-toto's library, in a signed envelope."""
        from google.protobuf.json_format import MessageToDict
        from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
        from in_toto_attestation.v1.statement import Statement
        from securesystemslib.dsse import Envelope

        subjects = [
            ResourceDescriptor(name=name, digest=digests).pb
            for name, digests in made.products.items()
        ]
        statement = Statement(subjects, PREDICATE_TYPE, predicate_of(made))
        statement.validate()
        payload = json.dumps(MessageToDict(statement.pb), sort_keys=True).encode()
        envelope = Envelope(payload, PAYLOAD_TYPE, {})
        envelope.sign(self._signer)
        found: dict[str, Any] = envelope.to_dict()
        return found

    def _write(self, signable: Any, name: str) -> None:
        from in_toto.models.metadata import Envelope

        envelope = Envelope.from_signable(signable)
        envelope.create_signature(self._signer)
        envelope.dump(str(self._folder / "links" / name))


def _pem_of(signer: Ed25519Signer) -> bytes:
    """Returns the public key as in-toto's programs read it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = signer.private_key.public_key()
    found: bytes = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


def _material_rules(made: Made) -> list[list[str]]:
    """Returns the rules for a step's materials: versions are products of their steps, groups, code
    and configuration are given, and there is nothing else."""
    matched = [
        ["MATCH", pattern, "WITH", "PRODUCTS", "FROM", name]
        for name in made.before
        for pattern in ("version/*", "line/*")
    ]
    given = [["ALLOW", name] for name in ("group/*", "configuration", "code")]
    return [*matched, *given, ["DISALLOW", "*"]]


def read_attestation(path: Path, public_key: str) -> dict[str, Any]:
    """Reads a statement whose envelope this key signed; raises `InputError` for any other."""
    require_libraries()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    key = SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)))
    try:
        envelope = Envelope.from_dict(json.loads(path.read_bytes()))
        envelope.verify([key], 1)
        found = json.loads(envelope.payload)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (VerificationError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no statement that this key signed", hint="give the key that signed them"
        ) from error
    if not isinstance(found, dict) or envelope.payload_type != PAYLOAD_TYPE:
        raise InputError(f"{path} holds no statement")
    return found

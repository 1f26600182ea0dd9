"""Reads, writes and uses Ed25519 keys for signed runs; needs the ``sign`` extra."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deltawire.errors import InputError

MAX_KEY_FILE_BYTES = 4096


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InputError(
            "signed runs need the package cryptography", hint="pip install 'deltawire[sign]'"
        ) from error
    return ed25519


class Ed25519Signer:
    """A private key: 32 secret bytes."""

    def __init__(self, secret: bytes) -> None:
        """Raises `InputError` if ``secret`` is not 32 bytes long, or the ``sign`` extra is not
        installed.
        """
        if len(secret) != 32:
            raise InputError(f"an Ed25519 key has 32 bytes, not {len(secret)}")
        self._key = _ed25519().Ed25519PrivateKey.from_private_bytes(secret)

    @classmethod
    def generate(cls) -> Ed25519Signer:
        """Makes a new key."""
        return cls(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def read(cls, path: Path) -> Ed25519Signer:
        """Reads the key in a file that `write` wrote; raises `InputError` if there is none."""
        try:
            with path.open("rb") as file:
                text = file.read(MAX_KEY_FILE_BYTES).decode("ascii")
        except OSError as error:
            raise InputError(
                f"cannot read the key {path}: {error.strerror or error}",
                hint="deltawire keygen makes one",
            ) from error
        except UnicodeDecodeError:
            text = ""
        try:
            secret = bytes.fromhex(text.strip())
        except ValueError:
            secret = b""
        if len(secret) != 32:
            raise InputError(
                f"{path} holds no key of 64 hexadecimal digits", hint="deltawire keygen makes one"
            )
        return cls(secret)

    def write(self, path: Path) -> None:
        """Writes the key to a new file that only its owner can read.

        Raises `InputError` if the file exists or cannot be made.
        """
        data = self._key.private_bytes_raw().hex().encode() + b"\n"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
            except OSError:
                path.unlink(missing_ok=True)  # A partial key is useless and would block the name.
                raise
        except FileExistsError as error:
            raise InputError(
                f"{path} exists already",
                hint="choose another file name: a lost key cannot be made again",
            ) from error
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error

    @property
    def public_key(self) -> str:
        """The public key: 64 hexadecimal digits."""
        return str(self._key.public_key().public_bytes_raw().hex())

    @property
    def private_key(self) -> Any:
        """The key as an object of the package cryptography, for libraries that sign with it."""
        return self._key

    def sign(self, message: bytes) -> bytes:
        """Returns the signature: 64 bytes."""
        return bytes(self._key.sign(message))


def verify(public_key: str, signature: bytes, message: bytes) -> bool:
    """Returns whether ``signature`` is that of ``message`` by the owner of ``public_key``.

    Raises `InputError` if the ``sign`` extra is not installed.
    """
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(
            signature, message
        )
    except (InvalidSignature, ValueError):
        return False
    return True

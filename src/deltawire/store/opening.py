"""Opens buckets by their location: a folder, or a URL of a store."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from obstore import exceptions
from obstore.store import MemoryStore, from_url

from deltawire.display import REDACTED, has_credentials, looks_secret
from deltawire.errors import InputError
from deltawire.store.aws_profile import read_profile
from deltawire.store.bucket import Bucket
from deltawire.store.folder import FolderBucket, make_folder
from deltawire.store.forked import ForkedBucket, split_fork
from deltawire.store.retrying import RetryingBucket

REMOTE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")

_CREDENTIALS = frozenset({"access_key_id", "credential_provider", "skip_signature"})

SECRETS = {
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
    "AZURE_CLIENT_SECRET": "client_secret",
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_ACCESS_KEY": "account_key",
    "AZURE_STORAGE_SAS_KEY": "sas_key",
    "AZURE_STORAGE_TOKEN": "token",
    "GOOGLE_SERVICE_ACCOUNT": "service_account",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "service_account_key",
    "GOOGLE_APPLICATION_CREDENTIALS": "application_credentials",
}
"""The environment variables that hold credentials, and the store's option for each."""
_FAMILIES = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_"}

IDLE_S = 60.0
"""A transfer that moves no bytes for this long is given up; its total time is not limited."""

DURABLE = "DELTAWIRE_DURABLE"
"""The environment variable that, set to 0, makes writes to folders faster but not durable."""


class NoFolderError(InputError):
    """There is no folder at the location; a process that waits for one may ask again."""


def refuse_credentials(location: str) -> None:
    """Raises `InputError` for a bucket's URL that contains credentials, without repeating them."""
    if has_credentials(location):
        raise InputError(
            "the bucket's URL contains credentials, which logs and process lists would show",
            hint="put them into the environment, such as AWS_SECRET_ACCESS_KEY, or into a profile",
        )


def open_bucket(
    location: str | os.PathLike[str],
    *,
    create: bool = False,
    durable: bool | None = None,
    **options: Any,
) -> Bucket:
    """Opens ``location``: a folder, or a ``file://``, ``memory://``, ``s3://``, ``gs://`` or
    ``az://`` URL. That of a fork, ``RUN/forks/NAME``, reads what it lacks from the run (see
    `deltawire.store.forked`). Requests that get no answer are repeated (see
    `deltawire.store.RetryingBucket`), and all are counted (see `deltawire.store.traffic`).

    ``create`` makes a missing folder. ``durable`` says whether writes to a folder survive a power
    cut; None asks the environment (`DURABLE`), where they do by default.

    Remote stores take their credentials and endpoint from the environment, as obstore documents:
    for S3 and compatible stores ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``
    and ``AWS_ENDPOINT_URL``, which may be plain http, or else from the profile in ``~/.aws`` that
    ``AWS_PROFILE`` names. ``options`` go to the store unchanged and take precedence over the
    environment, except over ``AWS_ENDPOINT_URL_S3``, which obstore prefers. A memory bucket lives
    in this process only.

    Raises `InputError` for an empty name (which would be the current folder), an unknown scheme, a
    folder that does not exist, or a URL that contains credentials, which no message repeats.
    """
    bucket = open_bare_bucket(location, create=create, durable=durable, **options)
    return RetryingBucket.over(bucket)


def open_bare_bucket(
    location: str | os.PathLike[str],
    *,
    create: bool = False,
    durable: bool | None = None,
    **options: Any,
) -> Bucket:
    """Opens ``location`` as `open_bucket` does, with one attempt an operation: for probes of a
    store, and for tests that count or fail single requests."""
    location = os.fspath(location)
    bucket = _open(location, create=create, durable=durable, options=options)
    upper, name = split_fork(bucket.url)
    if not name:
        return bucket
    return ForkedBucket(bucket, lambda: open_bare_bucket(upper, durable=durable, **options))


def _open(location: str, *, create: bool, durable: bool | None, options: dict[str, Any]) -> Bucket:
    if not location.strip():
        raise InputError(
            "the bucket's name is empty", hint="is the variable that should hold it set?"
        )
    refuse_credentials(location)
    try:
        scheme = urlsplit(location).scheme
    except ValueError as error:
        raise InputError(f"cannot open the bucket {location}: {error}") from error
    if scheme in ("", "file") or len(scheme) == 1:
        if durable is None:
            durable = os.environ.get(DURABLE, "1").lower() not in ("0", "false", "no")
        return _open_folder(location, create=create, durable=durable)
    if scheme == "memory":
        return Bucket(MemoryStore(), location, local=True)
    if scheme not in REMOTE_SCHEMES:
        raise InputError(
            f"cannot open the bucket {location}: unknown scheme {scheme}://",
            hint="use a folder, file://, memory://, s3://, gs:// or az://",
        )
    chosen = _remote_options(scheme, options)
    try:
        store = from_url(location, **chosen)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        cause = str(error).strip().splitlines()[0][:300]
        for option, value in chosen.items():
            if looks_secret(option) and value:
                cause = cause.replace(str(value), REDACTED)
        raise InputError(f"cannot open the bucket {location}: {cause}") from error
    return Bucket(store, location, local=False)


def _remote_options(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns ``options`` completed with deltawire's defaults."""
    chosen = dict(options)
    chosen.setdefault("retry_config", {"max_retries": 4, "retry_timeout": timedelta(seconds=20)})
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=5),
        "read_timeout": timedelta(seconds=IDLE_S),
        "timeout": timedelta(days=1),
        **options.get("client_options", {}),
    }
    chosen["client_options"] = client
    # As options, for a store is opened again later (`deltawire.store.repeats.opened_again`), when a
    # worker has removed these variables (`deltawire.rl.rollout.hardening`).
    family = _FAMILIES.get(scheme, "AZURE_")
    if not {*SECRETS.values(), *_CREDENTIALS} & options.keys():
        for variable, option in SECRETS.items():
            if variable.startswith(family) and (value := os.environ.get(variable)):
                chosen.setdefault(option, value)
    if scheme.startswith("s3"):
        for option, setting in read_profile(credentials=_CREDENTIALS.isdisjoint(options)).items():
            chosen.setdefault(option, setting)
        # In the order of the AWS tools: the variable of the service before the general one.
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        found = [value for name in names if (value := os.environ.get(name))]
        if found and "endpoint" not in options:
            chosen["endpoint"] = found[0]
        if str(chosen.get("endpoint", "")).startswith("http:"):
            client.setdefault("allow_http", True)
        # A call deletes one object, and some servers lack the request for many (DeleteObjects).
        named = {str(name).lower() for name in (*options, *options.get("config", ()))}
        if not {"disable_bulk_delete", "aws_disable_bulk_delete"} & named:
            chosen["disable_bulk_delete"] = os.environ.get("AWS_DISABLE_BULK_DELETE") or "true"
    return chosen


def _open_folder(location: str, *, create: bool, durable: bool) -> FolderBucket:
    if location.startswith("file:"):
        parts = urlsplit(location)
        if parts.netloc not in ("", "localhost"):
            raise InputError(f"{location} names a host", hint="write file:///absolute/path")
        from urllib.request import url2pathname  # brings HTTP and mail, which no other path needs

        folder = Path(url2pathname(parts.path))
    else:
        folder = Path(location)
    folder = folder.absolute()
    try:
        if create:
            make_folder(folder, durable=durable)
        elif not folder.is_dir():
            raise NoFolderError(
                f"there is no bucket at {location}",
                hint="is the path right? open_bucket(…, create=True) of Python makes a new folder",
            )
        return FolderBucket(folder, durable=durable)
    except (OSError, exceptions.BaseError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot use {folder} as a bucket: {reason}",
            hint="choose a writable folder",
        ) from error

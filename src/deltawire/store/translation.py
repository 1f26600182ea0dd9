"""Translates the errors of stores and file systems into deltawire's errors.

An error that a repeated call may not meet again becomes a `RetryError`: no answer, 5xx, 408, 409,
429, and expired credentials, which their provider may renew. Anything else must be fixed first and
becomes an `InputError`.
"""

from __future__ import annotations

import re

from obstore import exceptions

from deltawire.errors import DeltawireError, InputError, RetryError, ThrottledError
from deltawire.store.request_limit import Outcome

# Matches responses of S3 and compatible stores, GCS and Azure. No key of deltawire contains a "<".
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")

_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})\b")
_TRANSIENT_STATUSES = {408, 409, 429}
_THROTTLED_STATUSES = {429, 503}
"""*Slow down*: of S3 and Azure 503, of GCS 429."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_EXISTS = "<Code>BlobAlreadyExists</Code>"
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}

# The URLs that provide S3 credentials when the environment holds none.
_NO_CREDENTIALS = re.compile(r"latest/(api/token|meta-data/iam)|security-credentials")

_FULL = "free some space; nothing already stored was harmed"
_REFUSALS = {
    "No space left on device": _FULL,
    "Disk quota exceeded": _FULL,
    "Permission denied": "check the permissions",
    "Read-only file system": "choose a writable bucket",
    "Not a directory": "choose a folder, not a file",
    "Is a directory": "a folder has the object's name; move it away",
    "File name too long": "choose shorter names",
    "Operation not permitted": "choose a file system that has hard links",
    "Operation not supported": "choose a file system that has hard links",
}

_CODES = {
    "RequestTimeTooSkewed": (
        "this machine's clock differs too much from the store's",
        "set this machine's clock",
    ),
    "EntityTooLarge": ("the object is larger than the store allows", "check the store's limits"),
    "InvalidAccessKeyId": ("the store does not know the access key", "check the credentials"),
    "SignatureDoesNotMatch": ("the secret key is wrong", "check the credentials"),
    "PermanentRedirect": ("the bucket is in another region", "set AWS_REGION"),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", "set AWS_REGION"),
}
_STATUSES = {
    401: ("the store refused", "check the credentials and the bucket's name"),
    403: ("the store refused", "check the credentials and the bucket's name"),
    413: _CODES["EntityTooLarge"],
}


def means_no_bucket(error: BaseException) -> bool:
    """Returns whether an error says that the whole bucket, not only an object, does not exist."""
    return bool(_NO_BUCKET.search(str(error)))


def means_conflict(error: BaseException) -> bool:
    """Returns whether an error is S3's 409 to a conditional write: nothing is decided yet. Azure's
    409 says that the object exists."""
    text = str(error)
    status = _STATUS.search(text)
    return status is not None and status[1] == "409" and _EXISTS not in text


def means_throttled(error: BaseException) -> bool:
    """Returns whether an error says that the store gets too many requests."""
    status = _STATUS.search(str(error))
    return status is not None and int(status[1]) in _THROTTLED_STATUSES


def outcome_of(error: BaseException) -> Outcome:
    """Returns what an error says about the store: that it answered, refused, or neither."""
    if means_throttled(error):
        return "refused"
    answered = isinstance(error, exceptions.NotFoundError | FileNotFoundError)
    return "answered" if answered or _STATUS.search(str(error)) else "lost"


def is_panic(error: BaseException) -> bool:
    """Returns whether an error is a panic of the store's library, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


def translate(error: BaseException, verb: str, url: str, key: str) -> DeltawireError:
    """Returns the error to raise for ``error``, which the operation ``verb`` on ``key`` raised."""
    text = str(error)
    if means_no_bucket(error):
        return InputError(
            f"cannot {verb}: there is no such bucket",
            hint="check the bucket's name and the endpoint; deltawire does not create buckets",
            run=url,
            key=key,
        )
    for sign, hint in _REFUSALS.items():
        if sign.lower() in text.lower():
            return InputError(f"cannot {verb}: {sign.lower()}", hint=hint, run=url, key=key)
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = found[1] if (found := _CODE.search(text)) else ""
    if code in _EXPIRED:
        return RetryError(
            f"cannot {verb}: the credentials have expired", hint="renew them", run=url, key=key
        )
    if isinstance(error, exceptions.InvalidPathError):
        return InputError(
            f"cannot {verb}: {_first_line(text)}",
            hint="another program stored an object with an invalid key there; remove it",
            run=url,
            key=key,
        )
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        status = status or 403
    said = _first_line(text) or type(error).__name__
    if _NO_CREDENTIALS.search(text):
        return RetryError(
            f"cannot {verb}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE: "
            "there are no credentials",
            hint=f"the client said: {said}",
            run=url,
            key=key,
        )
    if 400 <= status < 500 and status not in _TRANSIENT_STATUSES:
        reason, hint = _CODES.get(code) or _STATUSES.get(status) or (_first_line(text), "")
        return InputError(f"cannot {verb}: {reason}", hint=hint, run=url, key=key)
    if "://" not in url:
        return RetryError(
            f"cannot {verb}: {said}", hint="is the folder reachable?", run=url, key=key
        )
    remedy = (
        f"try again later: the store answered {status}"
        if status
        else "check the endpoint and the network: the store does not answer"
    )
    kind = ThrottledError if status in _THROTTLED_STATUSES else RetryError
    return kind(f"cannot {verb}: {remedy}", hint=f"the client said: {said}", run=url, key=key)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else ""

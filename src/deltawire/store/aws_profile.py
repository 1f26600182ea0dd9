"""Reads credentials and endpoint from the profiles in ``~/.aws``, as the AWS tools do."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

from deltawire.errors import InputError

_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
_VARIABLES = {
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}


_INDIRECT = ("role_arn", "credential_process", "sso_session", "sso_start_url")
_ELSEWHERE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
"""Variables in which the store's client looks for credentials before a profile."""


def read_profile(*, credentials: bool = True) -> dict[str, str]:
    """Returns the store options of the current profile that the environment does not set.

    The profile is the one that ``AWS_PROFILE`` names, or else ``default``. Access key, secret and
    session token come from the same source; the environment takes precedence.

    Raises `InputError` if ``credentials`` are needed, the environment has none, and the profile
    gets them in a way that only the AWS tools support, such as assuming a role.
    """
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    folder = Path("~/.aws").expanduser()
    found: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(os.environ.get(variable) or folder / default, encoding="utf-8")
            found |= dict(parser.items(section))
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
    if credentials:
        _check_supported(name, found)
    options = {_KEYS[key]: value for key, value in found.items() if key in _KEYS and value}
    for option, variables in _VARIABLES.items():
        if any(os.environ.get(variable) for variable in variables):
            options.pop(option, None)
    if not {"access_key_id", "secret_access_key"} <= options.keys():
        for option in ("access_key_id", "secret_access_key", "session_token"):
            options.pop(option, None)
    return options


def _check_supported(name: str, found: dict[str, str]) -> None:
    if "aws_access_key_id" in found or any(os.environ.get(variable) for variable in _ELSEWHERE):
        return
    for key in _INDIRECT:
        if found.get(key):
            raise InputError(
                f"the profile {name} in ~/.aws gets its credentials by {key}, which only the AWS "
                "tools can do",
                hint=f'run: eval "$(aws configure export-credentials --profile {name} '
                '--format env)", and start again when they expire',
            )

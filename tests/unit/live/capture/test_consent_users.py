"""Lists of users who agreed, and functions that redact."""

import pytest

from deltawire.errors import InputError
from deltawire.live.capture import consent
from deltawire.live.capture.consent import ConsentRule, read_users
from deltawire.live.capture.pseudonyms import Pseudonyms

NAMES = Pseudonyms(b"secret")


def test_users_of_a_file_agreed_and_no_others(tmp_path):
    path = tmp_path / "users"
    path.write_text("alice\n\n  bob  \n")
    rule = ConsentRule(users=read_users(str(path), NAMES))
    assert [rule.allows("", NAMES.user(name)) for name in ("alice", "bob", "carol", "")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "it is not text"),
        (b"a\n" * 40, "exceeds 64 bytes"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused(tmp_path, monkeypatch, data, message):
    monkeypatch.setattr(consent, "MAX_USERS_BYTES", 64)
    path = tmp_path / "users"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_users(str(path), NAMES)

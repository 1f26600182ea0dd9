"""One user has one name, in whatever encoding and form it comes, and one pseudonym."""

import pytest

from deltawire.live.capture.consent import ConsentRule, read_users
from deltawire.live.capture.names import MAX_NAME_CHARACTERS, normalize_name, spellings_of
from deltawire.live.capture.pseudonyms import Pseudonyms

NAMES = Pseudonyms(b"secret")
JOSE = "jos\xe9"


@pytest.mark.parametrize(
    "spelling",
    [
        "jose\u0301",
        b"jos\xe9",
        "jos\udce9",
        "jos\xc3\xa9".encode("latin-1"),
        "jos\udcc3\udca9",
        "jos\xe9 ",
        "\t jos\xe9\u00a0\r\n",
        "\ufeffjos\xe9\u200b",
        "jos\xe9\0",
    ],
)
def test_every_spelling_of_a_name_is_one_user(spelling):
    assert normalize_name(spelling) == JOSE
    assert normalize_name(normalize_name(spelling)) == JOSE


def test_other_names_stay_other_names():
    names = [
        "alice",
        "Alice",
        "alice b",
        "alice  b",
        "a\ud800",
        "a\ud801",
        "a?",
        "\xc3\xa9",
        "\xe9",
    ]
    assert len({normalize_name(name) for name in names}) == len(names)
    assert [normalize_name(name) for name in ("", " ", "\u200b\t")] == ["", "", ""]


def test_a_long_name_is_cut_before_it_costs_time():
    assert normalize_name("a" * 10**7) == "a" * MAX_NAME_CHARACTERS
    marks = "e" + "\u0301\u0316" * 10**6
    assert len(normalize_name(marks)) <= MAX_NAME_CHARACTERS


def test_the_spellings_of_earlier_releases_hold_what_they_stored():
    found = spellings_of("jose\u0301")
    assert {JOSE, "jose\u0301", "jos\udce9", f"{JOSE} "} <= set(found)
    assert spellings_of("alice") == ("alice", "alice ")


def test_a_list_of_users_is_normalized_too(tmp_path):
    path = tmp_path / "users"
    path.write_bytes(b"\xef\xbb\xbfbob\njos\xe9 \n" + " jose\u0301\nbob\n".encode())
    assert read_users(str(path), NAMES) == {NAMES.user(JOSE), NAMES.user("bob")}


@pytest.mark.parametrize(
    "word", ["never", "n", "none", "deny", "no", "0", "off", "false", "nein", "maybe", "truee", "-"]
)
def test_only_words_of_consent_are_consent(word):
    alice = NAMES.user("alice")
    for rule in (ConsentRule(header=True), ConsentRule(share=1.0), ConsentRule(users={alice})):
        assert not rule.allows(word, alice)
        assert not rule.allows(f" {word.upper()} ", alice)
    assert all(ConsentRule(header=True).allows(yes, "") for yes in ("true", "1", "YES", " on "))


def test_a_readmitted_user_has_another_pseudonym_in_each_life():
    first = NAMES.user("alice")
    assert NAMES.lives("alice", set()) == [first]
    lives = NAMES.lives("alice", {first, NAMES.user("alice", 1)})
    assert lives == [first, NAMES.user("alice", 1), NAMES.user("alice", 2)]
    assert len(set(lives)) == 3
    assert NAMES.lives("", {""}) == [""]

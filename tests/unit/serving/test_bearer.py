"""Bearer tokens: the scheme in any case, and nothing else that is not the token."""

import pytest

from deltawire.bearer import bears


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_may_be_written_in_any_case(scheme: str) -> None:
    assert bears(f"{scheme} secret", "secret")
    assert not bears(f"{scheme} Secret", "secret")


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "secret", "Basic secret", "Bearer secret2", "Bearer\udcffx"]
)
def test_nothing_else_is_the_token(header: str) -> None:
    assert not bears(header, "secret")


def test_an_empty_token_is_nobodys() -> None:
    assert not bears("Bearer ", "")


def test_spaces_before_the_token_do_not_count_and_those_in_it_do() -> None:
    assert bears("Bearer   secret ", "secret ")
    assert not bears("Bearer secret ", "secret")

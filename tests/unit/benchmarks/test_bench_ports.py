"""Ports that are named before anybody listens."""

import socket

import pytest

from benchmarks import ports


@pytest.fixture
def given_out(tmp_path, monkeypatch):
    """The range that the system gives out by itself."""

    def pretend(first):
        (tmp_path / "range").write_text(f"{first}\t60999\n")
        monkeypatch.setattr(ports, "RANGE", tmp_path / "range")

    return pretend


def test_a_port_lies_below_those_that_the_system_gives_out(given_out):
    given_out(ports.LOWEST + 1000)
    assert ports.LOWEST <= ports.free_port() < ports.LOWEST + 1000


def test_a_port_that_is_taken_is_passed_over(given_out, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "LOWEST", taken)
        given_out(taken)
        found = {ports.free_port() for _ in range(20)}
    assert taken not in found
    with socket.create_server(("127.0.0.1", found.pop())):
        pass

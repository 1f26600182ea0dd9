"""Packed expert choices equal a bit-by-bit reference, and nothing else is accepted."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import CorruptError, InputError
from deltawire.parity import routes as module
from deltawire.parity.routes import RouteShape, pack_routes, unpack_routes


@st.composite
def choices(draw):
    experts = draw(st.integers(1, 9) | st.sampled_from([16, 17, 128, 256, 257, 384, 65536]))
    chosen = draw(st.integers(1, min(experts, 5)))
    layers, positions = draw(st.integers(1, 4)), draw(st.integers(0, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    routes = np.array(
        [
            [rng.choice(experts, chosen, replace=False) for _ in range(layers)]
            for _ in range(positions)
        ],
        np.int32,
    ).reshape(positions, layers, chosen)
    routes[rng.random(positions) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -1
    return routes, experts


def naive_pack(routes, experts):
    """The table in the module's docstring, bit by bit."""
    positions, layers, chosen = routes.shape
    bits = 0
    while 2**bits < experts:
        bits += 1
    recorded = [bool((row >= 0).all()) for row in routes]
    text = "".join("01"[mark] for mark in recorded)
    text += "0" * (-len(text) % 8)
    body = ""
    for row, mark in zip(routes, recorded, strict=True):
        for index in row.reshape(-1) if mark else ():
            body += "".join("01"[int(index) >> place & 1] for place in range(bits))
    body += "0" * (-len(body) % 8)
    whole = text + body
    octets = [int(whole[i : i + 8][::-1], 2) for i in range(0, len(whole), 8)]
    header = struct.pack("<BBHHHII", 1, bits, chosen, layers, 0, experts, positions)
    return header + bytes(octets)


@settings(max_examples=120, deadline=None)
@given(choices())
def test_packing_equals_the_naive_one_and_round_trips(made):
    routes, experts = made
    positions, layers, chosen = routes.shape
    packed = pack_routes(routes, experts=experts)
    assert packed == naive_pack(routes, experts)
    shape = RouteShape(layers, experts, chosen)
    assert (unpack_routes(packed, shape, positions=positions) == routes).all()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 8)


@pytest.mark.usefixtures("small_chunks")
def test_chunk_boundaries_are_exact():
    rng = np.random.default_rng(0)
    routes = rng.permuted(np.tile(np.arange(6, dtype=np.int32), (9, 5, 1)), axis=2)[:, :, :3]
    packed = pack_routes(routes, experts=6)
    assert packed == naive_pack(routes, 6)
    assert (unpack_routes(packed, RouteShape(5, 6, 3), positions=9) == routes).all()


@settings(max_examples=150, deadline=None)
@given(choices(), st.data())
def test_each_choice_has_exactly_one_encoding(made, data):
    """Turned bits, cuts and additions are refused, or are the packing of other choices."""
    routes, experts = made
    positions, layers, chosen = routes.shape
    packed = bytearray(pack_routes(routes, experts=experts))
    kind = data.draw(st.sampled_from(["flip", "cut", "add"]))
    if kind == "flip":
        place = data.draw(st.integers(0, 8 * len(packed) - 1))
        packed[place // 8] ^= 1 << place % 8
    elif kind == "cut":
        del packed[data.draw(st.integers(0, len(packed) - 1)) :]
    else:
        packed += data.draw(st.binary(min_size=1, max_size=9))
    shape = RouteShape(layers, experts, chosen)
    try:
        found = unpack_routes(bytes(packed), shape, positions=positions)
    except CorruptError:
        return
    assert pack_routes(found, experts=experts) == bytes(packed)


@pytest.mark.parametrize(
    ("shape", "positions"),
    [
        (RouteShape(3, 8, 2), 5),
        (RouteShape(2, 9, 2), 5),
        (RouteShape(2, 8, 3), 5),
        (RouteShape(2, 8, 2), 6),
    ],
)
def test_choices_of_another_model_or_trajectory_are_refused(shape, positions):
    routes = np.tile(np.array([0, 7], np.int32), (5, 2, 1))
    packed = pack_routes(routes, experts=8)
    with pytest.raises(CorruptError, match="the header has"):
        unpack_routes(packed, shape, positions=positions)


def test_a_header_without_data_allocates_no_memory():
    huge = struct.pack("<BBHHHII", 1, 3, 2, 2, 0, 8, 2**32 - 1)
    with pytest.raises(CorruptError, match="bytes for"):
        unpack_routes(huge, RouteShape(2, 8, 2), positions=2**32 - 1)


@pytest.mark.parametrize(
    ("routes", "experts"),
    [
        (np.full((1, 1, 1), 4, np.int32), 4),
        (np.array([[[-1, 2]]], np.int32), 4),
        (np.zeros((1, 1, 5), np.int32), 4),
        (np.zeros((1, 0, 1), np.int32), 4),
        (np.zeros((1, 1, 1), np.int32), 1 << 20),
    ],
)
def test_invalid_choices_are_not_packed(routes, experts):
    with pytest.raises(InputError):
        pack_routes(routes, experts=experts)

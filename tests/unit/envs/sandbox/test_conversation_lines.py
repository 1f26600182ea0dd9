"""Lines of a command: how they are split, and that others get their turn meanwhile."""

import asyncio
from types import SimpleNamespace

import pytest

from deltawire.envs.sandbox.conversation import Conversation, Lines, LineTooLongError

PIECE = 1 << 16


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_pieces_of_any_size_give_the_same_lines(size):
    text = b"one\n\n\ntwo and three\nfour"
    lines = Lines()
    found = [one for at in range(0, len(text), size) for one in lines.add(text[at : at + size])]
    assert found == [b"one", b"", b"", b"two and three"]
    assert lines.waiting == b"four"


def test_a_flood_of_lines_leaves_a_turn_to_others_after_each_piece():
    async def talked():
        stdout = asyncio.StreamReader(limit=1 << 24)
        stdout.feed_data(b"\n" * 4 * PIECE)
        talk = Conversation(SimpleNamespace(stdout=stdout))
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(other())
        for _ in range(4 * PIECE):
            assert await talk.read(most=10) == b""
        others.cancel()
        return turns

    assert asyncio.run(talked()) >= 4


def test_a_line_that_is_too_long_stays_so_when_its_reader_was_interrupted():
    async def talked():
        stdout = asyncio.StreamReader()
        talk = Conversation(SimpleNamespace(stdout=stdout))
        stdout.feed_data(b"x" * 60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await talk.read(most=10)
        stdout.feed_data(b"rest\nnext\n")
        with pytest.raises(LineTooLongError):
            await talk.read(most=10)
        return await talk.read(most=10)

    assert asyncio.run(talked()) == b"next"

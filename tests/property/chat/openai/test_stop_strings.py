"""Whatever is drawn and whatever stops it: the cut is where reading token by token finds it."""

import copy

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltawire.chat.openai.stops import IncrementalText, StopWatch, cut, safe
from deltawire.chat.text import Text
from deltawire.train.build import byte_tokenizer


def pieces():
    """A tokenizer whose tokens are longer than stop strings, and shorter than characters."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_tokens(["ab", "ba", "aab", " b"])
    return Text(tokenizer)


TEXT = pieces()
TOKENS = st.lists(
    st.sampled_from([*b"aab ", *"é\U0001f600".encode(), 0xC3, 256, 257, 258, 259, 260, 261]),
    max_size=24,
)
STOPS = st.lists(st.text("ab é\U0001f600", min_size=1, max_size=4), min_size=1, max_size=3)


def naive(tokens, stops):
    """The first token with which the text holds a stop string, found by reading them all."""
    for count in range(1, len(tokens) + 1):
        kept = TEXT.decode(tokens[:count])
        if any(stop in kept for stop in stops):
            return count, kept[: min(kept.index(s) for s in stops if s in kept)], kept
    return None


@given(tokens=TOKENS, stops=STOPS)
@settings(max_examples=200, deadline=None)
def test_the_cut_is_the_naive_one(tokens, stops):
    assert cut(TEXT, tokens, stops) == naive(tokens, stops)


@given(tokens=TOKENS, stops=STOPS)
@settings(max_examples=200, deadline=None)
def test_a_watch_ends_nothing_early_and_misses_nothing(tokens, stops):
    watch = StopWatch(TEXT, stops)
    found = next((n for n, token in enumerate(tokens, 1) if watch.add(token)), None)
    expected = naive(tokens, stops)
    assert (found is None) == (expected is None)
    assert found is None or expected[0] <= found


@example(tokens=[97, 97, 259], stops=["ab"])
@given(tokens=TOKENS, stops=STOPS)
@settings(max_examples=200, deadline=None)
def test_streamed_text_is_a_prefix_of_the_final_text(tokens, stops):
    heard, said, told = IncrementalText(TEXT), "", ""
    found = naive(tokens, stops)
    final = TEXT.decode(tokens) if found is None else found[1]
    for token in tokens:
        said += heard.add(token)
        now = safe(said, stops)
        # After one stop a longer one that begins earlier may be found; text already sent stays.
        assert now.startswith(told) or told.startswith(now)
        told = max(told, now, key=len)
    assert final.startswith(told)


@pytest.mark.parametrize(
    ("said", "told"),
    [("ab", ""), ("xab", "x"), ("xabc", "x"), ("xabd", "xabd"), ("abcab", ""), ("aabc", "a")],
)
def test_what_may_be_the_beginning_of_a_stop_is_held_back(said, told):
    assert safe(said, ["abc"]) == told

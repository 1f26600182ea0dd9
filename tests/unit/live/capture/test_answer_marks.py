"""Marks of answers: what a reward may not see."""

import pytest

from deltawire.live.capture.marks import marks_of

WORK = "The function reads each row once and returns the sum. " * 2


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("", []),
        (WORK, []),
        ("I can't help with that.", ["refusal"]),
        ("I’m sorry, but that is not possible.", ["refusal"]),
        ("As an AI, I have no opinion.", ["refusal"]),
        (f"{' '.join(f'word{n}' for n in range(60))} The user said: I can't do it.", []),
        ("Which file do you mean?", ["question"]),
        ("どのファイルですか？", ["question"]),
        (f"{WORK} Is that right? Yes.", []),
        ("Perhaps it is red, maybe blue, and it could be green.", ["hedging"]),
        (f"{' '.join(f'word{n}' for n in range(200))} perhaps maybe possibly", []),
        ("again and again " * 20, ["repetition"]),
        ("again and again " * 3, []),
        (" ".join(f"word{n}" for n in range(100)), []),
    ],
)
def test_texts_have_these_marks(text, marks):
    assert marks_of(text) == marks


def test_a_call_with_a_question_is_work():
    assert marks_of("Shall I look?", calls=1) == []


def test_an_endless_text_is_read_in_part():
    assert marks_of("a" * (1 << 22) + "?") == []

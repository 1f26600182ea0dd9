"""Regular expressions over text of others take time in proportion to the text.

Every expression of the package is found in its source and tried on texts made from itself: its
beginning, then what its repetitions take, then a character that fits nothing; and what almost
matches, many times. A twin counts the steps for two lengths, which may not grow faster than these,
and the text that took most of them is searched at a megabyte.
"""

import ast
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from expression_steps import Counted, TooManyStepsError, hard_texts

from deltawire.display import LONGEST_LINE, REDACTED, redact, safe_line
from deltawire.errors import InputError

SOURCE = Path(__file__).parents[3] / "src" / "deltawire"
LENGTH = 1_000_000
LIMIT_S = 60
"""Seconds of processor time, so that a test of what is not linear ends: no measure of anything."""
FEWEST = 400
"""Characters of the shorter text of which steps are counted; the other has twice as many."""
GROWTH = 2.5
"""The most that steps may grow when the text doubles: 2 if linear, 4 if quadratic."""
MOST_STEPS = 300
"""Steps a character after which counting ends: a bounded repetition may take its bound."""
ANCHORED = ("_PARAMETER", "_GLM_ARGUMENT")
"""Expressions that another function matches where the last match ended."""
USES = {"compile", "match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer"}
OURS = {
    ("dashboard/plots.py", r"<!--.*?-->\n?"): "matplotlib's output, in which < is escaped",
    ("dashboard/plots.py", r"<metadata>.*?</metadata>\n?"): "the same",
    ("dashboard/plots.py", r"<[^>]*>"): "the same",
    ("launch/simulate.py", rb"serving .* on (http://\S+)"): "the log of a child of this process",
}
"""Expressions over text that no one else writes, or that was made short before."""
BUILT = {
    ("config/sections.py", "group.names"): "a pattern of the run's owner",
    ("config/adapters.py", "pattern"): "the same",
    ("config/adapters.py", "f'(.*\\\\.)?({pattern})$'"): "the same",
    ("train/optimizer/groups.py", "g.names"): "the same",
    ("train/parallel/tensor_parallel.py", "re.escape(pattern).replace('\\\\*', '[^.]+')"): (
        "names of a model's layers"
    ),
    ("envs/templates.py", "f'{{({names})}}'"): "literals, escaped",
    ("chat/text.py", "f'mark{self._nonce}x([0-9]+)x'"): "one repetition after a literal",
    ("chat/text.py", "'|'.join((re.escape(text) for text in longer))"): "literals, escaped",
}
"""Expressions that are made when they are used."""


def expressions():
    """Returns (file, expression, flags, whether it is only matched at one place) of each constant
    one, and (file, source) of each other."""
    known, built = set(), set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if "re." not in text and "pattern=" not in text:
            continue
        place, tree, names = str(path.relative_to(SOURCE)), ast.parse(text), {"re": re}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names |= _value(node.value, names, node.targets[0].id)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                found = _value(node.value, names, "")
                targets = [one.id for one in node.targets[0].elts]
                names |= dict(zip(targets, found.get("", ()), strict=False))
        for node in ast.walk(tree):
            pattern, flags, anchored = _pattern_of(node, text)
            if pattern is None:
                continue
            found = _value(pattern, names, "it")
            if isinstance(found.get("it"), str | bytes):
                known.add((place, found["it"], flags, anchored))
            else:
                built.add((place, ast.unparse(pattern)))
    return known, built


def _value(node, names, name):
    """Evaluates an expression of constants of the module."""
    allowed = (ast.Constant, ast.JoinedStr, ast.BinOp, ast.Name, ast.Tuple, ast.Call)
    try:
        if not isinstance(node, allowed) or (isinstance(node, ast.Call) and not _escapes(node)):
            return {}
        return {name: eval(compile(ast.Expression(node), "", "eval"), {}, names)}
    except Exception:
        return {}


def _escapes(node):
    return ast.unparse(node.func) in ("re.escape", "str", "tuple", "'|'.join")


def _only_matched(node, text):
    """Tells whether the name that a compiled expression gets is used for nothing but matching."""
    name = re.escape(text.splitlines()[node.lineno - 1].partition(" = ")[0].strip())
    verbs = set(re.findall(rf"\b{name}\.(\w+)\(", text))
    return name in ANCHORED or (bool(verbs) and verbs <= {"match", "fullmatch"})


def _pattern_of(node, text):
    if not isinstance(node, ast.Call):
        return None, 0, False
    function = node.func
    if isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "re":
        if function.attr in USES:
            words = {ast.unparse(one) for one in node.args[1:]}
            words |= {ast.unparse(one.value) for one in node.keywords if one.arg == "flags"}
            flags = sum(getattr(re, word[3:]) for word in words if word.startswith("re."))
            anchored = function.attr in ("match", "fullmatch")
            anchored = anchored or (function.attr == "compile" and _only_matched(node, text))
            return node.args[0], int(flags), anchored
        return None, 0, False
    if getattr(function, "attr", getattr(function, "id", "")) == "Meta":
        found = [one.value for one in node.keywords if one.arg == "pattern"]
        return (found[0], 0, False) if found else (None, 0, False)
    return None, 0, False


FEED = """
import re, signal, sys
limit_s, length = int(sys.argv[1]), int(sys.argv[2])
for line in sys.stdin:
    place, pattern, flags, anchored, start, one = eval(line)
    print(place, repr(pattern), flush=True)
    compiled, text = re.compile(pattern, flags), start + one * (length // len(one)) + END
    data = text if isinstance(pattern, str) else text.encode("latin-1")
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # Its default action ends the process.
    if anchored:
        compiled.match(data)
        compiled.fullmatch(data)
    else:
        for found in compiled.finditer(data): pass
print("done")
"""
END = "\n\x01"
"""Fits nothing."""


def as_text(one):
    """The expression as one over text, with its flags."""
    _, pattern, flags, _ = one
    if isinstance(pattern, str):
        return pattern, flags
    return pattern.decode("latin-1"), flags | re.ASCII


def counted(one, length, start, text):
    """The steps of an expression over a text of this length."""
    plain, flags = as_text(one)
    found = Counted(plain, flags, budget=length * MOST_STEPS)
    whole = start + text * (length // len(text)) + END
    if one[3]:
        found.match(whole)
    else:
        found.spans(whole)
    return found.steps


def worst_text(one):
    """Returns what an expression takes most steps for, and fails if they grow faster than it."""
    plain, flags = as_text(one)
    steps = {}
    for start, text in sorted(hard_texts(plain, flags)):
        try:
            few, many = (counted(one, n, start, text) for n in (FEWEST, 2 * FEWEST))
        except TooManyStepsError:
            few, many = 1, math.inf
        assert many <= GROWTH * few + 100, f"{one} takes {few}, {many} steps on {text!r}"
        steps[many] = start, text
    return steps[max(steps)]


def feed(texts, limit_s=LIMIT_S):
    """Searches each text in a process with a limit; returns where it stopped."""
    lines = "".join(f"{(*one, *text)!r}\n" for one, text in texts)
    ended = subprocess.run(
        [sys.executable, "-I", "-c", f"END = {END!r}{FEED}", str(limit_s), str(LENGTH)],
        input=lines,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout.splitlines()[-1] if ended.stdout else ended.stderr


def checked_expressions():
    known, built = expressions()
    assert built == BUILT.keys()
    checked = {one for one in known if one[:2] not in OURS}
    assert len(known) - len(checked) == len(OURS)
    assert len(checked) > 90
    return sorted(checked, key=repr)


def test_every_expression_is_linear():
    """Counted for two sizes; then what it likes least is a megabyte long."""
    assert feed([(one, worst_text(one)) for one in checked_expressions()]) == "done"


@pytest.mark.parametrize(
    "pattern", [r"\s*```\s*(.*?)\s*```\Z", r"[\w-]+=", r"\[[^]]*\]", r"(a|b|ab)*c", r"x(\s+)+y"]
)
def test_one_that_is_not_linear_is_found(pattern):
    with pytest.raises(AssertionError, match="steps on"):
        worst_text(("here", pattern, 0, False))


def test_a_megabyte_for_one_that_is_not_linear_ends():
    one = ("here", r"\[[^]]*\]", 0, False)
    assert "here" in feed([(one, ("[", "["))], limit_s=1)


def test_steps_are_counted_over_the_matches_that_re_finds():
    draw = random.Random(0)
    for one in checked_expressions():
        plain, flags = as_text(one)
        letters = sorted(set(plain) | set("ab1 \n<>{}:"))
        texts = ["".join(draw.choices(letters, k=40)) for _ in range(3)]
        texts += [start + 3 * text + END for start, text in hard_texts(plain, flags)]
        for text in texts:
            found = [one.span() for one in re.finditer(plain, text, flags)]
            assert Counted(plain, flags).spans(text) == found, (plain, text)


SECRET = "hunter2-" * 3


@pytest.mark.parametrize(
    "text",
    [
        "a" * LENGTH,
        "ab:/c:" * (LENGTH // 6),
        "ab:/c@ab:/" * (LENGTH // 10),
        "--a" * (LENGTH // 3),
        "a" + " " * LENGTH,
        "A" * LENGTH + "=",
    ],
)
def test_redaction_reads_a_text_once(text):
    """As the expressions, in a process with a limit on its processor time."""
    code = (
        "import signal, sys; from deltawire.display import redact, safe_line\n"
        f"signal.setitimer(signal.ITIMER_PROF, {LIMIT_S})\n"
        "text = sys.stdin.read(); redact(text); safe_line(text); print('done')"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], input=text, capture_output=True, text=True, check=False
    )
    assert ended.stdout == "done\n"


def test_an_error_of_any_length_shows_no_half_of_a_secret():
    """Wherever a long message is cut, and however short redaction makes it."""
    long = "x" * 50
    for start in range(65_480, 65_560):
        fill = f"--api-key {long * (start // 50)} "  # Redacted to a few characters.
        for secret in (f"sk-{SECRET}", f"s3://user:{SECRET}@place", f"api_key={SECRET}"):
            shown = str(InputError(f"{fill[:10]}{fill[10:start]} {secret} ends"))
            assert "hunter2" not in shown
            assert "user" not in shown
    assert len(safe_line("word " * LENGTH)) == LONGEST_LINE


def test_users_in_urls_are_redacted_up_to_the_last_at():
    cases = {
        "s3://u:p@host/a": f"s3://{REDACTED}@host/a",
        "s3://u:p@q@host": f"s3://{REDACTED}@host",
        "s3://u@host and az:/v:w@x": f"s3://{REDACTED}@host and az:/{REDACTED}@x",
        "s3://host/a@b": "s3://host/a@b",
        "ab://u@ab://v@x": f"ab://{REDACTED}@ab://{REDACTED}@x",
    }
    assert {text: redact(text) for text in cases} == cases
    assert redact("cmd--api-key abc") == f"cmd--api-key {REDACTED}"

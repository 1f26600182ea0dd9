"""Regular expressions over text of others take time in proportion to the text.

Every expression of the package is found in its source, and searched in 262,144 characters made from
itself: its beginning, then what its repetitions take, then a character that fits nothing; and what
almost matches, many times. A quadratic one would need 3 * 10^10 steps.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deltawire.display import LONGEST_LINE, REDACTED, redact, safe_line
from deltawire.errors import InputError

SOURCE = Path(__file__).parents[3] / "src" / "deltawire"
LENGTH = 1 << 18
LIMIT_S = 10
"""Seconds of processor time for each text; a linear expression takes a hundredth of that."""
ANCHORED = ("_PARAMETER", "_GLM_ARGUMENT")
"""Expressions that another function matches where the last match ended."""
USES = {"compile", "match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer"}
OURS = {
    ("dashboard/plots.py", r"<!--.*?-->\n?"): "matplotlib's output, in which < is escaped",
    ("dashboard/plots.py", r"<metadata>.*?</metadata>\n?"): "the same",
    ("dashboard/plots.py", r"<[^>]*>"): "the same",
    ("launch/simulating.py", rb"serving .* on (http://\S+)"): "the log of a child of this process",
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


ATTACK = r"""
import re, signal, sys
from re import _constants as k, _parser as parser

LIMIT_S, LENGTH = int(sys.argv[1]), int(sys.argv[2])

def letter(items):
    # A character of a class: a space or a letter if it has one.
    for c in map(chr, [32, 97, 65, 48, 45, 91, 60, 58, *range(33, 127), 10]):
        if re.compile(parser_text(items)).match(c):
            return c
    return "a"

def parser_text(items):
    text, negate = "", ""
    for kind, value in items:
        if kind is k.NEGATE: negate = "^"
        elif kind is k.LITERAL: text += re.escape(chr(value))
        elif kind is k.RANGE: text += re.escape(chr(value[0])) + "-" + re.escape(chr(value[1]))
        elif kind is k.CATEGORY:
            text += {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w", "NOT_SPACE": r"\S",
                     "NOT_WORD": r"\W", "NOT_DIGIT": r"\D"}[str(value).removeprefix("CATEGORY_")]
    return f"[{negate}{text}]"

def sample(tree, pumps, prefix=""):
    # One text that matches, and (beginning, repeated text) of each long repetition.
    text = ""
    for kind, value in tree:
        if kind is k.LITERAL: text += chr(value)
        elif kind is k.NOT_LITERAL: text += "a" if chr(value) != "a" else "b"
        elif kind is k.ANY: text += "a"
        elif kind is k.IN: text += letter(value)
        elif kind is k.SUBPATTERN: text += sample(value[3], pumps, prefix + text)
        elif kind is k.ATOMIC_GROUP: text += sample(value, pumps, prefix + text)
        elif kind is k.BRANCH:
            for branch in value[1][::-1]:
                last = sample(branch, pumps, prefix + text)
            text += last
        elif kind in (k.MAX_REPEAT, k.MIN_REPEAT, k.POSSESSIVE_REPEAT):
            low, high, inner = value
            one = sample(inner, pumps, prefix + text)
            if high > 1000:
                pumps.append((prefix + text, one))
                pumps += [(prefix + text, mark + one) for mark in marks]
                pumps.append((prefix + text, " "))
            text += one * max(low, 1)
        elif kind is k.ASSERT and value[0] > 0: sample(value[1], pumps, prefix + text)
        elif kind is k.ASSERT: text += sample(value[1], pumps, prefix + text)
    return text

for line in sys.stdin:
    place, pattern, flags, anchored = eval(line)
    print(place, repr(pattern), flush=True)
    compiled, pumps = re.compile(pattern, flags), []
    plain = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    marks = {c for c in plain if c in "_.<[{`:-@/ "}
    whole = sample(parser.parse(plain, flags), pumps)
    pumps += [(start, one * 2 + " ") for start, one in pumps[:1]]
    pumps += [("", whole[:n]) for n in {len(whole) - 1, len(whole) // 2, 1} if n > 0]
    for start, one in set(pumps):
        if not one: continue
        text = start + one * (LENGTH // len(one)) + "\n\x01"
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # Its default action ends the process.
        data = text if isinstance(pattern, str) else text.encode("utf-8")
        if anchored:
            compiled.match(data)
            compiled.fullmatch(data)
        else:
            for found in compiled.finditer(data): pass
print("done")
"""


def attack(found, limit_s=LIMIT_S):
    """Runs the attack on expressions in a process with a limit; returns where it stopped."""
    lines = "".join(f"{one!r}\n" for one in sorted(found, key=repr))
    ended = subprocess.run(
        [sys.executable, "-I", "-c", ATTACK, str(limit_s), str(LENGTH)],
        input=lines,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout.splitlines()[-1] if ended.stdout else ended.stderr


def test_every_expression_is_linear():
    known, built = expressions()
    assert built == BUILT.keys()
    checked = {one for one in known if one[:2] not in OURS}
    assert len(known) - len(checked) == len(OURS)
    assert len(checked) > 90
    assert attack(checked) == "done"


@pytest.mark.parametrize("pattern", [r"\s*```\s*(.*?)\s*```\Z", r"[\w-]+=", r"\[[^]]*\]"])
def test_the_attack_finds_one_that_is_not(pattern):
    assert "here" in attack([("here", pattern, 0, False)], limit_s=1)


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

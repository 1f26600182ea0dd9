"""Docstrings, comments and documents are plain technical English: a few phrases that never are."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Docstrings of subjects.py are problem statements, which name the tasks of recorded runs.
SOURCES = sorted(
    path
    for folder in ("src", "benchmarks", "tests", "examples", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "subjects.py"
)
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
WORDS = re.compile(
    r"\b(?:beside|anew|whence|lest|by and by|mend|mended|his|himself|for ever)\b", re.IGNORECASE
)
OPENING = re.compile(r"(?:^|(?<=[.!?] ))(?:What|Whether|Who|Whom)\b[^.?]*(?:[.]|$)")
"""A sentence that begins like a question and does not end as one."""
SENTENCE = re.compile(r"(?:^|(?<=[.!?] ))(?:What|Whether|Who|Whom)\b[^.?]*[.]")
"""The same in a document, where a heading or a cell of a table may begin so."""
CANDIDATE = re.compile("(?i:" + WORDS.pattern.replace(" ", r"\s+") + r")|\bWh(?:at|ether|o|om)\b")
"""Occurs in every file that can have such a phrase: most files need not be parsed."""


def prose(source):
    """Docstrings and comments of a file, each as one line."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
                yield " ".join(str(one.value.value).split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def paragraphs(document):
    """Paragraphs, items and cells of a Markdown file, each as one line, without code."""
    text = re.sub(r"^```.*?^```$", "", document, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)", text):
        joined = re.sub(r"`[^`]*`|\*\*", "", " ".join(block.split()))
        for cell in joined.split("|") if joined.startswith("|") else [joined]:
            yield re.sub(r"^(?:#+|[-*]|\d+\.)\s+", "", cell.strip())


def phrases(texts, sentence):
    """The words and sentences of the texts that should not be there."""
    lines = list(texts)
    return [
        match[0]
        for pattern in (WORDS, sentence)
        for line in lines
        for match in pattern.finditer(line)
    ]


def phrases_of(source):
    """The same of the docstrings and comments of a file."""
    return phrases(prose(source), OPENING) if CANDIDATE.search(source) else []


def test_prose_has_no_phrase_that_reads_like_a_translation():
    # This file names the words that it looks for.
    paths = [path for path in SOURCES if path != Path(__file__)]
    found = {path.relative_to(ROOT).as_posix(): phrases_of(path.read_text()) for path in paths}
    assert len(found) > 1000
    assert not {name: those for name, those in found.items() if those}


def test_documents_have_no_phrase_that_reads_like_a_translation():
    found = {
        path.relative_to(ROOT).as_posix(): phrases(paragraphs(path.read_text()), SENTENCE)
        for path in DOCUMENTS
    }
    assert len(found) > 50
    assert not {name: those for name, those in found.items() if those}


def test_no_file_with_a_phrase_is_passed_over():
    for line in (
        "# It ends by and by.",
        '"""Runs for\n    ever."""',
        "# Reads. Who waits is told.",
    ):
        assert phrases_of(line), line


def test_the_patterns_find_what_they_are_for():
    assert OPENING.search("Reads a run. What is older waits.")
    assert not OPENING.search("What is measured?")
    assert WORDS.search("Starts anew.")
    document = (
        "# What it is\n\nIt runs. What\nis older waits.\n\n| What |\n\n- `lest` **Who** asks.\n"
    )
    texts = list(paragraphs(document))
    assert [match[0] for text in texts for match in SENTENCE.finditer(text)] == [
        "What is older waits.",
        "Who asks.",
    ]
    assert not [text for text in texts if WORDS.search(text)]

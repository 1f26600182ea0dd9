"""The documents of the repository and their code blocks, for tests."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, its language, its text, and the line before it."""

    path: Path
    line: int
    language: str
    text: str
    before: str

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """Every document for users: those of docs/, of the root, and of the examples."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/peers/README.md"]
    found += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(path for path in found if path.is_file())


def blocks(language: str) -> list[Block]:
    """Every code block of a language."""
    found = []
    for path in documents():
        text = path.read_text()
        for match in _FENCE.finditer(text):
            head = text[: match.start()].rstrip("\n")
            if match[2] == language:
                before = head.rsplit("\n", 1)[-1]
                indent = len(match[1])
                code = "".join(line[indent:] or "\n" for line in match[3].splitlines(keepends=True))
                found.append(Block(path, head.count("\n") + 2, language, code, before))
    return found


def commands(text: str) -> list[list[str]]:
    """The simple commands of a shell block, each as words, without settings of the environment."""
    joined = text.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        command: list[str] = []
        for word in [*words, ";"]:
            if word in (";", "&&", "|", "||", "&"):
                while command and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", command[0]):
                    command = command[1:]
                if command:
                    found.append(command)
                command = []
            else:
                command.append(word)
    return found

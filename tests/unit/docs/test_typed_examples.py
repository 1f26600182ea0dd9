"""The README's examples pass type checkers in strict mode.

Drills: a type checker without its cache reads all of torch, which takes a minute.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest
from documents import ROOT, blocks

# A first run of mypy takes a processor for minutes, and other work may have it meanwhile.
pytestmark = [pytest.mark.drills, pytest.mark.timeout(1800)]

INLINE = re.compile(r"`((?:deltawire\.open_publisher|publish)\([^`]*\))`")
"""Calls that a sentence shows."""


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The README's Python, and its calls of a trainer, as a user's module."""
    text = (ROOT / "README.md").read_text()
    opened, published = INLINE.findall(text)
    lines = [block.text for block in blocks("python") if block.path == ROOT / "README.md"]
    lines += [
        "import deltawire",
        "from torch import nn",
        "",
        "def train(url: str, model: nn.Module) -> int:",
        f"    with {opened} as publisher:",
        f"        return publisher.{published}",
    ]
    path = tmp_path_factory.mktemp("user") / "example.py"
    path.write_text("\n".join(lines) + "\n")
    return path


NAMES = """import deltawire
reveal_type(deltawire.open_publisher("s3://bucket/run", {}))
reveal_type(deltawire.tensors_of)
"""


WRONG = """import deltawire
from deltawire.trl import Publish

deltawire.open_publisher("s3://bucket/run", {}, retian=3)
deltawire.open_publisher("s3://bucket/run", {}, retain="three")
Publish("s3://bucket/run", anchor_evry=3)
Publish("s3://bucket/run", grace_s="soon")
options: deltawire.PublisherOptions = {"max_outage": None, "threads": 2}
deltawire.open_publisher("s3://bucket/run", {}, **options)
"""
"""Calls with a wrong option in lines 4 to 7, and a right one."""


@pytest.fixture(scope="module")
def said(example):
    """Mypy's lines by file, of one process: each would read the types of torch."""
    texts = {"names.py": NAMES, "options.py": WRONG}
    for name, text in texts.items():
        example.with_name(name).write_text(text)
    files = [str(example.with_name(name)) for name in (example.name, *texts)]
    # With the project's own settings, which are strict, so that what `make lint` left is used.
    command = [sys.executable, "-m", "mypy", "--strict", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [re.match(r"(?:.*/)?(\w+\.py):(.*)", line) for line in done.stdout.splitlines()]
    found = {name: [one[2] for one in lines if one and one[1] == name] for name in texts}
    return found | {example.name: [one[2] for one in lines if one and one[1] not in texts]}


def test_mypy_accepts_the_examples(example, said):
    assert said[example.name] == []


def test_mypy_knows_the_types_of_the_public_names(said):
    types = "\n".join(said["names.py"])
    assert '"deltawire.sync.publish.publisher.Publisher"' in types
    assert "dict[str, torch._tensor.Tensor]" in types


def test_mypy_sees_a_wrong_option(said):
    wrong = {line.partition(": error")[0] for line in said["options.py"] if ": error" in line}
    assert wrong == {"4", "5", "6", "7"}


def test_pyright_sees_a_wrong_option(example):
    program = shutil.which("pyright") or shutil.which("basedpyright")
    if program is None:
        pytest.skip("pyright is not installed")
    wrong = example.with_name("options.py")
    wrong.write_text(WRONG)
    settings = {
        "typeCheckingMode": "standard",
        "extraPaths": [str(ROOT / "src")],
        "include": [wrong.name],
    }
    (example.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [program, "--pythonpath", sys.executable, "--project", str(example.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"options\.py:(\d+):\d+ - error", done.stdout)
    assert sorted(set(found)) == ["4", "5", "6", "7"], done.stdout


def test_pyright_accepts_the_examples(example):
    program = shutil.which("pyright") or shutil.which("basedpyright")
    if program is None:
        pytest.skip("pyright is not installed")
    settings = {
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT / "src")],
        "include": [example.name],
    }
    (example.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [program, "--pythonpath", sys.executable, "--project", str(example.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

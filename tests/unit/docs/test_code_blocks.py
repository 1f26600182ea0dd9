"""Code blocks of the documents: commands parse, settings load, Python compiles and may run."""

import argparse
import ast
import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from documents import ROOT, blocks, commands, documents

from deltawire import errors
from deltawire.cli import exit_codes
from deltawire.cli.bench import benchmark_commands
from deltawire.cli.main import build_parser
from deltawire.config import RunConfig, flatten, parse_config
from deltawire.config.machine import MachinePolicy

RUN = "<!-- run -->"
FOREIGN = {"vllm", "tinker_cookbook", "export", "cd", "kill", "curl", "ray", "torchrun", "vf-eval"}
FOREIGN |= {"twine", "pipx", "sha256sum", "git", "sudo", "aws", "docker", "kubectl", "helm", "…"}
FOREIGN |= {"in-toto-verify", "sed", "mkdir", "cp", "start.sh"}
"""First words of commands that are not ours."""
OPTIONAL = {
    "torch",
    "transformers",
    "trl",
    "openai",
    "peft",
    "datasets",
    "tinker",
    "prometheus_client",
    "ray",
}


@functools.cache
def every_command():
    """The parser of all commands; building it takes a fifth of a second."""
    return build_parser()


@functools.cache
def every_benchmark():
    """The parser of all benchmarks."""
    parser = argparse.ArgumentParser()
    benchmark_commands().add_parsers(parser.add_subparsers())
    return parser


def named(found):
    return pytest.mark.parametrize("block", found, ids=lambda block: block.place)


def ours(command):
    """The arguments of ``deltawire``, None for another command."""
    while command[:1] in (["nohup"], ["time"], ["exec"]):
        command = command[1:]
    head = command[0].rpartition("/")[2]
    if head == "deltawire":
        return command[1:]
    if head.startswith("python") and command[1:3] == ["-m", "deltawire"]:
        return command[3:]
    return None


def parse(words):
    """Parse the words after ``deltawire``; fails the test with the parser's message."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            every_command().parse_args(words)
    except SystemExit as end:
        pytest.fail(f"{words}: {end}: {errors.getvalue()[-300:]}")


@named([block for block in blocks("") if re.search("^deltawire ", block.text, re.MULTILINE)])
def test_every_command_of_a_list_is_one_that_exists(block):
    for line in block.text.splitlines():
        if line.startswith("deltawire ") and not set("[|…") & set(line):
            parse(shlex.split(re.split(r"\s{2,}(?=[^-\s])|\s#", line)[0])[1:])


@named(blocks("sh"))
def test_every_command_is_one_that_exists(block):
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for command in commands(block.text):
        arguments = ours(command)
        head = command[0].rpartition("/")[2]
        if arguments is not None:
            words = [word for word in arguments if word != "…"]
            parse(words[: words.index(">")] if ">" in words else words)
        elif head == "make":
            for target in (word for word in command[1:] if "=" not in word):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        elif head == "pip" or command[1:3] == ["-m", "pip"]:
            for names in re.findall(r"deltawire\[([\w,]+)\]", " ".join(command)):
                assert set(names.split(",")) <= set(extras["optional-dependencies"])
        elif head.startswith("python"):
            scripts = [word for word in command[1:] if word.endswith(".py")]
            assert not [name for name in scripts if not (ROOT / name).is_file()]
        else:
            assert head in FOREIGN, f"{command}: neither ours nor named in FOREIGN"


INLINE = re.compile(r"`deltawire ([a-z][^`\n]*)`")
"""Commands that a sentence or a table shows, which may leave out arguments."""
SIGNED_TEXTS = {"line", "sealed"}
"""Texts of the format that begin with the project's name and are no commands."""


def options_of(words):
    """The command that ``words`` name, one level down where it has verbs, and its options."""
    parser = every_command()
    if words[0] == "bench":
        parser, words = every_benchmark(), words[1:]
    for word in words:
        listed = [a.choices for a in parser._actions if isinstance(a.choices, dict)]
        if not listed or word.startswith("-"):
            break
        assert word in listed[0], f"no command {word}"
        parser = listed[0][word]
    return set(parser._option_string_actions)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_every_command_in_a_sentence_exists_with_its_options(path):
    for shown in INLINE.findall(re.sub(r"(?ms)^( *)```.*?^\1```", "", path.read_text())):
        words = shown.split()
        if words[0] in SIGNED_TEXTS or words == ["bench", "WHAT"]:
            continue
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert named <= options_of(words), shown


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_every_link_to_a_file_leads_to_one(path):
    text = re.sub(r"(?ms)^( *)```.*?^\1```|`[^`\n]*`", "", path.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target and not target.startswith("mailto:"):
            assert (path.parent / target).exists(), target


@named(blocks("toml"))
def test_settings_load(block):
    raw = tomllib.loads(block.text)
    if {"isolation", "ceilings", "trusted_modules"} & raw.keys():
        msgspec.convert(raw, MachinePolicy)
        return
    sections = {field.name for field in msgspec.structs.fields(RunConfig)}
    if not raw.keys() & sections:
        pytest.fail("neither a run's configuration nor a machine's policy")
    whole = {"name": "example", "model": {"path": "models/mine"}, **raw}
    if raw.get("task", {}).get("data") and not raw["task"].get("environment"):
        whole["task"] = {**raw["task"], "environment": "dataset"}
    assert flatten(parse_config(whole, source=block.place))


@named(blocks("json"))
def test_json_parses(block):
    decoder = json.JSONDecoder()
    rest = block.text.strip()
    assert rest
    while rest:
        _, end = decoder.raw_decode(rest)
        rest = rest[end:].strip()


@named(blocks("python"))
def test_python_compiles_and_what_it_imports_exists(block):
    text = block.text.replace("…", "...")
    if re.match(r'"\w+": ', text):  # One line of a table.
        text = f"{{{text}}}"
    tree = ast.parse(text, block.place)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("deltawire"):
            source = Path(importlib.util.find_spec(node.module).origin).read_text()
            missing = [one.name for one in node.names if not re.search(rf"\b{one.name}\b", source)]
            assert not missing, node.module
        if isinstance(node, ast.Import):
            for one in node.names:
                assert one.name in OPTIONAL or importlib.util.find_spec(one.name), one.name


MARKED = [block for block in blocks("python") if block.before == RUN]


@pytest.mark.parametrize("path", sorted({block.path for block in MARKED}), ids=lambda p: p.name)
def test_marked_blocks_run_one_after_another(path, tmp_path):
    code = "\n".join(block.text for block in MARKED if block.path == path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_work_in_a_checkout(path):
    """Headings, as GitHub anchors them, and files."""
    broken = []
    for target, anchor in re.findall(r"\]\(([^)\s#:]*)(#[^)\s]+)?\)", path.read_text()):
        place = (path.parent / target) if target else path
        if not place.exists():
            broken.append(target)
        elif anchor and place.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in titles]
            broken += [] if anchor[1:] in anchors else [target + anchor]
    assert not broken


def test_every_exit_code_is_documented():
    table = (ROOT / "docs/TROUBLESHOOTING.md").read_text().partition("## Exit codes")[2]
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert codes == sorted(set(codes))  # One line a code: no two commands end with it by accident.
    kinds = [
        vars(exit_codes),
        *(vars(kind) for kind in vars(errors).values() if isinstance(kind, type)),
    ]
    used = {
        value
        for names in kinds
        for name, value in names.items()
        if isinstance(value, int) and (name.isupper() or name == "exit_code")
    }
    assert set(codes) == used | {0}


def test_the_documents_have_blocks_of_each_kind():
    assert min(len(blocks(kind)) for kind in ("sh", "toml", "python", "json")) > 5
    assert len(MARKED) >= 4

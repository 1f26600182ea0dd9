"""Code that a run's configuration names: one gate, every setting, every command."""

import ast
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import get_args, get_origin

import msgspec
import numpy as np
import pytest

from deltawire import codec
from deltawire.cli.main import main
from deltawire.config import RunConfig
from deltawire.config.machine import POLICY, TRUSTED
from deltawire.config.own_code import CODE_SETTINGS, load_code
from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import create_run
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.status import TrainerStatus

SOURCE = Path(__file__).parents[3] / "src" / "deltawire"
BY_NAME = {"import_module", "__import__", "exec", "eval", "spec_from_file_location", "run_path"}
BY_NAME |= {"run_module", "resolve_name", "exec_module"}
FROM_TABLES = {
    ("__init__.py", "__getattr__"): "names of this package",
    ("trl/__init__.py", "__getattr__"): "names of this package",
    ("train/__init__.py", "__getattr__"): "names of this package",
    ("envs/__init__.py", "__getattr__"): "names of this package",
    ("cli/main.py", "build_parser"): "COMMANDS",
    ("cli/bench.py", "benchmark_commands"): "benchmarks.commands",
    ("engines/registry.py", "_module"): "ENGINES",
    ("parity/scorers.py", "_module"): "SCORERS",
    ("export/source.py", "open_source"): "EXPORTERS",
    ("quantization/formats.py", "open_format"): "PACKED",
    ("train/loss/policy.py", "surrogate_named"): "SURROGATES; others go through the gate",
    ("envs/registry.py", "_attribute"): "BUILT_IN and entry points; others go through the gate",
    ("envs/scoring_process.py", "_serve"): "the child of an OwnReward, which passed the gate",
    ("envs/text_gym_process.py", "__init__"): "skyrl_gym and gymnasium, which passed the gate",
    ("envs/text_gym_process.py", "main"): "modules of a text environment, which passed the gate",
    ("envs/workspace/problems.py", "_function"): "text of this package",
    ("envs/sandbox/evaluator_server.py", "_evaluate"): "in a sandbox",
    ("config/own_code.py", "_loaded"): "the gate",
    ("engines/sglang/http_calls.py", "install"): "SGLang's own server",
    ("engines/following/http_calls.py", "_json"): "a module of fastapi",
    ("engines/following/unix_listening.py", "listen_on"): "uvicorn",
    ("integrations/__main__.py", "main"): "NAMES, and the module that the caller names",
    ("integrations/nemo_rl.py", "verify"): "NeMo-RL itself",
    ("launch/branches/envelopes.py", "require_libraries"): "the packages of the extra prove",
    ("launch/branches/rescoring.py", "load_reward"): "the file that the caller of rescore names",
}
"""The functions that import or execute by a name, and where their names come from."""

LIGHT = [
    *(["live", action, "--once"] for action in ("status", "plan", "decide")),
    *([name] for name in ("status", "report", "probes", "log", "fsck", "replay", "rollouts")),
    ["probes", "--live"],
]
PROCESSES = [["learner"], ["worker", "--patience", "1"], ["evaluator"], ["trainer"]]


def _calls(path):
    """The name of the innermost function around each call that imports or executes by name."""
    found = []

    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call):
                name = getattr(child.func, "attr", getattr(child.func, "id", ""))
                method = isinstance(child.func, ast.Attribute) and name in ("eval", "exec")
                if name in BY_NAME and not method:
                    found.append(function)
            walk(child, inside)

    walk(ast.parse(path.read_text()), "")
    return found


def test_nothing_but_the_gate_imports_what_a_setting_names():
    """A new call that imports or executes by name fails here: use `own_code.load_code`."""
    found = {
        (str(path.relative_to(SOURCE)), function)
        for path in SOURCE.rglob("*.py")
        if any(f"{name}(" in path.read_text() for name in BY_NAME)
        for function in _calls(path)
    }
    assert found == FROM_TABLES.keys()


def test_every_python_process_starts_without_the_working_directory():
    """``-P`` or ``-I`` follows the interpreter wherever a child is started."""
    wrong, right = [], 0
    for path in SOURCE.rglob("*.py"):
        for line in path.read_text().splitlines():
            if re.search(r'(sys\.executable|\bpython), "', line):
                isolated = re.search(r'(sys\.executable|\bpython), "-[PI]"', line)
                right += bool(isolated)
                wrong += [] if isolated else [f"{path.name}: {line.strip()}"]
    assert not wrong
    assert right >= 7


def _strings(kind, place=""):
    """The settings of a section that are texts: (name, pattern or "")."""
    for field in msgspec.structs.fields(kind):
        yield from _texts(field.type, f"{place}.{field.name}".lstrip("."))


def _texts(kind, place, pattern=""):
    origin = get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if place.count("mixture") < 2:  # A mixture holds tasks again.
            yield from _strings(kind, place)
    elif hasattr(kind, "__metadata__"):
        patterns = [meta.pattern for meta in kind.__metadata__ if getattr(meta, "pattern", None)]
        yield from _texts(kind.__origin__, place, *patterns[:1])
    elif kind is str:
        yield place, pattern
    elif origin in (list, dict, types.UnionType) or (origin and "Union" in str(origin)):
        for inner in get_args(kind):
            yield from _texts(inner, place, pattern)


def test_every_setting_that_names_code_is_listed():
    """Found by what a setting accepts: ``module:function``, and no other text."""
    by_pattern = {
        re.sub(r".*\.task\.", "task.", name)
        for name, pattern in _strings(RunConfig)
        if pattern and re.search(pattern, "a.b:c") and not re.search(pattern, "two words")
    }
    # Two are no plain patterns: a table of names checks one, and the other is a free table, of
    # which the environment verifiers makes package names.
    listed = {*CODE_SETTINGS, "budget.scaffolds"}  # each of them is a rollout.scaffold
    assert by_pattern | {"train.loss.surrogate", "task.options"} == listed


def _trap(folder, number):
    """A module that leaves a file once it is imported."""
    mark = folder / f"imported{number}"
    (folder / f"trap{number}.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef f(*_): pass\n")
    return f"trap{number}", mark


def _with(setting, module):
    if setting == "task.options":
        options = {"taskset": module}
        return {"task": {"environment": "verifiers", "options": options}}
    *sections, key = setting.split(".")
    raw = {key: f"{module}:f"}
    for section in reversed(sections):
        raw = {section: raw}
    return raw


@pytest.fixture
def traps(tmp_path, monkeypatch):
    """Makes an unsigned run whose ``setting`` names a module that can be imported."""
    monkeypatch.delenv(POLICY, raising=False)
    monkeypatch.delenv(TRUSTED, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # Processes set it for good.
    monkeypatch.chdir(tmp_path)  # Reports are written there.
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(setting):
        number = CODE_SETTINGS.index(setting)
        module, mark = _trap(tmp_path, number)
        sys.modules.pop(module, None)
        bucket = open_bucket(str(tmp_path / f"bucket{number}"), create=True)
        bits = {"w": np.zeros(64, np.uint16)}
        create_run(
            bucket,
            Run(
                id="ab" * 16,
                name="trapped",
                created_at=time.time(),
                tensors=[TensorSpec("w", (64,), "BF16")],
                digest=codec.digest_model(bits).hex(),
                config={"name": "trapped", **_with(setting, module)},
            ),
        )
        status = TrainerStatus(
            phase="finished", version=0, digest="", epoch=1, credits={}, at=time.time()
        )
        bucket.put(keys.TRAINER, encode_json(status))
        return bucket.url, module, mark

    return make


@pytest.mark.parametrize("setting", CODE_SETTINGS)
def test_no_command_imports_what_an_unsigned_run_names(setting, traps, capsys):
    url, module, mark = traps(setting)
    for words in [*LIGHT, *PROCESSES]:
        place = words[:2] if words[0] == "live" else words[:1]
        main([*place, url, *words[len(place) :]])
        assert not mark.exists(), words
        assert module not in sys.modules, words
    capsys.readouterr()


def test_a_trusted_reward_is_imported_by_the_same_commands(traps, monkeypatch, capsys):
    """Shows that the commands above reach the setting."""
    url, module, mark = traps("live.reward_function")
    for words in (["live", "status"], ["live", "decide", "--once"], ["probes", "--live"]):
        place = words[:2] if words[0] == "live" else words[:1]
        assert main([*place, url, *words[len(place) :]]) == 2, words
        assert f"live.reward_function names code of module {module}" in capsys.readouterr().err
    monkeypatch.setenv(TRUSTED, module)
    main(["live", "status", url])
    assert mark.exists()


def test_the_working_directory_supplies_no_module(traps, tmp_path):
    """Not even one that this machine trusts: a bucket may be a folder in it."""
    url, module, mark = traps("live.reward_function")
    # An owner may put folders on the path by PYTHONPATH; an empty entry is the working directory.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-m", "deltawire", "live", "status", url],
        cwd=tmp_path,
        env={**inherited, TRUSTED: module},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert f"cannot load live.reward_function {module}:f: No module named" in ended.stderr
    assert not mark.exists()


@pytest.mark.parametrize("setting", CODE_SETTINGS)
def test_the_gate_imports_only_what_is_trusted(setting, traps, monkeypatch):
    _, module, mark = traps(setting)
    with pytest.raises(InputError, match=f"{setting} names code of module {module}"):
        load_code(setting, f"{module}:f")
    assert not mark.exists()
    monkeypatch.setenv(TRUSTED, module)
    assert load_code(setting, f"{module}:f")() is None
    for wrong in (f"{module}:g", ":f", ""):
        with pytest.raises(InputError, match=r"cannot load|does not trust"):
            load_code(setting, wrong)

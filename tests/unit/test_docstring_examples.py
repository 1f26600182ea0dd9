"""Examples in docstrings are right: TOML is accepted, Python names what exists and calls it right.

An example of a configuration's section is a fragment of the file; every other one is Python. Names
in lower case that a fragment does not assign, such as ``bucket``, stand for the reader's own.
"""

import ast
import builtins
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
import tomllib

import pytest

import deltawire
from deltawire.config import parse_config
from deltawire.config.base import Section

ROOMS = (
    "codec",
    "config",
    "data",
    "engines",
    "export",
    "launch",
    "placement",
    "plan",
    "quantization",
    "runtime",
    "store",
    "sync",
    "train",
    "wire",
)
NOT_HERE = ("deltawire.engines.vllm", "deltawire.placement.triton", "deltawire.quantization.triton")
"""Modules that need vLLM or Triton."""
ELSEWHERE = {
    "Console": "rich.console",
    "Mapping": "collections.abc",
    "Path": "pathlib",
    "closing": "contextlib",
}
"""Names from other packages that fragments use."""
FRAGMENT = re.compile(r"Example::\n\n((?:[ ]+[^\n]*\n|\n)+)")


@functools.cache
def modules():
    """Every module of the rooms that this machine can import."""
    return list(_walked())


def _walked():
    for room in ROOMS:
        package = importlib.import_module(f"deltawire.{room}")
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.startswith(NOT_HERE):
                yield importlib.import_module(found.name)


def classes():
    """Every class of the rooms, with the module that defines it."""
    for module in modules():
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield value


def fragment_of(thing):
    """The example in a docstring, None if it has none."""
    match = FRAGMENT.search(f"{inspect.cleandoc(thing.__doc__ or '')}\n")
    return textwrap.dedent(match[1]) if match else None


CLASSES = {
    f"{one.__module__.removeprefix('deltawire.')}.{one.__qualname__}": one for one in classes()
}
SECTIONS = {
    name: one
    for name, one in CLASSES.items()
    if issubclass(one, Section) and "Not a key of a file." not in (one.__doc__ or "")
}
EXAMPLES = {
    name: text
    for name, one in CLASSES.items()
    if name not in SECTIONS and (text := fragment_of(one)) is not None
}


def public():
    """The classes that a room exports, by name."""
    for module in modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isclass(value) and value.__module__.startswith("deltawire."):
                yield f"{value.__module__.removeprefix('deltawire.')}.{value.__qualname__}", value


def test_every_public_class_has_an_example():
    exported = dict(public())
    assert len(exported) > 80
    assert not {
        name
        for name, value in exported.items()
        if name.startswith(tuple(f"{room}." for room in ROOMS)) and fragment_of(value) is None
    }


def tables(value, found):
    """Every section within a configuration, by its class."""
    if isinstance(value, Section):
        found.setdefault(type(value), []).append(value)
        for name in value.__struct_fields__:
            tables(getattr(value, name), found)
    elif isinstance(value, list | tuple):
        for one in value:
            tables(one, found)
    return found


@pytest.mark.parametrize("name", [n for n, one in SECTIONS.items() if fragment_of(one)])
def test_an_example_of_a_section_is_accepted_and_sets_it(name):
    section = SECTIONS[name]
    values = tomllib.loads(fragment_of(section))
    values = {"name": "example", "model": {"build": {}}, **values}
    config = parse_config(values, source=name)
    plain = tables(parse_config({"name": "example", "model": {"build": {}}}, source=name), {})
    assert any(one not in plain.get(section, []) for one in tables(config, {})[section])


def known_names(place):
    """The names that a fragment of a class in that module may use."""
    names = {name: value for name, value in vars(builtins).items() if callable(value)}
    del names["credits"]  # Of `site`, in sessions at a terminal.
    for module in modules():
        for name in getattr(module, "__all__", ()):
            names.setdefault(name, getattr(module, name))
    names |= {one.__name__: one for one in CLASSES.values()}
    names |= {name: getattr(importlib.import_module(m), name) for name, m in ELSEWHERE.items()}
    return names | vars(importlib.import_module(place))


def assigned(tree):
    """Names that a fragment gives a value: targets, arguments, functions, classes and imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.arg):
            yield node.arg
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]


def called(node, names):
    """The thing that a call in a fragment calls, None if that is the reader's own."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := called(node.value, names)) is not None:
        return getattr(owner, node.attr)
    return None


def check_call(node, thing):
    """Raise if the arguments of a call do not fit the signature of what it calls."""
    starred = any(isinstance(one, ast.Starred) for one in node.args)
    if starred or any(one.arg is None for one in node.keywords):
        return
    try:
        signature = inspect.signature(thing)
    except ValueError:  # Some builtins have none.
        return
    signature.bind(*node.args, **{one.arg: one.value for one in node.keywords})


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_uses_what_exists_as_it_is_called(name):
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(EXAMPLES[name], name, "exec", flags)
    own = set(assigned(tree))
    names = {n: v for n, v in known_names(CLASSES[name].__module__).items() if n not in own}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, one.name) for one in node.names)
        if isinstance(node, ast.Name) and node.id not in own and node.id[0].isupper():
            assert node.id in names, f"{name}: {node.id} does not exist"
        if isinstance(node, ast.Call) and (thing := called(node.func, names)) is not None:
            check_call(node, thing)


def test_the_check_finds_what_is_wrong():
    tree = ast.parse("Path('a', mode=1)", mode="eval").body
    with pytest.raises(TypeError):
        check_call(tree, lambda first, *, create=False: None)
    assert fragment_of(deltawire.config.parsing) is None

"""Names that packages load at first use are listed, documented, and known to type checkers."""

import ast
import importlib
from pathlib import Path

import pytest

LAZY = ("deltawire", "deltawire.envs", "deltawire.train", "deltawire.trl")


@pytest.mark.parametrize("name", LAZY)
def test_every_public_name_is_listed_and_imported_for_type_checkers(name):
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    tree = ast.parse(Path(package.__file__).read_text())
    typed = {
        one.name
        for branch in tree.body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in branch.body
        for one in node.names
    }
    assert typed == set(package.__all__) - {"__version__"}


def test_the_names_of_the_package_are_documented():
    import deltawire

    for name in set(deltawire.__all__) - {"__version__"}:
        assert getattr(deltawire, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'open_publishers'"):
        deltawire.open_publishers  # noqa: B018

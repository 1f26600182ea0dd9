"""The site of the documents: it is built, its links hold, and its generated pages are whole."""

import importlib
import re
import sys

import msgspec
import pytest
from documents import ROOT

from deltawire.cli import COMMANDS
from deltawire.config import RunConfig

pytest.importorskip("zensical")


@pytest.fixture(scope="module")
def builder():
    """The module that builds the site."""
    sys.path.insert(0, str(ROOT / "scripts" / "site"))
    try:
        yield importlib.import_module("build")
    finally:
        sys.path.remove(str(ROOT / "scripts" / "site"))


@pytest.fixture(scope="module")
def site(builder):
    """The built site; building it fails for a broken link."""
    builder.build()
    return builder.SITE


def test_every_page_is_built(site):
    names = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    documents = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    }
    assert {name.replace("/README", "/index") for name in documents} <= names
    assert {"CLI", "CONFIGURATION", "api/publish", "ARCHITECTURE"} <= names


def test_every_document_is_in_the_navigation():
    listed = set(re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {
        path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if path.parent.name != "design"
    }
    assert there <= listed


def test_the_reference_names_every_command_key_and_public_name(site, builder):
    commands = (builder.STAGED / "CLI.md").read_text()
    for name in COMMANDS:
        assert f"`deltawire {name.strip('_').replace('_', '-')}`" in commands
    keys = (builder.STAGED / "CONFIGURATION.md").read_text()
    for field in msgspec.structs.fields(RunConfig):
        assert f"`{field.name}`" in keys or f"[{field.name}]`" in keys
    assert "train.loss.corrections" in keys
    publishing = (builder.STAGED / "api" / "publish.md").read_text()
    for name in ("open_publisher", "tensors_of", "Subscriber", "open_bucket", "FolderBucket"):
        assert f"### `{name}`" in publishing


def test_broken_links_and_foreign_resources_are_found(builder, tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top">a</h1><a href="b.html#there">b</a><a href="b.html#gone">b</a>'
        '<a href="c.html">c</a><a href="https://example.org">x</a>'
        '<script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1><a href="a.html#top">a</a>')
    assert sorted(builder.broken_links(tmp_path)) == [
        "a.html: b.html#gone",
        "a.html: c.html",
        "a.html: loads https://example.org/x.js",
    ]


def test_messages_of_the_troubleshooting_page_are_those_of_the_sources():
    page = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
    messages = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(messages) > 10
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    # A message may be split over lines of source.
    joined = [re.sub(r'"\s+f?"', "", text) for text in sources]
    missing = [one for one in messages if not any(one in text for text in joined)]
    assert not missing

"""Builds the documents as a site: generated pages, resolved links, then the site generator.

    .venv/bin/python scripts/site/build.py            writes build/site

``docs/`` is copied to ``build/docs``, where the pages of the configuration, the commands and the
Python interface are added, and links that leave ``docs/`` are resolved. So the generator, named in
`COMMAND`, can be exchanged: mkdocs with its Material theme builds the same folder.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from api import PAGES, api_page
from commands import commands_page
from configuration import configuration_page

ROOT = Path(__file__).resolve().parents[2]
STAGED = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
COMMAND = (sys.executable, "-m", "zensical", "build", "--strict", "--clean")
COPIED = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Documents of the repository's root that the site has too."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def stage() -> None:
    """Write all pages of the site to `STAGED`."""
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGED)
    made = {"CONFIGURATION.md": configuration_page(), "CLI.md": commands_page()}
    made |= {f"api/{name}.md": api_page(name) for name in PAGES}
    made |= {name: (ROOT / name).read_text() for name in COPIED}
    for name, text in made.items():
        path = STAGED / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for path in STAGED.rglob("*.md"):
        name = path.relative_to(STAGED).as_posix()
        path.write_text(resolved(path.read_text(), name))


def resolved(markdown: str, name: str) -> str:
    """Rewrite a page's links from the repository's places to those of the site.

    A link to a document stays one; a link to a source file becomes its path in the repository.
    """
    here = posixpath.dirname(name)
    folder = "" if name in COPIED else posixpath.join("docs", here)

    def rewrite(match: re.Match[str]) -> str:
        mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/") or path in COPIED:
            inside = "design/README.md" if path == "docs/design" else path.removeprefix("docs/")
            return f"{mark}[{text}]({posixpath.relpath(inside, here or '.')}{anchor})"
        if path == "README.md":
            return f"[{text}]({posixpath.relpath('index.md', here or '.')})"
        if not (ROOT / path).exists():
            return match[0]  # The generator reports it.
        return text if f"`{path}`" == text else f"{text} (`{path}`)"

    return _LINK.sub(rewrite, markdown)


class _Links(HTMLParser):
    """Collects the targets and the identities of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.identities: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag refers to, and what it may be referred to by."""
        values = dict(attrs)
        if tag in ("script", "img", "link") and "canonical" not in (values.get("rel") or ""):
            self.loaded += [url for name in ("src", "href") if (url := values.get(name))]
        for name, value in attrs:
            if name in ("href", "src") and value and tag != "base":
                self.targets.append(value)
            if name in ("id", "name") and value:
                self.identities.add(value)


def broken_links(site: Path) -> list[str]:
    """Every link of the site to a page, file or heading that does not exist, and every file that is
    loaded from elsewhere."""
    pages: dict[Path, _Links] = {}
    for path in site.rglob("*.html"):
        pages[path] = _Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, found in pages.items():
        elsewhere = [url for url in found.loaded if urlsplit(url).netloc]
        broken += [f"{path.relative_to(site)}: loads {url}" for url in elsewhere]
        for target in found.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            aim = (
                path
                if not parts.path
                else Path(os.path.normpath(path.parent / unquote(parts.path)))
            )
            aim = aim / "index.html" if aim.is_dir() else aim
            missing = not aim.exists()
            anchor = unquote(parts.fragment)
            if not missing and anchor and aim in pages:
                missing = anchor not in pages[aim].identities and anchor != "__skip"
            if missing:
                broken.append(f"{path.relative_to(site)}: {target}")
    return broken


def build() -> None:
    """Build the site; raises `SystemExit` if the generator fails, or a link is broken."""
    stage()
    done = subprocess.run(  # noqa: S603 - our own words
        COMMAND, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-6000:] + done.stderr[-3000:])
    if broken := broken_links(SITE):
        raise SystemExit("broken links:\n" + "\n".join(broken))


def main() -> int:
    """Build, and say where the site is."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    build()
    sys.stdout.write(f"open {SITE / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

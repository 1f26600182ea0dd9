"""The doctor's findings about installed packages."""

import importlib.metadata
from types import SimpleNamespace

import pytest

from deltawire.launch.doctor import examine_packages, packages

NEEDS = [
    "msgspec<1,>=0.20",
    'aiohttp<4,>=3.12; extra == "serve"',
    'cryptography<51,>=43; extra == "sign"',
    'peft<1,>=0.17; extra == "lora"',
]


@pytest.fixture
def findings(monkeypatch):
    """Findings by name, for the installed ``versions``."""

    def examine(versions):
        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        metadata = SimpleNamespace(
            requires=lambda name: NEEDS,
            version=version,
            PackageNotFoundError=importlib.metadata.PackageNotFoundError,
        )
        monkeypatch.setattr(packages, "importlib", SimpleNamespace(metadata=metadata))
        return {one.name: one for one in examine_packages()}

    return examine


def test_complete_and_incomplete_extras(findings):
    found = findings({"msgspec": "0.22.0", "aiohttp": "3.14.5"})
    assert (found["deltawire"].status, found["[serve]"].status) == ("ok", "ok")
    assert found["[sign]"].status == "note"
    assert found["[sign]"].fix == "pip install 'deltawire[sign]'"


def test_versions_outside_of_the_tested_range(findings):
    found = findings({"msgspec": "1.3", "aiohttp": "4.0a1", "peft": "0.17.0+local"})
    assert found["deltawire"].status == "problem"
    assert "msgspec 1.3 (tested:" in found["deltawire"].found
    assert found["[serve]"].status == "note"
    assert found["[lora]"].status == "ok"


def test_an_extra_that_the_installed_metadata_lacks(findings):
    found = findings({"msgspec": "0.22.0"})
    assert "does not know" in found["[ray]"].found

"""A run of thousands of versions and a hundred thousand groups stays usable in the page."""

from __future__ import annotations

import pytest
from large_run import write_large_run
from watch_browser import Visit, chromium, served

pytestmark = [pytest.mark.drills, pytest.mark.long]

VERSIONS = 4_000
GROUPS = 25


def test_a_long_run_is_searched_and_browsed(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DELTAWIRE_DURABLE", "0")
    place = tmp_path / "run"
    write_large_run(place, tmp_path / "cache", versions=VERSIONS, groups=GROUPS)
    with chromium() as browser, served([place], tmp_path / "cache") as link:
        visit = Visit(browser, link)
        visit.until("#live", "live")
        visit.until(".range", "Every 5th of 4,00")
        visit.open("/run/0/rollouts")
        visit.until("#live", f"{VERSIONS * GROUPS:,} groups")
        visit.until(".count", "50 of more than 10,000 groups")
        visit.page.get_by_label("Search").fill("problem-00123")
        visit.until(".count", "6 of 6 groups")
        visit.page.get_by_label("Search").fill("no such problem")
        visit.until(".count", "No group matches")
        visit.open("/run/0/rollouts?cause=the+scorer+took+longer+than+5+s&order=oldest")
        visit.until(".count", f"{VERSIONS // 1000} of {VERSIONS // 1000} groups")
        visit.open("/run/0/weights")
        visit.page.locator(f"a[href='/run/0/weights/{VERSIONS}']").first.wait_for()
        visit.page.get_by_role("button", name="Show older versions").click()
        visit.page.locator(f"a[href='/run/0/weights/{VERSIONS - 60}']").first.wait_for()
        visit.sound()
        visit.context.close()

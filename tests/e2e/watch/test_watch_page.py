"""The page of ``deltawire watch`` in a headless Chromium: what is clicked, and what is read."""

from __future__ import annotations

import os

import pytest
from watch_browser import Visit, chromium, served
from watched_run import HOSTILE, write_run

VERSIONS = 24


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A browser, and the link to a page of one honest and one hostile run."""
    folder = tmp_path_factory.mktemp("runs")
    with chromium() as browser, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAWIRE_DURABLE", "0")
        write_run(folder / "honest", versions=VERSIONS)
        write_run(folder / "hostile", versions=6, hostile=True)
        with served([folder / "honest", folder / "hostile"], folder / "cache") as link:
            yield browser, link


def test_the_overview_says_what_status_says(page) -> None:
    visit = Visit(*page)
    assert "token" not in visit.page.url
    visit.until("#live", "live")
    text = visit.text()
    for words in (
        "worker-c is silent",
        f"{VERSIONS} of {VERSIONS + 20}",
        "Training reward",
        "Held-out accuracy",
        "arithmetic",
        "Timeline",
        "Fleet",
        "died: killed: no sign of life for 31 s",
    ):
        assert words in text, words
    assert visit.page.locator(".plot canvas").count() >= 6
    visit.page.locator("#fleet input").fill("worker-a")
    assert visit.page.locator("#fleet tbody tr").count() == 1
    visit.page.locator("#reward .plot").focus()
    visit.page.keyboard.press("End")
    assert f"version {VERSIONS}" in visit.text("#reward .at")
    visit.page.keyboard.press("ArrowLeft")
    assert f"version {VERSIONS - 1}" in visit.text("#reward .at")
    visit.sound()
    visit.context.close()


def test_a_group_is_found_and_read_token_by_token(page) -> None:
    visit = Visit(*page)
    visit.page.get_by_role("link", name="Rollouts").click()
    visit.wait()
    visit.until("#live", f"{4 * VERSIONS} groups")
    visit.page.get_by_label("Family").select_option("tools")
    visit.until(".count", f"{VERSIONS} of {VERSIONS} groups")
    assert "family=tools" in visit.page.url
    visit.page.locator("table.groups tbody a").first.click()
    visit.wait()
    assert visit.page.locator(".answer").count() == 2
    call = visit.page.locator("details.call").first
    assert "multiply" in call.inner_text()
    call.locator("summary").click()
    assert '"a": 12' in call.inner_text()
    visit.page.get_by_role("button", name="Tokens").click()
    visit.page.wait_for_selector(".token[aria-selected=true]")
    visit.page.locator(".tokens").first.focus()
    visit.page.keyboard.press("ArrowRight")
    assert "log-probability" in visit.text(".token-detail")
    visit.page.get_by_role("link", name="This task over versions").click()
    visit.wait()
    assert "Groups of this task" in visit.text()
    visit.page.go_back()
    visit.wait()
    assert visit.page.locator(".token-panel").count() == 2
    visit.sound()
    visit.context.close()


def test_hostile_names_and_texts_are_text(page) -> None:
    visit = Visit(*page, width=390)
    for path in ("overview", "rollouts", "weights", "group/worker-b/1?answers=0,1&tokens=1"):
        visit.open(f"/run/1/{path}")
        assert visit.page.evaluate("window.pwned") is None
        assert visit.page.locator("main img, main script").count() == 0
        assert "\u202e" not in visit.text("body")
        visit.sound()
    visit.open("/run/1/overview")
    assert HOSTILE[:40] in visit.text("#sets")
    visit.open("/compare")
    visit.sound()
    visit.context.close()


def test_a_page_without_the_token_shows_nothing_of_the_run(page) -> None:
    browser, link = page
    address = link.partition("/#")[0]
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(f"{address}/run/0/overview")
    tab.wait_for_selector(".notice.bad")
    assert "open the link that deltawire watch printed" in tab.inner_text("main")
    assert "watched" not in tab.inner_text("body")
    context.close()


def test_the_release_to_live_users_is_in_the_overview(page) -> None:
    browser, link = page
    visit = Visit(browser, link)
    with visit.page.expect_response("**/api/runs/0/overview") as box:
        visit.open("/run/0/overview")
    found = box.value.json()
    assert visit.page.locator("#release").count() == 0
    release = {
        "number": 7,
        "verdict": "canary",
        "serving": 12,
        "digest": "0" * 32,
        "candidate": 20,
        "share": 0.25,
        "waits_for": "",
        "restores": None,
        "at": 1.7e9,
        "by": "gateway-1",
        "reason": HOSTILE,
        "decisions": {"serve": 1, "canary": 6},
        "void": 1,
    }

    found["status"]["release"] = release
    visit.page.route("**/api/runs/0/overview", lambda route: route.fulfill(json=found))
    visit.open("/run/0/overview")
    card = visit.text("#release")
    for words in ("20 at 25 % of users", "canary", "by gateway-1", HOSTILE[:40], "1 void"):
        assert words in card, words
    if folder := os.environ.get("WATCH_PICTURES"):
        visit.page.locator("#release").screenshot(path=f"{folder}/release.png")
    figures = {"version": 20, "snips": 0.5, "snips_error": 0.04, "doubly_robust": 0.52}
    figures |= {"doubly_robust_error": 0.03, "live_candidate": None, "live_serving": None}
    release |= {"verdict": "shadow", "share": 0.0, "copies": 0.5, "figures": figures}
    visit.open("/run/0/overview")
    card = visit.text("#release")
    for words in (
        "20 on copies of 50 % of requests",
        "estimated before users saw it",
        "0.5 ± 0.04",
    ):
        assert words in card, words
    assert "as users showed it" not in card
    assert "hold-back" not in card
    release |= {"hold_back": 4, "hold_back_share": 0.05, "hold_back_difference": None}
    visit.open("/run/0/overview")
    card = visit.text("#release")
    assert "4 keeps 5 % of users" in card
    assert "against it" not in card
    release |= {"hold_back_difference": -0.02, "hold_back_low": -0.05, "hold_back_high": 0.01}
    visit.open("/run/0/overview")
    card = visit.text("#release")
    assert "the serving version is -0.02 against it (-0.05 to +0.01, 95 %)" in card
    release |= {"verdict": "rollback", "share": 0.0, "restores": 9, "hold_back": None}
    visit.open("/run/0/overview")
    assert "12 with the weights of version 9" in visit.text("#release")
    assert "% of users" not in visit.text("#release")
    assert visit.page.evaluate("window.pwned") is None
    visit.sound()
    visit.context.close()

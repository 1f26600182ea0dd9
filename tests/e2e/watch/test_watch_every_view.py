"""Every view of the page: both widths, both themes, printed, exported, and during a run."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from heartbeats import put_heartbeat
from watch_browser import Visit, chromium, served
from watched_run import CONFIG, write_run

from deltawire.events import Published, encode_lines
from deltawire.store import open_bucket
from deltawire.wire import keys

pytestmark = pytest.mark.drills

VERSIONS = 60
VIEWS = (
    "/run/0/overview",
    "/run/0/rollouts?family=logic",
    "/run/0/group/worker-a/9?answers=0,1,2,3&tokens=1",
    "/run/0/task?task=tools%2Fproblem-016",
    "/run/0/weights?measure=norm",
    "/run/0/weights/50",
    "/run/2/overview",
    "/compare",
)

UNNAMED = """() => [...document.querySelectorAll("button, input, select, canvas[role], .plot")]
  .filter((one) => one.offsetParent && !one.textContent.trim())
  .filter((one) => !one.getAttribute("aria-label") && !one.labels?.length)
  .map((one) => one.outerHTML)"""
"""Controls and pictures that have no name for a screen reader."""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A browser, the link to a page of two seeds and a hostile run, and the folder of the runs."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [folder / "seed-7", folder / "seed-8", folder / "hostile"]
    with chromium() as browser, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAWIRE_DURABLE", "0")
        write_run(runs[0], versions=VERSIONS)
        write_run(runs[1], versions=20, seed=8)
        loss = {"advantage": "given", "preference": {"kind": "dpo"}}
        pairs = CONFIG | {"train": CONFIG["train"] | {"loss": loss}}
        write_run(runs[2], versions=20, hostile=True, config=pairs)
        with served(runs, folder / "cache") as link:
            yield browser, link, folder


def test_only_a_run_that_trains_on_pairs_shows_their_curve(page) -> None:
    visit = Visit(*page[:2])
    for path, shown in (("/run/0/overview", False), ("/run/2/overview", True)):
        visit.open(path)
        assert visit.page.locator("#pairs").is_visible() is shown
    assert "highest" in visit.page.locator("#pairs .plot").get_attribute("aria-label")


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(390, False, id="narrow, light"),
        pytest.param(390, True, id="narrow, dark", marks=pytest.mark.long),
        pytest.param(1600, False, id="wide, light", marks=pytest.mark.long),
        pytest.param(1600, True, id="wide, dark"),
    ],
)
def test_every_view_is_sound(page, width: int, dark: bool) -> None:
    visit = Visit(*page[:2], width=width, dark=dark)
    for path in VIEWS:
        visit.open(path)
        assert visit.page.locator("main h1, main h2").count() >= 1
        assert visit.page.locator(".notice.bad:not(p)").count() == 0, path
        visit.sound()
        # Each control has a name that a screen reader says.
        unnamed = visit.page.evaluate(UNNAMED)
        assert unnamed == [], path
    visit.context.close()


def test_pages_print_without_controls(page) -> None:
    visit = Visit(*page[:2])
    for path in VIEWS:
        visit.open(path)
        visit.page.emulate_media(media="print")
        assert not visit.page.locator("nav").is_visible()
        assert visit.page.locator("main .card, main .answer").first.is_visible()
        assert len(visit.page.pdf()) > 5_000
        visit.page.emulate_media(media="screen")
    visit.context.close()


def download(visit: Visit, button) -> bytes:
    with visit.page.expect_download() as found:
        button.click()
    return Path(found.value.path()).read_bytes()


def test_exports(page) -> None:
    visit = Visit(*page[:2])
    card = visit.page.locator("#reward")
    rows = list(csv.reader(io.StringIO(download(visit, card.get_by_text("CSV")).decode())))
    assert rows[0] == ["version", "reward"]
    assert [int(row[0]) for row in rows[1:]] == [*range(1, VERSIONS + 1)]
    for name in ("#reward", "#timeline"):
        picture = download(visit, visit.page.locator(name).get_by_text("PNG"))
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5_000
    card.get_by_text("Table").click()
    assert visit.page.locator("#reward .data-table tbody tr").count() == VERSIONS
    visit.open("/run/0/rollouts")
    visit.until("#live", f"{4 * VERSIONS} groups")
    visit.page.get_by_label("Order").select_option("worst")
    visit.until(".count", "50 of")
    text = download(visit, visit.page.locator("#groups").get_by_text("CSV")).decode()
    rewards = [float(row["reward"]) for row in csv.DictReader(io.StringIO(text, newline=""))]
    assert len(rewards) == 4 * VERSIONS
    assert rewards == sorted(rewards)
    visit.open("/run/0/group/worker-a/9?answers=0&tokens=1")
    group = json.loads(download(visit, visit.page.get_by_text("JSON")))
    assert group["row"]["sequence"] == 9
    visit.sound()
    visit.context.close()


@pytest.mark.long  # On loaded cores the page sometimes misses the drag, for an unknown reason.
def test_filters_ranges_and_measures_are_in_the_url(page) -> None:
    visit = Visit(*page[:2])
    plot = visit.page.locator("#reward .plot .u-over").bounding_box()
    mouse = visit.page.mouse
    mouse.move(plot["x"] + plot["width"] * 0.25, plot["y"] + 50)
    mouse.down()
    mouse.move(plot["x"] + plot["width"] * 0.5, plot["y"] + 60, steps=4)
    mouse.up()
    visit.until(".range", "Versions")
    assert "from=" in visit.page.url
    visit.page.reload()
    visit.until(".range", "Versions")
    visit.page.get_by_role("button", name="Show all").click()
    visit.page.locator(".range").wait_for(state="hidden")
    visit.open("/run/0/weights/10")
    visit.page.get_by_role("button", name="Measure changes").click()
    visit.page.wait_for_selector("#tensors-norm")
    assert "%" in visit.text("#tensors tbody tr:nth-child(3)")
    visit.open("/run/0/weights")
    visit.page.get_by_label("Version that the reader holds").fill("")
    visit.page.get_by_label("Version that it wants").fill("30")
    visit.page.get_by_role("button", name="Find route").click()
    visit.until(".route", "anchor")
    visit.open("/run/0/rollouts?version_min=5&version_max=6")
    visit.until(".count", "8 of 8 groups")
    visit.page.get_by_label("Search").fill("no such task")
    visit.until(".count", "No group matches")
    visit.page.get_by_label("Newest version").fill("x")
    visit.until(".count.bad", "filter")
    visit.errors = [one for one in visit.errors if "400 (Bad Request)" not in one]
    visit.sound()
    visit.context.close()


def test_a_theme_is_chosen_and_kept(page) -> None:
    visit = Visit(*page[:2])
    color = "getComputedStyle(document.body).backgroundColor"
    light = visit.page.evaluate(color)
    button = visit.page.get_by_label("Color theme")
    button.click()
    button.click()
    dark = visit.page.evaluate(color)
    assert dark != light
    visit.page.reload()
    visit.wait()
    assert visit.page.evaluate(color) == dark
    visit.sound()
    visit.context.close()


def test_the_page_follows_a_run_that_goes_on(page) -> None:
    browser, link, folder = page
    visit = Visit(browser, link)
    visit.open("/run/1/overview")
    visit.until("#live", "live")
    bucket = open_bucket(str(folder / "seed-8"))
    published = Published(
        process="trainer",
        at=4e9,
        version=21,
        bytes_delta=123,
        bytes_full=1000,
        bytes_anchor=0,
        changed=1,
        elements=10,
        blocked_ms=1.0,
        encode_ms=1.0,
        upload_ms=1.0,
    )
    bucket.put(keys.events("trainer-2", 0), encode_lines([published]))
    put_heartbeat(bucket, "worker-late", at=4e9, version=21)
    visit.until("#fleet tbody", "worker-late")
    visit.until("#bytes .legend", "123 B")
    visit.sound()
    visit.context.close()

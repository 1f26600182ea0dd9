"""Two views that need runs of a special kind: several seeds, and recorded expert choices."""

from __future__ import annotations

import os

import pytest
from honest_groups import RoutedRun
from watch_browser import Visit, chromium, served
from watched_run import write_run

from deltawire.wire import keys
from deltawire.wire.rollouts import encode_group

pytestmark = [pytest.mark.drills, pytest.mark.long]

VERSIONS = 24
SHADED = """(id) => {
  const chart = document.querySelector(`#${id} canvas`);
  const found = chart.getContext("2d").getImageData(0, 0, chart.width, chart.height).data;
  let faint = 0;
  for (let at = 3; at < found.length; at += 4) if (found[at] > 36 && found[at] < 46) faint += 1;
  return faint / (found.length / 4);
}"""
"""The share of a chart that a band covers: its color has an opacity of 0.16."""


def picture(visit: Visit, name: str) -> None:
    """Keep a picture of the page, for a person to look at, where ``WATCH_PICTURES`` says."""
    if folder := os.environ.get("WATCH_PICTURES"):
        visit.page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def test_seeds_are_one_curve_with_a_band(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DELTAWIRE_DURABLE", "0")
    runs = [tmp_path / f"seed-{seed}" for seed in (7, 8, 9)]
    for number, place in enumerate(runs):
        write_run(place, versions=VERSIONS, seed=7 + number)
    with chromium() as browser, served(runs, tmp_path / "cache") as link:
        visit = Visit(browser, link)
        visit.until("#live", "live")
        visit.open("/compare")
        visit.until("#compare-reward .legend", "3 seeds")
        assert visit.page.locator(".families li").count() == 1
        assert visit.page.locator(".families li a").count() == 3
        assert visit.page.evaluate(SHADED, "compare-reward") > 0.02
        visit.page.locator("#compare-reward").get_by_text("Table").click()
        heads = visit.page.locator("#compare-reward .data-table th").all_inner_texts()
        assert [head.split(", ")[-1] for head in heads[1:3]] == ["highest", "lowest"]
        row = visit.page.locator("#compare-reward .data-table tbody tr").first
        version, high, low, mean = map(float, row.locator("td").all_inner_texts())
        assert version == VERSIONS
        assert low <= mean <= high
        assert low < high
        picture(visit, "seeds")
        visit.sound()
        visit.context.close()


def test_flipped_expert_choices_are_marked_token_by_token(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DELTAWIRE_DURABLE", "0")
    place = tmp_path / "run"
    routed = RoutedRun.with_routes(tmp_path / "model", place=str(place))
    group = routed.rerouted(routed.group(0), token=2)
    routed.bucket.put(keys.rollout("w0", 0), encode_group(group))
    with chromium() as browser, served([place], tmp_path / "cache") as link:
        visit = Visit(browser, link)
        visit.open("/run/0/group/w0/0?answers=0&tokens=1")
        visit.page.get_by_label("Color tokens by").select_option("flips")
        count = len(group.trajectories[0].tokens_T)
        visit.until(".token-panel", f"Flipped {200 / (4 * count):.2f} % of all choices")
        visit.page.locator(".token").nth(2).click()
        visit.until(".token-detail", "2 of 4 choices, in expert layer 1")
        colors = visit.page.evaluate(
            "[...document.querySelectorAll('.token')].map((one) => one.style.backgroundColor)"
        )
        assert [place for place, color in enumerate(colors) if color != "transparent"] == [2]
        visit.page.get_by_role("button", name="Show by layer").click()
        visit.page.wait_for_selector(".experts .tag.bad")
        assert visit.page.locator(".experts .tag.bad").count() == 1
        picture(visit, "experts")
        visit.sound()
        visit.context.close()

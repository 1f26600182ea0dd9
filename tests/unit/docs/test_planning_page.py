"""docs/PLANNING.md's figures of the example plans, derived from the plans."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from deltawire.plan.fleet.planner import make_plan
from deltawire.plan.fleet.rates import shipped_rates
from deltawire.plan.fleet.request import read_request

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "PLANNING.md").read_text(encoding="utf-8")
RATES = shipped_rates()


def planned(name, **changes):
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    changed = {key.replace("each", "regions.*"): value for key, value in changed.items()}
    request = read_request(ROOT / "examples" / "plans" / f"{name}.toml", changed)
    return make_plan(request, request.architecture(), RATES, changed=request.changed(RATES))


def items(plan):
    """Dollars of a day by item, over all regions."""
    found = Counter()
    for line in plan.costs:
        found[line.item] += line.dollars
    return found


def short(seconds):
    """Three digits, as the page has them: 16.3, 24.5, 27, 607."""
    return f"{float(f'{seconds:.3g}'):g}"


def rounded(number, digits):
    """A number with zeros for its last digits: 3,310, 6,400."""
    return f"{round(number, -digits):,.0f}"


def said(*texts):
    missing = [text for text in texts if text not in PAGE]
    assert not missing, "docs/PLANNING.md does not say what `deltawire plan` computes"


def test_four_regions():
    plan = planned("kimi-1t-four-regions")
    home, away, _, asia = plan.regions
    own = plan.dollars_a_day - sum(region.dollars_a_day for region in plan.regions)
    hops = {hop.hop: hop for hop in home.hops}
    relayed = {hop.hop: hop.seconds for hop in away.hops}
    methods, far = ({one.method: one for one in region.methods} for region in (home, away))
    whole, far_whole = methods["whole checkpoint"], far["whole checkpoint"]
    sparse, far_sparse = methods["sparse indices and codes"], far["sparse indices and codes"]
    published, far_published = methods["Fireworks"], far["Fireworks"]
    said(
        f"A version has {plan.delta_bytes / 1e9:.2f} GB of {plan.model_bytes / 1e9:,.0f}.",
        f"| to the last reader | {short(home.seconds)} s | {short(away.seconds)} s (asia, at half "
        f"the link: {asia.seconds:.0f}) |",
        f"256 readers × 256 blobs are {rounded(hops['get'].requests, 3)} GETs, "
        f"{256 * 256 / 5500:.0f} s at 5,500 a second",
        f"it waits {relayed['relay poll']:.1f} s for its poll and copies for "
        f"{relayed['relay copy']:.1f} s |",
        f"288 versions: deltas | {home.version_dollars_a_day:.1f} | "
        f"{away.version_dollars_a_day:.0f} |",
        f"| all, after 30 days | {home.dollars_a_day:.1f}, and {own:.0f} of the trainer's bucket "
        f"| {away.dollars_a_day:.0f} |",
        f"| a cold start of 256 readers, at least | {home.cold.seconds:.0f} s, "
        f"{home.cold.requests / 1e6:.1f} million requests | the same |",
        f"| whole checkpoints: time, dollars a day | {whole.seconds:.0f} s, "
        f"{whole.dollars_a_day:.0f} | {rounded(far_whole.seconds, 1)} s, "
        f"{rounded(far_whole.dollars_a_day, 2)} |",
        f"{sparse.bytes / 1e9:.1f} GB, at least {sparse.seconds:.0f} s | "
        f"{sparse.bytes / 1e9:.1f} GB, at least {far_sparse.seconds:.0f} s |",
        f"{published.bytes / 1e9:.1f} GB, at least {published.seconds:.0f} s | "
        f"{published.bytes / 1e9:.1f} GB, at least {far_published.seconds:.0f} s |",
    )


def test_four_regions_otherwise():
    plan = planned("kimi-1t-four-regions")
    direct = planned("kimi-1t-four-regions", each__relay="false")
    divided = planned("kimi-1t-four-regions", each__expert_parallel="1")
    said(
        f"the last reader has a version after {direct.seconds:.0f} s",
        f"deltas cost ${direct.version_dollars_a_day:.0f} a day instead of "
        f"${plan.version_dollars_a_day:.0f}.",
        f"a rank reads {divided.regions[0].reader_bytes / 1e9:.2f} GB of each version instead of "
        f"{plan.regions[0].reader_bytes / 1e6:.0f} MB, and the last reader has it after "
        f"{divided.seconds:.0f} s.",
    )


def test_a_hundred_accelerators():
    plan = planned("100-gpus-15s")
    (region,) = plan.regions
    gets = next(hop.requests for hop in region.hops if hop.hop == "get")
    by_cores = {
        cores: planned("100-gpus-15s", each__cores_per_host=str(cores)).seconds
        for cores in (64, 48, 96)
    }
    whole = plan.whole_dollars_a_day
    said(
        f"{plan.seconds:.1f} s, so the goal is met",
        f"| {region.reader_bytes / 1e6:.0f} MB for each: "
        f"{region.needed_bytes_s / 1e6:.0f} MB/s are",
        f"{rounded(gets, 2)} GETs, {100 * region.reads_share:.0f} % of one prefix's limit",
        f"64 take {by_cores[64]:.1f} s, 48 take {by_cores[48]:.1f}, 96 take {by_cores[96]:.1f}",
        f"| ${plan.version_dollars_a_day:.2f} a day for the deltas of 540 versions; whole "
        f"checkpoints ${whole:.0f}. With anchors and 30 days of them ${plan.dollars_a_day:.0f} |",
    )


def test_a_thousand_nodes():
    fleet = partial(planned, "kimi-1t-1000-nodes")
    plan, without = fleet(), fleet(each__blob_cache="false")
    wide = {"model__precision": '"bf16"', "model__changed": "0.01"}
    large, sized = fleet(**wide), fleet(**wide, each__blob_cache_gb="40")
    assert fleet(**wide, each__blob_cache="false").seconds == large.seconds
    divided = fleet(prices__s3__reads_per_s="22000")
    gets, alone = (
        next(hop.requests for hop in one.regions[0].hops if hop.hop == "get")
        for one in (plan, without)
    )
    named = {"relay": "relays", "deltas": "deltas", "trainer's polls": "the trainer's polls"}
    of_a_day = ", ".join(
        f"{named.get(item, item)} ${dollars:.0f}" for item, dollars in items(plan).most_common()
    )
    said(
        f"{rounded(alone, 3)} GETs",
        f"by {rounded(gets, 3)} GETs, and deltas cost ${plan.version_dollars_a_day:.0f} a day "
        f"instead of ${without.version_dollars_a_day:.0f}.",
        f"All of a day is ${plan.dollars_a_day:,.0f} after 30 days: {of_a_day}.",
        f"these have {2 * large.delta_bytes / 1e9:.0f} GB",
        f"({large.seconds:.0f} s, and ${large.version_dollars_a_day:.0f} for deltas)",
        f"halves both ({sized.seconds:.0f} s, ${sized.version_dollars_a_day:.0f})",
        f"the last reader has a version after {short(divided.seconds)} s, and then",
        f"| {short(plan.regions[0].seconds)} s; {plan.regions[1].seconds:.1f} to "
        f"{plan.regions[3].seconds:.1f} |",
        f"| {short(without.regions[0].seconds)} s; {without.regions[1].seconds:.0f} to "
        f"{without.regions[3].seconds:.0f} |",
    )


@pytest.mark.parametrize("name", ["100-gpus-15s", "kimi-1t-four-regions"])
def test_the_closed_forms_next_to_the_simulation(name):
    plan = planned(name)
    said(
        f"{plan.seconds:.1f} s; {plan.period_s:.0f} s; {plan.staleness_mean:.2f} |"
        if len(plan.regions) == 1
        else f"| mean staleness; largest, bound 4 | {plan.staleness_mean:.2f} |"
    )

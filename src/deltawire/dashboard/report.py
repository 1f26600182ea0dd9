"""Writes ``report.json`` for programs and ``report.html`` for people.

The page is one file without scripts and without references to other files. Names and settings come
from the bucket and from users, so each is escaped where it enters the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import fmean

import msgspec

from deltawire.builds import build_name
from deltawire.dashboard.figures import BY_NAME, text
from deltawire.dashboard.plots import ACTIVITIES, Charts, charts
from deltawire.dashboard.probes_card import probes_card
from deltawire.dashboard.readers import readers_card
from deltawire.dashboard.state import RunState
from deltawire.dashboard.summary import Summary, WorkerVerdict
from deltawire.dashboard.wording import (
    MISSING,
    byte_size,
    controller_words,
    duration,
    figure,
    forecast_words,
    percent,
    smaller,
)
from deltawire.display import legible, safe_json
from deltawire.rl.control.drop_bias import PolicyCost

_STYLE = Path(__file__).with_name("report.css")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
"""A page with ``title``, ``style`` and ``body``, which are HTML and CSS already."""


def write_report(summary: Summary, state: RunState, directory: Path) -> None:
    """Writes ``report.json`` and ``report.html`` into ``directory``, which is created if
    missing."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = msgspec.json.format(safe_json(summary), indent=2)
    (directory / "report.json").write_text(figures + "\n", encoding="utf-8")
    (directory / "report.html").write_text(page(summary, state), encoding="utf-8")


def page(summary: Summary, state: RunState) -> str:
    """Renders ``report.html``."""
    drawn = charts(state, summary.staleness.bound)
    probes = probes_card(summary.probes)
    flagged = summary.probes is not None and summary.probes.flagged > 0
    body = [
        _header(summary, state),
        _heads(summary),
        probes if flagged else "",
        *_chart_cards(drawn, summary, state),
        "" if flagged else probes,
        _workers(summary, state),
        readers_card(summary.readers),
        f'<div class="pair">{_figures(summary, state)}{_configuration(summary)}</div>',
        _footer(),
    ]
    return PAGE.format(
        title=f"{_safe(summary.name)} · deltawire",
        style=_STYLE.read_text(encoding="utf-8"),
        body="\n".join(body),
    )


def _safe(text: str, limit: int = 60) -> str:
    return escape(legible(text, limit))


def _footer() -> str:
    return (
        f"<footer>Written by deltawire {escape(build_name())}. "
        "The same figures are in report.json next to this file, for programs.</footer>"
    )


def _header(summary: Summary, state: RunState) -> str:
    facts = [f"{duration(summary.wall_s)} of wall time", f"seed {summary.seed}"]
    if state.published:
        ended = datetime.fromtimestamp(max(event.at for event in state.published.values()), UTC)
        facts.insert(0, f"trained until {ended.day} {ended:%B %Y, %H:%M} UTC")
    line = " · ".join(facts)
    return (
        '<header><p class="eyebrow">deltawire run report</p>'
        f'<h1>{_safe(summary.name)}</h1><p class="facts">{line[0].upper()}{line[1:]}</p></header>'
    )


def _heads(summary: Summary) -> str:
    """Renders the six most important figures."""
    heldout, size, stale = summary.heldout, summary.bytes, summary.staleness
    arrow = '<span class="arrow"> → </span>'
    within = stale.max is None or stale.max <= stale.bound
    most = MISSING if stale.max is None else stale.max
    identical = sum(worker.bit_identical is True for worker in summary.workers)
    audited = sum(worker.bit_identical is not None for worker in summary.workers)
    left = len(summary.workers) - audited
    audit = f"; {left} left before" if left else ", against the trainer's"
    pace = f"{figure(summary.steps_per_minute)} a minute"
    problems = f"{heldout.problems} problems" if heldout.problems else "not evaluated"
    accuracy = (
        "Held-out accuracy",
        f"{percent(heldout.first)}{arrow}{percent(heldout.last)}",
        f"first to last evaluated version, {problems}",
    )
    losses = summary.heldout_loss
    heads = [
        accuracy
        if losses is None
        else (
            "Held-out loss",
            f"{_nats(losses.first)}{arrow}{_nats(losses.last)}",
            f"nats a token, first to last measured version; perplexity {_nats(losses.perplexity)}",
        ),
        ("Versions", f"{summary.versions}", f"of {summary.target_versions} planned, {pace}"),
        (
            "Bytes a version",
            byte_size(size.delta_mean),
            f"{smaller(size.full, size.delta_mean)} than the full {byte_size(size.full)}",
        ),
        (
            "Staleness, at most",
            f"{most}{_mark(within)}",
            f"bound {stale.bound}, mean {figure(stale.mean)}",
        ),
        (
            "Trainer idle",
            percent(summary.idle.trainer),
            f"workers {percent(summary.idle.workers)}, between first and last step",
        ),
        (
            "Workers bit-identical",
            f"{identical} of {audited}{_mark(identical == audited if audited else None)}",
            f"serving weights at the end{audit}",
        ),
    ]
    cells = "".join(
        f'<div class="head"><dt>{label}</dt><dd><span class="value">{value}</span>'
        f'<span class="note">{note}</span></dd></div>'
        for label, value, note in heads
    )
    return f'<dl class="heads">{cells}</dl>'


def _nats(number: float | None) -> str:
    return MISSING if number is None else figure(number)


def _mark(good: bool | None) -> str:
    if good is None:
        return ""
    return ' <span class="good">✓</span>' if good else ' <span class="bad">✗</span>'


def _chart_cards(drawn: Charts, summary: Summary, state: RunState) -> list[str]:
    accuracy = _card(
        "Held-out accuracy",
        "On problems the training never sees, answers drawn as in training (pass@1), and the mean "
        "reward of the groups "
        "each version was trained on.",
        drawn.accuracy,
        _legend(("accent", "held-out accuracy"), ("second", "training reward"), stroke=True),
        wide=True,
    )
    losses = _card(
        "Held-out loss",
        "Mean cross-entropy on documents that are never trained on, in nats a token: over all of "
        "them, and by source.",
        drawn.losses,
        "",
        wide=True,
    )
    budgets = _card(
        "Accuracy over thinking budgets",
        "The share of held-out answers that are correct if the model may think this many tokens, "
        "at the first, the middle and the last measured version.",
        drawn.budgets,
        _legend(("accent", "last version"), ("second", "earlier versions"), stroke=True),
        wide=True,
    )
    staleness = _card(
        "Staleness",
        "How many versions older than the trainer the consumed groups were: smallest to largest "
        "of each step, and the mean.",
        drawn.staleness,
        _legend(("accent", "mean"), ("band", "smallest to largest"), ("alarm", "bound")),
    )
    anchored = any(event.bytes_anchor > 0 for event in state.deltas)
    anchors = [("second", "anchor")] if anchored else []
    size = _card(
        "Bytes a version",
        "Bytes stored for each version, on a log scale. From one version to the next, "
        f"{percent(summary.bytes.changed_mean, 2)} of the weights changed on average.",
        drawn.bytes,
        _legend(("accent", "delta"), *anchors, ("ink", "full model")),
    )
    seen = {span.activity for process in state.processes.values() for span in process.spans}
    timeline = _card(
        "Timeline of the processes",
        "Each row is a process. Where a row is split in height, several activities shared "
        "that moment in these proportions.",
        drawn.timeline,
        _legend(*((activity, activity) for activity in ACTIVITIES if activity in seen)),
        wide=True,
    )
    pair = f'<div class="pair">{staleness}{size}</div>' if staleness or size else ""
    pairs = _card(
        "Pairs",
        "Served answers with a better one, such as a user's edit, that each version was trained "
        "on, and the running mean.",
        drawn.pairs,
        _legend(("accent", "pairs"), stroke=True),
        wide=True,
    )
    return [losses, accuracy, budgets, pairs, pair, timeline]


def _card(title: str, caption: str, chart: str, legend: str, *, wide: bool = False) -> str:
    if not chart:
        return ""
    chart = chart.replace("<svg ", f'<svg aria-label="{title}" ', 1)
    return (
        f'<section class="card{" wide" if wide else ""}"><h2>{title}</h2><p>{caption}</p>{legend}'
        f'<div class="scroll">{chart}</div></section>'
    )


def _legend(*entries: tuple[str, str], stroke: bool = False) -> str:
    kind = ' class="stroke"' if stroke else ""
    items = "".join(
        f'<li><i{kind} style="background:var(--{color})"></i>{label}</li>'
        for color, label in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _workers(summary: Summary, state: RunState) -> str:
    if not summary.workers:
        return ""
    rows = "".join(_worker_row(worker, state) for worker in summary.workers)
    heads = (
        "<th>Worker</th><th>Joined</th><th>Weights at the end</th>"
        '<th class="number">Version</th><th class="number">Groups</th>'
        '<th class="number">Idle</th><th class="number">Restarts</th>'
    )
    return (
        '<section class="card"><h2>Workers</h2><div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _worker_row(worker: WorkerVerdict, state: RunState) -> str:
    process = state.processes.get(worker.id)
    verdict = {
        True: '<span class="good">✓</span> bit-identical',
        False: '<span class="bad">✗ differ</span>',
        None: '<span class="quiet">left before the audit</span>',
    }
    idle = state.idle([process]) if process else None
    figures = (
        MISSING if worker.version is None else str(worker.version),
        str(worker.groups),
        percent(idle),
        str(process.restarts) if process else MISSING,
    )
    return (
        f"<tr><td><code>{_safe(worker.id)}</code></td>"
        f"<td>{'supervised' if worker.supervised else 'by hand'}</td>"
        f"<td>{verdict[worker.bit_identical]}</td>"
        + "".join(f'<td class="number">{text}</td>' for text in figures)
        + "</tr>"
    )


REPORTED = (
    "steps_per_minute",
    "blocked_ms",
    "merge_kept",
    "served_share",
    "upload_ms",
    "swap_ms",
    "prepare_ms",
    "update_latency_ms",
    "update_latency_p95_ms",
    "update_latency_last_ms",
    "groups_per_s",
    "k3",
    "k3_max",
    "k3_same_version",
    "largest_gap",
    "entropy",
    "completion_length",
    "truncated",
    "reward_spread",
    "zero_advantage",
    "pairs_total",
    "heldout_reward",
    "bytes_total",
    "tokens_total",
    "restarts",
)
"""The figures of the report's table that stand there without further words."""


LAYERS = 8
"""The layers with the largest errors of packing that the report lists; report.json has all."""


def _figures(summary: Summary, state: RunState) -> str:
    heldout = f"{text('heldout_greedy_first', state)} → {text('heldout_greedy', state)}"
    reward = f"{text('reward_first', state)} → {text('reward_last', state)}"
    rows = [
        *((BY_NAME[name].help, text(name, state)) for name in REPORTED),
        *_parity(summary, state),
        ("Training reward, first to last tenth", reward),
        ("Held-out accuracy, greedy", heldout),
        *(
            (
                f"· {_safe(name)}: solved, greedy, mean reward",
                f"{percent(score.accuracy)}, {percent(score.greedy)}, {figure(score.reward)}",
            )
            for name, score in summary.heldout_sets.items()
        ),
        *_source_losses(summary),
        *_over_budgets(summary),
        *_forecast(state),
        *_decision(state),
        *(summary.allocation.rows() if summary.allocation else []),
        ("Groups consumed", f"{summary.groups_consumed:,}"),
        *_proof(summary),
        *_base(summary),
        *_restores(state),
        *_candidates(summary),
        (BY_NAME["groups_dropped_total"].help, f"{summary.groups_dropped:,}"),
        *_policy_cost(summary.policy_cost),
        *([("To continue", _safe(summary.continues, 400))] if summary.continues else []),
        *(("Warning", _safe(words, 400)) for words in summary.warnings),
    ]
    return f'<section class="card"><h2>Figures</h2>{_pairs(rows)}</section>'


def _source_losses(summary: Summary) -> list[tuple[str, str]]:
    """Renders rows on the held-out documents; none where none were measured."""
    losses = summary.heldout_loss
    if losses is None:
        return []
    rows = [
        (
            "Held-out loss, nats a token, and perplexity",
            f"{_nats(losses.first)} → {_nats(losses.last)}; {_nats(losses.perplexity)}",
        )
    ]
    return rows + [
        (
            f"· {_safe(name)}: loss, perplexity, tokens",
            f"{_nats(one.loss)}, {_nats(one.perplexity)}, {one.tokens:,}",
        )
        for name, one in losses.sources.items()
    ]


def _decision(state: RunState) -> list[tuple[str, str]]:
    """Renders the controller's newest decision; nothing without one."""
    found = state.newest_decision
    return [] if found is None else [("Controller", escape(controller_words(found)))]


def _forecast(state: RunState) -> list[tuple[str, str]]:
    """Renders the forecast by which the run may end; nothing without one."""
    found = state.newest_forecast
    return [] if found is None else [("Forecast", escape(forecast_words(found)))]


def _over_budgets(summary: Summary) -> list[tuple[str, str]]:
    """Renders rows on accuracy over thinking budgets; none where it was not measured."""
    if not summary.heldout_budgets:
        return []
    first, last = summary.heldout_area
    area = f"{percent(first)} → {percent(last)}"
    newest = summary.heldout_budgets[max(summary.heldout_budgets)]
    return [("Area under accuracy over thinking budgets", area)] + [
        (
            f"· {one.budget:,} tokens: solved, majority, tokens for an answer, closed by force",
            ", ".join(
                (
                    percent(one.accuracy),
                    percent(one.majority),
                    figure(one.tokens),
                    percent(one.forced),
                )
            ),
        )
        for one in newest
    ]


def _policy_cost(cost: PolicyCost) -> list[tuple[str, str]]:
    """Renders rows on dropped groups and the bias from dropping; none if nothing was dropped."""
    rows = [(f"· dropped: {_safe(cause)}", f"{count:,}") for cause, count in cost.dropped.items()]
    rows += [
        (f"· episodes failed: {_safe(cause)}", f"{count:,}")
        for cause, count in cost.episodes_failed.items()
    ]
    if cost.length_dropped is not None:
        rows += [
            ("· length trained, against all that finished", f"{cost.length_skew or 0:+.1%}"),
            ("· families shifted by dropping", percent(cost.family_distance)),
        ]
    return rows


def _parity(summary: Summary, state: RunState) -> list[tuple[str, str]]:
    """Renders rows on limits that the comparison of sampler and trainer crossed."""
    parity = summary.parity
    shown = [("parity_warnings", f"{parity.warnings}{_mark(not parity.warnings)}")]
    if parity.flipped_worst is not None:
        shown.append(("flipped_worst", text("flipped_worst", state)))
    if parity.masked:
        shown.append(("sequences_masked", text("sequences_masked", state)))
    rows = [(BY_NAME[name].help, words) for name, words in shown]
    if (precision := summary.precision) is not None:
        rows.append(("Precision of sampler and trainer", _safe(precision.words, 300)))
        rows.append(("· a batch warns above k3", f"{precision.warn_k3:g}"))
    if parity.stopped:
        rows.append(("Stopped at", escape("; ".join(parity.stopped)) + _mark(False)))
    return rows


def _proof(summary: Summary) -> list[tuple[str, str]]:
    """Renders rows on the audit, which read every manifest and every named group from the
    bucket."""
    proof = summary.proof
    if proof is None:
        return []
    within = proof.staleness_max <= summary.staleness.bound
    return [
        ("Read back from the bucket", f"{proof.groups:,} groups of {proof.versions} versions"),
        ("· largest staleness of any token", f"{proof.staleness_max}{_mark(within)}"),
        ("· consumed twice", f"{proof.repeated}{_mark(not proof.repeated)}"),
        ("· lost", f"{proof.lost}{_mark(not proof.lost)}"),
    ]


CANDIDATES = 8
"""The newest candidates that the report lists; report.json has all."""


def _candidates(summary: Summary) -> list[tuple[str, str]]:
    """Renders a row on each of the newest candidates for live users."""
    return [
        (f"Candidate version {one.version}, decision {one.number}", _safe(one.words, 300))
        for one in summary.candidates[-CANDIDATES:]
    ]


def _restores(state: RunState) -> list[tuple[str, str]]:
    """Renders rows on the versions that restore an earlier one after a rollback."""
    return [
        (f"Rollback {one.decision}, followed by the trainer", _safe(one.line, 300))
        for _, one in sorted(state.restored.items())
    ]


def _base(summary: Summary) -> list[tuple[str, str]]:
    """Render rows on the frozen base of an adapter run, and what packing changed in each layer."""
    base = summary.base
    if base is None:
        return []
    rows = [("Frozen base, the same in every process", f"<code>{_safe(base.digest)}</code>")]
    if base.packed != "none":
        rows.append(("· packed as", _safe(base.packed)))
    if base.native:
        rows.append(("· tensors that kept their codes", f"{base.native:,}, without loss"))
    if base.errors:
        mean = fmean(base.errors.values())
        rows.append(("· relative error of packed layers, mean", percent(mean)))
        worst = sorted(base.errors.items(), key=lambda one: -one[1])[:LAYERS]
        rows += [(f"· {_safe(name, 120)}", percent(error)) for name, error in worst]
    return rows


def _configuration(summary: Summary) -> str:
    if not summary.configuration:
        return ""
    digest = f"<code>{escape(summary.configuration_sha256[:16])}</code>"
    rows = [
        (_safe(key), f"<code>{_safe(value, 200)}</code>")
        for key, value in summary.configuration.items()
    ]
    rows += [
        (
            f"changed after version {one.version}: {_safe(one.key)}",
            f"<code>{_safe(one.old)} → {_safe(one.new)}</code>",
        )
        for one in summary.settings_changed
    ]
    rows.append(("digest", digest))
    listed = f'<div class="long" tabindex="0">{_pairs(rows)}</div>'
    return f'<section class="card"><h2>Configuration</h2>{listed}</section>'


def _pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Renders a table of labels and values that are HTML already."""
    cells = "".join(f"<tr><td>{label}</td><td>{value}</td></tr>" for label, value in rows)
    return f'<table class="pairs"><tbody>{cells}</tbody></table>'

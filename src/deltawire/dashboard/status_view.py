"""Renders a `RunStatus` in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deltawire.dashboard.builds import builds_words
from deltawire.dashboard.figures import BY_NAME
from deltawire.dashboard.readers import reader_table
from deltawire.dashboard.status import ProcessLine, RunStatus, Spread, builds_in
from deltawire.dashboard.wording import (
    MISSING,
    controller_words,
    duration,
    figure,
    forecast_words,
    percent,
    smaller,
)
from deltawire.display import legible
from deltawire.events import HeldoutScore
from deltawire.wire.status import Incident

MAX_ROWS = 40
_STYLES = {"alive": "green", "silent": "red", "stalled": "red", "ended": "dim", "unknown": "dim"}


def view(status: RunStatus) -> RenderableType:
    """Renders figures, processes, failures and problems."""
    title = Text.assemble(("deltawire ", "bold cyan"), (legible(status.name), "bold"))
    parts: list[RenderableType] = [
        Panel(
            _figures(status),
            title=title,
            title_align="left",
            subtitle=Text(legible(status.bucket, 60), "dim"),
            subtitle_align="right",
            border_style="bright_black",
            padding=(0, 1),
        ),
        _processes(status),
        *_builds(status),
    ]
    if status.readers:
        parts += [Text(), reader_table(status.readers)]
    if status.heldout_sources:
        parts += [Text(), _sources(status)]
    if status.heldout_sets:
        parts += [Text(), _sets(status.heldout_sets)]
    if status.heldout_budgets:
        parts += [Text(), _budgets(status)]
    if status.failures:
        parts += [Text(), _counts("failures", status.failures)]
    if status.gateways:
        counts = {
            name.replace("_", " "): f"{value:.3g}" if name.startswith("rate_") else f"{value:,.0f}"
            for name, value in sorted(status.gateways.items())
        }
        parts += [Text(), _counts("gateways", counts)]
    if status.release is not None:
        parts += [Text(f"release: {legible(status.release.words, 300)}", "dim")]
    if status.probes:
        probes = {name: percent(value) for name, value in status.probes.items()}
        parts += [Text(), _counts("probes", probes)]
    if status.incidents:
        parts += [Text(), _incidents(status.incidents)]
    if status.self_attested:
        words = "; ".join(legible(text, 300) for text in status.self_attested)
        parts += [Text(f"self-attested by workers: {words}", "dim")]
    parts += [Text(words, "dim") for words in _precisions(status)]
    parts += _expectations(status)
    if status.alarm:
        parts += [Text(f"alarm: {legible(status.alarm, 300)}", "red")]
    parts += [Text(f"problem: {legible(text, 300)}", "yellow") for text in status.problems]
    return Group(*parts)


def _precisions(status: RunStatus) -> Iterator[str]:
    """Says in which further precisions versions are published, and what the sampler serves."""
    if status.lines:
        held = ", ".join(
            f"{legible(name, 64)} {'none yet' if version is None else version}"
            for name, version in sorted(status.lines.items())
        )
        yield f"also published: {held}"
    if status.precision is not None and status.precision.differs:
        limit = f"parity warns above k3 {status.precision.warn_k3:g}"
        yield f"precision: {status.precision.words}; {limit}"


def _expectations(status: RunStatus) -> list[Text]:
    """The controller's newest decision and the newest forecast, each in one line."""
    lines = []
    if status.controlled is not None:
        lines.append(Text(f"controller: {controller_words(status.controlled)}", "dim"))
    if status.forecast is not None:
        lines.append(Text(f"forecast: {forecast_words(status.forecast)}", "dim"))
    return lines


def _figures(status: RunStatus) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    for width in (None, 2, None, 2):
        style = "dim" if width is None else ""
        grid.add_column(style=style, no_wrap=width is None, ratio=width)
    of = f" of {status.target}" if status.target is not None else ""
    version = MISSING if status.version is None else f"{status.version}{of}"
    pace = f"{_text('steps_per_minute', status)} a minute" if status.steps_per_minute else MISSING
    stale = status.staleness
    bound = f" of {stale.bound}" if stale.bound is not None else ""
    heldout = _text("heldout", status)
    if status.heldout_version is not None:
        heldout += f" at {status.heldout_version}"
    bad = status.phase.startswith("trainer ")
    in_flight = MISSING if status.groups_in_flight is None else status.groups_in_flight
    drawn, trained = _rate(status.tokens_generated_per_s), _rate(status.tokens_trained_per_s)
    ratio = smaller(status.bytes_full, status.bytes_per_version)
    rows: list[tuple[RenderableType, ...]] = [
        ("phase", Text(legible(status.phase), "bold red" if bad else "bold"), "steps", pace),
        ("version", Text(version, "bold"), "reward", _text("reward", status)),
        ("staleness", _spread(stale.total, bound), "held-out", heldout),
        ("  in flight", _spread(stale.in_flight), "k3", _k3(status)),
        ("  queued", _spread(stale.queued), "largest ratio", _text("ratio_max", status)),
        (
            "answers",
            f"{_text('completion_length', status)} tokens, {_text('truncated', status)} cut off",
            "reward spread",
            f"{_text('reward_spread', status)}, {_text('zero_advantage', status)} of groups equal",
        ),
        *_thinking(status),
        *_pairs(status),
        (
            "loss",
            f"{_text('loss', status)}, entropy {_text('entropy', status)}",
            "held-out reward",
            _text("heldout_reward", status),
        ),
        (
            "idle",
            f"trainer {percent(status.trainer_idle, 0)}, workers {percent(status.workers_idle, 0)}",
            "tokens",
            f"{drawn} drawn, {trained} trained",
        ),
        (
            "a version",
            f"{_text('bytes_per_version', status)}, {ratio}",
            "paused",
            f"{_text('blocked_ms', status)} a publish, {_text('swap_ms', status)} a swap",
        ),
        (
            "update latency",
            f"{_text('update_latency_ms', status)}, 95 % {_text('update_latency_p95_ms', status)}",
            "slowest worker",
            _text("update_latency_last_ms", status),
        ),
        (
            "groups",
            f"{status.groups_stored} stored, {in_flight} in flight, {_rate(status.groups_per_s)}",
            "over the last",
            _text("window_s", status),
        ),
    ]
    for row in (*rows, *_further_rows(status)):
        grid.add_row(*row)
    return grid


def _further_rows(status: RunStatus) -> Iterator[tuple[str, str, str, str]]:
    """Rows that only some runs have."""
    if status.sampled_tokens and not status.version:
        sampled = f"{status.sampled_episodes:,} episodes, {status.sampled_tokens:,} tokens so far"
        yield "sampled", sampled, "", ""
    for title, name in (("merge keeps", "merge_kept"), ("training served", "served_share")):
        if getattr(status, name) is not None:
            yield title, _text(name, status), "", ""
    if (allocated := status.allocation) is not None:
        saved = f"{allocated.saved_tokens:,} tokens, {percent(allocated.equal_share)} of them equal"
        yield "prompts", allocated.verdicts, "saved", saved
        yield "  completions", allocated.sizes, "", ""


def _text(name: str, status: RunStatus) -> str:
    """Writes a figure of the status by its unit."""
    return BY_NAME[name].text(attrgetter(name)(status))


def _spread(spread: Spread, bound: str = "") -> str:
    if spread.mean is None:
        return MISSING
    return f"mean {spread.mean:.2f}, max {spread.max}{bound}"


def _k3(status: RunStatus) -> str:
    if status.k3 is None:
        return MISSING
    return f"{_text('k3', status)} median, {_text('k3_max', status)} max"


def _rate(value: float | None) -> str:
    return MISSING if value is None else f"{figure(value)}/s"


def _processes(status: RunStatus) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim", pad_edge=True)
    table.add_column("process", no_wrap=True, ratio=4)
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True, ratio=4)
    for heading in ("version", "lag", "groups", "idle", "restarts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in status.processes[:MAX_ROWS]:
        table.add_row(*_row(line))
    if len(status.processes) > MAX_ROWS:
        table.add_row(Text(f"and {len(status.processes) - MAX_ROWS} more", "dim"))
    return table


def _builds(status: RunStatus) -> list[Text]:
    words = builds_words(builds_in(status.processes))
    return [Text(words, "dim")] if words else []


def _row(line: ProcessLine) -> list[Text]:
    words = line.state if line.state != "alive" else legible(line.doing) or "alive"
    cell = Text.assemble(("● ", _STYLES[line.state]), words)
    if line.state in ("silent", "stalled"):
        cell.stylize("red")
        cell.append(f" for {duration(line.age_s or 0.0)}" if line.state == "silent" else "")
    role = Text(line.role or MISSING)
    if not line.supervised:
        role.append(", by hand", "dim")
    return [
        Text(legible(line.name, 24), "dim" if line.state == "ended" else "bold"),
        role,
        cell,
        _number(line.version),
        _number(line.lag),
        _number(line.groups),
        Text(percent(line.idle, 0)),
        _number(line.restarts or None),
    ]


def _number(value: int | None) -> Text:
    return Text(MISSING if value is None else str(value), "dim" if value is None else "")


def _incidents(incidents: list[Incident]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    for heading in ("incidents", "worker", "", "the last one"):
        table.add_column(heading, no_wrap=heading != "the last one")
    for one in incidents[:MAX_ROWS]:
        table.add_row(
            Text(legible(one.kind, 32), "red" if one.quarantined else ""),
            Text(legible(one.worker, 24) + (" (quarantined)" if one.quarantined else "")),
            str(one.count),
            Text(legible(one.detail, 200), "dim"),
        )
    return table


def _sets(scores: dict[str, HeldoutScore]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    table.add_column("held-out set", no_wrap=True)
    for heading in ("solved", "greedy", "reward", "problems"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, score in list(scores.items())[:MAX_ROWS]:
        table.add_row(
            Text(legible(name)),
            percent(score.accuracy),
            percent(score.greedy),
            figure(score.reward),
            str(score.problems),
        )
    return table


def _budgets(status: RunStatus) -> Table:
    """Accuracy over thinking budgets at the newest version that was measured."""
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    table.add_column("thinking budget", no_wrap=True)
    for heading in ("solved", "pass@k", "majority", "tokens", "per correct", "forced"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in status.heldout_budgets[:MAX_ROWS]:
        most = list(one.pass_at.items())[-1:]
        table.add_row(
            f"{one.budget:,}",
            percent(one.accuracy),
            f"{percent(most[0][1])} of {most[0][0]}" if most else MISSING,
            percent(one.majority),
            figure(one.tokens),
            MISSING if one.tokens_per_correct is None else figure(one.tokens_per_correct),
            percent(one.forced),
        )
    if status.heldout_area is not None:
        table.add_row(Text("area under it", "dim"), _text("heldout_area", status))
    return table


def _sources(status: RunStatus) -> Table:
    """The held-out losses of the newest version that was measured."""
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    at = "" if status.heldout_loss_version is None else f" at version {status.heldout_loss_version}"
    table.add_column(f"held-out loss{at}", no_wrap=True)
    for heading in ("nats a token", "perplexity", "tokens", "documents"):
        table.add_column(heading, justify="right", no_wrap=True)
    sources = list(status.heldout_sources.items())
    for name, one in sources[:MAX_ROWS]:
        table.add_row(
            Text(legible(name)),
            MISSING if one.loss is None else figure(one.loss),
            MISSING if one.perplexity is None else figure(one.perplexity),
            f"{one.tokens:,}",
            f"{one.documents:,}",
        )
    if len(sources) > 1:
        tokens, documents = (
            sum(getattr(one, part) for _, one in sources) for part in ("tokens", "documents")
        )
        total = (_text("heldout_loss", status), _text("heldout_perplexity", status))
        table.add_row(Text("together", "dim"), *total, f"{tokens:,}", f"{documents:,}")
    return table


def _counts(title: str, counts: dict[str, int] | dict[str, str]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    table.add_column(title, no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for cause, count in list(counts.items())[:MAX_ROWS]:
        table.add_row(Text(legible(cause, 90)), str(count))
    return table


def _pairs(status: RunStatus) -> list[tuple[str, str, str, str]]:
    """A row on pairs of answers; none in a run that does not train on them."""
    if status.pairs_total is None:
        return []
    return [
        (
            "pairs",
            f"{figure(status.pairs)} in the newest step",
            "pairs trained on",
            figure(status.pairs_total),
        )
    ]


def _thinking(status: RunStatus) -> list[tuple[str, str, str, str]]:
    """A row on thinking and on reused tokens; none in a run without them."""
    if status.thinking_length is None and not status.reused_length:
        return []
    length, forced = figure(status.thinking_length), percent(status.forced_share, 0)
    thinking = MISSING if status.thinking_length is None else f"{length} tokens, {forced} forced"
    return [("thinking", thinking, "reused tokens", f"{figure(status.reused_length)} an answer")]

"""Renders a run in a terminal: the live view, one line of it, and the closing screen."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deltawire.dashboard.figures import text, value, whole
from deltawire.dashboard.probes import flags, summary_of_streams
from deltawire.dashboard.state import ProcessState, RunState
from deltawire.dashboard.summary import HeldoutLosses, Summary, WorkerVerdict
from deltawire.dashboard.wording import (
    MISSING,
    byte_size,
    duration,
    figure,
    milliseconds,
    percent,
    smaller,
    sparkline,
)
from deltawire.display import legible
from deltawire.events import Parity

MAX_ROWS = 14
MAX_FLAGS = 4
DEATH_SHOWN_S = 60.0
"""A death is shown for this long, in seconds: one that repeats stays on the screen."""
SILENT_AFTER_S = 20.0

_ROLES = ("trainer", "worker", "evaluator", "reference", "warm-start", "supervisor", None)
_COLORS = {
    "sample": "bright_blue",
    "train": "magenta",
    "publish": "yellow",
    "swap": "bright_yellow",
    "evaluate": "green",
    "checkpoint": "cyan",
    "start": "white",
    "wait": "bright_black",
    "stopped": "bright_black",
    "died": "red",
}


class Sparkline:
    """Draws a series in one line, as wide as its place."""

    def __init__(self, values: Sequence[float], style: str) -> None:
        self.values = values
        self.style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self.values, options.max_width), self.style, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), min(48, options.max_width))


class LiveView:
    """Draws a `RunState`, for `rich.live.Live` or line by line."""

    def __init__(
        self,
        target_versions: int,
        bound: int,
        bytes_full: int | None = None,
        *,
        name: str = "",
        warm_steps: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.target_versions = target_versions
        self.bound = bound
        self.bytes_full = bytes_full
        self.name = name
        self.warm_steps = warm_steps
        self.clock = clock

    def render(self, state: RunState) -> RenderableType:
        """Renders the whole screen."""
        body = [self._progress(state), Text(), self._figures(state)]
        title = Text.assemble(("deltawire ", "bold cyan"), (legible(self.name), "bold"))
        parts: list[RenderableType] = [
            Panel(
                Group(*body),
                title=title,
                title_align="left",
                subtitle=Text(self._elapsed(state), "dim"),
                subtitle_align="right",
                border_style="bright_black",
                padding=(1, 2),
            ),
            Padding(self._processes(state), (1, 1, 0, 1)),
        ]
        if state.probes is not None and state.probes.streams:
            shown = Padding(summary_of_streams(state.probes), (1, 2, 0, 2))
            # A terminal cuts the end of a long screen, so a flag comes first.
            parts.insert(1 if state.probes.flagged else 2, shown)
        parts += [Padding(Text(line, "red"), (0, 2)) for line in self._deaths(state)]
        return Group(*parts)

    def plain_line(self, state: RunState) -> str:
        """Renders one line without escapes, for a log or a pipe."""
        if not state.training:
            parts = [self._warm_words(state), *self._deaths(state)]
            return f"[{self._elapsed(state)}] " + "  ".join(parts)
        parts = [f"version {state.version or 0}/{self.target_versions}"]
        if state.evaluated:
            parts.append(f"held-out {text('heldout', state)} (from {text('heldout_first', state)})")
        if state.heldout_losses:
            first = text("heldout_loss_first", state)
            parts.append(f"held-out loss {text('heldout_loss', state)} (from {first})")
            parts.append(f"loss {text('loss', state)}")
        elif state.steps:
            parts.append(f"reward {text('reward', state)}")
        if (most := whole("staleness.total.max", state)) is not None:
            mean = text("staleness_newest", state)
            parts.append(f"staleness {mean} max {most} of {self.bound}")
        if (delta := value("bytes_newest", state)) is not None:
            ratio = smaller(self._full(state), delta)
            parts.append(f"{text('bytes_newest', state)} a version ({ratio})")
        if state.window is not None:
            trainer, workers = text("trainer_idle", state), text("workers_idle", state)
            parts.append(f"idle trainer {trainer}, workers {workers}")
        if state.probes is not None and (apart := flags(state.probes)):
            parts.append(f"rewards apart from probes: {', '.join(apart[:MAX_FLAGS])}")
        return f"[{self._elapsed(state)}] " + "  ".join([*parts, *self._deaths(state)])

    def _deaths(self, state: RunState) -> list[str]:
        """Says of each process that died in the last `DEATH_SHOWN_S` how often, and why."""
        lines = []
        for process in sorted(state.processes.values(), key=lambda one: one.name):
            deaths = [life for life in process.lives if life.what == "died"]
            if not deaths or self.clock() - deaths[-1].at > DEATH_SHOWN_S:
                continue
            times = f" {len(deaths)} times" if len(deaths) > 1 else ""
            lines.append(legible(f"{process.name} died{times}: {deaths[-1].detail}", 160))
        return lines

    def _elapsed(self, state: RunState) -> str:
        return duration(self.clock() - state.extent[0] if state.extent else 0.0)

    def _full(self, state: RunState) -> int | None:
        return state.bytes_full or self.bytes_full

    def _warm_words(self, state: RunState) -> str:
        if sampled := _sampled_words(state):
            return sampled
        if (warm := state.last_warm) is None:
            return "starting"
        of = f"/{self.warm_steps}" if self.warm_steps else ""
        measured = [step for step in sorted(state.warm) if state.warm[step].accuracy is not None]
        loss = "no number" if warm.loss is None else f"{warm.loss:.3f}"
        words = f"warm start {warm.step}{of}  loss {loss}"
        if measured:
            words += f"  accuracy {percent(state.warm[measured[-1]].accuracy)}"
        return words

    def _progress(self, state: RunState) -> RenderableType:
        line = Table.grid(expand=True, padding=(0, 2))
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        if not state.training:
            done = state.last_warm.step if state.last_warm else 0
            bar = ProgressBar(
                total=self.warm_steps or 1,
                completed=done if self.warm_steps else 0,
                pulse=not self.warm_steps,
                complete_style="magenta",
                finished_style="magenta",
            )
            line.add_row(Text(self._warm_words(state), "bold"), bar, Text(""))
            return line
        done = min(state.version or 0, self.target_versions)
        bar = ProgressBar(
            total=max(1, self.target_versions),
            completed=done,
            complete_style="cyan",
            finished_style="green",
        )
        pace = value("steps_per_minute", state)
        words = ""
        if pace:
            left_s = 60 * (self.target_versions - done) / pace
            words = f"{figure(pace)} a minute" + (f" · {duration(left_s)} left" if left_s else "")
        of = Text.assemble((f"version {done}", "bold"), (f" of {self.target_versions}", "dim"))
        line.add_row(of, bar, Text(words, "dim"))
        return line

    def _figures(self, state: RunState) -> RenderableType:
        grid = Table.grid(expand=True, padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True, min_width=9)
        grid.add_column(no_wrap=True, ratio=5)
        grid.add_column(no_wrap=True, ratio=4)
        rewards = [reward for _, reward in state.reward_curve]
        grid.add_row(*_heldout_row(state))
        grid.add_row(
            "training reward",
            Text(text("reward", state), "bold"),
            Text(f"from {text('reward_first', state)}" if len(rewards) > 1 else "", "dim"),
            Sparkline(rewards, "magenta"),
        )
        delta, full = value("bytes_newest", state), self._full(state)
        grid.add_row(
            "bytes a version",
            Text(text("bytes_newest", state), "bold cyan"),
            Text.assemble((f"full model {byte_size(full)}", "dim")),
            Text(smaller(full, delta) if delta else "", "bold cyan"),
        )
        most = whole("staleness.total.max", state)
        within = most is None or most <= self.bound
        grid.add_row(
            "staleness",
            Text(text("staleness_newest", state), "bold"),
            Text(
                f"max {most} of {self.bound} allowed" if most is not None else "",
                "dim" if within else "bold red",
            ),
            self._histogram(state),
        )
        if (parity := state.last_parity) is not None:
            grid.add_row("parity", *_parity_columns(parity))
        return grid

    def _histogram(self, state: RunState) -> Text:
        """Draws how often each staleness occurred, from 0 to the bound."""
        counts = state.staleness
        if not counts:
            return Text()
        most = min(max(*counts, self.bound), 1000)
        heights = [counts[value] for value in range(most + 1)]
        return Text.assemble(
            ("0 ", "dim"), (sparkline(heights, 24, floor=0), "cyan"), (f" {most}", "dim")
        )

    def _lag_style(self, process: ProcessState, lag: int | None) -> str:
        """Colors a worker's lag above the bound; an evaluator may lag."""
        if not lag:
            return "dim"
        return "yellow" if process.role == "worker" and lag > self.bound else ""

    def _processes(self, state: RunState) -> RenderableType:
        table = Table(box=None, expand=True, padding=(0, 1), header_style="dim", pad_edge=True)
        table.add_column("process", no_wrap=True, ratio=5)
        table.add_column("role", no_wrap=True, min_width=15)
        table.add_column("doing", no_wrap=True, ratio=4)
        for heading in ("version", "lag", "groups", "idle"):
            table.add_column(heading, justify="right", no_wrap=True, min_width=6)
        shown = sorted(
            filter(lambda one: _worth_a_row(one, state), state.processes.values()), key=_rank
        )
        for process in shown[:MAX_ROWS]:
            table.add_row(*self._row(process, state))
        if len(shown) > MAX_ROWS:
            table.add_row(Text(f"and {len(shown) - MAX_ROWS} more", "dim"))
        return table

    def _row(self, process: ProcessState, state: RunState) -> list[Text]:
        trainer = process.role == "trainer"
        version = state.version if trainer else process.version
        lag = None if trainer or process.gone else state.lag(process)
        style = "dim" if process.gone else ""
        doing = process.doing
        cell = Text.assemble(("● ", _COLORS.get(doing, "bright_black")), legible(doing) or MISSING)
        silent_s = self.clock() - process.heard_at
        if not process.gone and silent_s > SILENT_AFTER_S:
            cell.append(f"  {duration(silent_s)} ago", "yellow")
        role = Text(process.role or MISSING)
        if not process.supervised:
            role.append(", by hand", "dim")
        return [
            Text(legible(process.name, 24), style or "bold"),
            role,
            cell,
            _number(version),
            Text(MISSING if lag is None else str(lag), self._lag_style(process, lag)),
            _number(process.groups or None),
            Text(percent(state.idle([process]), 0), style),
        ]


def screen(summary: Summary, *, report: str) -> RenderableType:
    """Renders the closing screen; ``report`` is the path of report.html."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for label, cell in _closing_rows(summary):
        grid.add_row(Text(label), cell)
    title = Text.assemble(("deltawire ", "bold cyan"), (legible(summary.name), "bold"))
    return Group(
        Panel(grid, title=title, title_align="left", border_style="bright_black", padding=(1, 2)),
        Text.assemble(("  report  ", "dim"), (legible(report, 400), "bold"), overflow="fold"),
    )


def _closing_rows(summary: Summary) -> list[tuple[str, RenderableType]]:
    heldout, size, stale = summary.heldout, summary.bytes, summary.staleness
    within = stale.max is None or stale.max <= stale.bound
    pace = f" · {figure(summary.steps_per_minute)} a minute" if summary.steps_per_minute else ""
    swap = milliseconds(summary.swap_ms)
    rows: list[tuple[str, RenderableType]] = [
        _closing_losses(summary.heldout_loss)
        if summary.heldout_loss
        else (
            "held-out accuracy",
            Text.assemble(
                percent(heldout.first),
                (" → ", "dim"),
                (percent(heldout.last), "bold green"),
                (
                    f"   pass@1 on {heldout.problems} problems; greedy "
                    f"{percent(heldout.greedy_first, 0)} → {percent(heldout.greedy_last, 0)}"
                    if heldout.problems
                    else "",
                    "dim",
                ),
            ),
        ),
        (
            "versions",
            Text.assemble(
                (f"{summary.versions}", "bold"),
                (f" of {summary.target_versions} in {duration(summary.wall_s)}{pace}", "dim"),
            ),
        ),
        (
            "bytes a version",
            Text.assemble(
                (byte_size(size.delta_mean), "bold cyan"),
                (f" against {byte_size(size.full)} whole · ", "dim"),
                (smaller(size.full, size.delta_mean), "bold cyan"),
            ),
        ),
        (
            "staleness",
            Text.assemble(
                (f"max {MISSING if stale.max is None else stale.max} of {stale.bound} ", "bold"),
                _mark(within),
                (f"   mean {figure(stale.mean)}", "dim"),
            ),
        ),
        *_proof_rows(summary),
        *_probe_rows(summary),
        (
            "idle",
            Text.assemble(
                (f"trainer {percent(summary.idle.trainer)}", "bold"),
                ("  ", ""),
                (f"workers {percent(summary.idle.workers)}", "bold"),
            ),
        ),
        (
            "paused",
            Text.assemble(
                f"trainer {milliseconds(summary.trainer_blocked_ms)} a publish",
                ("  ", ""),
                f"worker {swap} a swap",
            ),
        ),
    ]
    return [
        *rows, _latency_row(summary), *_verdict_rows(summary.workers), *_remark_rows(summary),
    ]  # fmt: skip


def _remark_rows(summary: Summary) -> list[tuple[str, RenderableType]]:
    """Rows of text about the run: how it is continued, if that is not obvious, and warnings."""
    continues = [("to continue", summary.continues, "dim")] if summary.continues else []
    warnings = [("warning", words, "yellow") for words in summary.warnings]
    return [
        (title, Text(legible(words, 400), style)) for title, words, style in (*continues, *warnings)
    ]


def _sampled_words(state: RunState) -> str:
    """Says what the workers have sampled before the first step; empty before they begin."""
    workers = [one for one in state.processes.values() if one.role == "worker"]
    groups = [group for one in workers for group in one.generated.values()]
    if groups:
        tokens = sum(group.tokens for group in groups)
        return f"sampling for the first step: {len(groups):,} groups, {tokens:,} tokens stored"
    begun = any(one.last_span and one.last_span.activity == "sample" for one in workers)
    return "sampling the first groups" if begun else ""


def _latency_row(summary: Summary) -> tuple[str, RenderableType]:
    return (
        "update latency",
        Text.assemble(
            f"{milliseconds(summary.update_latency_ms)} from a step to a worker",
            (f"   95 % within {milliseconds(summary.update_latency_p95_ms)}", "dim"),
            (f" · {figure(summary.groups_per_s)} tasks a second", "dim"),
        ),
    )


def _closing_losses(losses: HeldoutLosses) -> tuple[str, RenderableType]:
    first, last, perplexity = (
        MISSING if number is None else figure(number)
        for number in (losses.first, losses.last, losses.perplexity)
    )
    tokens = sum(one.tokens for one in losses.sources.values())
    words = f"   nats a token on {tokens:,} tokens; perplexity {perplexity}"
    return (
        "held-out loss",
        Text.assemble(first, (" → ", "dim"), (last, "bold green"), (words, "dim")),
    )


def _proof_rows(summary: Summary) -> list[tuple[str, RenderableType]]:
    proof = summary.proof
    if proof is None:
        return []
    sound = not proof.repeated and not proof.lost
    found = (
        f"{proof.groups} groups read back from the bucket: {proof.repeated} consumed twice, "
        f"{proof.lost} lost "
    )
    return [("consumed", Text.assemble((found, "dim"), _mark(sound)))]


def _probe_rows(summary: Summary) -> list[tuple[str, RenderableType]]:
    probes = summary.probes
    if probes is None:
        return []
    if not probes.flagged:
        found = f"rewards came apart from none, in {len(probes.streams)} pairs of family and probe "
        return [("probes", Text.assemble((found, "dim"), _mark(True)))]
    shown = ", ".join(flags(probes)[:MAX_FLAGS])
    rest = probes.flagged - MAX_FLAGS
    more = f" and {rest} more" if rest > 0 else ""
    cell = Text.assemble((f"rewards came apart: {shown}{more} ", "bold red"), _mark(False))
    return [("probes", cell)]


def _verdict_rows(workers: Sequence[WorkerVerdict]) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = [("", Text())] if workers else []
    for worker in workers[:MAX_ROWS]:
        verdict = {True: "bit-identical", False: "differs", None: "not audited"}
        by_hand = "" if worker.supervised else ", joined by hand"
        held = MISSING if worker.version is None else worker.version
        cell = Text.assemble(
            _mark(worker.bit_identical),
            f" {verdict[worker.bit_identical]}",
            (f" at version {held} · {worker.groups} groups{by_hand}", "dim"),
        )
        rows.append((legible(worker.id, 24), cell))
    if len(workers) > MAX_ROWS:
        rows.append(("", Text(f"and {len(workers) - MAX_ROWS} more", "dim")))
    return rows


def _mark(good: bool | None) -> tuple[str, str]:
    if good is None:
        return (MISSING, "dim")
    return ("✓", "bold green") if good else ("✗", "bold red")


def _number(value: int | None) -> Text:
    return Text(MISSING if value is None else str(value), "dim" if value is None else "")


def _heldout_row(state: RunState) -> tuple[RenderableType, ...]:
    """Renders held-out accuracy, or the loss on held-out documents where that is measured."""
    losses = state.heldout_loss_curve
    name, curve = ("heldout_loss", losses) if losses else ("heldout", state.accuracy_curve)
    first = f"from {text(f'{name}_first', state)} at {curve[0][0]}" if len(curve) > 1 else ""
    return (
        "held-out loss" if losses else "held-out accuracy",
        Text(text(name, state), "bold green"),
        Text(first, "dim"),
        Sparkline([value_ for _, value_ in curve], "green"),
    )


def _parity_columns(parity: Parity) -> tuple[Text, Text, Text]:
    """Renders the newest batch's k3, its meaning, and the action taken."""
    crossed = parity.stopped or parity.warnings
    shown = parity.numeric if parity.numeric.tokens else parity.drift
    what = "k3, the same version" if parity.numeric.tokens else "k3, older versions' tokens"
    done = "; ".join(crossed) if crossed else "within limits"
    if parity.masked:
        done += f"; {parity.sequences_masked} masked"
    return (
        Text(figure(shown.k3), "bold red" if crossed else "bold"),
        Text(what, "dim"),
        Text(legible(done, 60), "red" if crossed else "dim"),
    )


def _worth_a_row(process: ProcessState, state: RunState) -> bool:
    """Returns whether to show a process: not a supervisor, nor a warm start once training runs."""
    return process.role != "supervisor" and not (process.role == "warm-start" and state.training)


def _rank(process: ProcessState) -> tuple[int, list[tuple[int, str]]]:
    """Returns a sort key: by role, then by name, with ``worker-10`` after ``worker-9``."""
    parts = re.split(r"(\d{1,18})", process.name[:100])
    natural = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
    return _ROLES.index(process.role), natural

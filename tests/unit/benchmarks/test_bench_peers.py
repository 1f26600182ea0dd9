"""The frame of ``deltawire bench peers``: one job for both, and a table that shows lost rows."""

import sys
import tomllib

import pytest
from rich.console import Console

from benchmarks.peers.grpo import job
from benchmarks.peers.grpo.memory import descendants, run_and_watch
from benchmarks.reports import peers as report
from benchmarks.reports.peers import table
from deltawire.cli.main import build_parser
from deltawire.config import load_config, parse_config


def figures(system, **changed):
    """Figures of a job of two steps."""
    whole = {
        "system": system,
        "seed": 0,
        "steps": 2,
        "seconds": 4.0,
        "whole_seconds": 9.0,
        "tokens": 100.0,
        "tokens_per_second": 25.0,
        "seconds_to_target": 3.0,
        "accuracies": {0: 0.1, 2: 0.4},
        "peak_bytes": 1_000_000,
        "lines": 10,
    }
    return job.JobFigures(**{**whole, **changed})


def test_the_job_of_a_run_begins_from_the_given_model(tmp_path):
    (tmp_path / "seed-3" / "start").mkdir(parents=True)
    start = job.Start(tmp_path, seed=3)
    config = parse_config(tomllib.loads(job._configuration(start, 7)), source="job")
    assert (config.train.versions, config.seed) == (7, 3)
    assert config.model.path == str((tmp_path / "seed-3" / "start").resolve())
    assert config.warm_start.max_steps == 0
    assert config.train.groups_per_step == load_config(job.JOB).train.groups_per_step


def test_both_jobs_have_the_same_settings():
    config, script = load_config(job.JOB), job.SCRIPT.read_text()
    assert f"GROUP, GROUPS = {config.rollout.group_size}, {config.train.groups_per_step}" in script
    assert f"max_completion_length={config.rollout.max_tokens}" in script
    assert (
        f"learning_rate={config.train.optimizer.learning_rate:.0e}".replace("e-0", "e-") in script
    )
    low, high = config.train.loss.clip_bounds
    assert f"epsilon={low}" in script
    assert f"epsilon_high={high}" in script
    assert f"warmup_steps={config.train.schedule.warmup_steps}" in script
    assert f"adam_beta2={config.train.optimizer.beta2}" in script


def test_tasks_are_never_those_that_are_held_out(tmp_path):
    (tmp_path / "seed-0" / "start").mkdir(parents=True)
    start = job.Start(tmp_path, seed=0)
    lines = start.write_tasks(40).read_text().splitlines()
    held = {task.data["question"] for task in start.source.heldout()}
    assert len(lines) == 40
    assert not [line for line in lines for question in held if question in line]


def test_lines_are_those_between_the_marks():
    assert 20 < job.lines_of(job.THEIRS) < 70
    assert 15 < job.lines_of(job.OURS) < 40


def test_a_lost_row_says_so():
    shown = Console(width=120, record=True)
    slower = figures(job.OURS, tokens_per_second=10.0, seconds_to_target=None)
    shown.print(table([slower, figures(job.THEIRS)], 0.3))
    text = shown.export_text()
    assert text.count("trl (we lose)") == 1
    assert "not reached" in text
    assert text.count("equal") == 4


def test_memory_of_children_counts(tmp_path):
    grow = "import time; block = bytearray(b'x' * 80_000_000); time.sleep(2)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grow!r}], check=True)"
    command = [sys.executable, "-c", code]
    assert run_and_watch(command, log=tmp_path / "log", env={}) > 80_000_000
    assert len(descendants(1)) >= 1


def test_the_command_takes_its_options():
    arguments = build_parser().parse_args(["bench", "peers", "--steps", "40", "--json"])
    assert (arguments.benchmark, arguments.steps, arguments.target) == ("peers", 40, 0.3)


def test_a_failed_command_is_an_error(tmp_path):
    import subprocess

    with pytest.raises(subprocess.CalledProcessError):
        run_and_watch([sys.executable, "-c", "raise SystemExit(3)"], log=tmp_path / "log", env={})


def test_an_interrupted_bench_measures_only_what_is_missing(tmp_path, monkeypatch):
    ran = []

    def one(system):
        def run(start, *, steps, save, target):
            assert (steps, save, target) in ((100, 20, 0.3), (40, 20, 0.3))
            ran.append((start.seed, system))
            return job.JobFigures(
                system=system, seed=start.seed, steps=steps, seconds=1.0, whole_seconds=2.0,
                tokens=3.0, tokens_per_second=3.0, seconds_to_target=None, accuracies={20: 0.5},
                peak_bytes=4, lines=5,
            )  # fmt: skip

        return run

    class Folder:
        def __init__(self, folder, *, seed):
            self.folder, self.seed = folder / f"seed-{seed}", seed
            self.folder.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(report, "Start", Folder)
    monkeypatch.setattr(report, "run_ours", one("deltawire"))
    monkeypatch.setattr(report, "run_theirs", one("trl"))
    options = {"steps": 100, "save": 20, "target": 0.3}
    first = report.measured(tmp_path, 0, "deltawire", options)
    assert report.measured(tmp_path, 0, "deltawire", options) == first
    report.measured(tmp_path, 0, "trl", options)
    report.measured(tmp_path, 1, "trl", options)
    assert ran == [(0, "deltawire"), (0, "trl"), (1, "trl")]
    report.measured(tmp_path, 0, "deltawire", {**options, "steps": 40})
    assert ran[-1] == (0, "deltawire")
    assert len(ran) == 4

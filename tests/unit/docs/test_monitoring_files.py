"""The files of examples/monitoring: each alert has an entry in the runbook, uses metrics that are
exported, fires on its fault and is silent without it; Prometheus accepts them."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from documents import ROOT

MONITORING = ROOT / "examples" / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
METRICS = set(re.findall(r"`(deltawire_\w+)`", (ROOT / "docs" / "WATCHING.md").read_text()))
BOARD = json.loads((MONITORING / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
RUN = 'job="j", instance="i"'
PROCESS = f'{RUN}, process="w0", role="worker"'
READER = f'{RUN}, reader="relay-7", kind="relay", host="h"'
HEALTHY = {
    f"deltawire_up{{{RUN}}}": "1",
    f'deltawire_run_info{{{RUN}, phase="training"}}': "1",
    f"deltawire_version{{{RUN}}}": "0+1x",
    f"deltawire_staleness_bound{{{RUN}}}": "4",
    f"deltawire_process_alive{{{PROCESS}}}": "1",
    f"deltawire_process_ended{{{PROCESS}}}": "0",
    f"deltawire_process_restarts{{{PROCESS}}}": "1",
    f"deltawire_process_lag_versions{{{PROCESS}}}": "2",
    f"deltawire_reader_late_seconds{{{READER}}}": "20",
    f"deltawire_reader_age_seconds{{{READER}}}": "40",
    f"deltawire_store_requests_total{{{PROCESS}}}": "0+100x",
    f"deltawire_store_refused_total{{{PROCESS}}}": "0+1x",
    f'deltawire_idle_share{{{RUN}, role="trainer"}}': "0.2",
    f'deltawire_update_latency_seconds{{{RUN}, statistic="last"}}': "40",
    f"deltawire_problems{{{RUN}}}": "0",
    f'deltawire_incidents{{{RUN}, worker="w0", kind="not granted"}}': "0",
    f'deltawire_k3_nats{{{RUN}, statistic="median"}}': "0.001",
    f"deltawire_zero_advantage_share{{{RUN}}}": "0.3",
}
FAULTS = {
    "DeltawireUnreadable": ("deltawire_up", "0"),
    "DeltawireNoNewVersion": ("deltawire_version", "7"),
    "DeltawireProcessSilent": ("deltawire_process_alive", "0"),
    "DeltawireProcessRestarts": ("deltawire_process_restarts", "4"),
    "DeltawireWorkerLags": ("deltawire_process_lag_versions", "5"),
    "DeltawireReaderLate": ("deltawire_reader_late_seconds", "700"),
    "DeltawireReaderSilent": ("deltawire_reader_age_seconds", "400"),
    "DeltawireStoreRefuses": ("deltawire_store_refused_total", "0+10x"),
    "DeltawireTrainerWaits": ("deltawire_idle_share", "0.6"),
    "DeltawireUpdateLate": ("deltawire_update_latency_seconds", "700"),
    "DeltawireObjectsUnreadable": ("deltawire_problems", "1"),
    "DeltawireIncidents": ("deltawire_incidents", "1"),
    "DeltawireDivergence": ("deltawire_k3_nats", "0.2"),
    "DeltawireRewardsEqual": ("deltawire_zero_advantage_share", "0.95"),
}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool, of the package prometheus, is not installed"
)


def test_each_alert_has_an_entry_in_the_runbook():
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in RULES]
    assert set(headings) == set(FAULTS)
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/RUNBOOK.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_alerts_and_board_use_metrics_that_are_exported():
    asked = [rule["expr"] for rule in RULES]
    for text in (*asked, *QUERIES):
        names = set(re.findall(r"deltawire_\w+", text))
        assert names, text
        assert names <= METRICS, text


def test_the_panels_of_the_board_do_not_cover_each_other():
    squares = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, "Grafana's columns"
        covered = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not squares & covered, panel["title"]
        squares |= covered
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert [one["name"] for one in BOARD["templating"]["list"]] == ["source", "run"]


def series_of(fault):
    """The series of a healthy run, one of them with a fault."""
    metric, value = FAULTS.get(fault, ("", ""))
    for series, usual in HEALTHY.items():
        shown = value if series.startswith(f"{metric}{{") else usual
        steps = "x200" if "+" not in shown else "200"
        yield {"series": series, "values": f"{shown}{steps}"}


@needs_promtool
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_each_alert_fires_on_its_fault_only(fault, tmp_path):
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    cases = {
        "rule_files": ["alerts.yml"],
        "tests": [
            {
                "interval": "1m",
                "input_series": list(series_of(fault)),
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "3h",
                        "exp_samples": [
                            {"labels": f'{{alertname="{fault}"}}', "value": 1} for _ in [0] if fault
                        ],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump(cases))
    found = subprocess.run(
        [shutil.which("promtool"), "test", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@needs_promtool
def test_prometheus_parses_every_query_of_the_board(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "1m")}
        for number, text in enumerate(QUERIES)
    ]
    path = tmp_path / "board.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    found = subprocess.run(
        [shutil.which("promtool"), "check", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{len(QUERIES)} rules found" in found.stdout + found.stderr


@needs_promtool
def test_prometheus_accepts_the_configuration(tmp_path):
    shutil.copytree(MONITORING, tmp_path, dirs_exist_ok=True)
    (tmp_path / "token").write_text("t")
    found = subprocess.run(
        [shutil.which("promtool"), "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{len(RULES)} rules found" in found.stdout + found.stderr

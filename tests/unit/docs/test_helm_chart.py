"""The chart of examples/launch/helm gives the plain manifests with its default values.

Where Helm or its library (``pip install -r scripts/helm.txt``) is installed the chart is rendered.
Elsewhere only its values, their schema and the names that templates use are compared."""

import importlib
import importlib.util
import json
import re
import shutil
import subprocess

import pytest
import yaml
from documents import ROOT

LAUNCH = ROOT / "examples" / "launch"
CHART = LAUNCH / "helm" / "deltawire"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = sorted((CHART / "templates").glob("*.yaml"))
needs_helm = pytest.mark.skipif(
    shutil.which("helm") is None and importlib.util.find_spec("helm_python") is None,
    reason="neither helm nor helm-python-sdk, which render charts, is installed",
)


def leaves(values, path=""):
    """Dotted names of all values; those of a container's limits are one."""
    for name, value in values.items():
        inner = isinstance(value, dict) and not name.lower().endswith("limits")
        yield from leaves(value, f"{path}{name}.") if inner else [f"{path}{name}"]


def plain(*names):
    found = []
    for name in names:
        found += yaml.safe_load_all((LAUNCH / "kubernetes" / f"{name}.yaml").read_text())
    return sorted(found, key=place)


def place(one):
    return one["kind"], one["metadata"]["name"]


def render(*settings):
    """Returns the exit code, the errors and the manifests that Helm gives for settings."""
    code, said, text = (_by_program if shutil.which("helm") else _by_library)(settings)
    return code, said, sorted(filter(None, yaml.safe_load_all(text)), key=place)


def _by_program(settings):
    words = [word for one in settings for word in ("--set", one)]
    done = subprocess.run(
        [shutil.which("helm"), "template", "run", str(CHART), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr, done.stdout


def _by_library(settings):
    helm = importlib.import_module("helm_python")
    values = helm.parse_set_string(",".join(settings)) if settings else {}
    try:
        chart = helm.Chart.load(str(CHART))
        chart.validate_schema(values)
        rendered = chart.render(values, name="run")
    except helm.HelmError as error:
        return 1, str(error), ""
    return 0, "", "\n---\n".join(rendered.values())


def test_templates_use_each_value_and_no_other():
    used = set()
    for path in TEMPLATES:
        used |= set(re.findall(r"\.Values\.([\w.]+)", path.read_text()))
    assert used == set(leaves(VALUES))


def test_the_schema_has_each_value_and_its_kind():
    kinds = {"string": str, "integer": int, "boolean": bool, "object": dict}

    def compare(schema, values):
        assert set(schema["required"]) == values.keys()
        assert schema["additionalProperties"] is False
        for name, value in values.items():
            expected = schema["properties"][name]
            assert type(value) is kinds[expected["type"]], name
            assert re.search(expected.get("pattern", ""), str(value)), name
            if "properties" in expected:
                compare(expected, value)

    compare(SCHEMA, VALUES)


@needs_helm
def test_the_default_values_give_the_plain_manifests():
    assert render() == (0, "", plain("run"))
    assert render("gateway.enabled=true") == (0, "", plain("run", "gateway"))


@needs_helm
def test_a_second_cluster_has_workers_only():
    code, _, found = render(
        "trainer.enabled=false", "evaluator.enabled=false", "workers.count=2",
        "workers.prefix=far", "run=gs://other/run", "workers.bucketSecret=",
        "workers.serviceAccountName=worker",
    )  # fmt: skip
    assert code == 0
    assert [place(one) for one in found] == [("Job", "workers"), ("NetworkPolicy", "no-way-in")]
    spec = found[0]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert container["args"][:4] == [
        "worker", "gs://other/run", "--id", "far-$(JOB_COMPLETION_INDEX)"
    ]  # fmt: skip
    assert 'alive gs://other/run "far-$' in container["livenessProbe"]["exec"]["command"][-1]
    assert container["volumeMounts"][0]["subPathExpr"] == "far-$(JOB_COMPLETION_INDEX).key"
    assert pod["serviceAccountName"] == "worker"
    assert "envFrom" not in container


@needs_helm
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("run=bucket", "/run"),
        ("model.revision=main", "/model/revision"),
        ("workers.count=0", "/workers/count"),
        ("worker.count=4", "additional properties 'worker'"),
    ],
)
def test_wrong_values_are_refused(wrong, named):
    code, said, found = render(wrong)
    assert code != 0
    assert named in said
    assert found == []

"""The files of examples/launch: their commands parse, and no role listens or shares a volume."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tomllib

import pytest
import yaml
from documents import ROOT

from deltawire.cli.main import build_parser
from deltawire.config import parse_config

LAUNCH = ROOT / "examples" / "launch"
KUBERNETES = sorted((LAUNCH / "kubernetes").glob("*.yaml"))
SKYPILOT = sorted((LAUNCH / "skypilot").glob("*.yaml"))
SLURM = sorted((LAUNCH / "slurm").glob("*.sbatch"))
PINNED = re.search(
    r"^  revision: [0-9a-f]{40}$",
    (LAUNCH / "helm" / "deltawire" / "values.yaml").read_text(),
    re.MULTILINE,
)
"""The chart's default revision; its schema refuses a name that can move."""
WORKLOADS = {"Job", "Deployment", "StatefulSet"}


def objects(path):
    return list(yaml.safe_load_all(path.read_text()))


def pods(path):
    """Kind and pod of each workload in a file."""
    return [
        (one["kind"], one["spec"]["template"]) for one in objects(path) if one["kind"] in WORKLOADS
    ]


def containers(pod):
    return pod["spec"].get("initContainers", []) + pod["spec"]["containers"]


def commands(script):
    """The arguments of every ``deltawire`` in a shell script."""
    joined = script.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        if "deltawire" in words and words[0] != "pip":
            found.append(words[words.index("deltawire") + 1 :])
    return found


def test_there_is_a_file_for_each_launcher():
    assert (len(KUBERNETES), len(SKYPILOT), len(SLURM)) == (3, 2, 2)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_containers_run_commands_that_exist(path):
    seen = 0
    for _, pod in pods(path):
        for container in containers(pod):
            assert re.fullmatch(r"deltawire(-vllm)?", container["image"])
            if "command" not in container:  # The image's entry point is deltawire.
                build_parser().parse_args(container["args"])
                seen += 1
    assert seen >= 2


@pytest.mark.parametrize("path", SKYPILOT, ids=lambda path: path.name)
def test_tasks_run_commands_that_exist(path):
    (task,) = objects(path)
    (command,) = commands(task["run"])
    build_parser().parse_args(command)
    own = {*re.findall(r"^(\w+)=", task["setup"], re.MULTILINE), "HOME", "PATH"}
    for name in re.findall(r"\$(\w+)", task["run"] + task["setup"]):
        assert name in {*task["envs"], *own}
    subprocess.run(["bash", "-n", "-c", task["setup"] + task["run"]], check=True)


@pytest.mark.parametrize("path", SLURM, ids=lambda path: path.name)
def test_job_scripts_run_commands_that_exist_and_parse(path):
    subprocess.run(["bash", "-n", path], check=True)
    (command,) = commands(path.read_text())
    build_parser().parse_args(command)


def test_job_scripts_pass_shellcheck():
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    tool = shutil.which("shellcheck", path=places) or pytest.skip("shellcheck is not installed")
    done = subprocess.run([tool, *SLURM], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_kubernetes_knows_every_field():
    validator = pytest.importorskip("kubernetes_validate")
    for path in KUBERNETES:
        for one in objects(path):
            validator.validate(one, "1.33", strict=True)


def test_the_configuration_is_one_that_loads():
    (loaded,) = [one for path in KUBERNETES for one in objects(path) if one["kind"] == "ConfigMap"]
    config = parse_config(tomllib.loads(loaded["data"]["run.toml"]), source="run.toml")
    assert config.name == "countdown"


def test_roles_of_a_run_share_nothing_and_listen_nowhere():
    path = LAUNCH / "kubernetes" / "run.yaml"
    kinds = [one["kind"] for one in objects(path)]
    assert "Service" not in kinds
    (policy,) = [one["spec"] for one in objects(path) if one["kind"] == "NetworkPolicy"]
    assert policy["policyTypes"] == ["Ingress"]
    assert not policy.get("ingress")
    for kind, pod in pods(path):
        assert kind == "Job"
        assert pod["metadata"]["labels"].items() >= policy["podSelector"]["matchLabels"].items()
        assert not any("ports" in container for container in containers(pod))


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_pods_have_no_more_rights_than_they_need(path):
    for _, pod in pods(path):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for volume in spec.get("volumes", []):
            assert volume.keys() & {"configMap", "emptyDir", "secret"}, (
                "nothing that pods write together"
            )
        for container in containers(pod):
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}


def test_every_role_has_its_own_secrets():
    held = {}
    for path in KUBERNETES:
        for _, pod in pods(path):
            for container in containers(pod):
                secrets = {one["secretRef"]["name"] for one in container.get("envFrom", ())}
                held.setdefault(container["name"], set()).update(secrets)
    assert {name for name, secrets in held.items() if "gateway-tokens" in secrets} == {"gateway"}
    assert held["vllm"] == {"bucket-reader", "replica-key"}
    roles = [
        held[name]
        for name in ("trainer", "worker", "evaluator", "vllm", "gateway", "learner", "decider")
    ]
    buckets = [secrets & {name for name in secrets if "bucket" in name} for secrets in roles]
    assert all(len(one) == 1 for one in buckets)
    assert len(set().union(*buckets)) == len(buckets), "no two roles share the bucket's secret"


def keys_of(pod):
    """By container, the secret and the item that ``--key`` names, as the container sees it."""
    volumes = {one["name"]: one.get("secret", {}) for one in pod["spec"].get("volumes", [])}
    found = {}
    for container in containers(pod):
        arguments = container.get("args", [])
        if "--key" not in arguments:
            continue
        place = arguments[arguments.index("--key") + 1]
        for mount in container["volumeMounts"]:
            secret = volumes[mount["name"]]
            if place == mount["mountPath"] or place.startswith(mount["mountPath"] + "/"):
                assert mount["readOnly"] is True
                assert secret["defaultMode"] == 0o440, "the group of the pod's user may read it"
                assert pod["spec"]["securityContext"]["fsGroup"] == 10001
                item = mount.get("subPathExpr", place.removeprefix(mount["mountPath"] + "/"))
                found[container["name"]] = (secret["secretName"], item)
    return found


def test_the_run_is_signed_and_each_role_has_its_own_key():
    held, mounted = {}, {}
    for path in KUBERNETES:
        for _, pod in pods(path):
            held |= keys_of(pod)
            volumes = {one["name"]: one.get("secret", {}) for one in pod["spec"].get("volumes", [])}
            for container in containers(pod):
                for mount in container.get("volumeMounts", []):
                    secret = volumes[mount["name"]].get("secretName", "")
                    mounted.setdefault(secret, set()).add(container["name"])
    assert held == {
        "trainer": ("owner-key", "owner.key"),
        "worker": ("worker-keys", "k8s-$(JOB_COMPLETION_INDEX).key"),
        "evaluator": ("evaluator-key", "evaluator.key"),
        "gateway": ("gateway-key", "gateway.key"),
        "decider": ("gateway-key", "gateway.key"),
        "learner": ("learner-key", "learner.key"),
    }
    signers = {"gateway-key": {"gateway", "decider"}}  # One role: both decide for users.
    for name, (secret, _) in held.items():
        assert mounted[secret] == signers.get(secret, {name}), "no two roles share a key"


def test_disruption_budgets_name_pods_of_which_one_can_go():
    workloads = {
        one["metadata"]["name"]: one for path in KUBERNETES for one in objects(path)
        if one["kind"] in WORKLOADS
    }  # fmt: skip
    budgets = [
        one["spec"] for path in KUBERNETES for one in objects(path)
        if one["kind"] == "PodDisruptionBudget"
    ]  # fmt: skip
    assert len(budgets) == 2
    for budget in budgets:
        wanted = budget["selector"]["matchLabels"]
        (found,) = [
            one for one in workloads.values()
            if wanted.items() <= one["spec"]["template"]["metadata"]["labels"].items()
        ]  # fmt: skip
        assert found["spec"]["replicas"] > budget["minAvailable"], "a node can be drained"


def test_every_long_lived_pod_of_a_live_run_has_a_probe():
    for path in KUBERNETES:
        for kind, pod in pods(path):
            if kind in ("Deployment", "StatefulSet"):
                (container,) = pod["spec"]["containers"]
                assert {"livenessProbe", "readinessProbe"} & container.keys(), container["name"]


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_every_process_pins_the_owner(path):
    """Also vLLM, whose plugin reads the run: an unsigned run is refused by each of them."""
    for _, pod in pods(path):
        for container in containers(pod):
            arguments = container.get("args", [])
            if not any("s3://bucket/run" in one for one in arguments):
                continue
            source = {one["name"]: one.get("valueFrom") for one in container["env"]}["PUBLIC_KEY"]
            assert source == {"configMapKeyRef": {"name": "pin", "key": "public-key"}}
            if container["name"] == "vllm":
                settings = json.loads(arguments[arguments.index("--additional-config") + 1])
                pinned = settings["deltawire"]["public_key"]
            else:
                pinned = arguments[arguments.index("--public-key") + 1]
            assert pinned == "$(PUBLIC_KEY)"


def test_the_commands_of_the_comments_parse_and_make_what_the_pods_need():
    """Each key that a pod mounts is made and granted by the commands, and no other."""
    text = "".join(path.read_text() for path in KUBERNETES)
    lines = re.findall(r"^#   (.*)$", text, re.MULTILINE)
    script = "\n".join(lines)
    subprocess.run(["bash", "-n", "-c", script], check=True)
    for line in script.replace("\\\n", " ").splitlines():
        for command in re.findall(r"deltawire ((?:grant|live|keygen) [^;>#]*)", line):
            build_parser().parse_args(shlex.split(command))
    for secret in (
        "owner-key",
        "worker-keys",
        "evaluator-key",
        "gateway-key",
        "live",
        "learner-key",
    ):
        assert f"create secret generic {secret} " in script
    assert 'create configmap pin --from-literal=public-key="$(cat owner.pub)"' in script
    granted = set(re.findall(r"deltawire grant \S+ ([\w$-]+)", script))
    assert granted == {"worker-k8s-$n", "evaluator", "gateway", "worker-live"}


@pytest.mark.parametrize("path", [LAUNCH / "Dockerfile", *SKYPILOT], ids=lambda path: path.name)
def test_packages_are_installed_from_the_lock_by_hash(path):
    text = path.read_text()
    files = re.findall(r"-r (?:/?)requirements/([a-z]+)\.txt", text)
    assert {"build", "torch", "core", "rl", "lora", "sign"} <= set(files)
    for name in files:
        assert (ROOT / "requirements" / f"{name}.txt").is_file()
    for command in re.split(r"&&|\n", text.replace("\\\n", " ")):
        if re.search(r"-r /?requirements", command):
            assert "--require-hashes" in command
        assert not re.search(r"install '?deltawire", command)
    assert "--no-deps" in text


def test_no_file_installs_packages_in_another_way():
    for path in sorted(LAUNCH.rglob("*")):
        if path.is_file() and path not in (LAUNCH / "Dockerfile", *SKYPILOT):
            assert not re.search(r"^[^#]*\b(pip|conda|uv) ", path.read_text(), re.MULTILINE), path


def test_models_are_downloaded_at_a_revision():
    found = 0
    for path in sorted(LAUNCH.rglob("*")):
        text = path.read_text() if path.is_file() else ""
        revisions = re.findall(r"^ +REVISION: ([0-9a-f]{40})$", text, re.MULTILINE)
        for command in re.findall(r"\bhf,? download\b.*", text):
            found += 1
            pinned = re.search(r"--revision,? ([0-9a-f]{40})", command)
            chart = "--revision, {{ .Values.model.revision }}" in command and PINNED
            assert pinned or chart or ('--revision "$REVISION"' in command and revisions), path
    assert found == 3

"""The machine, not the bucket, decides what a run may ask of it."""

import asyncio

import pytest

from deltawire.config import DataConfig, TaskConfig
from deltawire.config.machine import DATA, POLICY, TRUSTED, Ceilings, machine_policy
from deltawire.config.tasks import ToolServerConfig
from deltawire.envs import open_tasks
from deltawire.envs.workspace import WorkspaceSettings
from deltawire.errors import InputError
from deltawire.launch.processes import read_config


@pytest.fixture
def policy(tmp_path, monkeypatch):
    def write(text):
        path = tmp_path / "policy.toml"
        path.write_text(text)
        monkeypatch.setenv(POLICY, str(path))
        return machine_policy()

    monkeypatch.delenv(POLICY, raising=False)
    monkeypatch.delenv(TRUSTED, raising=False)
    return write


def workspace(**options):
    config = TaskConfig(environment="workspace", heldout=1, options=options)
    return open_tasks(config, seed=0)


def test_a_run_cannot_take_the_sandbox_away(policy):
    """The configuration of a run is in its bucket, which others can write."""
    with pytest.raises(InputError, match="does not allow"):
        workspace(isolation="process")
    policy('isolation = "process"')
    assert workspace(isolation="process").sandbox.isolation == "process"
    assert workspace().sandbox.isolation == "namespaces"


def test_a_run_gets_the_smaller_of_its_limits_and_the_machines(policy):
    greedy = {"wall_s": 3600.0, "memory_mib": 1 << 20, "processes": 1 << 15, "at_once": 4096}
    limits = workspace(**greedy).settings.limits
    assert (limits.wall_s, limits.memory_bytes, limits.processes) == (600.0, 8192 << 20, 512)
    assert workspace(**greedy).settings.at_once == 64
    policy("[ceilings]\nwall_s = 5.0\nmemory_mib = 64\nat_once = 1")
    limits = workspace(wall_s=3.0, memory_mib=4096).settings.limits
    assert (limits.wall_s, limits.memory_bytes) == (3.0, 64 << 20)
    assert workspace().settings.at_once == 1


def test_every_ceiling_is_a_setting():
    ceilings = machine_policy().ceilings.__struct_fields__
    assert set(ceilings) <= set(WorkspaceSettings.__struct_fields__)


def test_environments_and_modules_are_the_machines_choice(policy, monkeypatch):
    policy('environments = ["reasoning_gym"]')
    with pytest.raises(InputError, match="does not run the environment 'workspace'"):
        workspace()
    other = TaskConfig(environment="doubling:tasks")
    policy("")
    with pytest.raises(InputError, match="does not trust"):
        open_tasks(other, seed=0)
    policy('trusted_modules = ["doubling"]').require_trust("doubling")
    policy("")
    monkeypatch.setenv(TRUSTED, "other,doubling")
    machine_policy().require_trust("doubling")


@pytest.mark.parametrize("text", ["isolation = 3", "[ceilings]\nspeed = 1", "x =", 'x = "y"'])
def test_a_policy_that_is_wrong_stops_everything(policy, text):
    with pytest.raises(InputError, match="machine policy"):
        policy(text)


def test_a_policy_that_is_named_and_missing_stops_everything(policy, monkeypatch, tmp_path):
    monkeypatch.setenv(POLICY, str(tmp_path / "none.toml"))
    with pytest.raises(InputError, match="no machine policy"):
        machine_policy()


def test_a_run_reads_only_rows_that_the_machine_gives_it(policy, tmp_path, monkeypatch):
    """Its tasks would be copied into prompts, and with them into the bucket."""
    monkeypatch.setenv(DATA, "")
    given = tmp_path / "given"
    given.mkdir()
    for path in (tmp_path / "secret.jsonl", given / "rows.jsonl"):
        path.write_text('{"question": "q", "answer": "a"}\n' * 4)
    (given / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")

    def opened(path):
        config = TaskConfig(environment="dataset", data=DataConfig(path=str(path)), heldout=1)
        return open_tasks(config, seed=0)

    monkeypatch.chdir(tmp_path)
    for path in (given / "rows.jsonl", "secret.jsonl", "given/../secret.jsonl"):
        with pytest.raises(InputError, match="which this machine does not give to runs"):
            opened(path)
    monkeypatch.setenv(DATA, str(given))
    assert opened(given / "rows.jsonl").epoch == 3
    for path in ("secret.jsonl", given / ".." / "secret.jsonl", given / "link.jsonl"):
        with pytest.raises(InputError, match="does not give"):
            opened(path)
    monkeypatch.setenv(DATA, "")
    policy(f"data_dirs = ['{given}']")
    assert opened("given/rows.jsonl").epoch == 3


def test_a_configuration_of_this_machine_gives_its_rows(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA, "/elsewhere")
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "x"\n[model.build]\n[task]\nenvironment = "dataset"\nprompt = "{question}"\n'
        f"[task.data]\npath = '{tmp_path}/a.jsonl'\nanswer = 'answer'\n"
        "[[evaluate.sets]]\nname = 'held'\n[evaluate.sets.task]\nenvironment = 'dataset'\n"
        f"prompt = '{{question}}'\n[evaluate.sets.task.data]\npath = '{tmp_path}/b.jsonl'\n"
        "answer = 'answer'\n"
    )
    read_config(path)
    monkeypatch.delenv(POLICY, raising=False)
    for name in ("a.jsonl", "b.jsonl"):
        machine_policy().require_data(str(tmp_path / name), "task.data.path")
    with pytest.raises(InputError, match="does not give"):
        machine_policy().require_data(str(tmp_path / "c.jsonl"), "task.data.path")


def test_the_machine_chooses_whether_servers_of_tools_start(policy):
    pytest.importorskip("jsonschema")
    from deltawire.envs.mcp.server import require_server

    command = ToolServerConfig(name="c", command=["true"])
    require_server(command)
    policy('environments = ["dataset"]\nurls = ["http://127.0.0.1:1/"]')
    with pytest.raises(InputError, match="does not run the environment 'mcp'"):
        require_server(command)
    require_server(ToolServerConfig(name="u", url="http://127.0.0.1:1/"))
    policy('environments = ["dataset", "mcp"]')
    require_server(command)


def test_every_ceiling_holds_for_servers_of_tools(policy, monkeypatch):
    pytest.importorskip("jsonschema")
    from deltawire.envs.mcp import server

    asked = []

    async def opened(sandbox, command, files, *, limits, packages, wait_s):
        asked.append((sandbox, limits))

    monkeypatch.setattr(server.Conversation, "open", opened)
    policy("[ceilings]\n" + "\n".join(f"{name} = 1" for name in Ceilings.__struct_fields__))
    config = ToolServerConfig(name="c", command=["true"])
    asyncio.run(server.McpServer(config, server.ServerParts())._transport())
    [(sandbox, limits)] = asked
    assert sandbox._at_once == 1
    assert (limits.wall_s, limits.cpu_s, limits.cores, limits.processes) == (1, 1, 1, 1)
    assert (limits.memory_bytes, limits.disk_bytes) == (1 << 20, 1 << 20)
    assert (limits.files, limits.output_bytes) == (1, 1024)

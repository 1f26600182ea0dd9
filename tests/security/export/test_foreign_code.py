"""No file of a model leads to code from outside: neither its own nor a hub's."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers.integrations.hub_kernels as hub

import deltawire
from deltawire.errors import InputError
from deltawire.export.models import check_directory, empty_model, load_model, save_model

HUB = "kernels-community/vllm-flash-attn3"

HOSTILE = {
    "attention": {"attn_implementation": HUB},
    "attention, private": {"_attn_implementation": HUB},
    "attention, internal": {"_attn_implementation_internal": f"{HUB}@main:flash"},
    "attention of a part": {"attn_implementation": {"text_config": HUB}},
    "what the library may fetch": {"attn_implementation": "flash_attention_2"},
    "experts": {"experts_implementation": "someone/experts"},
    "not a name": {"attn_implementation": ["sdpa"]},
    "deep inside": {"text_config": {"parts": [{"attn_implementation": HUB}]}},
    "a custom class": {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
    "a custom class, inside": {"text_config": {"auto_map": {"AutoConfig": "evil.Config"}}},
}


@pytest.fixture
def directory(tiny, byte_tokenizer, tmp_path):
    save_model(tiny, byte_tokenizer, tmp_path / "model")
    return tmp_path / "model"


def change(directory, members):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **members}))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_configuration_that_names_foreign_code_is_refused(directory, monkeypatch, name):
    fetched = []
    monkeypatch.setattr(hub, "load_and_register_attn_kernel", lambda *a, **k: fetched.append(a))
    change(directory, HOSTILE[name])
    for load in (check_directory, load_model, empty_model):
        with pytest.raises(InputError, match="needs code from outside the library"):
            load(directory)
    assert not fetched


def test_every_reader_of_a_runs_configuration_checks_it():
    """Only these modules let the library read a directory, and what is a run's is checked there;
    the other model is one that the caller names."""
    root = Path(deltawire.__file__).parent
    calls = re.compile(r"AutoConfig|auto\.from_|AutoModel\w*\.from_")
    found = {
        str(path.relative_to(root)): len(calls.findall(path.read_text()))
        for path in root.rglob("*.py")
    }
    places = {name for name, count in found.items() if count}
    assert places == {"export/models.py", "trl/transfer.py"}
    assert found["trl/transfer.py"] == 1


@pytest.mark.parametrize("value", ["eager", "sdpa", None, {"": "sdpa"}])
def test_what_the_library_itself_has_is_loaded(directory, value):
    change(directory, {"attn_implementation": value, "text": {"experts_implementation": "eager"}})
    assert load_model(directory) is not None


@pytest.mark.parametrize(("given", "expected"), [(None, "True"), ("0", "False")])
def test_processes_of_a_run_stay_off_the_hub(tmp_path, given, expected):
    """The variable is set before the library reads it; the machine's owner can decide otherwise."""
    code = (
        "import sys\n"
        "from deltawire.errors import DeltawireError\n"
        "from deltawire.launch.processes import ChildOptions, join_as_worker\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "import deltawire.runtime.process as process\n"
        "process.RUN_PATIENCE_S = 0\n"
        "try:\n"
        "    join_as_worker(sys.argv[1], name='w0', patience_s=1, options=ChildOptions())\n"
        "except DeltawireError:\n"
        "    pass\n"
        "import huggingface_hub.constants as constants\n"
        "print(constants.HF_HUB_OFFLINE)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": given} if given else dict(os.environ)
    if given is None:
        environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, env=environment, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == expected, done.stderr

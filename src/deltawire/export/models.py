"""Hugging Face model directories: reading, writing, and carrying them through a bucket.

Weights are read from safetensors alone and no code of a model's own is ever run.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights

from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import get_blob
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import Run

MAX_MODEL_FILE_BYTES = 256 << 20

CARRIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""The only file names that are ever read from, or written to, a model directory by name."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's progress bars and warnings out of our own output."""
    level = transformers.utils.logging.get_verbosity()
    speech: Any = transformers.utils.logging
    speech.set_verbosity(logging.ERROR)
    speech.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)


def check_directory(path: Path) -> None:
    """Raises `InputError` unless ``path`` looks like a model directory with weights in it, for
    which no code of its own is needed."""
    if not path.is_dir():
        raise InputError(f"there is no model directory {path}", hint="is model.path right?")
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json", hint="give a Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise InputError(
            f"{path} has no weights", hint="deltawire reads *.safetensors; convert other formats"
        )
    _check_settings(path)


def _check_settings(path: Path) -> None:
    try:
        settings = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path / 'config.json'} cannot be read: {_first_line(error)}") from error
    if not isinstance(settings, dict):
        raise InputError(f"{path / 'config.json'} is no JSON object")
    if "auto_map" in settings:
        raise InputError(f"the model in {path} wants code of its own, which deltawire never runs")


def load_model(path: Path) -> Any:
    """The causal LM of a directory, float32, on the CPU; raises `InputError`."""
    check_directory(path)
    try:
        with _quiet():
            auto: Any = AutoModelForCausalLM
            model, report = auto.from_pretrained(
                path,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # the library raises whatever its dependencies do
        raise InputError(f"cannot load the model in {path}: {_first_line(error)}") from error
    # In place of a tensor that is missing, or does not fit, the library makes up a random one.
    made_up = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if made_up:
        raise InputError(
            f"the weights in {path} do not fit its config.json: {min(made_up)} "
            "is missing or of another shape"
        )
    return model


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a directory; raises `InputError`."""
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # as above
        raise InputError(f"cannot load the tokenizer in {path}: {_first_line(error)}") from error


def save_model(model: Any, tokenizer: Any, path: Path) -> None:
    """Write a directory that `load_model` and `load_tokenizer` read, parameters as bf16 and saved
    buffers as they are: families keep biases of routers in float32."""
    path.mkdir(parents=True, exist_ok=True)
    with _quiet():
        tokenizer.save_pretrained(path)
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tied -= {name for name, _ in model.named_parameters()}
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        state = {
            name: tensor.detach() if name in buffers else tensor.detach().to(torch.bfloat16)
            for name, tensor in model.state_dict().items()
            if name not in tied
        }
        model.save_pretrained(path, state_dict=state)


def read_files(path: Path) -> dict[str, bytes]:
    """The carried files of a directory: all that a worker needs besides weights."""
    files = {}
    for name in CARRIED:
        file = path / name
        if file.is_file():
            if file.stat().st_size > MAX_MODEL_FILE_BYTES:
                raise InputError(f"{file} exceeds {MAX_MODEL_FILE_BYTES} bytes")
            files[name] = file.read_bytes()
    return files


def write_files(files: dict[str, bytes], path: Path) -> None:
    """Write carried files into a folder; raises `CorruptError` for any other name."""
    for name, data in files.items():
        if name not in CARRIED:
            raise CorruptError(f"{name[:80]!r} is not a model file that a run may carry")
        (path / name).write_bytes(data)


def empty_model(path: Path) -> Any:
    """The causal LM that a directory's ``config.json`` describes, float32, weights unset."""
    _check_settings(path)
    try:
        with _quiet(), no_init_weights():
            config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
            auto: Any = AutoModelForCausalLM
            model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
            if (path / "generation_config.json").is_file():  # it may name more stop tokens
                model.generation_config = GenerationConfig.from_pretrained(path)
        model.tie_weights()
        return model
    except Exception as error:  # as above
        raise InputError(f"cannot build the run's model: {_first_line(error)}") from error


def serve_as(model: Any, precision: str) -> Any:
    """Let a model compute in ``float32`` or ``bfloat16``. Only parameters are rounded: what is kept
    beside them, rotary frequencies for example, loses whole positions in bf16."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token id at which generation ends."""
    found: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return sorted(set(found))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def fetch_model_files(bucket: Bucket, run: Run) -> tempfile.TemporaryDirectory[str]:
    """The run's model files (no weights) in a temporary folder, for the libraries that want one."""
    from deltawire.export.models import MAX_MODEL_FILE_BYTES, write_files

    files = {}
    for file in run.model_files:
        if file.bytes > MAX_MODEL_FILE_BYTES:
            raise InputError(f"model file {file.name[:80]!r} has {file.bytes} bytes")
        files[file.name] = bytes(get_blob(bucket, BlobRef(hash=file.blob, bytes=file.bytes)))
    folder = tempfile.TemporaryDirectory(prefix="deltawire-")
    write_files(files, Path(folder.name))
    return folder

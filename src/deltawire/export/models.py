"""Reads and writes Hugging Face model directories, and carries their files through a bucket.

Weights are read from safetensors only, and a model's own code is never run: neither Python files
that its configuration names nor kernels that the library would fetch from a hub.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights

from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.base_statement import states_base
from deltawire.sync.chain.objects import get_blob
from deltawire.sync.publish.model_files import LAYOUT
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import Run, TensorSpec

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
"""The only files that are read from, or written to, a model directory by name."""

ADAPTER_CONFIG = "adapter_config.json"
_PULLED_ONLY = (ADAPTER_CONFIG, LAYOUT)
"""Files that only pulled directories get: with them, a worker's directory would be taken for an
adapter's.
"""

_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_BUILT_IN = frozenset({None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"})
"""Attention implementations in the library itself. It treats any other name as a kernel on a hub,
and runs that kernel's code.
"""

_CONFIG_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the library's progress bars and warnings."""
    level = transformers.utils.logging.get_verbosity()
    library: Any = transformers.utils.logging
    library.set_verbosity(logging.ERROR)
    library.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)


def check_directory(path: Path) -> None:
    """Raises `InputError` unless ``path`` is a model directory with weights that needs no code of
    the model's own."""
    if not path.is_dir():
        raise InputError(f"there is no model directory {path}", hint="check model.path")
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json", hint="give a Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise InputError(f"{path} has no weights", hint="convert them to *.safetensors")
    _check_settings(path)


def _check_settings(path: Path) -> None:
    try:
        settings = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path / 'config.json'} cannot be read: {_first_line(error)}") from error
    if not isinstance(settings, dict):
        raise InputError(f"{path / 'config.json'} is not a JSON object")
    if found := _foreign_code(settings):
        raise InputError(
            f"config.json in {path} needs code from outside the library: {found[:200]}",
            hint="deltawire never runs such code; remove the entry, or use another model",
        )


def _foreign_code(value: Any) -> str:
    """Returns the first member, at any depth, that would make the library load foreign code."""
    if isinstance(value, list):
        return next((found for one in value if (found := _foreign_code(one))), "")
    if not isinstance(value, dict):
        return ""
    for name, member in value.items():
        if name == "auto_map":
            return "auto_map"
        if _IMPLEMENTATION.fullmatch(name):
            named = member.values() if isinstance(member, dict) else [member]
            if any(not isinstance(one, str | None) or one not in _BUILT_IN for one in named):
                return f"{name} = {json.dumps(member)}"
        elif found := _foreign_code(member):
            return found
    return ""


def load_model(path: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Loads the causal LM of a directory in ``dtype`` on the CPU; raises `InputError`."""
    check_directory(path)
    try:
        with _quiet():
            auto: Any = AutoModelForCausalLM
            model, report = auto.from_pretrained(
                path,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # the library raises any error of its dependencies
        raise InputError(f"cannot load the model in {path}: {_first_line(error)}") from error
    # The library fills a missing or misfit tensor with random values.
    made_up = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if made_up:
        raise InputError(
            f"the weights in {path} do not fit its config.json: {min(made_up)} "
            "is missing or of another shape"
        )
    return model


def holds_only_bf16(path: Path) -> bool:
    """Returns whether all tensors of a directory's files are bf16, so that loading them as such
    changes no bit; reads the files' headers only."""
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as opened:
            if any(opened.get_slice(name).get_dtype() != "BF16" for name in opened.keys()):  # noqa: SIM118
                return False
    return bool(files)


def load_tokenizer(path: Path) -> Any:
    """Loads the tokenizer of a directory; raises `InputError`."""
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # as above
        raise InputError(f"cannot load the tokenizer in {path}: {_first_line(error)}") from error


def save_model(model: Any, tokenizer: Any, path: Path) -> None:
    """Writes a directory that `load_model` and `load_tokenizer` read: parameters as bf16, saved
    buffers as they are, since families keep biases of routers in float32."""
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
    config = path / "config.json"
    config.write_bytes(_with_dtype(config.read_bytes(), "bfloat16"))


def save_settings(model: Any, tokenizer: Any, path: Path, *, dtype: str | None) -> None:
    """Writes a model directory without weights: configuration, generation settings and tokenizer.

    ``config.json`` states ``dtype``, such as ``"bfloat16"``, if given; ``tokenizer`` may be None.
    The model itself is not changed.
    """
    path.mkdir(parents=True, exist_ok=True)
    with _quiet():
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        config = copy.deepcopy(model.config)
        if not config.architectures:  # FSDP2 puts its own name in front of the class's.
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(path)
        if getattr(model, "generation_config", None) is not None:
            # The library refuses to save contradictory settings, which a trainer may have.
            settings = json.dumps(model.generation_config.to_diff_dict(), indent=2)
            (path / "generation_config.json").write_text(settings + "\n")
    if dtype is not None:
        file = path / "config.json"
        file.write_bytes(_with_dtype(file.read_bytes(), dtype))


def read_files(path: Path) -> dict[str, bytes]:
    """Reads the carried files of a directory: everything other than weights that a worker needs."""
    files = {}
    for name in CARRIED:
        file = path / name
        if file.is_file():
            if file.stat().st_size > MAX_MODEL_FILE_BYTES:
                raise InputError(f"{file} exceeds {MAX_MODEL_FILE_BYTES} bytes")
            files[name] = file.read_bytes()
    return files


def published_files(path: Path, tensors: Sequence[TensorSpec]) -> dict[str, bytes]:
    """Reads the carried files of a directory, with the dtype in ``config.json`` that most published
    elements have: a reader of the version would otherwise convert it when loading."""
    files = read_files(path)
    elements: Counter[str] = Counter()
    for spec in tensors:
        elements[spec.dtype] += spec.count
    dtype = _CONFIG_DTYPES.get(max(elements, key=lambda name: elements[name], default=""))
    if dtype is not None and "config.json" in files:
        files["config.json"] = _with_dtype(files["config.json"], dtype)
    return files


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """Returns a ``config.json`` that states ``dtype``, also in nested configurations."""

    def stating(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        inner = {name: stating(member) for name, member in value.items()}
        before = inner.pop("torch_dtype", None) or inner.get("dtype")
        return inner | {"dtype": dtype} if before in _CONFIG_DTYPES.values() else inner

    settings = stating(json.loads(config)) | {"dtype": dtype}
    return json.dumps(settings, indent=2, ensure_ascii=False).encode()


def with_quantization(config: bytes, quantization: dict[str, Any]) -> bytes:
    """Returns a ``config.json`` whose weights are stored so, and dequantized to bf16."""
    settings = json.loads(_with_dtype(config, "bfloat16"))
    settings["quantization_config"] = quantization
    return json.dumps(settings, indent=2, ensure_ascii=False).encode()


def write_files(files: dict[str, bytes], path: Path) -> None:
    """Writes carried files into a folder; raises `CorruptError` for any other name."""
    for name, data in files.items():
        if name not in CARRIED:
            raise CorruptError(f"{name[:80]!r} is not a model file that a run may carry")
        (path / name).write_bytes(data)


class _EmptyOnMeta(TorchFunctionMode):
    """Gives what ``torch.empty`` makes no memory, in this thread. Layers make their weights so;
    frequencies, norms and the like, which are small, have their values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def empty_model(path: Path, *, meta: bool = False) -> Any:
    """Builds the causal LM that a directory's ``config.json`` describes, in float32, with weights
    unset. With ``meta``, weights have no memory either, until each rank gives its shards some
    (`deltawire.train.parallel.shard_model`)."""
    _check_settings(path)
    try:
        with _quiet(), no_init_weights(), _EmptyOnMeta() if meta else nullcontext():
            config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
            # Weights of a quantized version are packed afterwards, by the exporter's rules.
            config.__dict__.pop("quantization_config", None)
            auto: Any = AutoModelForCausalLM
            model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
            if (path / "generation_config.json").is_file():  # it may name more stop tokens
                model.generation_config = GenerationConfig.from_pretrained(path)
        model.tie_weights()
        for module in model.modules() if meta else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
        return model
    except Exception as error:  # as above
        raise InputError(f"cannot build the run's model: {_first_line(error)}") from error


def serve_as(model: Any, precision: str) -> Any:
    """Makes a model compute in ``float32`` or ``bfloat16``. Rounds parameters only: in bf16, rotary
    frequencies and the like would lose whole positions.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
    for parameter in model.parameters():
        if parameter.is_floating_point():  # Packed weights are bytes.
            parameter.data = parameter.data.to(dtype)
    return model


def move_to(model: Any, device: torch.device) -> Any:
    """Moves a model to ``device``, in place; one that was built on the meta device, for its
    settings, stays there."""
    return model if next(model.parameters()).is_meta else model.to(device)


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Returns every token id that ends generation."""
    found: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return sorted(set(found))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def fetch_model_files(bucket: Bucket, run: Run) -> tempfile.TemporaryDirectory[str]:
    """Writes the run's model files, without weights, into a temporary folder."""
    files = {}
    for file in run.model_files:
        if file.name in _PULLED_ONLY or states_base(file.name):
            continue
        if file.bytes > MAX_MODEL_FILE_BYTES:
            raise InputError(f"model file {file.name[:80]!r} has {file.bytes} bytes")
        files[file.name] = bytes(get_blob(bucket, BlobRef(hash=file.blob, bytes=file.bytes)))
    folder = tempfile.TemporaryDirectory(prefix="deltawire-")
    write_files(files, Path(folder.name))
    return folder

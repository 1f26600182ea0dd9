"""The protocol buffers of Tinker's SDK, as far as the server reads and writes them.

Messages, field numbers and types are those of ``tinker_public`` in the SDK 0.38. They live in a
descriptor pool of deltawire's, so that the SDK's own module can be loaded into the same process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from deltawire.errors import InputError

PACKAGE = "tinker_public"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
    "bool": _FIELD.TYPE_BOOL,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
}
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": (
        "DTYPE_UNSPECIFIED",
        "DTYPE_FLOAT32",
        "DTYPE_INT64",
        "DTYPE_INT32",
        "DTYPE_BFLOAT16",
    ),
}

# Each field: name, number, type. "*" repeats it, "?" makes it optional, "NAME|" puts it into the
# oneof NAME, and "map " maps strings to the type.
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "SampleResponse": [
        ("sequences", 1, "*SampledSequence"),
        ("prompt_logprobs", 2, "?bytes"),
        ("topk_prompt_logprobs", 3, "?TopkLogprobs"),
    ],
    "TopkLogprobs": [
        ("token_ids", 1, "bytes"),
        ("logprobs", 2, "bytes"),
        ("k", 3, "uint32"),
        ("length", 4, "uint32"),
    ],
    "SampledSequence": [
        ("stop_reason", 1, "StopReason"),
        ("tokens", 2, "bytes"),
        ("logprobs", 3, "?bytes"),
    ],
    "SparseCsr": [
        ("values", 1, "bytes"),
        ("crow_indices", 2, "bytes"),
        ("col_indices", 3, "bytes"),
    ],
    "Tensor": [
        ("dense", 1, "encoding|bytes"),
        ("sparse_csr", 2, "encoding|SparseCsr"),
        ("dtype", 3, "DType"),
        ("shape", 4, "*int64"),
    ],
    "BatchedTensor": [
        ("data", 1, "bytes"),
        ("offsets", 2, "bytes"),
        ("dtype", 3, "DType"),
        ("trailing_shape", 4, "*int64"),
    ],
    "ArrayRecord": [
        ("type_tag", 1, "string"),
        ("fields", 2, "map BatchedTensor"),
        ("num_datums", 3, "int64"),
    ],
    "ForwardBackwardOutput": [
        ("loss_fn_output_type", 1, "string"),
        ("loss_fn_outputs", 2, "*ArrayRecord"),
        ("metrics", 3, "map double"),
    ],
    "ForwardBackwardRequest": [
        ("model_id", 1, "string"),
        ("seq_id", 2, "int32"),
        ("data", 3, "*Datum"),
        ("loss_fn", 4, "string"),
        ("loss_fn_config", 5, "map double"),
        ("forward_only", 6, "bool"),
        ("loss_fn_config_v2", 7, "map LossConfigValue"),
    ],
    "LossConfigValue": [("number", 1, "value|double"), ("text", 2, "value|string")],
    "Datum": [
        ("model_input", 1, "*Chunk"),
        ("loss_fn_inputs", 2, "map Tensor"),
        ("model_input_spans", 3, "*ProvenanceSpan"),
        ("loss_fn_input_spans", 4, "*ProvenanceSpan"),
    ],
    "ProvenanceSpan": [
        ("prompt_tokens", 1, "span|PromptProvenanceSpan"),
        ("sampled_tokens", 2, "span|SampledProvenanceSpan"),
    ],
    "PromptProvenanceSpan": [
        ("sequence_id", 1, "string"),
        ("offset", 2, "int64"),
        ("length", 3, "int64"),
    ],
    "SampledProvenanceSpan": [
        ("sequence_id", 1, "string"),
        ("offset", 2, "int64"),
        ("length", 3, "int64"),
    ],
    "Chunk": [
        ("encoded_text", 1, "chunk|EncodedTextChunk"),
        ("image", 2, "chunk|ImageChunk"),
        ("dmel", 3, "chunk|DmelChunk"),
    ],
    "EncodedTextChunk": [("tokens", 1, "bytes")],
    "ImageChunk": [("data", 1, "bytes"), ("format", 2, "string")],
    "DmelChunk": [("dmel", 1, "bytes")],
}


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="deltawire/tinker_public.proto", package=PACKAGE, syntax="proto3"
    )
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add(message, *field)
    for message in file.message_type:  # The oneofs of optional fields come after all others.
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    return file


def _add(message: Any, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if kind.startswith("map "):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add(entry, "key", 1, "string")
        _add(entry, "value", 2, kind.removeprefix("map "))
        field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        return
    if "|" in kind:
        group, _, kind = kind.partition("|")
        names = [one.name for one in message.oneof_decl]
        if group not in names:
            message.oneof_decl.add(name=group)
            names.append(group)
        field.oneof_index = names.index(group)
    elif kind.startswith("?"):
        field.proto3_optional = True
    elif kind.startswith("*"):
        field.label = _FIELD.LABEL_REPEATED
    kind = kind.lstrip("?*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _FIELD.TYPE_ENUM if kind in _ENUMS else _FIELD.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


_DESCRIPTORS = descriptor_pool.DescriptorPool()
DESCRIPTOR = _DESCRIPTORS.AddSerializedFile(_file().SerializeToString())
"""The schema; compare it with the SDK's own."""


def message(name: str) -> Any:
    """Returns the class of a message."""
    return message_factory.GetMessageClass(_DESCRIPTORS.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def parse(name: str, data: bytes) -> Any:
    """Returns a message from its bytes; raises `InputError`."""
    from google.protobuf.message import DecodeError

    found = message(name)()
    try:
        found.ParseFromString(data)
    except DecodeError as error:
        raise InputError(f"the request is not a {name}: {error}") from error
    return found

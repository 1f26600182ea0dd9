"""The command's wrong input, and the schema against the SDK's own."""

import sys

import pytest
from tinker_serving import make_model

from deltawire.cli.main import main
from deltawire.testing.s3_server import S3Server
from deltawire.tinker import schema


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def fail(capsys, monkeypatch):
    """Runs the command, which must fail; returns its one error."""
    monkeypatch.setenv("DELTAWIRE_TOKEN", "tml-test")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)

    def run(*arguments):
        assert main(["tinker", *map(str, arguments), "--port", "0"]) not in (0, 1)
        lines = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        assert len(lines) == 1
        return lines[0]

    return run


def test_a_bucket_that_is_not_there(fail, model, monkeypatch, tmp_path):
    server = S3Server()
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        line = fail("s3://no-such-bucket/run", "--model", model)
    finally:
        server.close()
    assert "deltawire does not create buckets" in line
    (tmp_path / "file").write_text("")
    assert "as a bucket" in fail(tmp_path / "file", "--model", model)


def test_wrong_options(fail, model, monkeypatch, tmp_path):
    assert "no model directory" in fail(tmp_path / "b", "--model", tmp_path / "nowhere")
    assert "--parameters lora" in fail(tmp_path / "b", "--model", model, "--frozen-head")
    monkeypatch.setenv("DELTAWIRE_TOKEN", "secret")
    assert "begin with tml-" in fail(tmp_path / "b", "--model", model)
    monkeypatch.delenv("DELTAWIRE_TOKEN")
    assert "there is no token" in fail(tmp_path / "b", "--model", model)


def test_adapters_without_their_package(fail, model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)
    line = fail(tmp_path / "b", "--model", model, "--parameters", "lora")
    assert "need the package peft; pip install 'deltawire[lora]'" in line
    assert not (tmp_path / "b").exists()


def test_a_missing_package_is_named(fail, model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "google", None)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert "needs the package protobuf" in fail(tmp_path / "b", "--model", model)


def test_the_schema_is_the_sdks():
    pytest.importorskip("tinker")
    from google.protobuf import descriptor_pb2
    from tinker.proto import tinker_public_pb2

    def fields(file):
        found = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(found)
        messages = {
            one.name: {
                field.name: (
                    field.number,
                    field.type,
                    field.label,
                    field.type_name,
                    field.proto3_optional,
                    one.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "",
                )
                for field in one.field
            }
            for one in found.message_type
        }
        enums = {one.name: [(v.name, v.number) for v in one.value] for one in found.enum_type}
        return messages, enums

    ours, our_enums = fields(schema.DESCRIPTOR)
    theirs, their_enums = fields(tinker_public_pb2.DESCRIPTOR)
    assert our_enums == {name: their_enums[name] for name in our_enums}
    for name, message in ours.items():
        assert message == {field: theirs[name][field] for field in message}, name

"""The table of clients in docs/CLIENTS.md is that of the registry and of what ran."""

import re

from client_registry import BEGIN, CLIENTS, DOCUMENT, END, TESTS, in_document, stored, table


def test_the_document_has_the_table():
    text = DOCUMENT.read_text()
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    assert text == in_document(text, table(CLIENTS, stored())), "run scripts/client_table.py"


def test_every_client_names_tests_that_exist_and_a_source():
    names = [client.name for client in CLIENTS]
    assert len(set(names)) == len(names)
    assert stored().keys() <= set(names)
    for client in CLIENTS:
        assert client.tests
        assert all((TESTS / path).is_file() for path in client.tests), client.tests
        assert bool(client.package) != bool(client.repository), client.name
        if client.repository:
            assert re.fullmatch(r"[0-9a-f]{7,40}", client.commit), client.name
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", client.checked), client.name


def test_a_client_that_runs_as_itself_is_imported_by_its_tests():
    for client in CLIENTS:
        if client.package:
            assert client.against == "its own code", client.name
        if client.against == "its own code":
            module = (client.package or client.name).replace("-", "[._]")
            imports = rf"^\s*(?:import|from) {module}\b|importorskip\(\"{module}\b"
            for path in client.tests:
                text = (TESTS / path).read_text()
                assert re.search(imports, text, re.MULTILINE), (client.name, path)

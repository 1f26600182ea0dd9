"""The file of reports' ids: bounded, compacted, and read again."""

from deltawire.live.feedback.identities import ReportIdentities


def test_the_file_is_bounded_and_keeps_the_newest(tmp_path):
    path = tmp_path / "reports"
    known = ReportIdentities(path, limit=4)
    for number in range(11):
        known.add(f"id-{number}", b"content")
        known.write(f"id-{number}")
    assert path.stat().st_size <= 2 * 4 * 32
    assert known.check("id-10", b"content") == "same"
    assert known.check("id-10", b"other") == "other"
    assert known.check("id-2", b"content") == "new"
    known.close()
    again = ReportIdentities(path, limit=4)
    assert [again.check(f"id-{n}", b"content") for n in (6, 7, 10)] == ["new", "same", "same"]
    again.close()


def test_a_report_that_was_not_stored_is_new_again(tmp_path):
    known = ReportIdentities(tmp_path / "reports")
    known.add("id", b"content")
    known.discard("id")
    known.write("id")
    assert known.check("id", b"other") == "new"
    known.close()
    assert (tmp_path / "reports").read_bytes() == b""

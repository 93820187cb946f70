from __future__ import annotations

from tost._text import Table, closest, count, did_you_mean


def test_suggestions():
    assert closest("tost_smal", ["tost_small", "vit"]) == "tost_small"
    assert closest("zzz", ["tost_small"]) is None
    assert did_you_mean("digts", ["digits"]) == "did you mean 'digits'? "
    assert did_you_mean("zzz", ["digits"]) == ""


def test_count_agrees_with_its_noun():
    assert count(1, "thread") == "1 thread"
    assert count(2, "thread") == "2 threads"
    assert count(0, "thread") == "0 threads"
    assert count(1234, "entry", "entries") == "1,234 entries"


def test_table_in_both_forms():
    table = Table(headers=("name", "ms"), rows=(("a", "1"), ("long", "10")), labels=1)
    assert table.markdown().splitlines() == ["| name | ms |", "| --- | ---: |", "| a | 1 |", "| long | 10 |"]
    assert list(table.plain()) == ["name\tms", "a   \t 1", "long\t10"]

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from tost._text import Table, printable


def test_table_in_both_forms():
    table = Table(headers=("name", "ms"), rows=(("a", "1"), ("long", "10")), labels=1)
    assert table.markdown().splitlines() == ["| name | ms |", "| --- | ---: |", "| a | 1 |", "| long | 10 |"]
    assert list(table.plain()) == ["name\tms", "a   \t 1", "long\t10"]


@given(st.text(alphabet=st.characters()))
def test_what_reaches_a_terminal_cannot_control_it(text):
    shown = printable(text)
    assert len(shown) == len(text)
    for before, after in zip(text, shown, strict=True):
        assert after in "\n\t" or unicodedata.category(after) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(after) not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        assert before == after or after == "\ufffd" or "\u2400" <= after <= "\u2421"


def test_marks_and_controls_are_shown_by_their_pictures():
    assert printable("a\x1b[31m\x9b31m\u202eb\x7f\n\t\r") == "a␛[31m�31m�b␡\n\t␍"
    assert printable("naïve 统计 שלום عربي 🙂‍🙂") == "naïve 统计 שלום عربي 🙂‍🙂"

"""Text from tokens: whatever the pieces, what is shown is the text, as early as it is certain."""

from hypothesis import example, given
from hypothesis import strategies as st

from tost.generation import ByteTokenizer, TextStream

BYTES = st.binary(max_size=30)
# Characters of one to four bytes, with stop texts that overlap each other and themselves.
TEXTS = st.text(alphabet="ab\u00e9\u20ac\U0001f600", max_size=20)
STOPS = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=3)


def stream(data, sizes, stops=()):
    """Feed bytes in pieces; returns the pieces of text."""
    text = TextStream(ByteTokenizer().decoder(), stops)
    shown, begin = [], 0
    for size in sizes:
        shown.append(text.feed(data[begin : begin + size]))
        begin += size
    shown.append(text.feed(data[begin:]))
    return [*shown, text.finish()], text.stopped


def cut(text, stops):
    """The text up to the stop text that begins first."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


@given(TEXTS)
def test_encode_and_decode_are_inverse(text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text
    assert all(0 <= token < 256 for token in ByteTokenizer().encode(text))


@given(BYTES)
def test_any_bytes_come_back_from_text_with_surrogates(data):
    assert bytes(ByteTokenizer().encode(data.decode("utf-8", errors="surrogateescape"))) == data


@given(BYTES, st.lists(st.integers(0, 5), max_size=10))
def test_pieces_give_the_text_of_the_whole(data, sizes):
    pieces, stopped = stream(data, sizes)
    assert "".join(pieces) == ByteTokenizer().decode(data)
    assert not stopped
    for piece in pieces:
        piece.encode("utf-8")  # each one is valid by itself


@given(TEXTS, st.lists(st.integers(0, 5), max_size=20), STOPS)
@example("aab", [1, 1, 1], ["ab"])
@example("abab", [1, 1, 1, 1], ["b", "aba"])
def test_stop_texts_cut_at_the_first_one_whatever_the_pieces(text, sizes, stops):
    pieces, stopped = stream(text.encode(), sizes, stops)
    assert "".join(pieces) == cut(text, stops)
    assert stopped == any(stop in text for stop in stops)


@given(TEXTS, STOPS)
def test_text_is_shown_as_soon_as_it_is_certain(text, stops):
    """What is held back is the beginning of a character or of a stop text, never more."""
    longest = max(map(len, stops), default=1) - 1
    shown = TextStream(ByteTokenizer().decoder(), stops)
    out = ""
    for count, character in enumerate(text, 1):
        out += shown.feed(character.encode())
        if shown.stopped:
            break
        assert len(out) >= count - longest


def test_an_incomplete_character_is_held_back_and_replaced_at_the_end():
    euro = "\u20ac".encode()
    assert stream(euro, [1, 1])[0] == ["", "", "\u20ac", ""]
    assert stream(euro[:2], [1])[0] == ["", "", "\ufffd"]
    assert stream(b"a\xffb", [])[0] == ["a\ufffdb", ""]

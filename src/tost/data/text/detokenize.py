"""Changes to the text of corpora that were cut into words long ago. Each works on one line or row."""

from __future__ import annotations

import re
from collections.abc import Callable

_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"})


def straighten_quotes(text: str) -> str:
    """Replace curly quotes, single and double, by straight ones."""
    return text.translate(_QUOTES)


def detokenize_wikitext(text: str) -> str:
    r"""Undo WikiText's spaces around punctuation and its marks ``@-@``, ``@,@`` and ``@.@`` inside words and numbers.

    Headings, line ends and ``<unk>`` stay.

    Example:
        >>> detokenize_wikitext(' The " 1 @,@ 000 @-@ ton " ship ( 1912 ) didn \'t sink . \n')
        'The "1,000-ton" ship (1912) didn\'t sink.\n'
    """
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    return _close_up(re.sub(r'" ([^"]*?) "', r'"\1"', text))


def detokenize_ptb(text: str) -> str:
    """Undo the spaces of the Penn Treebank around punctuation and inside contractions; ``<unk>`` and ``N`` stay.

    Example:
        >>> detokenize_ptb("he did n't pay $ N , said <unk> 's lawyer .")
        "he didn't pay $N, said <unk>'s lawyer."
    """
    return _close_up(re.sub(r"([$#]) (?=[N\d])| (n't)\b", r"\1\2", text))


def _close_up(text: str) -> str:
    text = re.sub(r" ('(?:s|re|ve|ll|d|m|t)?)(?= |$)", r"\1", text, flags=re.IGNORECASE)
    text = re.sub(r" ([.,;:!?%)\]}]+)(?= |$|\n|['\"])", r"\1", text)
    text = re.sub(r"([(\[{]) ", r"\1", text)
    return re.sub(r"^ | (?=\n|$)", "", text)


EDITS: dict[str, Callable[[str], str]] = {
    "wikitext": detokenize_wikitext,
    "ptb": detokenize_ptb,
    "quotes": straighten_quotes,
}
"""Changes by the name that a job gives them."""

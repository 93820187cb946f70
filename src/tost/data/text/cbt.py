"""The Children's Book Test: twenty sentences, a twenty-first with a word missing, and ten candidates for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tost.data.text.files import lines_of
from tost.errors import ConfigError

CHOICES = 10
COLUMNS = ("sentences", "question", "answer", "options")
_BLANK = "XXXXX"


def candidate_texts(row: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the passage with each candidate in the place of the missing word, and which of them is right.

    Args:
        row: One question with the columns `COLUMNS`.

    Raises:
        ConfigError: It is not such a question.
    """
    options, question = list(row["options"]), str(row["question"])
    if len(options) != CHOICES or row["answer"] not in options or _BLANK not in question:
        raise ConfigError(
            f"a question needs {CHOICES} candidates, the answer among them, and {_BLANK} in its text; got "
            f"{len(options)} candidates, answer {row['answer']!r}, text {question[:60]!r}."
        )
    story = " ".join(sentence.strip() for sentence in row["sentences"])
    texts = [f"{story} {question.replace(_BLANK, option).strip()}" for option in options]
    return texts, options.index(row["answer"])


def parse_questions(blocks: Iterable[str], place: str) -> Iterator[Mapping[str, Any]]:
    """Read the published text files: numbered lines, the last one with question, answer and candidates between tabs.

    Args:
        blocks: The text in pieces of any size.
        place: Name of the file in messages.

    Raises:
        ConfigError: A question is not complete.
    """
    sentences: list[str] = []
    for number, line in enumerate(lines_of(blocks), start=1):
        if not line.strip():
            continue
        first, _, rest = line.rstrip("\n").partition(" ")
        if "\t" not in rest:
            sentences.append(rest)
            continue
        fields = [field for field in rest.split("\t") if field]
        if len(fields) != 3 or not first.isdigit():
            raise ConfigError(f"{place}, line {number}: a question has three fields between tabs, got {len(fields)}.")
        yield {"sentences": sentences, "question": fields[0], "answer": fields[1], "options": fields[2].split("|")}
        sentences = []

"""What scripts/sanitize.py makes of the output of a run."""

from __future__ import annotations

import pytest

from tests.test_docs import load_script


@pytest.fixture(scope="module")
def sanitize():
    return load_script("sanitize")


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("805 passed, 3 skipped in 60.1s", 0, (805, 0)),
        ("1 failed, 804 passed in 60.1s", 1, (804, 1)),
        ("==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x60", 1, (0, 1)),
        ("tssa.h:40:7: runtime error: signed integer overflow", 134, (0, 1)),
        ("WARNING: ThreadSanitizer: data race (pid=7)\n9 passed in 3s", 66, (9, 1)),
        ("killed", -9, (0, 1)),
    ],
)
def test_outcomes_are_counted(sanitize, output, code, expected):
    assert sanitize.count_outcomes(output, code) == expected


def test_what_is_linked_and_run_exists(sanitize):
    for sanitizer in sanitize.SANITIZERS.values():
        paths = [name for name in (*sanitizer.sources, *sanitizer.tests) if "/" in name]
        assert [path for path in paths if not (sanitize.ROOT / path).exists()] == []

"""MATLAB files: what SciPy writes is read, and a piece of a file never is."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from scipy.io import savemat

from tost.data.images.sources.matlab import read_matlab
from tost.errors import ConfigError

RECORDS = np.array(
    [(1, "n01440764", np.arange(3.0)), (2, "n01443537\u00e9", 0)],
    dtype=[("ILSVRC2012_ID", object), ("WNID", object), ("children", object)],
)


@pytest.fixture(params=[False, True], ids=["plain", "compressed"])
def write(request, tmp_path):
    def save(**variables):
        savemat(tmp_path / "a.mat", variables, do_compression=request.param)
        return tmp_path / "a.mat"

    return save


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
@pytest.mark.parametrize("count", [0, 1, 3, 300])
def test_numbers(write, dtype, count):
    values = np.arange(count).astype(dtype)
    path = write(other="text", values=values, last=np.ones((2, 3)))
    (found,) = read_matlab(path, ["values"], dtype=np.int64)
    assert found.tolist() == values.tolist()


def test_texts_and_records(write):
    path = write(text="Zo\u00eb", synsets=RECORDS)
    text, records = read_matlab(path, ["text", "synsets"])
    assert text == "Zo\u00eb"
    assert [(one["ILSVRC2012_ID"], one["WNID"]) for one in records] == [(1, "n01440764"), (2, "n01443537\u00e9")]
    assert records[0]["children"].tolist() == [0, 1, 2]


def test_the_other_order_of_bytes(tmp_path):
    def element(kind, content):
        return struct.pack(">II", kind, len(content)) + content + bytes(-len(content) % 8)

    parts = [
        (6, struct.pack(">II", 11, 0)),
        (5, struct.pack(">ii", 1, 3)),
        (1, b"labels"),
        (4, struct.pack(">3H", 1, 2, 300)),
    ]
    matrix = b"".join(element(*part) for part in parts)
    (tmp_path / "a.mat").write_bytes(bytes(124) + b"\1\0MI" + element(14, matrix))
    assert read_matlab(tmp_path / "a.mat", ["labels"])[0].tolist() == [1, 2, 300]


def test_a_piece_of_a_file_is_refused(write):
    path = write(labels=np.arange(40, dtype=np.uint16), synsets=RECORDS)
    whole = path.read_bytes()
    for size in range(0, len(whole) - 8, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="cannot be read as a MATLAB file with labels, synsets"):
            read_matlab(path, ["labels", "synsets"])


def test_what_is_not_there_or_of_another_kind_is_refused(write):
    path = write(cells=np.array(["one", "two"], dtype=object), text="one", many=np.zeros(1))
    for name in ("missing", "cells", "text"):
        with pytest.raises(ConfigError, match=f"a MATLAB file with {name}"):
            read_matlab(path, [name], dtype=np.int64)

"""Files that are made to do harm: every one is refused in words, quickly and without filling the memory."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.io import savemat

from tost.data import DataOptions, build_data
from tost.data._tables import open_parquet
from tost.data.images import published
from tost.data.images.published import read_matlab
from tost.data.images.sources import FileImages, image_files, open_shards
from tost.data.images.transforms import BadImageError
from tost.data.lra.readers import read_metadata_rows
from tost.errors import ConfigError, StorageError

from .images import files
from .samples import limited

# Folders.


def test_folders_that_are_linked_in_many_ways_are_read_once(tmp_path):
    root = files.write_folder(tmp_path)
    for name in ("again", "and_again"):  # 2^40 ways, if links were followed
        (root / "train" / "ant" / name).symlink_to(root / "train")
    (root / "train" / "dog").symlink_to(root / "train" / "bee")  # a class may be a link
    assert [len(image_files(root / "train" / name)) for name in ("ant", "dog")] == [3, 3]


def test_large_files_are_no_images(tmp_path):
    with (tmp_path / "a.jpg").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StorageError, match=r"a\.jpg cannot be opened: it has 1,099,511,627,776 bytes; images of more"):
        FileImages(tmp_path, ["a.jpg"]).image(0)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def eps_in_folder(root):
    files.write(root / "0.png", EPS)
    FileImages(root, ["0.png"]).image(0)


def eps_in_parquet(root):
    pq.write_table(pa.table({"image": [EPS], "label": [0]}), root / "a.parquet")
    open_shards([root / "a.parquet"]).source.image(0)


@pytest.mark.parametrize("read", [eps_in_folder, eps_in_parquet])
def test_no_image_starts_another_program(tmp_path, monkeypatch, read):
    """Pillow opens EPS with Ghostscript, whatever the name of the file is."""
    log = tmp_path / "started"
    files.write(tmp_path / "bin" / "gs", f"#!/bin/sh\necho started >> {log}\n".encode())
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    with pytest.raises(BadImageError, match="unknown format; the formats that are read are BMP, GIF, JPEG"):
        read(tmp_path)
    assert not log.exists()


# Small files that unpack to gigabytes.


@pytest.mark.parametrize(
    ("shape", "said"),
    [((3, 1 << 15, 1 << 15), "more than any such file has"), ((2, 2, 2), "values are stated, but it holds more")],
)
def test_packed_idx_files(tmp_path, shape, said):
    files.write_fashion_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(bytes([0, 0, 8, 3]) + np.array(shape, dtype=">u4").tobytes())
        file.write(bytes(1 << 24))
    with limited(1), pytest.raises(ConfigError, match=said):
        build_data(DataOptions(name="fashion_mnist", path=str(tmp_path)), seed=0)


@pytest.mark.parametrize("opened", [open, gzip.open], ids=["plain", "packed"])
def test_idx_files_that_announce_more_than_they_hold(tmp_path, opened):
    files.write_fashion_mnist(tmp_path)
    with opened(tmp_path / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(bytes([0, 0, 8, 1]) + (2**30 - 1).to_bytes(4, "big"))
    with limited(0.5), pytest.raises(ConfigError, match=r"\[1073741823\] values are stated, but it holds 0"):
        build_data(DataOptions(name="fashion_mnist", path=str(tmp_path)), seed=0)


def test_large_cifar_files_are_not_read(tmp_path):
    files.write_cifar_binary(tmp_path)
    with (tmp_path / "data_batch_1.bin").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"data_batch_1\.bin has 1,099,511,627,776 bytes, more than CIFAR ever has"):
        build_data(DataOptions(name="cifar10", path=str(tmp_path)), seed=0)


def write_repeated(path, value, rows, **settings):
    """A file of one image, repeated: a dictionary or a prefix holds it once."""
    indices = pa.array(np.zeros(rows, dtype=np.int32))
    images = pa.DictionaryArray.from_arrays(indices, pa.array([value], pa.binary()))
    table = pa.table({"image": images, "label": np.zeros(rows, dtype=np.int64)})
    with pq.ParquetWriter(path, table.schema, compression="zstd", store_schema=False, **settings) as writer:
        writer.write_table(table, row_group_size=rows)


def write_column(path, values, label, **settings):
    table = pa.table({"image": values, "label": label})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, row_group_size=len(values), **settings)


PREFIXES = {"column_encoding": {"image": "DELTA_BYTE_ARRAY", "label": "PLAIN"}}
PARQUETS = {
    "long values": ("image", lambda path: write_repeated(path, b"x" * (1 << 20), 1 << 20)),
    "huge value": ("image", lambda path: write_repeated(path, b"x" * (300 << 20), 8)),
    "many rows": ("label", lambda path: write_repeated(path, b"x", 1 << 26)),
    "prefixes": ("image", lambda path: write_column(path, [b"x" * 100_000] * 4000, [0] * 4000, **PREFIXES)),
    "plain": ("image", lambda path: write_column(path, [b"x" * (1 << 20)] * 400, [0] * 400)),
    "nothing": ("label", lambda path: write_column(path, pa.nulls(1 << 26), pa.nulls(1 << 26))),
}


@pytest.mark.parametrize(("column", "write"), PARQUETS.values(), ids=PARQUETS.keys())
def test_small_parquet_files_that_unpack_to_gigabytes(tmp_path, column, write):
    write(tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1_000_000
    with (
        limited(1.0),
        pytest.raises(ConfigError, match=rf"'{column}' of .*a\.parquet unpacks to more than 268,435,456"),
    ):
        open_shards([tmp_path / "a.parquet"])


def test_parquet_files_that_state_more_than_images_unpack_to(tmp_path):
    write_column(tmp_path / "a.parquet", [b"x" * (1 << 20)] * 1100, [0] * 1100)
    with limited(1.0), pytest.raises(ConfigError, match=r"state to unpack to 1,153,.* made to fill the disk"):
        open_shards([tmp_path / "a.parquet"])


def test_matlab_files(tmp_path, monkeypatch):
    savemat(tmp_path / "a.mat", {"labels": np.zeros(20_000_000, dtype=np.uint8)}, do_compression=True)
    with pytest.raises(ConfigError, match="a variable has more than 1,000,000 values"):
        read_matlab(tmp_path / "a.mat", ["labels"])
    savemat(tmp_path / "b.mat", {"labels": np.arange(40)})
    whole = (tmp_path / "b.mat").read_bytes()
    for damaged, names in ((whole[:150], ["labels"]), (b"MATLAB 5.0", ["labels"]), (whole, ["other"])):
        (tmp_path / "b.mat").write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"b\.mat cannot be read as a MATLAB file with {names[0]}: "):
            read_matlab(tmp_path / "b.mat", names)
    # SciPy's compiled reader has ended the program for damaged files.
    monkeypatch.setattr(published, "_MATLAB", "import os; os.kill(os.getpid(), 11)")
    with pytest.raises(ConfigError, match=r"b\.mat cannot be read as a MATLAB file with labels: .*SIGSEGV"):
        read_matlab(tmp_path / "b.mat", ["labels"])


# Tables.


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (pa.array([0, 1 << 63], pa.uint64()), "from 0 to 9223372036854775808"),
        (pa.array([-1, 0]), "from -1 to 0"),
        (pa.array([0, 1 << 40]), "from 0 to 1099511627776"),
    ],
    ids=["uint64", "negative", "large"],
)
def test_labels_that_number_no_class(tmp_path, labels, said):
    table = pa.table({"image": pa.array([b"x", b"y"]), "label": labels})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=f"'label' of .* has labels {said}; classes are numbered 0, 1, 2"):
        open_shards([tmp_path / "a.parquet"])


def test_parquet_texts_that_are_no_texts(tmp_path):
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"a\xff\xfe")]
    )
    pq.write_table(pa.table({"text": broken, "label": [0, 1]}), tmp_path / "train.parquet")
    with pytest.raises(ConfigError, match=r"train\.parquet cannot be read as a parquet file: .*UTF8"):
        build_data(DataOptions(name="lra_text", path=str(tmp_path)), seed=0)


@pytest.mark.parametrize(
    "error",
    [pa.ArrowNotImplementedError("no such type"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), KeyError("x")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_reader_raises_is_said_in_words(tmp_path, error):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read as a parquet file: "):  # noqa: SIM117
        with open_parquet(tmp_path / "a.parquet"):
            raise error


@pytest.mark.parametrize("label", [2, None, 0.5, float("nan"), 1.0, "1", [0]], ids=str)
def test_reviews_have_whole_labels(tmp_path, label):
    pq.write_table(pa.table({"text": ["x"], "label": [label]}), tmp_path / "train.parquet")
    with pytest.raises(ConfigError, match="labels are 0"):
        build_data(DataOptions(name="lra_text", path=str(tmp_path)), seed=0)


# Other files.


def test_pathfinder_metadata(tmp_path):
    with (tmp_path / "0.npy").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"more than metadata ever has; it was not read"):
        read_metadata_rows(tmp_path / "0.npy")


@pytest.mark.parametrize(
    ("name", "file"), [("lra_listops", "basic_train.tsv"), ("lra_retrieval", "new_aan_pairs.train.tsv")]
)
def test_lines_without_end(tmp_path, name, file):
    for other in (file, file.replace("train", "val"), file.replace("train", "eval")):
        with (tmp_path / other).open("wb") as stream:
            stream.truncate(1 << 33)
    with limited(1), pytest.raises(ConfigError, match=r"has a line of more than 67,108,864 bytes; it is damaged"):
        build_data(DataOptions(name=name, path=str(tmp_path)), seed=0)


KILLED = """
import os, signal
from tests.data.samples import Numbers
from tost.data.loader import make_loader, watching_workers
from tost.errors import StorageError

loader = make_loader(Numbers(10_000), batch_size=2, seed=0, workers=1)
stream = iter(loader)
next(stream)
try:
    with watching_workers():
        os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
        for _ in zip(range(1000), stream):
            pass
except StorageError as error:
    print(error)
"""


def test_a_killed_worker_is_named():
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", KILLED], cwd=root, capture_output=True, text=True, timeout=120)
    assert "a process that prepares batches was killed, perhaps for lack of memory" in run.stdout, run.stderr
    assert "a smaller data.workers" in run.stdout

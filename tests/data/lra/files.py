"""Small files in the official layout of the Long Range Arena, each with the traps of the real ones."""

from __future__ import annotations

import numpy as np
from PIL import Image

from tost.data.lra.options import PATHFINDER_FOLDERS

LISTOPS = [
    ("( ( ( [MAX 2 ) 9 ) ] )", 9),
    ("( ( ( [MED 1 ) 2 ) ] )", 1),
    ("( ( ( ( [SM 7 ) 8 ) ( ( ( [MIN 4 ) 3 ) ] ) ) ] )", 8),
]
PAIRS = [
    (b"1.0", b"P07-1001", b"W05-0301", b'He said "yes', b"no quoting, \"here\" or 'there'"),
    (b"0.0", b"P07-1002", b"W05-0302", b"one\rline\x0b still \xe2\x80\xa8 one", b"B" * 50),
    (b"1.0", b"P07-1003", b"W05-0303", "naïve café".encode(), b""),
]


def write_listops(folder, rows=LISTOPS, splits=("train", "val", "test"), end="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["Source\tTarget", *(f"{source}\t{target}" for source, target in rows)]
    for split in splits:
        (folder / f"basic_{split}.tsv").write_bytes((end.join(lines) + end).encode())
    return folder


def write_pairs(folder, rows=PAIRS, splits=("train", "eval", "test")):
    folder.mkdir(parents=True, exist_ok=True)
    for split in splits:
        (folder / f"new_aan_pairs.{split}.tsv").write_bytes(b"".join(b"\t".join(row) + b"\n" for row in rows))
    return folder


def pixels_of(batch, number, side):
    """An image that says which it is."""
    return np.full((side, side), 10 * batch + number, dtype=np.uint8)


def write_pathfinder(release, resolution=32, difficulty="hard", batches=(10, 2), each=10):
    """Images of two batches; the second sorts first by name but not by number."""
    folder = release / f"pathfinder{resolution}" / PATHFINDER_FOLDERS[difficulty]
    (folder / "metadata").mkdir(parents=True)
    for batch in batches:
        (folder / "imgs" / str(batch)).mkdir(parents=True)
        rows = []
        for number in range(each):
            Image.fromarray(pixels_of(batch, number, resolution)).save(
                folder / "imgs" / str(batch) / f"sample_{number}.png"
            )
            label = (batch + number) % 2
            rows.append([f"imgs/{batch}", f"sample_{number}.png", number, label, 1.0, 14, 4, 2, 0.5, 1, 1])
        text = "".join(" ".join(map(str, row)) + "\n" for row in rows)
        (folder / "metadata" / f"{batch}.npy").write_text(text)
    return folder

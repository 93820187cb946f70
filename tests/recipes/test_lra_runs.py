"""One tiny run per task of the Long-Range Arena, on files in the official layout that are written here."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.lra.files import write_listops, write_pairs, write_pathfinder
from tests.train.runs import Recorder
from tost.recipes import get_task, load_config
from tost.train.loop import fit

TINY = (
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=2",
    "train.steps=2",
    "train.batch_size=4",
    "schedule.warmup_steps=1",
    "evaluate.batch_size=4",
)
SHORT = ("data.options.length=48",)


def write_parquet(folder, columns):
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(pa.table(columns), folder / f"{split}.parquet")
    return folder


def write_reviews(folder):
    return write_parquet(folder, {"text": ["bad film", "a good film", "so so", "never again"], "label": [0, 1, 1, 0]})


def write_photographs(folder):
    def encoded(number):
        buffer = io.BytesIO()
        Image.fromarray(np.full((32, 32, 3), 20 * number, dtype=np.uint8)).save(buffer, format="png")
        return {"bytes": buffer.getvalue(), "path": None}

    return write_parquet(folder, {"img": [encoded(n) for n in range(10)], "label": list(range(10))})


def write_images(resolution):
    def write(folder):
        write_pathfinder(folder, resolution, difficulty="easy", each=8)
        return folder

    return write


CASES = {
    "listops_cpu": (lambda folder: write_listops(folder / "listops-1000").parent, SHORT),
    "text_cpu": (write_reviews, (*SHORT, "data.options.hold_out=1")),
    "retrieval_cpu": (lambda folder: write_pairs(folder / "tsv_data").parent, SHORT),
    "image_cpu": (write_photographs, ()),
    "pathfinder_cpu": (write_images(32), ()),
    "pathx": (
        write_images(128),
        (
            "data.options.difficulty=easy",
            "train.clip_value=null",
            "schedule.name=cosine",
            "train.batch_size=1",
            "evaluate.batches=1",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_task_trains_on_files_in_the_official_layout(name, tmp_path):
    write, overrides = CASES[name]
    path = write(tmp_path / "data")
    config = load_config(f"lra/{name}", [f"data.path={path}", *TINY, *overrides])
    result = fit(config, get_task(config.recipe), tmp_path / "run", resume=None, reporter=Recorder())
    assert (result.status, result.step) == ("finished", 2)
    assert 0 <= result.metrics["accuracy"] <= 1
    assert np.isfinite(result.metrics["loss"])

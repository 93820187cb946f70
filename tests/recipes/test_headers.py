"""The script that fills the measured lines of a configuration's header."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from tost.recipes import find_config, load_config
from tost.train.config import dump_config

ROOT = Path(__file__).parents[2]
DAY = 981_158_400  # 2001-02-03, noon at UTC is still this day


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fill_recipe_header", ROOT / "scripts" / "fill_recipe_header.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    lines = find_config("demo/digits").read_text().splitlines(keepends=True)
    header = ["# Mine.\n", "#   run      tost train mine.yaml\n"]
    path.write_text(re.sub(r"\bsteps: \d+", "steps: 7", "".join([*header, *lines[5:]])))
    return path


@pytest.fixture
def make_run(tmp_path, recipe):
    """Write the files that a run of the recipe leaves."""

    def write(seed: int, accuracy: float, *overrides: str, of: Path = recipe, **changes: object) -> Path:
        folder = tmp_path / f"run-{seed}-{len(overrides)}"
        folder.mkdir()
        config = load_config(str(of), [f"train.seed={seed}", *overrides])
        (folder / "config.yaml").write_text(dump_config(config))
        summary = {
            "final": {"accuracy": accuracy, "loss": 0.5},
            "seconds": 90.0 + seed,
            "peak_memory_bytes": 512_000_000,
            "steps": config.train.steps,
            "revision": "abc1234",
            **changes,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        os.utime(folder / "summary.json", (DAY, DAY))
        (folder / "env.json").write_text(json.dumps({"cpu": "A CPU", "threads": 2}))
        return folder

    return write


def test_three_runs_give_mean_and_spread(script, recipe, make_run, capsys):
    before = recipe.read_text()
    runs = [str(make_run(seed, accuracy)) for seed, accuracy in enumerate((0.96, 0.98, 0.97))]
    assert script.main([str(recipe), *runs]) == 0
    lines = recipe.read_text().splitlines()
    assert lines[:5] == [
        "# Mine.",
        "#   run      tost train mine.yaml",
        "#   cost     1.5 min on A CPU, 2 threads; 0.51 GB",
        "#   expect   accuracy 0.97 (0.96 to 0.98 over 3 seeds) at step 7",
        "#   checked  2001-02-03, revision abc1234",
    ]
    assert lines[5:] == before.splitlines()[2:]
    assert capsys.readouterr().out.splitlines() == lines[:5]


def test_one_run_says_that_it_is_one_and_replaces_older_numbers(script, recipe, make_run):
    script.main([str(recipe), str(make_run(0, 0.5))])
    script.main([str(recipe), str(make_run(1, 0.75))])
    assert "#   expect   accuracy 0.75 (one seed) at step 7\n" in recipe.read_text()


def test_runs_that_prove_nothing_are_refused(script, recipe, make_run, tmp_path):
    before = recipe.read_text()
    same = make_run(0, 0.5)
    refused = {
        "other settings than the file: model.depth, train.steps": [make_run(1, 0.5, "train.steps=5", "model.depth=1")],
        "two runs had the same seed": [same, same],
        "stopped at step 3 of 7; finish it first": [make_run(2, 0.5, steps=3)],
        "is not the folder of a finished run": [tmp_path / "nowhere"],
    }
    for message, runs in refused.items():
        with pytest.raises(SystemExit, match=message):
            script.main([str(recipe), *map(str, runs)])
    assert recipe.read_text() == before


def test_places_of_data_and_weights_do_not_matter_but_random_weights_do(script, make_run, tmp_path):
    recipe = tmp_path / "finetuned.yaml"
    recipe.write_text(find_config("small/imagenette").read_text())

    def finished(seed: int, weights: str) -> str:
        given = (f"data.path=/machine-{seed}/images", f"train.init_from={weights}")
        return str(make_run(seed, 0.5, *given, of=recipe))

    trained = [finished(seed, f"/machine-{seed}/run") for seed in (0, 1)]
    assert script.main([str(recipe), *trained]) == 0
    assert re.search(r"#   expect   accuracy 0\.5 \(0\.5 to 0\.5 over 2 seeds\)", recipe.read_text())
    with pytest.raises(SystemExit, match=r"other settings than the file: train\.init_from"):
        script.main([str(recipe), trained[0], finished(2, "null")])

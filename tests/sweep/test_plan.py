"""Plans: what is accepted, what is refused and in which words, and those that come with the package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tost.sweep
from tost.errors import ConfigError
from tost.sweep import expand, find_plan, list_plans, load_plan

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(tost.sweep.__file__).parent / "plans").iterdir())
GOOD = """title: T
config: demo/digits
metric: accuracy
arms:
  a: {}
"""


def problems_of(tmp_path: Path, text: str) -> dict[str, str]:
    """What is said about a plan, by its key."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_plan(str(path))
    heading, *lines = str(caught.value).splitlines()
    assert heading.startswith(f"{path} cannot be used")
    return {line.split()[0].rstrip(":"): line.strip() for line in lines}


def test_a_plan_needs_little(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    plan = load_plan(str(path))
    assert (plan.seeds, plan.mode, plan.percent, list(plan.arms)) == ([0], "max", False, ["a"])


MISTAKES = {
    "arms.a.st": ("  a: {st: [x=1]}", "(line 5): unknown key; did you mean arms.a.set?"),
    "arms.a.set": ("  a: {set: x=1}", "needs a list, each entry text"),
    "arms.a.after": ("  a: {after: bb}\n  b: {}", "there is no arm bb in this plan; did you mean b?"),
    "arms.a.reference": ("  a: {reference: high}\nsource: S", "needs a number"),
    "arms.A": ("  A: {}", "small letters"),
    "arms.a": ("  a:", "null given; needs keys"),
    "source": ("  a: {reference: 1.5}", "name the source of the values"),
    "arms.a.seeds": ("  a: {seeds: [0, 3]}\nseeds: [0, 1]", "[3] given; an arm takes some of the plan's seeds, [0, 1]"),
    "arms.b.seeds": ("  a: {seeds: [1]}\n  b: {after: a}\nseeds: [0, 1]", "[0] given, but a, which it starts from"),
    "seeds": ("  a: {}\nseeds: [1, 1]", "every seed once"),
    "seeds.0": ("  a: {}\nseeds: [-1]", ">= 0"),
    "mode": ("  a: {}\nmode: most", "needs one of min, max"),
    "metrics": ("  a: {}\nmetrics: x", "did you mean metric?"),
}


@pytest.mark.parametrize(("key", "arms", "text"), [(key, *rest) for key, rest in MISTAKES.items()], ids=MISTAKES)
def test_mistakes_are_named_with_their_remedy(tmp_path, key, arms, text):
    found = problems_of(tmp_path, GOOD.replace("  a: {}", arms))
    assert list(found) == [key]
    assert text in found[key]


def test_all_problems_are_told_at_once(tmp_path):
    found = problems_of(tmp_path, "title: T\narms:\n  a: {after: b}\n  b: {after: a}\n")
    assert list(found) == ["config", "metric", "arms.a.after", "arms.b.after"]
    assert "a after b after a" in found["arms.a.after"]


def test_unknown_plans_get_a_suggestion():
    with pytest.raises(ConfigError, match=r"did you mean vision_cifar10\?"):
        find_plan("vision_cifar")
    with pytest.raises(ConfigError, match="there is no such file"):
        find_plan("nowhere.yaml")


def test_the_list_is_what_the_folder_holds():
    assert list_plans() == [path.stem for path in FILES]
    assert {path.suffix for path in FILES} == {".yaml"}
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tost"]
    assert set(FILES) <= {path for pattern in patterns for path in (ROOT / "src" / "tost").glob(pattern)}


@pytest.mark.parametrize("name", list_plans())
def test_every_run_of_a_built_in_plan_is_valid(name, tmp_path):
    plan = load_plan(name)
    others = [arm.after.split("/") for arm in plan.arms.values() if arm.after and "/" in arm.after]
    for other, arm in others:
        assert arm in load_plan(other).arms
        for seed in plan.seeds:
            (tmp_path / arm / f"seed{seed}" / "checkpoints" / "best").mkdir(parents=True)
    path = [] if plan.config.startswith("probes/") else ["data.path=somewhere"]  # these are drawn
    runs = expand(plan, path, tmp_path / "out", name=name, start=tmp_path)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for arm in plan.arms:
        first = plan.seeds_of(arm)[:1]
        wanted = plan.seeds_of(arm) if plan.tune is None else first * len(plan.tune.values)
        assert [run.seed for run in runs if run.arm == arm] == wanted
    assert len(plan.seeds) >= 2, "one seed says nothing about the spread"
    assert {run.settings.checkpoint.best_metric for run in runs} == {plan.metric}
    assert {run.settings.checkpoint.best_mode for run in runs} == {plan.mode}
    lengths = {(run.settings.train.steps, run.settings.train.batch_size) for run in runs}
    assert len(lengths) == 1 or plan.tasks, "arms that are compared take equal steps"


def test_the_ablation_is_the_four_cells_of_the_paper():
    arms = load_plan("vision_ablation").arms
    assert {name: arm.reference for name, arm in arms.items()} == {
        "mlp_norm": 91.2,
        "ista_norm": 87.4,
        "mlp_nonorm": 85.2,
        "ista_nonorm": 80.6,
    }
    cells = {tuple(sorted(change.split("=")[1] for change in arm.set)) for arm in arms.values()}
    assert len(cells) == 4


def test_the_package_loads_no_torch():
    program = (
        "import sys, tost.sweep as s\n"
        "[getattr(s, name) for name in s.__all__]\n"
        "s.load_plan('vision_cifar10')\n"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The workflows and templates of .github: they parse, and what they run exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_docs import make_targets

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What a step makes itself, so that it cannot be looked up here.
MADE = ("dist/", "wheelhouse/")


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text())["jobs"]


def steps() -> list[Any]:
    return [
        pytest.param(step, id=f"{path.stem}-{name}-{number}")
        for path in WORKFLOWS
        for name, job in jobs(path).items()
        for number, step in enumerate(job["steps"])
    ]


def words_of(step: dict[str, Any]) -> list[list[str]]:
    """The commands of a step, without programs that are written into it."""
    script = re.sub(r"<<'(\w+)'.*?^\1$", "", step.get("run", ""), flags=re.DOTALL | re.MULTILINE)
    return [words for line in script.splitlines() if (words := shlex.split(line))]


@pytest.mark.parametrize("step", steps())
def test_every_step_names_what_exists(step):
    assert ("run" in step) != ("uses" in step)
    if "uses" in step:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), "actions are pinned by hash"
    for words in words_of(step):
        if words[0] == "make":
            assert set(words[1:]) <= make_targets()
        extras = [name for word in words for name in re.findall(r"^\.\[([\w,]+)\]$", word)]
        assert set(",".join(extras).split(",")) - {""} <= set(PROJECT["project"]["optional-dependencies"])
        files = [word for word in words[1:] if re.fullmatch(r"[\w.-]+(/[\w.-]+)+|[\w-]+\.(py|txt|yml|toml)", word)]
        missing = [file for file in files if not file.startswith(MADE) and not (ROOT / file).exists()]
        assert missing == []


def test_every_platform_and_version_is_tested():
    matrix = jobs(ROOT / ".github" / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert matrix["python"] == versions, "classifiers and tests name the same versions"
    assert f">={versions[0]}" == PROJECT["project"]["requires-python"]
    wheels = jobs(ROOT / ".github" / "workflows" / "release.yml")["wheels"]["strategy"]["matrix"]
    assert matrix["os"] == wheels["os"], "a wheel is published for a platform that is tested"


def test_what_ci_runs_here_is_what_it_runs_there():
    local = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    commands = [words for step in steps() for words in words_of(step.values[0])]
    remote = {target for words in commands if words[0] == "make" for target in words[1:]}
    assert set(local) == remote - {"browser"}, "Chrome is on the runners, but not on every machine"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_only_read_and_keep_no_credentials(path):
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    checkouts = [step for job in jobs(path).values() for step in job["steps"] if "checkout" in step.get("uses", "")]
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_only_a_tag_publishes_and_no_password_is_stored():
    publish = jobs(ROOT / ".github" / "workflows" / "release.yml")["publish"]
    assert "refs/tags/v" in publish["if"]
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    assert set(publish["needs"]) == {"wheels", "sdist"}
    assert not any("secrets." in path.read_text() for path in WORKFLOWS)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_complete(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(form)
    assert [part for part in form["body"] if not part["attributes"].get("label")] == []


def test_pre_commit_hooks_download_nothing():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]


def test_addresses_of_the_project_are_addresses():
    assert all(re.fullmatch(r"https://\S+", address) for address in PROJECT["project"]["urls"].values())

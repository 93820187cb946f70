"""The documentation site: tutorials that run, the recorded explorer, links that lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.test_docs import ROOT

SCRIPTS = ROOT / "scripts" / "website"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
PUBLIC = {*("tost", "tost.analysis", "tost.data", "tost.generation", "tost.integrations.timm", "tost.objective")}
PUBLIC |= {"tost.recipes", "tost.train"}


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


@pytest.fixture
def tutorials():
    import tutorials  # beside the hook of mkdocs

    return tutorials


@pytest.fixture
def links():
    import links

    return links


@pytest.fixture
def recording():
    import recording

    return recording


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_use_public_names_and_explain_themselves(path, tutorials):
    notebook = tutorials.read(path)
    assert notebook.cells[0].cell_type == "markdown"
    assert re.match(r"# \w", notebook.cells[0].source)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds.count("code") > 4
    assert kinds.count("markdown") > 4
    text = path.read_text()
    assert set(re.findall(r"^(?:from|import) (tost[\w.]*)", text, flags=re.MULTILINE)) <= PUBLIC
    assert not re.search(r"\b(tost|analysis|model|objective)(\.\w+)*\._\w", text)
    assert f"tutorials/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_run(path, tutorials):
    notebook = tutorials.execute(path)
    text, pictures = tutorials.page(notebook, path.stem)
    assert "Traceback" not in text
    assert pictures
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in pictures.values())


def test_outputs_of_a_notebook_are_in_its_page(tutorials):
    output = nbformat.v4.new_output
    dot = "iVBORw0KGgo="
    outputs = [
        output("stream", name="stdout", text="print"),
        output("stream", name="stdout", text="ed\n"),
        output(
            "execute_result", data={"text/plain": "Repr()", "text/html": f'<img src="data:image/png;base64,{dot}">'}
        ),
        output("display_data", data={"text/plain": "<Figure>", "image/png": dot}),
        output("execute_result", data={"text/plain": "42"}),
    ]
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell("show()", outputs=outputs)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"seconds": 7})
    text, pictures = tutorials.page(notebook, "name")
    assert list(pictures) == ["name-1.png", "name-2.png"]
    order = ["# Title", "run in 7 s", "name.ipynb", "show()", "printed", 'src="name-1.png"', "](name-2.png)", "42"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "base64" not in text


def test_equations_are_drawn_by_the_browser(tutorials):
    shown = tutorials.with_mathml("Let $x_i$ be\n\n$$\\sum_i x_i$$\n")
    assert shown.count("<math") == 2
    assert 'display="block"' in shown
    assert "$" not in shown


def test_modules_of_the_page_become_one_script(recording):
    script = recording.bundle()
    modules = [path.stem for path in recording.STATIC.glob("*.js")]
    assert all(f"const {name} = await (async () => {{" in script for name in modules)
    assert not re.search(r"^(import|export) ", script, flags=re.MULTILINE)


def test_a_module_that_cannot_be_joined_is_named(recording, tmp_path):
    (tmp_path / "app.js").write_text('import whole from "./other.js";\n')
    with pytest.raises(ValueError, match=r"app\.js.*import whole"):
        recording.bundle(tmp_path)


def write_site(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return folder


def test_good_links_are_passed(links, tmp_path):
    (tmp_path / "a b.png").write_bytes(b"")
    first = '<a href="b.html#here">x</a> <img src="a%20b.png"> <a href="https://example.org">y</a> <a href="#top">z</a>'
    assert links.problems(write_site(tmp_path, a=f'<p id="top">{first}</p>', b='<h2 id="here">x</h2>')) == []


@pytest.mark.parametrize(
    ("html", "reason"),
    [
        ('<a href="missing.html">x</a>', "there is no such file"),
        ('<a href="b.html#missing">x</a>', "there is no such anchor"),
        ('<img src="missing.png">', "there is no such file"),
        ('<script src="https://example.org/x.js"></script>', "loaded from another site"),
    ],
)
def test_bad_links_are_found(links, tmp_path, html, reason):
    (found,) = links.problems(write_site(tmp_path, a=html, b="<p>"))
    assert reason in found


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_its_links_resolve(links, tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert links.problems(tmp_path) == []
    assert (tmp_path / "explore-demo" / "recorded.js").stat().st_size > 100_000
    assert "search_index.js" in {path.name for path in (tmp_path / "search").iterdir()}

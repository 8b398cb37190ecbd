"""The README's code runs as it stands, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from support.fresh import run_fresh

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "virtual" / "README.md", *ROOT.glob("docs/*.md")])


def test_the_snippet_runs_and_prints_what_it_says(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    expected = re.findall(r"print\(.*?\) +# (.*)", code)
    ran = run_fresh(code, directory=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert expected
    assert ran.stdout.split("\n")[:-1] == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """To a file that is there, and to a heading in it if the link names one."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if not link.startswith("http")]
    missing = []
    for link in links:
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(link)
    assert missing == []


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_leads_to_every_page():
    linked = re.findall(r"\]\((docs/[^)#]+\.md)", (ROOT / "README.md").read_text())
    assert {path.name for path in ROOT.glob("docs/*.md")} == {Path(link).name for link in linked}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_its_figures_are_those_of_the_measurements():
    """A figure that is measured again changes on both pages."""
    readme, all_figures = ((ROOT / name).read_text() for name in ("README.md", "docs/measurements.md"))
    figures = readme.split("Five figures")[1].split("**Untested")[0]
    rows = re.findall(r"^\| (\w.*) \| (.*) \|$", figures, re.MULTILINE)
    assert len(rows) == 5
    measured = re.findall(r"^\| .* \| (.*) \|.*\|$", all_figures, re.MULTILINE)
    for what, figure in rows:
        numbers = set(re.findall(r"\d+\.\d+", figure))
        assert any(numbers <= set(re.findall(r"\d+\.\d+", cell)) for cell in measured), what


def test_contributing_lists_the_folders_of_the_tests():
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| folder | what is tested |")[1].split("\n\n")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/*/**/test_*.py")}
    assert listed == folders

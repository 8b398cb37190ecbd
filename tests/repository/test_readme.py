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
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    assert missing == []

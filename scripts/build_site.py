"""Build the documentation as a site: python scripts/build_site.py [serve].

README.md is the site's first page and the tables of benchmarks/ are pages, so that each text is kept once. All pages
are put together in build/pages, where a link to another file becomes a link to that file's page, or plain text where
the site has none. Zensical (`pip install -e .[docs]`) makes the site of them, and fails on a warning.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository, where the package is not installed

from scripts.flags_reference import flags_pages

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files at the top of the repository, and their pages."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")
FENCE_OF_FILE = re.compile(r"^```(\w+) file=(\S+)$", flags=re.MULTILINE)


def page_of(path: str) -> str | None:
    """Name the site's page (or picture) of a file of the repository, both with `/`; None if it has none."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.startswith("benchmarks/") and path.endswith(".md") else None


def with_site_links(text: str, path: str) -> str:
    """Return the Markdown of a repository's file with its links to files turned into links to pages, or into text."""
    here = PurePosixPath(page_of(path) or path).parent

    def link(match: re.Match[str]) -> str:
        mark, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        aim = os.path.normpath(PurePosixPath(path).parent / target)
        page = page_of(aim)
        if page is None:
            return words if words.startswith("`") else f"{words} (`{aim}`)"
        return f"{mark}[{words}]({os.path.relpath(page, here)}{anchor})"

    return LINK.sub(link, text)


def with_titles(text: str) -> str:
    """Return Markdown whose fences have titles (`python title="NAME"`) where the repository writes `python file=NAME`,
    which superfences does not read as a fence."""
    return FENCE_OF_FILE.sub(r'```\1 title="\2"', text)


def collect_pages(root: Path = ROOT, pages: Path = PAGES) -> None:
    """Write all pages, those of the flags included, and the pictures to the folder `pages`, which is emptied first."""
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(root / "docs", pages)
    tables, moved = (root / "benchmarks").glob("*.md"), (root / name for name in MOVED)
    for path in [*(root / "docs").rglob("*.md"), *tables, *moved]:
        name = path.relative_to(root).as_posix()
        page = pages / str(page_of(name))
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(with_titles(with_site_links(path.read_text(encoding="utf-8"), name)), encoding="utf-8")
    for name, text in flags_pages().items():
        (pages / name).write_text(text, encoding="utf-8")


def main() -> int:
    """Build the site, or serve it while pages are written; return Zensical's exit code."""
    zensical = Path(sys.executable).parent / "zensical"
    if not zensical.exists():
        print('The site is made by Zensical, which is not installed: pip install -e ".[docs]"', file=sys.stderr)
        return 1
    collect_pages()
    command = ["serve"] if sys.argv[1:] == ["serve"] else ["build", "--clean", "--strict"]
    return subprocess.run([zensical, *command, "-f", str(ROOT / "mkdocs.yml")], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

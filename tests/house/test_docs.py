"""Documentation without dead links: in the sources always, in the built site where mkdocs is installed.

Local links and anchors only: nothing here reaches the network.
"""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from eagle3lab.core.paths import repository
from eagle3lab.runs.presets import PRESETS

ROOT = repository()
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def pages(root: Path) -> list[Path]:
    """Markdown that people read: the top folder's, docs/ and the README files of data and figures."""
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("data/*.md"), *root.glob("figures/*.md")])


def anchors(text: str) -> set[str]:
    """Anchors of the headings as GitHub and mkdocs make them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?)\s*$", prose(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).strip()
        found |= {slug.replace(" ", "-"), re.sub(r"[-\s]+", "-", slug)}
    return found


def prose(text: str) -> str:
    """Without code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def dead_links(root: Path) -> list[str]:
    """`page: link` for every local link or anchor that leads nowhere."""
    found: list[str] = []
    for page in pages(root):
        text = page.read_text()
        for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", prose(text))):
            link = match[1] or match[2]
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            alive = there.exists() and there.is_relative_to(root)
            if alive and parts.fragment and there.suffix == ".md":
                alive = parts.fragment in anchors(there.read_text())
            if not alive:
                found.append(f"{page.relative_to(root)}: {link}")
    return found


def test_no_dead_link_in_the_sources() -> None:
    assert dead_links(ROOT) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/there.md").write_text("# There\n\n## A title: two words\n")
    (tmp_path / "README.md").write_text(
        "[good](docs/there.md#a-title-two-words) [far](https://example.org/x) `[code](nowhere.md)`\n"
        "[gone](docs/gone.md) [no anchor](docs/there.md#nothing) ![no picture](figures/x.png) [out](../elsewhere.md)\n"
        "```\n[in a block](nowhere.md)\n```\n"
    )
    wanted = ["docs/gone.md", "docs/there.md#nothing", "figures/x.png", "../elsewhere.md"]
    assert dead_links(tmp_path) == [f"README.md: {link}" for link in wanted]


def preset_rows() -> dict[str, list[str]]:
    """What the table of presets in docs/profiles.md must say of every preset."""
    presets = [PRESETS[name] for name in ("quick", "default", "long")]
    return {
        "training conversations": ["all" if p.train_samples is None else f"{p.train_samples:,}" for p in presets],
        "optimiser steps x tokens": [f"{p.train_steps:,} x {p.batch_tokens}" for p in presets],
        "draft vocabulary": [f"{p.draft_vocab_size:,}" for p in presets],
        "head rows a step": [f"{p.head_rows:,}" for p in presets],
        "head": ["trained" if p.train_lm_head else "the target's rows" for p in presets],
        "weight of the feature term": [f"{p.feature_weight:g}" for p in presets],
        "evaluation prompts a set x new tokens": [
            f"{p.eval_prompts} x {p.max_new_tokens}" + (", and HumanEval" if p.humaneval else "") for p in presets
        ],
    }


def test_the_documented_presets_are_the_presets() -> None:
    lines = (ROOT / "docs/profiles.md").read_text().splitlines()
    told = {cells[0]: cells[1:] for cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines)}
    for name, cells in preset_rows().items():
        assert told[name] == cells


class Site(HTMLParser):
    """Links, anchors and loaded assets of one built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.assets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {value for value in (values.get("id"), values.get("name")) if value}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        loads = values.get("src") if tag in {"script", "img", "iframe"} else None
        if tag == "link" and values.get("rel") in {"stylesheet", "preload", "icon", "shortcut icon"}:
            loads = values.get("href")
        self.assets += [loads] if loads else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Site]:
    """The built site, page by page."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e .[docs]")
    folder = tmp_path_factory.mktemp("site").resolve()
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Site(path.read_text()) for path in folder.rglob("*.html") if path.name != "404.html"}


def test_no_dead_link_in_the_site(site: dict[Path, Site]) -> None:
    dead: list[str] = []
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            fragment = unquote(parts.fragment)
            if there not in site or (fragment and fragment not in site[there].ids):
                dead.append(f"{path.name}: {link}")
    assert dead == []


def test_the_site_loads_nothing_remote(site: dict[Path, Site]) -> None:
    assert {asset for page in site.values() for asset in page.assets if urlsplit(asset).netloc} == set()


def test_the_reference_holds_the_package(site: dict[Path, Site]) -> None:
    ids = {one for path, page in site.items() if path.parent.name == "api" for one in page.ids}
    for name in (
        "eagle3lab.points.captured",
        "eagle3lab.drafter.model.Eagle3Drafter",
        "eagle3lab.acceptance.counts.AcceptanceCounts",
    ):
        assert name in ids, name

"""Hooks of the documentation site: pages and links of the repository, pages of ops, formulas."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

sys.path.append(str(Path(__file__).parent))  # for the extension of griffe, too
from sources import BESIDE, ROOT, commands_left, names_of, ops, with_links_of_the_site

# Files beside docs/ that pages show or link to.
SHOWN = ("bench/results/**/*.svg", "examples/*.py")
# Page -> the packages whose public names it lists.
REFERENCES = {
    "reference.md": ["specdec_hf"],
    "reference-papers.md": ["specdec_papers", "specdec_serve"],
}
# Pages that docstrings and the changelog name; neither those in links nor those in programs.
NAMED = re.compile(r"<a\b.*?</a>|<pre\b.*?</pre>|\bdocs/([\w/-]+)\.md(#[\w-]+)?", re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
SIGNS = {"&lt;": "<", "&gt;": ">", "&amp;": "&"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that they have elsewhere."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies beside docs/, the pages of the ops, and those of the names of packages."""
    pages = {page: (ROOT / name).read_text() for name, page in BESIDE.items()}
    for op, classes in ops().items():
        blocks = [f"::: specdec_kernels.{op}\n    options: {{heading_level: 1}}\n"]
        blocks += [f"::: specdec_kernels.{name}\n" for name in classes]
        pages[f"ops/{op}.md"] = "\n".join(blocks)
    for page, packages in REFERENCES.items():
        names = "".join(f"\n::: {name}\n" for package in packages for name in names_of(package))
        pages[page] = f"# Names of {' and '.join(packages)}\n{names}"
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links that are right in the repository lead to pages of the site."""
    return with_links_of_the_site(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Set formulas as MathML, which browsers show by themselves, and link pages that are named."""
    up = "../" * page.file.src_uri.count("/")

    def formula(found: re.Match[str]) -> str:
        latex = re.sub("|".join(SIGNS), lambda sign: SIGNS[sign[0]], found[2])
        return convert(latex, display="inline" if found[1] == "span" else "block")

    def linked(found: re.Match[str]) -> str:
        if not found[1]:
            return found[0]
        return f'<a href="{up}{found[1]}.html{found[2] or ""}">{found[0]}</a>'

    html = FORMULA.sub(formula, html)
    if left := commands_left(html):
        names = ", ".join(left)
        raise PluginError(f"{page.file.src_uri} shows {names}, which latex2mathml lacks")
    return NAMED.sub(linked, html)

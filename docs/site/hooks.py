"""Hooks of the documentation site: pages and links of the repository, pages of ops, formulas."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
# Documents beside docs/ -> their pages.
BESIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Files beside docs/ that pages show or link to.
SHOWN = ("bench/results/**/*.svg", "examples/*.py")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")
# Pages that docstrings and the changelog name; neither those in links nor those in programs.
NAMED = re.compile(r"<a\b.*?</a>|<pre\b.*?</pre>|\bdocs/([\w/-]+)\.md(#[\w-]+)?", re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def ops(folder: Path) -> dict[str, list[str]]:
    """Each public function of `specdec_kernels.ops`, with the classes that its signature names.

    A class stands on the page of the first function that returns it, or else takes it.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("[!_]*.py")):
        body = ast.parse(file.read_text()).body
        classes = {n.name for n in body if isinstance(n, ast.ClassDef)}
        functions = [n for n in body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
        for returned in (True, False):
            for function in functions:
                where = function.returns if returned else function.args
                named = {n.id for n in ast.walk(where or function) if isinstance(n, ast.Name)}
                found.setdefault(function.name, []).extend(sorted(named & classes))
                classes -= named
    return found


def names_of_the_loop(stub: Path) -> list[str]:
    """The public names of `specdec_hf`, each with the module that defines it."""
    imports = [n for n in ast.parse(stub.read_text()).body if isinstance(n, ast.ImportFrom)]
    return [f"{n.module}.{name.name}" for n in imports for name in n.names]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that they have elsewhere."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies beside docs/, and the pages of the ops."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            shown = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, shown, abs_src_path=str(path)))
    for op, classes in ops(ROOT / "specdec_kernels/ops").items():
        shown = [f"::: specdec_kernels.{op}\n    options: {{heading_level: 1}}\n"]
        shown += [f"::: specdec_kernels.{name}\n" for name in classes]
        files.append(File.generated(config, f"ops/{op}.md", content="\n".join(shown)))
    names = names_of_the_loop(ROOT / "python/specdec_hf/__init__.pyi")
    listed = "".join(f"\n::: {name}\n" for name in names)
    files.append(File.generated(config, "reference.md", content=f"# Names of specdec_hf\n{listed}"))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links that are right in the repository lead to pages of the site."""
    uri = page.file.src_uri
    beside = {page: name for name, page in BESIDE.items()}
    folder = posixpath.dirname(beside.get(uri, f"docs/{uri}"))

    def on_the_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        return posixpath.relpath(
            BESIDE.get(path, path.removeprefix("docs/")), posixpath.dirname(uri)
        )

    return LINK.sub(on_the_site, markdown)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Set formulas as MathML, which browsers show by themselves, and link pages that are named."""
    up = "../" * page.file.src_uri.count("/")

    def formula(found: re.Match[str]) -> str:
        latex = re.sub(
            r"&(lt|gt|amp);", lambda sign: {"lt": "<", "gt": ">", "amp": "&"}[sign[1]], found[2]
        )
        return convert(latex, display="inline" if found[1] == "span" else "block")

    def linked(found: re.Match[str]) -> str:
        if not found[1]:
            return found[0]
        return f'<a href="{up}{found[1]}.html{found[2] or ""}">{found[0]}</a>'

    return NAMED.sub(linked, FORMULA.sub(formula, html))

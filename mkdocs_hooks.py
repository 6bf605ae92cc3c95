"""Hooks of the documentation site: pages outside docs/, links to files of the repository, and equations as MathML.

The pages are written for two readers: a repository browser, where `../examples/x.py` is a file, and the site, which
holds nothing but docs/. Files outside docs/ that a page links to are therefore added to the site, and links are
rewritten. README.md becomes the home page. MkDocs then checks every link of the result (`mkdocs build --strict`).
"""

import os
import re
from html import unescape
from pathlib import Path, PurePosixPath

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
PAGES = {
    "README.md": "index.md",
    "README_CN.md": "zh/index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
FENCE = re.compile(r"^(```\w*\n.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def source_of(uri: str) -> str:
    """The path in the repository of a page of the site."""
    outside = {page: path for path, page in PAGES.items()}
    return outside.get(uri, f"docs/{uri}")


def uri_of(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def target_of(page: str, link: str) -> str:
    """The path in the repository that a link of a page leads to."""
    return os.path.normpath(PurePosixPath(source_of(page)).parent / link)


def prose_of(markdown: str) -> list[str]:
    """The text split at its fenced blocks: text at even places, blocks at odd ones."""
    return FENCE.split(markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs/ and every file that a page links to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    linked = {
        target_of(file.src_uri, link)
        for file in files.documentation_pages()
        for text in prose_of(file.content_string)[::2]
        for link in LINK.findall(text)
    }
    for path in sorted(linked):
        if not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file():
            files.append(File.generated(config, uri_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links between files of the repository to links between pages of the site."""
    here = page.file.src_uri

    def rewritten(match: re.Match[str]) -> str:
        return os.path.relpath(uri_of(target_of(here, match[1])), PurePosixPath(here).parent)

    parts = prose_of(markdown)
    parts[::2] = [LINK.sub(rewritten, text) for text in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns equations into MathML, which browsers show without a script."""

    def mathml(match: re.Match[str]) -> str:
        return convert(unescape(match[3]), display="inline" if match[2] == "(" else "block")

    return EQUATION.sub(mathml, html)

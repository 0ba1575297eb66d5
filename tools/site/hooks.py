"""Hooks of MkDocs: a page for each public module, at the end of the tab "Reference", and checks.

mkdocstrings fills the pages from the sources, and imports nothing. A public name without a
docstring, which it would leave out, is refused, and so is a page that loads what is elsewhere.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LIBRARY = Path(__file__).resolve().parents[2] / "bandmf_tf"
_ELSEWHERE = re.compile(r'<(?:iframe|img|link|script)\b[^>]*\b(?:href|src)="?(?:https?:)?//[^>]*>')
_LOG = get_plugin_logger(__name__)


def on_config(config: MkDocsConfig) -> None:
    """Adds the pages to the navigation: packages with their modules below them."""
    api: list = []
    for name, page in _pages().items():
        package, _, module = name.rpartition(".")
        below = next((entry[package] for entry in api if package in entry), api)
        is_package = name and page.endswith("index.md")
        below.append({module or "bandmf_tf": [page] if is_package else page})
    (reference,) = (entry["Reference"] for entry in config.nav or () if "Reference" in entry)
    reference.append({"API": api})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages themselves."""
    for name, page in _pages().items():
        module = f"bandmf_tf.{name}".rstrip(".")
        files.append(File.generated(config, page, content=f"# {module}\n\n::: {module}\n"))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Warns, which strict mode refuses, of public names that are not on the page of a package."""
    name = next((name for name, uri in _pages().items() if uri == page.file.src_uri), None)
    if name is None or not page.file.src_uri.endswith("index.md"):
        return
    for public in sorted(set(_exported(name)) - set(_exported(""))):
        if f'id="bandmf_tf.{name}.{public}"' not in html:
            _LOG.warning("bandmf_tf.%s.%s has no docstring.", name, public)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:
    """Warns of what a reader's browser would fetch from another site."""
    for element in _ELSEWHERE.findall(output):
        _LOG.warning("%s loads %s.", page.file.src_uri, element)


def _pages() -> dict[str, str]:
    """Returns the pages of the public modules, each by its name without the library's."""
    pages, public = {"": "api/index.md"}, _exported("")
    for path in sorted(LIBRARY.rglob("*.py")):
        *packages, module = path.relative_to(LIBRARY).with_suffix("").parts
        if not packages or packages[0] not in public:
            continue
        if module == "__init__":
            pages[".".join(packages)] = "/".join(("api", *packages, "index.md"))
        elif not module.startswith("_"):
            pages[".".join((*packages, module))] = "/".join(("api", *packages, f"{module}.md"))
    return pages


def _exported(package: str) -> list[str]:
    """Returns `__all__` of a package."""
    tree = ast.parse(LIBRARY.joinpath(*package.split("."), "__init__.py").read_text("utf-8"))
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    return ast.literal_eval(assigned.get("__all__", ast.List([])))

"""Writes the documentation as a site: the Markdown pages of the repository and the API reference.

Fails when a page links to nothing, or when a docstring or annotation cannot be rendered.
Usage: python -m tools.build.docs [folder]
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.render
import pdoc.render_helpers

import bandmf_tf

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    Path("README.md"),
    *sorted(path.relative_to(ROOT) for path in ROOT.glob("docs/*.md")),
    *(Path(folder, "README.md") for folder in ("production", "benchmarks")),
    Path("CONTRIBUTING.md"),
    Path("CHANGELOG.md"),
]


def write_reference(folder: Path) -> None:
    """Writes a page for each public module."""
    modules = [
        name
        for _, name, _ in pkgutil.walk_packages(bandmf_tf.__path__, "bandmf_tf.")
        if "._" not in name
    ]
    for name in modules:
        importlib.import_module(name)
    for name in bandmf_tf.__all__:  # pdoc does not ask for names that are imported late.
        setattr(bandmf_tf, name, getattr(bandmf_tf, name))
    pdoc.pdoc("bandmf_tf", *modules, output_directory=folder)


def address(target: Path) -> str | None:
    """Where the site has what stands at a path of the repository, if it does."""
    if (ROOT / target).is_dir():
        target = target / ("__init__.py" if target.parts[:1] == ("bandmf_tf",) else "README.md")
    if target in PAGES:
        return "index.html" if target == PAGES[0] else target.with_suffix(".html").as_posix()
    if target.suffix == ".py" and target.parts[0] == "bandmf_tf":
        module = target.parent if target.name == "__init__.py" else target
        return f"api/{module.with_suffix('.html').as_posix()}"
    return target.as_posix() if (ROOT / target).exists() else None


def write_page(page: Path, site: Path) -> list[str]:
    """Writes a Markdown page, and the files it links to; returns the links that lead nowhere."""
    broken = []
    top = "../" * (len(page.parts) - 1)

    def new_link(match: re.Match[str]) -> str:
        attribute, link, anchor = match.groups()
        target = (ROOT / page.parent / link).resolve().relative_to(ROOT)
        if (place := address(target)) is None:
            broken.append(f"{page} links to {link}, which does not exist.")
            return match[0]
        if place == target.as_posix() and (ROOT / target).is_file():
            (site / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / target, site / place)
        return f'{attribute}="{top}{place}{anchor}"'

    text = (ROOT / page).read_text()
    html = pdoc.render_helpers.to_html(text)
    output = site / address(page)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        pdoc.render.env.get_template("page.html.jinja2").render(
            title=_title(page),
            pages={_title(other): address(other) for other in PAGES},
            top=top,
            contents=html.toc_html or "",
            text=re.sub(r'(href|src)="(?!\w+:|#)([^"#]+)(#?[^"]*)"', new_link, html),
        )
    )
    return broken


def _title(page: Path) -> str:
    return re.search(r"^# (.*)$", (ROOT / page).read_text(), re.MULTILINE)[1].replace("`", "")


def broken_anchors(site: Path) -> list[str]:
    """Links of the pages to parts that their target does not have."""
    broken = []
    for page in PAGES:
        output = site / address(page)
        for link, anchor in re.findall(r'href="(?!\w+:)([^"#]*)#([^"]+)"', output.read_text()):
            target = output.parent / link if link else output
            if f'id="{anchor}"' not in target.read_text():
                broken.append(f"{page} links to {link}#{anchor}, which does not exist.")
    return broken


def main() -> None:
    """Writes the site, or says what is wrong with it."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    shutil.rmtree(site, ignore_errors=True)
    pdoc.render.configure(
        docformat="google", template_directory=Path(__file__).parent / "docs_templates"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="pdoc")
        warnings.filterwarnings("ignore", "The module specification")  # Some are found twice.
        write_reference(site / "api")
    broken = [problem for page in PAGES for problem in write_page(page, site)]
    broken += broken_anchors(site)
    print(*broken or [f"For reading: {site}/index.html"], sep="\n", flush=True)
    os._exit(bool(broken))  # pdoc's caches hold TFF, which would complain while Python shuts down.


if __name__ == "__main__":
    main()

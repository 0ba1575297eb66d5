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


def address(target: Path) -> str:
    """Where the site has what stands at a path of the repository."""
    if (ROOT / target).is_dir():
        target = target / ("__init__.py" if target.parts[:1] == ("bandmf_tf",) else "README.md")
    if target in PAGES:
        return "index.html" if target == PAGES[0] else target.with_suffix(".html").as_posix()
    if target.suffix == ".py" and target.parts[0] == "bandmf_tf":
        module = target.parent if target.name == "__init__.py" else target
        return f"api/{module.with_suffix('.html').as_posix()}"
    return target.as_posix()


def write_page(page: Path, site: Path) -> None:
    """Writes a Markdown page, and the files that it links to."""
    top = "../" * (len(page.parts) - 1)

    def new_link(match: re.Match[str]) -> str:
        attribute, link, anchor = match.groups()
        target = (ROOT / page.parent / link).resolve().relative_to(ROOT)
        place = address(target)
        if place == target.as_posix() and (ROOT / target).is_file():
            (site / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / target, site / place)
        return f'{attribute}="{top}{place}{anchor}"'

    html = pdoc.render_helpers.to_html((ROOT / page).read_text())
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


def _title(page: Path) -> str:
    return re.search(r"^# (.*)$", (ROOT / page).read_text(), re.MULTILINE)[1].replace("`", "")


def dead_links(page: Path, site: Path) -> list[str]:
    """Sentences about the links of a written page that lead nowhere."""
    output = site / address(page)
    dead = []
    for link, anchor in re.findall(r'(?:href|src)="(?!\w+:)([^"#]*)#?([^"]*)"', output.read_text()):
        target = output.parent / link if link else output
        if not target.is_file() or (anchor and f'id="{anchor}"' not in target.read_text()):
            dead.append(
                f"{page} links to {link}{'#' * bool(anchor)}{anchor}, which does not exist."
            )
    return dead


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
        # The constructor of a named tuple has no module to look its annotations up in.
        warnings.filterwarnings("ignore", r"Error parsing type annotation ForwardRef.*\.__init__")
        write_reference(site / "api")
    for page in PAGES:
        write_page(page, site)
    dead = [sentence for page in PAGES for sentence in dead_links(page, site)]
    print(*dead or [f"For reading: {site}/index.html"], sep="\n", flush=True)
    os._exit(bool(dead))  # pdoc's caches hold TFF, which would complain while Python shuts down.


if __name__ == "__main__":
    main()

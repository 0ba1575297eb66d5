"""HTML pages: templates that share one look, `base.html` and `style.css`.

A page stands alone: its style and its pictures are inside, nothing is loaded from elsewhere. It is
one column, readable on a phone, and printable.
"""

from __future__ import annotations

import base64

import jinja2


def render(template: str, **values: object) -> str:
    """Returns the page that a template of this folder makes of the values."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    return environment.get_template(template).render(**values)

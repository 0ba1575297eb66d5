"""JSON Schemas of the files that this library writes, and what does not follow them."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jsonschema


def find_error(document: object, name: str) -> jsonschema.ValidationError | None:
    """Returns what is wrong with a document under the schema `name`; None if nothing is."""
    from jsonschema import exceptions

    return exceptions.best_match(validator(name).iter_errors(document))


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """Returns the validator of `name`.schema.json."""
    import jsonschema  # Programs answer --help without it.

    schema = importlib.resources.files(__name__) / f"{name}.schema.json"
    return jsonschema.Draft202012Validator(json.loads(schema.read_text("utf-8")))

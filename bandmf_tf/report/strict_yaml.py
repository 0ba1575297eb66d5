"""YAML that people write for the tools: read strictly, with what is wrong said in one sentence."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from bandmf_tf.evidence.reader import ReportError, UnreadableError


def load(path: str | os.PathLike[str], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the entries of a YAML file, all of which are among `names`.

    Raises:
      ReportError: It cannot be read, is no YAML, has an entry twice, an alias, or a name that is
        not among them.
    """
    try:
        loaded = yaml.load(Path(path).read_text("utf-8"), _StrictLoader)
    except ReportError as error:
        raise ReportError(f"{os.fspath(path)}: {error}") from error
    # A tag can promise what its text is not, such as `!!bool maybe`, which is met by any error.
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        first_line = (str(error) or "nested too deeply").splitlines()[0]
        raise ReportError(f"{os.fspath(path)} is not a YAML file: {first_line}.") from error
    except OSError as error:
        reason = error.strerror or error
        raise UnreadableError(f"{os.fspath(path)} cannot be read: {reason}.") from error
    if not isinstance(loaded, dict):
        raise ReportError(f"{os.fspath(path)}: it must hold `name: value` lines.")
    unknown = sorted(map(str, loaded.keys() - set(names)))
    if unknown:
        raise ReportError(
            f"{os.fspath(path)}: unknown fields {unknown}; the fields are {', '.join(names)}."
        )
    return loaded


class _StrictLoader(yaml.SafeLoader):
    """YAML of which no entry is there twice, where readers would choose differently.

    Nor are there numbers such as 010 and 1:30, which are 8 and 90 to some of them, nor aliases, by
    which a short file stands for an endless one.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Returns the next node."""
        if self.check_event(yaml.AliasEvent):
            raise ReportError("aliases (*name) are not taken; write out what they stand for.")
        return super().compose_node(parent, index)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Returns a number that all readers take for the same."""
        if re.match(r"[-+]?0[0-9_]|.*:", text := self.construct_scalar(node)):
            raise ReportError(
                f"{text} is read as several numbers; quote it, or write it in decimal digits."
            )
        if node.tag.endswith(":int"):
            return self.construct_yaml_int(node)
        return self.construct_yaml_float(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns a mapping."""
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(set(map(str, names))) < len(names):
            raise ReportError(f"there are two entries of one name in {names}.")
        return super().construct_mapping(node, deep)


for _kind in ("int", "float"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _StrictLoader.construct_number)

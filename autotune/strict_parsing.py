"""JSON and YAML as documents and workloads have them: finite numbers, each key once, and nothing that JSON cannot hold.

Both parsers raise ``ValueError`` for everything else, whatever the text is.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import yaml
from pydantic_core import from_json


def parse_json(text: str) -> Any:
    """The content of a JSON text."""
    try:
        content = json.loads(text, parse_constant=_number, parse_float=_number, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    from_json(text)  # refuses more than 200 levels, and half of a surrogate pair
    return content


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r:.60} occurs twice")
    return content


def parse_yaml(text: str) -> Any:
    """The content of a YAML text. Dates are text; aliases and tags are refused, because a few lines of them are
    gigabytes.
    """
    try:
        content = yaml.load(text, _JsonLoader)
        from_json(json.dumps(content, allow_nan=False))
        return content
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise ValueError(f"line {line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _JsonLoader(yaml.SafeLoader):
    """Makes what JSON can hold."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) not in (None, "!"):
            what = "aliases" if isinstance(event, yaml.AliasEvent) else "tags"
            raise yaml.MarkedYAMLError(None, None, f"{what} are not accepted; write the value out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.MappingNode):
            return _unique([(self._key(key), self.construct_object(value, deep=True)) for key, value in node.value])
        return super().construct_object(node, deep=True)

    def _key(self, node: Any) -> str:
        if not isinstance(key := self.construct_object(node), str):
            raise yaml.MarkedYAMLError(None, None, f"keys are text; got {key!r:.60}", node.start_mark)
        return key


_JsonLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith((":timestamp", ":merge", ":value"))]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads 5e-4 as text, because it has no dot, and 5.0e4, because its exponent has no sign.
_JsonLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)

"""YAML files of options and studies as plain values, under limits of size, depth and number. Knows no options.

Values are null, true or false, numbers, text, lists and mappings. A date is text. An alias counts as often as it is
used, so that a short file cannot stand for a large value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from adapterbank.errors import InputError
from adapterbank.tasks.limits import MAX_DEPTH

MAX_BYTES = 1 << 20
"""Size of a file."""
MAX_VALUES = 100_000
"""Values of a file, where each use of an alias counts all values that it stands for."""
_SCALARS = ("null", "bool", "int", "float", "str")
_TAG = "tag:yaml.org,2002:"


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file; a duplicate name is an error, because its first value would be lost."""
    import yaml

    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"{path} has more than {MAX_BYTES:,} bytes; options and studies are smaller.")
        return yaml.load(data.decode(), _loader())
    except (OSError, ValueError, OverflowError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise InputError(f"{path} cannot be read as YAML: {reason}. Write 'name: value' lines.") from error


@functools.cache
def _loader() -> Any:
    """Return the class that loads a file; `yaml` is imported only when a file is read."""
    import yaml

    class Loader(yaml.SafeLoader):
        # Nothing beyond JSON's values; any other tag is refused by name.
        yaml_constructors: ClassVar = {
            tag: made
            for tag, made in yaml.SafeLoader.yaml_constructors.items()
            if tag is None or tag.removeprefix(_TAG) in (*_SCALARS, "seq", "map")
        }

        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.yaml_implicit_resolvers = _without_dates(yaml.SafeLoader.yaml_implicit_resolvers)
            self.level = 0
            self.sizes: dict[int, tuple[int, int]] = {}  # by `id` of a complete node: values and levels, expanded

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.level += 1
            alias = self.check_event(yaml.AliasEvent)
            start = self.current_event.start_mark
            if self.level > MAX_DEPTH:
                raise _error(f"there are more than {MAX_DEPTH} levels", start)
            node = super().compose_node(parent, index)
            self.level -= 1
            if alias and id(node) not in self.sizes:  # it is not complete
                raise _error("a value contains itself", start)
            if not alias:
                self.sizes[id(node)] = _measure(node, self.sizes, start)
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                made = super().construct_object(node, deep)
                if isinstance(made, str):
                    made.encode()  # half of a surrogate pair is not text
                if isinstance(made, int) and made.bit_length() > 64:
                    raise OverflowError
                return made
            except (ValueError, LookupError, ArithmeticError) as error:  # such as `0b_`, or `!!float abc`
                kind = node.tag.removeprefix(_TAG)
                raise _error(f"{node.value[:40]!r} is not a value of type {kind}", node.start_mark) from error

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = set()
            for key, _ in node.value:
                if key.tag == f"{_TAG}merge":
                    continue
                if key.tag == f"{_TAG}bool":
                    key.tag = f"{_TAG}str"  # a name is what is written: `on` is an option
                name = self.construct_object(key, deep=True)
                if not isinstance(name, str | int | float | None):
                    raise _error("a name is a list or a mapping", key.start_mark)
                if name in names:
                    raise _error(f"{name!r} occurs twice; write a list of its values instead", key.start_mark)
                names.add(name)
            return super().construct_mapping(node, deep)

    return Loader


def _without_dates(resolvers: Any) -> Any:
    """Return the patterns of plain values without dates, which are text: one that does not exist would be an error."""
    dates = f"{_TAG}timestamp"
    return {first: [(tag, one) for tag, one in rows if tag != dates] for first, rows in resolvers.items()}


def _measure(node: Any, sizes: Mapping[int, tuple[int, int]], start: Any) -> tuple[int, int]:
    """Return the number of values in a node and its levels, given those of the nodes in it."""
    if isinstance(node.value, str):
        return 1, 1
    inside = [one for pair in node.value for one in (pair if isinstance(pair, tuple) else (pair,))]
    count = 1 + sum(sizes[id(one)][0] for one in inside)
    depth = 1 + max((sizes[id(one)][1] for one in inside), default=0)
    if count > MAX_VALUES or depth > MAX_DEPTH:
        limit = f"{MAX_VALUES:,} values" if count > MAX_VALUES else f"{MAX_DEPTH} levels"
        raise _error(f"with its aliases a value has more than {limit}", start)
    return count, depth


def _error(reason: str, mark: Any) -> Exception:
    import yaml

    return yaml.YAMLError(f"line {mark.line + 1}: {reason}")

"""data.map_keys: rename the columns of a file before their format is recognised.

{"prompt": "problem", "query": "", "response": "answer"}        our column: the file's column; "" removes ours
{"ground_truth": "reward_model.ground_truth"}                    a value inside a column
{"prompt": "turns.0", "completion": "turns.1.text"}              an item of a list; JSON in a text is parsed for a path
{"prompt": "{context}\n\n{question}"}                            a text with columns or paths in braces
{"function": "convert.py:to_columns"}                            a function: columns of the file -> columns here
{"messages": "talk", "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "you"}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from posttrain.core.errors import DataError, UsageError
from posttrain.data.reading.cells import cell_error, nested_value, number_as_text
from posttrain.data.reading.records import Record
from posttrain.sandbox.user_code import import_location, parse_location

OPTIONAL = ("query", "system", "history", "input", "tools")  # columns that a record may lack
ROLE_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}
TAGS = ("role_tag", "content_tag", *ROLE_TAGS)
FUNCTION = "function"  # the key whose value is FILE.py:FUNCTION
IN_BRACES = re.compile(r"\{([^{}\s][^{}]*)\}")
NUMBERS = ("margin", "label", "labels", "value", "score")  # columns that are not text; numbers stay numbers


@dataclass(frozen=True)
class KeyMap:
    """Maps our column names to those of a file, and the keys and roles of messages."""

    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    function: Callable[[dict[str, Any]], Any] | None = None

    @classmethod
    def parse(cls, text: str | Mapping[str, Any]) -> KeyMap:
        """Read the option: a mapping, or JSON text."""
        if isinstance(text, str) and not text.strip():
            return cls()
        try:
            mapping = json.loads(text) if isinstance(text, str) else dict(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"data.map_keys: not valid JSON ({error}): {text}") from None
        if not isinstance(mapping, dict):
            raise UsageError(f'data.map_keys: expected {{"our column": "their column"}}, found {text}')
        inner = mapping.pop("tags", {})
        tags = dict(inner) if isinstance(inner, dict) else {"tags": inner}
        tags |= {key: mapping.pop(key) for key in TAGS if key in mapping}
        for key in tags:
            if key not in TAGS:
                raise UsageError(f"data.map_keys: unknown tag {key!r}; known are {', '.join(TAGS)}")
        for key, value in (mapping | tags).items():
            if not isinstance(value, str):
                raise UsageError(f"data.map_keys: {key}: expected a column name, found {value!r}")
        location = mapping.pop(FUNCTION) if ".py:" in mapping.get(FUNCTION, "") else ""
        return cls(mapping, tags, _load_function(location) if location else None)

    @cached_property
    def read_inside(self) -> set[str]:
        """The columns of the file of which a part is read, or which are part of a text."""
        paths = [path for their in self.columns.values() for path in (their, *IN_BRACES.findall(their))]
        return {path.split(".")[0] for path in paths}

    @property
    def changes_columns(self) -> bool:
        """Whether the user decided which columns are read."""
        return bool(self.columns) or self.function is not None

    def apply(self, record: Record) -> Record:
        """Return the record with our column names; renamed columns lose their old name."""
        if self.function is not None:
            record = _call_function(self.function, record)
        if not self.columns and not self.tags:
            return record
        taken = {their: self._find(record, our, their) for our, their in self.columns.items() if their}
        kept = {name: value for name, value in record.values.items() if name not in taken and name not in self.columns}
        found = {our: taken[their] for our, their in self.columns.items() if their}
        values = {name: value for name, value in found.items() if value is not MISSING} | kept
        if self.tags:
            values = {name: self._rename_keys(value) for name, value in values.items()}
        return replace(record, values=values)

    def _find(self, record: Record, our: str, their: str) -> Any:
        if our in OPTIONAL and their not in record.values and their.isidentifier():
            return MISSING
        if their not in record.values and IN_BRACES.search(their):
            return IN_BRACES.sub(lambda match: self._text_at(record, our, match[1]), their)
        value = self._value_at(record, our, their)
        return value if our in NUMBERS else number_as_text(value)

    def _value_at(self, record: Record, our: str, path: str) -> Any:
        if path in record.values:
            return record.values[path]
        try:
            return nested_value(record, path)
        except DataError as error:
            if "null" in str(error):
                return None
            columns = ", ".join(map(str, record.values))
            shown = self.columns[our]
            raise cell_error(
                record,
                path,
                f'no such column, but data.map_keys has "{our}": "{shown}"; the columns are {columns}',
            ) from None

    def _text_at(self, record: Record, our: str, path: str) -> str:
        value = number_as_text(self._value_at(record, our, path))
        if not isinstance(value, str):
            found = "null" if value is None else type(value).__name__
            raise cell_error(record, path, f"is {found}; data.map_keys puts it into a text")
        return value

    def _rename_keys(self, value: Any) -> Any:
        """Rename the keys of messages to role and content; return other values unchanged."""
        if isinstance(value, list):
            return [self._rename_keys(item) for item in value]
        role_tag, content_tag = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        if not isinstance(value, dict) or role_tag not in value or content_tag not in value:
            return value
        roles = {self.tags[tag]: role for tag, role in ROLE_TAGS.items() if tag in self.tags}
        role = value[role_tag]
        rest = {key: item for key, item in value.items() if key not in (role_tag, content_tag)}
        known = roles.get(role, role) if isinstance(role, str) else role
        return {**rest, "role": known, "content": value[content_tag]}


def _load_function(location: str) -> Callable[[dict[str, Any]], Any]:
    """Import FILE.py:FUNCTION, which is code of the user, like a reward function."""
    where = f"data.map_keys: {FUNCTION}: {location}"
    loaded = import_location(parse_location(location, where, FUNCTION), FUNCTION, callable)
    if not callable(loaded):
        raise UsageError(f"{where}: is not a function")
    function: Callable[[dict[str, Any]], Any] = loaded
    return function


def _call_function(function: Callable[[dict[str, Any]], Any], record: Record) -> Record:
    """Return the record that a function of the user makes; an error in it names the record."""
    name = getattr(function, "__name__", FUNCTION)
    try:
        values = function(dict(record.values))
    except Exception as error:
        raise DataError(f"{record.origin}: {name}() of data.map_keys raised {type(error).__name__}: {error}") from error
    if not isinstance(values, dict):
        found = type(values).__name__
        raise DataError(f"{record.origin}: {name}() of data.map_keys must return columns as a dict, not {found}")
    return replace(record, values=values)


MISSING = object()

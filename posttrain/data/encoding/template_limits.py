"""Renders chat templates within limits of work, time and size.

A chat template is a program that comes with a model. transformers runs it in jinja's sandbox, which keeps it from files
and modules, but not from loops that never end and texts that fill the memory. `LimitedEnvironment` is the same sandbox
with a budget: iterations, calls, filters and operators are counted, and a result that would be too large is refused
before it is made. Rendered texts do not change.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from transformers.utils import chat_template_utils

from posttrain.core.errors import UsageError
from posttrain.core.lazy import PreTrainedTokenizerBase

MAX_TEMPLATE_CHARACTERS = 2**18  # of the template itself; the longest of known models have 20,000
MAX_CHARACTERS = 2**25  # of one text, also of the rendered conversation
MAX_ITEMS = 2**20  # of one list
MAX_WORK = 2_000_000  # units for one rendering: a step of the template, or 128 characters
MAX_SECONDS = 5.0  # CPU time of one rendering, for steps that take long
CHARACTERS_PER_UNIT = 128
CLOCK_UNITS = 32  # of work between two readings of the clock
MAX_INTEGER_BITS = 4096
CONSTANT_TIME = ("length", "count", "first", "last", "default", "d")  # filters that do not read the whole value


class TemplateLimitError(Exception):
    """Says which limit a chat template exceeded."""


class Budget:
    """Counts the work of one rendering."""

    def __init__(self) -> None:
        self.left = MAX_WORK
        self.clock_at = MAX_WORK - CLOCK_UNITS
        self.started = time.thread_time()

    def spend(self, units: int = 1) -> None:
        self.left -= units
        if self.left < self.clock_at:
            if self.left < 0:
                raise TemplateLimitError(f"more than {MAX_WORK:,} steps")
            if time.thread_time() - self.started > MAX_SECONDS:
                raise TemplateLimitError(f"more than {MAX_SECONDS:g} s of CPU time")
            self.clock_at = self.left - CLOCK_UNITS

    def spend_text(self, characters: int) -> None:
        """Counts a text before it is made."""
        if characters > MAX_CHARACTERS:
            raise TemplateLimitError(f"a text of {characters:,} characters; at most {MAX_CHARACTERS:,} are allowed")
        self.spend(1 + characters // CHARACTERS_PER_UNIT)


class Unlimited(Budget):
    """Is used where a template is rendered by other code than ours."""

    def spend(self, units: int = 1) -> None:
        pass

    def spend_text(self, characters: int) -> None:
        pass


BUDGET: ContextVar[Budget] = ContextVar("BUDGET", default=Unlimited())  # noqa: B039  has no state


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Any], **options: Any) -> str:
    """Render a conversation as text by the tokenizer's chat template; UsageError if that exceeds a limit."""
    with limited_rendering():
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(rendered, str)
    return rendered


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Give what is rendered in the block one budget, and turn an exceeded limit into a UsageError."""
    if chat_template_utils.ImmutableSandboxedEnvironment is not LimitedEnvironment:
        chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment
        chat_template_utils._compile_jinja_template.cache_clear()
    token = BUDGET.set(Budget())
    try:
        yield
    except TemplateLimitError as error:
        raise limit_exceeded(str(error)) from None
    except (RecursionError, MemoryError) as error:
        raise limit_exceeded(f"macros or expressions that are nested too deeply ({type(error).__name__})") from None
    finally:
        BUDGET.reset(token)


def limit_exceeded(reason: str) -> UsageError:
    return UsageError(
        f"the chat template was stopped: it needs {reason}. Use another template (--data.chat_template chatml, for "
        "example), or a model from a source that you trust"
    )


class LimitedGenerator(CodeGenerator):
    """Compiles `~` to a call that checks the size of the result."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802  as jinja calls it
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class LimitedFilters(dict[str, Callable[..., Any]]):
    """Filters by name, each wrapped so that its work and its result are counted."""

    def __init__(self, filters: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        for name, function in filters.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, limited_filter(name, function))


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Is the sandbox of transformers, with a budget for each rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = LimitedGenerator

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, finalize=checked_output)
        self.filters: Any = LimitedFilters(self.filters)
        self.globals.pop("lipsum", None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse the template and add a counted step at the start of every loop's body."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            limit = f"at most {MAX_TEMPLATE_CHARACTERS:,} are allowed"
            raise TemplateLimitError(f"{len(source):,} characters for the template itself; {limit}")
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            step = nodes.ExprStmt(nodes.EnvironmentAttribute("count_step()", lineno=loop.lineno), lineno=loop.lineno)
            loop.body.insert(0, step)
        return tree

    def count_step(self) -> None:
        BUDGET.get().spend()

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        """Join what a template, a macro or a block has written."""
        budget, texts, size = BUDGET.get(), [], 0
        for piece in pieces:
            texts.append(piece)
            size += len(piece)
            if size > MAX_CHARACTERS:
                budget.spend_text(size)
        budget.spend_text(size)
        return "".join(texts)

    def join_texts(self, values: tuple[Any, ...]) -> str:
        """Compute `a ~ b`."""
        BUDGET.get().spend_text(sum(text_size(value) for value in values))
        return "".join(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = BUDGET.get()
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                budget.spend_text(len(left) + len(right))
                return left + right
            if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                spend_items(budget, len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            budget.spend_text(formatted_size(left, right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS and operator != "%":
                raise TemplateLimitError(f"a number of more than {MAX_INTEGER_BITS} bits")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str) and isinstance(times, int):
                    budget.spend_text(len(value) * max(0, times))
                elif isinstance(value, (list, tuple)) and isinstance(times, int):
                    spend_items(budget, len(value) * max(0, times))
        budget.spend()
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in jinja
        budget = BUDGET.get()
        owner = getattr(__obj, "__self__", None) or getattr(getattr(__obj, "__wrapped__", None), "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join" and len(args) == 1 and not isinstance(args[0], str):
                args = (counted_list(budget, args[0]),)
            budget.spend_text(result_size(__obj.__name__, owner, args, kwargs))
        else:
            budget.spend()
        return super().call(__context, __obj, *args, **kwargs)


def limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: count the items that it reads and yields, and the size of its result before it is made."""
    skipped = 0 if _PassArg.from_obj(function) is None else 1  # jinja's context or environment comes first

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        if isinstance(budget, Unlimited) or name in CONSTANT_TIME:
            budget.spend()
            return function(*args, **kwargs)
        before, (value, *others) = args[:skipped], args[skipped:]
        if hasattr(value, "__next__") or isinstance(value, range):
            value = counted_list(budget, value)
        elif isinstance(value, (list, tuple, dict)):
            budget.spend(len(value))
        budget.spend_text(result_size(name, value, tuple(others), kwargs))
        result = function(*before, value, *others, **kwargs)
        return counted(budget, result) if hasattr(result, "__next__") else result

    return wrapper


def counted(budget: Budget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.spend()
        yield item


def counted_list(budget: Budget, items: Iterable[Any]) -> list[Any]:
    found = []
    for item in counted(budget, items):
        found.append(item)
        if len(found) > MAX_ITEMS:
            spend_items(budget, len(found))
    return found


def spend_items(budget: Budget, items: int) -> None:
    if items > MAX_ITEMS and not isinstance(budget, Unlimited):
        raise TemplateLimitError(f"a list of {items:,} items; at most {MAX_ITEMS:,} are allowed")
    budget.spend(1 + items // CHARACTERS_PER_UNIT)


def checked_output(value: Any) -> Any:
    """Counts a value that the template writes, before it becomes text."""
    if not isinstance(value, str):
        BUDGET.get().spend_text(text_size(value))
    return value


# Sizes, in characters, of results that are not made yet


def text_size(value: Any) -> int:
    """Return about how many characters a value has as text; stop counting above the limit."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (list, tuple, dict, set)):
        return value.bit_length() // 3 if isinstance(value, int) else 20
    size, waiting = 0, [value]
    while waiting and size <= MAX_CHARACTERS:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple, set)):
            waiting += part
        size += 4 + (len(part) if isinstance(part, str) else 0)
    return size


def formatted_size(template: str, values: Any) -> int:
    """Return a bound of the size of `template % values` and `template.format(*values)`."""
    widths = [int(digits[:9]) for digits in re.findall("[0-9]+", template)]
    listed = (
        values if isinstance(values, (list, tuple)) else [*values.values()] if isinstance(values, dict) else [values]
    )
    numbers = [abs(value) for value in listed if isinstance(value, int)]
    widest = max([text_size(values), *widths, *(numbers if "*" in template or "{" in template else ())])
    fields = template.count("%") + template.count("{")
    return len(template) + fields * widest


def replaced_size(text: str, old: str, new: str, count: int | None = None) -> int:
    found = text.count(old) if old else len(text) + 1
    return len(text) + found * len(new)


def joined_size(separator: str, items: Iterable[Any]) -> int:
    listed = list(items)
    return sum(text_size(item) for item in listed) + len(separator) * len(listed)


def result_size(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return a bound of the size of what a filter, or a method of a text, returns for a value."""
    others = [*args, *kwargs.values()]
    size = text_size(value)
    texts = sum(text_size(other) for other in others if not isinstance(other, int))
    numbers = sum(abs(other) for other in others if isinstance(other, int))
    if name == "replace" and len(others) >= 2:
        return replaced_size(str(value), str(others[0]), str(others[1]))
    if name == "join":
        if isinstance(value, str) and args:  # a method: the text is the separator
            return joined_size(value, args[0])
        return size + (texts + 1) * (len(value) if hasattr(value, "__len__") else 1)
    if name in ("format", "format_map"):
        return formatted_size(str(value), [*others] if name == "format" else others[0])
    if name in ("indent", "expandtabs", "tojson", "wordwrap", "translate", "pprint"):
        lines = 1 + str(value).count("\n") + str(value).count("\t") if isinstance(value, str) else 1 + size // 4
        return size * (2 if name != "translate" else 1 + texts) + lines * (numbers + texts)
    return size + texts + numbers

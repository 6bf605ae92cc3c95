"""`posttrain data check` and `posttrain data preprocess`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from posttrain.algorithms import ALGORITHMS
from posttrain.cli.options import Parser
from posttrain.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.data.check import SourceReport
    from posttrain.data.reading.records import ReadProgress

COMMANDS = {
    "check": "look at files before training: format, counts, lengths, duplicates, problems",
    "preprocess": "tokenise files once into indexed ones, which trainers read directly",
}
BAR = 40  # characters

# Without a model any role must do, and tools must have a place.
ANY_ROLE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def run(args: list[str]) -> int:
    """`posttrain data check|preprocess ...`."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: posttrain data COMMAND ...\n")
        print("\n".join(f"  {name:<11} {text}" for name, text in COMMANDS.items()))
        return 0
    if args[0] == "check":
        return check(args[1:])
    if args[0] == "preprocess":
        from posttrain.cli.preprocess import run as preprocess

        return preprocess(args[1:])
    raise UsageError(f"there is no `posttrain data {args[0]}`; there are {', '.join(COMMANDS)}")


def check(args: list[str]) -> int:
    """0 if all rows can be used, 1 if some cannot."""
    options = check_parser().parse_args(args)
    from rich.console import Console

    from posttrain.config.renames import split_weights
    from posttrain.core.logging import quiet_libraries
    from posttrain.data.check import check_source

    if options.verb and options.verb not in ALGORITHMS:
        raise UsageError(f"--verb {options.verb}: there is no such verb; there are {', '.join(ALGORITHMS)}")
    quiet_libraries()
    console = Console(highlight=False, soft_wrap=True)
    make_encoder = encoder_maker(options)
    kind = ALGORITHMS[options.verb].example_kind if options.verb else None
    names, _ = split_weights(options.files)
    failed = False
    for name in names:
        with progress_bar(name, console) as (meter, progress):
            report = check_source(name, make_encoder, kind, options.max_tokens, options.full, meter, progress)
        show(report, options, console)
        failed = failed or bool(report.bad)
    return int(failed)


def check_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="posttrain data check", description=COMMANDS["check"])
    parser.add_argument("files", nargs="+", metavar="FILE", help="files, folders, globs or hub names, as data.train")
    parser.add_argument("--verb", default="", help="the trainer they are for; default: all that take such rows")
    parser.add_argument("--model.path", dest="model", default="", help="the model whose tokenizer and template count")
    parser.add_argument("--model.tokenizer", dest="tokenizer", default="", help="a tokenizer, if not the model's own")
    parser.add_argument(
        "--data.max_length", "--data.max_tokens", "--max_tokens", dest="max_tokens", type=int, help="longest sequence"
    )
    parser.add_argument(
        "--data.on_overlong",
        "--data.on_long",
        dest="on_long",
        choices=("truncate", "drop", "error"),
        default="truncate",
    )
    parser.add_argument("--data.map_keys", dest="map_keys", default="", help="columns under other names, as JSON")
    parser.add_argument(
        "--data.chat_template",
        "--data.template",
        dest="template",
        default="",
        help="chat template by name or file, or text with {}",
    )
    parser.add_argument("--algo.placeholder", dest="placeholder", default="ки", help="what marks the end of a step")
    parser.add_argument("--full", action="store_true", help="encode every row of large files too, not every tenth")
    return parser


def encoder_maker(options: argparse.Namespace) -> Callable[[Any], Any]:
    """Makes the encoder for a kind of rows."""
    from posttrain.config.parsing import json_option
    from posttrain.config.sections import DataConfig, ModelConfig
    from posttrain.data.encoding.encoder import Encoder
    from posttrain.models.loading import vocabulary_size
    from posttrain.models.tokenizers import load_tokenizer

    model = ModelConfig(path=options.model or "pico", tokenizer=options.tokenizer)
    tokenizer = load_tokenizer(model)
    if not options.model and not options.tokenizer:
        tokenizer.chat_template = ANY_ROLE
    vocabulary = vocabulary_size(model) if options.model else len(tokenizer)
    chosen = {
        "on_overlong": options.on_long,
        "map_keys": json_option("data.map_keys", options.map_keys),
        "chat_template": options.template,
    }
    if options.max_tokens is None and (options.model or options.tokenizer):
        options.max_tokens = DataConfig().max_length
    if options.max_tokens is not None:
        chosen["max_length"] = options.max_tokens

    def make(kind: Any) -> Encoder:
        return Encoder(tokenizer, DataConfig(**chosen), kind, vocabulary, options.placeholder)

    return make


@contextmanager
def progress_bar(name: str, console: Console) -> Iterator[tuple[ReadProgress, Callable[[int], None] | None]]:
    """A bar on a terminal: part of the file, and rows so far."""
    from posttrain.core.progress import ProgressDisplay, time_left
    from posttrain.data.reading.records import ReadProgress
    from posttrain.data.reading.sources import source_parts

    meter, started = ReadProgress(), time.monotonic()
    with ProgressDisplay(stream=cast(TextIO, console.file), transient=True) as display:
        if not display.on_terminal:
            yield meter, None
            return
        meter.total = sum(part.size for part in source_parts(name))

        def report(rows: int) -> None:
            details = f"{rows:,} rows  {time_left(started, meter.done, meter.total)}"
            display.update(name, details, done=meter.done, total=meter.total or None)

        yield meter, report


def show(report: SourceReport, options: argparse.Namespace, console: Console) -> None:
    """Print what was found."""
    out = Printer(console)
    for description, verbs in report.descriptions:
        out.line(f"{report.name}: {description}", "bold")
        out.line(f"  for {', '.join(verbs)}")
    if not report.descriptions:
        out.line(f"{report.name}: no known format", "bold")
    good = f"{report.rows:,} rows" + (f", {report.bad:,} of them bad" if report.bad else "")
    out.line(f"  {good}; {report.duplicates:,} repeat an earlier one exactly")
    if report.lengths:
        show_lengths(report, options, out)
    for origin, samples in report.shown:
        out.line(f"\n  {origin}", "bold")
        names = ("better", "worse") if report.kind == "pair" else tuple(map(str, range(1, len(samples) + 1)))
        for name, pieces in zip(names, samples, strict=False):
            out.sample(pieces, f"{name}: " if len(samples) > 1 else "")
    if report.shown:
        out.line(f"\n  {out.legend}")
    if report.bad:
        most = f"; the first {len(report.problems)}" if report.bad > len(report.problems) else ""
        out.line(f"\n  {report.bad:,} problem{'s' * (report.bad > 1)}{most}:", "red")
        for problem in report.problems:
            out.line(f"  {problem}")
    out.line("")


def show_lengths(report: SourceReport, options: argparse.Namespace, out: Printer) -> None:
    from posttrain.data.check import ENCODED_EVERY, ENCODED_FIRST, histogram

    limit, lengths = options.max_tokens, report.lengths
    mean = sum(lengths) / len(lengths)
    against = "" if limit is None else f"; data.max_length is {limit:,}"
    out.line(f"  tokens of a sequence: {mean:,.0f} on average, {max(lengths):,} at most{against}")
    if not options.model and not options.tokenizer:
        out.line("  (counted by pico, a token a byte: give --model.path to count with the tokenizer of your model)")
    if report.encoded < report.rows - report.bad:
        seen = f"of the first {ENCODED_FIRST:,} rows and every {ENCODED_EVERY}th of the others"
        out.line(f"  (lengths and what the tokenizer says are {seen}; --full looks at all)")
    bins = histogram(lengths, limit)
    largest = max(count for _, _, count in bins)
    for low, high, count in bins:
        bar = "#" * -(-BAR * count // largest)
        over = "  over the limit" if limit is not None and low > limit else ""
        out.line(f"  {low:>9,} - {high:>9,}  {bar:<{BAR}} {count:>9,}{over}", "yellow" if over else "")
    if report.too_long:
        fate = {"truncate": "will be truncated", "drop": "will be left out", "error": "stop the run"}[options.on_long]
        fate = "will be split" if report.kind == "text" and options.on_long == "truncate" else fate
        out.line(f"  {report.too_long:,} rows are longer and {fate}: data.on_overlong is {options.on_long}")


class Printer:
    """Lines for a person: with colours on a terminal, with marks elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.colours = console.is_terminal and not console.no_color
        self.legend = "green counts: the model learns it" if self.colours else "[[...]] counts: the model learns it"

    def line(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self.console.print(Text(text, style=style if self.colours else ""))

    def sample(self, pieces: list[Any], title: str) -> None:
        from rich.text import Text

        from posttrain.data.check import shortened

        text = Text(f"  {title}")
        for piece in pieces:
            shown = shortened(piece.text).replace("\n", "\n  ")
            if self.colours:
                text.append(shown, style="green" if piece.trained else "")
            else:
                text.append(f"[[{shown}]]" if piece.trained else shown)
        self.console.print(text)

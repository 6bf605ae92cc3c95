"""`posttrain data COMMAND`: check, which inspects files before training, mix, split and preprocess."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO, cast

from posttrain.algorithms import example_kind
from posttrain.cli import mix, split
from posttrain.cli.arguments import reading_progress
from posttrain.cli.preprocess import PreprocessArgs
from posttrain.cli.preprocess import run as preprocess
from posttrain.config.tools import ToolArgs, check_at_least, positional, read_tool
from posttrain.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.data.check import SourceReport
    from posttrain.data.curation.checks import CurationChecks, CurationReport

COMMANDS = {
    "check": "inspect files before training: format, lengths, duplicates, overlap with evaluation sets, problems",
    "mix": mix.MixArgs.about,
    "split": split.SplitArgs.about,
    "preprocess": "tokenize files once into indexed files, which trainers read directly",
}
BAR = 40  # characters
LONGEST_AS_JSON = 4000  # characters of a part of an example

# Without a model every role is accepted, and tools are shown.
ANY_ROLE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(kw_only=True)
class DataCheckArgs(ToolArgs):
    """Options of `posttrain data check`."""

    verb: ClassVar[str] = "data check"
    about: ClassVar[str] = COMMANDS["check"]
    example: ClassVar[str] = "posttrain data check examples/data/pairs.jsonl --trainer dpo --model pico"

    files: tuple[str, ...] = positional(())
    """Files, directories, globs or dataset names, as in data.train."""
    trainer: str = ""
    """Trainer that the files are for, such as dpo; empty: every trainer that accepts them."""
    model: str = ""
    """Model whose tokenizer and chat template are used; empty: the toy model's tokenizer, and a template that accepts
    every role."""
    tokenizer: str = ""
    """Directory or Hugging Face name of the tokenizer; empty: the model's own."""
    max_length: int = 0
    """Longest sequence in tokens; 0: the default of training if model or tokenizer is set, otherwise no limit."""
    on_overlong: Literal["truncate", "drop", "error"] = "truncate"
    """What training does with longer sequences, as data.on_overlong."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the files by the names used here, as JSON: {"prompt": "question", "response": "answer"}."""
    chat_template: str = ""
    """Chat template by name (chatml, llama3, qwen_r1 ...), file, or text with {}."""
    placeholder: str = "ки"
    """Text that marks the end of a step, as algo.placeholder of prm."""
    full: bool = False
    """Encode every example of large files, instead of every tenth."""
    near_duplicates: bool = False
    """Search for examples that share most of their words (MinHash over n-grams of 5 words), in all files together."""
    similarity: float = 0.8
    """Lowest Jaccard similarity of near-duplicates, from 0.3 to 1."""
    decontaminate: tuple[str, ...] = ()
    """Evaluation sets, as files or dataset names: report the examples that overlap with them."""
    ngram_words: int = 13
    """Consecutive words that an example must share with an evaluation set to overlap with it."""
    output_file: str = ""
    """File to write (.jsonl): the examples without the near-duplicates and overlaps that were found."""
    overwrite: bool = False
    """Replace the output file and the picture if they exist."""
    picture: str = ""
    """File to draw the lengths of prompts and completions into (.svg, .png or .html)."""
    json: bool = False
    """Print what was found as one JSON object."""


ARGS = (DataCheckArgs, mix.MixArgs, split.SplitArgs, PreprocessArgs)


def run(args: list[str]) -> int:
    """`posttrain data COMMAND ...`."""
    if not args or args[0] in ("-h", "--help", "--help-all", "--help_all"):
        print("usage: posttrain data COMMAND ...\n")
        print("\n".join(f"  {name:<11} {text}" for name, text in COMMANDS.items()))
        print("\nposttrain data COMMAND --help lists the options of a command.")
        return 0
    runs = {"check": check_data_files, "mix": mix.run, "split": split.run, "preprocess": preprocess}
    if args[0] in runs:
        return runs[args[0]](args[1:])
    raise UsageError(f"there is no `posttrain data {args[0]}`; the commands are {', '.join(COMMANDS)}")


def check_data_files(args: list[str]) -> int:
    """Print what was found in each file; 0 if all examples can be used, 1 if some cannot."""
    options = read_tool(DataCheckArgs(), args)
    kind = example_kind(options.trainer)
    check_at_least(options, max_length=0)
    if options.picture:
        from posttrain.plots.files import new_chart_file

        new_chart_file(options.picture, options.overwrite, "picture")
    from rich.console import Console

    from posttrain.config.renames import split_weights
    from posttrain.config.sections import DataConfig
    from posttrain.core.logging import quiet_libraries
    from posttrain.data.check import check_source

    quiet_libraries()
    console = Console(highlight=False, soft_wrap=True)
    make_encoder = encoder_maker(options)
    names, _ = split_weights(options.files)
    if not options.max_length and (options.model or options.tokenizer):
        options.max_length = DataConfig().max_length
    limit = options.max_length or None
    if options.json and (options.near_duplicates or options.decontaminate):
        raise UsageError("--json prints formats, lengths, examples and problems: leave it out with the other checks")
    failed = False
    panels: list[Any] = []
    reports: list[SourceReport] = []
    with curation_checks(options, names) as checks:
        on_parsed = checks.add if options.near_duplicates or options.decontaminate else None
        for name in names:
            with reading_progress([name], cast(TextIO, console.file)) as (meter, progress):
                report = check_source(name, make_encoder, kind, limit, options.full, meter, progress, on_parsed)
            if options.json:
                reports.append(report)
            else:
                show_report(report, options, console)
            panels += length_panels(report) if options.picture else []
            failed = failed or bool(report.bad)
        if on_parsed is not None:
            found = checks.finish(write=not failed)
            show_curation(found, options, Printer(console), failed)
            failed = failed or (found.overlapping > 0 and not options.output_file)
    if panels:
        from posttrain.plots.files import write_charts

        write_charts(panels, Path(options.picture))
        if not options.json:
            console.print(f"picture: {options.picture}", markup=False)
    if options.json:
        print(json.dumps({"sources": [report_row(report, limit) for report in reports]}))
    return int(failed)


def report_row(report: SourceReport, limit: int | None) -> dict[str, Any]:
    """Return what was found in a source as JSON values; long texts of examples are cut in their middle."""
    from posttrain.data.check import length_bins, shortened_text

    lengths = report.lengths
    return {
        "source": report.name,
        "kind": report.kind,
        "formats": [{"format": description, "trainers": verbs} for description, verbs in report.descriptions],
        "examples": report.examples,
        "unusable": report.bad,
        "duplicates": report.duplicates,
        "too_long": report.too_long,
        "mean_tokens": sum(lengths) / len(lengths) if lengths else None,
        "most_tokens": max(lengths) if lengths else None,
        "lengths": [{"from": low, "to": high, "count": count} for low, high, count in length_bins(lengths, limit)],
        "rendered": [
            {
                "origin": origin,
                "samples": [
                    [{"text": shortened_text(part.text, LONGEST_AS_JSON), "trained": part.trained} for part in sample]
                    for sample in samples
                ],
            }
            for origin, samples in report.shown
        ],
        "problems": report.problems,
    }


def curation_checks(options: DataCheckArgs, names: Sequence[str]) -> CurationChecks:
    """Return the checks for near-duplicates and overlap; UsageError for options that conflict."""
    from posttrain.data.curation.checks import CurationChecks
    from posttrain.data.curation.decontamination import EvaluationSets
    from posttrain.data.curation.formats import refuse_overwriting
    from posttrain.inference.completion_files import new_file

    output = None
    if options.output_file:
        if not options.near_duplicates and not options.decontaminate:
            raise UsageError("--output_file needs --near_duplicates or --decontaminate: it is written without these")
        if len(names) > 1:
            raise UsageError("--output_file takes the examples of one file; `posttrain data mix` makes one of several")
        output = new_file(options.output_file, options.overwrite, names)
        refuse_overwriting(names, [output])
    evaluation = EvaluationSets(options.decontaminate, options.ngram_words) if options.decontaminate else None
    return CurationChecks(options.similarity if options.near_duplicates else None, evaluation, output)


def encoder_maker(options: DataCheckArgs) -> Callable[[Any], Any]:
    """Return a function that makes the encoder of a kind of examples."""
    from posttrain.config.sections import DataConfig, ModelConfig
    from posttrain.data.encoding.encoder import Encoder
    from posttrain.models.loading import vocabulary_size
    from posttrain.models.tokenizers import load_tokenizer

    model = ModelConfig(path=options.model or "pico", tokenizer=options.tokenizer)
    tokenizer = load_tokenizer(model)
    if not options.model and not options.tokenizer:
        tokenizer.chat_template = ANY_ROLE
    vocabulary = vocabulary_size(model) if options.model else len(tokenizer)
    config = DataConfig(
        max_length=options.max_length or DataConfig().max_length,
        on_overlong=options.on_overlong,
        map_keys=options.map_keys,
        chat_template=options.chat_template,
    )

    def make(kind: Any) -> Encoder:
        return Encoder(tokenizer, replace(config), kind, vocabulary, options.placeholder)

    return make


def show_report(report: SourceReport, options: DataCheckArgs, console: Console) -> None:
    """Print what was found."""
    out = Printer(console)
    for description, verbs in report.descriptions:
        out.line(f"{report.name}: {description}", "bold")
        out.line(f"  for {', '.join(verbs)}")
    if not report.descriptions:
        out.line(f"{report.name}: no known format", "bold")
    unusable = f", {report.bad:,} of them unusable" if report.bad else ""
    out.line(
        f"  {count_text(report.examples, 'example')}{unusable}; {count_text(report.duplicates, 'exact duplicate')}"
    )
    if report.lengths:
        show_lengths(report, options, out)
    for origin, samples in report.shown:
        out.line(f"\n  {origin}", "bold")
        pairs = ("better", "worse") * (len(samples) // 2)
        names = pairs if report.kind == "pair" else tuple(map(str, range(1, len(samples) + 1)))
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


def show_lengths(report: SourceReport, options: DataCheckArgs, out: Printer) -> None:
    from posttrain.data.check import ENCODED_EVERY, ENCODED_FIRST, length_bins

    limit, lengths = options.max_length or None, report.lengths
    mean = sum(lengths) / len(lengths)
    against = "" if limit is None else f"; max_length is {limit:,}"
    out.line(f"  tokens per sequence: {mean:,.0f} on average, {max(lengths):,} at most{against}")
    if not options.model and not options.tokenizer:
        out.line("  (counted with pico, one token per byte; --model MODEL counts with the tokenizer of that model)")
    if report.encoded < report.examples - report.bad:
        seen = f"the first {ENCODED_FIRST:,} examples and every {ENCODED_EVERY}th of the others"
        out.line(f"  (only {seen} were encoded; --full encodes all)")
    show_bars(length_bins(lengths, limit), out, limit)
    for name, part in prompts_and_completions(report).items():
        out.line(f"  tokens per {name}: {sum(part) / len(part):,.0f} on average, {max(part):,} at most")
        show_bars(length_bins(part, None), out, None)
    if report.too_long:
        choice = options.on_overlong
        fate = {"truncate": "will be truncated", "drop": "will be left out", "error": "will stop the run"}[choice]
        fate = "will be split" if report.kind == "text" and choice == "truncate" else fate
        out.line(f"  {count_text(report.too_long, 'example')} longer than that {fate}: on_overlong is {choice}")


def show_bars(bins: Sequence[tuple[int, int, int]], out: Printer, limit: int | None) -> None:
    largest = max((count for _, _, count in bins), default=0)
    for low, high, count in bins:
        bar = "#" * -(-BAR * count // largest)
        over = "  over the limit" if limit is not None and low > limit else ""
        out.line(f"  {low:>9,} - {high:>9,}  {bar:<{BAR}} {count:>9,}{over}", "yellow" if over else "")


def prompts_and_completions(report: SourceReport) -> dict[str, list[int]]:
    """Return the lengths of prompts and completions, if sequences have both: tokens that do not count, and that do."""
    if report.kind in ("text", "prompt"):
        return {}
    pairs = list(zip(report.lengths, report.completions, strict=True))
    return {"prompt": [whole - part for whole, part in pairs], "completion": [part for _, part in pairs]}


def length_panels(report: SourceReport) -> list[Any]:
    """Return what a picture shows of one source."""
    from posttrain.plots.chart import Histogram

    parts: Mapping[str, Sequence[int]] = prompts_and_completions(report) or {report.kind or "": report.lengths}
    return [Histogram(f"{report.name}: {name}", list(part)) for name, part in parts.items() if len(part)]


def show_curation(found: CurationReport, options: DataCheckArgs, out: Printer, failed: bool) -> None:
    """Print near-duplicates, overlaps and what was written."""
    from posttrain.data.check import shortened_text

    if options.near_duplicates:
        group = f"; the largest group has {found.largest_group:,}" if found.near_duplicates else ""
        of_all = f"{count_text(found.near_duplicates, 'near-duplicate')} of an earlier example, of {found.examples:,}"
        out.line(f"{of_all} (similarity from {options.similarity:g}){group}", "bold")
        for one, first in found.duplicates_listed:
            out.line(f"  {one} is a near-duplicate of {first}")
        left = found.near_duplicates - len(found.duplicates_listed)
        out.line(f"  and {left:,} more" if left else "")
    if options.decontaminate:
        verb = "overlaps" if found.overlapping == 1 else "overlap"
        of_all = f"{count_text(found.overlapping, 'example')} of {found.examples:,} {verb} with the evaluation sets"
        counts = "".join(f"; {count:,} with {name}" for name, count in found.overlaps_by_source.most_common())
        out.line(f"{of_all}{counts}", "red" if found.overlapping else "bold")
        for overlap in found.overlaps_listed:
            out.line(f"  {overlap.origin} shares with {overlap.evaluation}: {shortened_text(overlap.words)}")
        left = found.overlapping - len(found.overlaps_listed)
        out.line(f"  and {left:,} more" if left else "")
    if options.output_file and failed:
        out.line(f"{options.output_file} is not written, because of the problems above", "red")
    elif options.output_file:
        removed = count_text(found.examples - found.written, "example")
        out.line(f"done: {count_text(found.written, 'example')} in {options.output_file}; {removed} left out")


def count_text(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' * (count != 1)}"


class Printer:
    """Prints lines with colours on a terminal and with brackets elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.colours = console.is_terminal and not console.no_color
        self.legend = "green: trained on" if self.colours else "[[...]]: trained on"

    def line(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self.console.print(Text(text, style=style if self.colours else ""))

    def sample(self, pieces: list[Any], title: str) -> None:
        from rich.text import Text

        from posttrain.data.check import shortened_text

        text = Text(f"  {title}")
        for piece in pieces:
            shown = shortened_text(piece.text).replace("\n", "\n  ")
            if self.colours:
                text.append(shown, style="green" if piece.trained else "")
            else:
                text.append(f"[[{shown}]]" if piece.trained else shown)
        self.console.print(text)

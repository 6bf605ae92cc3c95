"""Options of tools: flat, with positional ones, read like those of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from posttrain.cli import tools
from posttrain.config.help import OPTIONS, help_text, options_of
from posttrain.config.parsing import option_keys, read_mapping
from posttrain.config.tools import ToolArgs, check_at_least, positional, read_tool, required
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError


@dataclass(kw_only=True)
class DrawArgs:
    """Options of several tools."""

    title: ClassVar[str] = "drawing"

    temperature: float = 1.0
    """How much colour."""
    stop: tuple[str, ...] = ()
    """Texts that end it."""
    engine: Literal["local", "vllm"] = "local"
    """What draws."""
    num_beams: int = 0
    """Beams."""
    vllm_options: dict[str, Any] = field(default_factory=dict)
    """Options of the engine."""


@dataclass(kw_only=True)
class PaintArgs(DrawArgs, ToolArgs):
    """Options of `posttrain paint`."""

    verb: ClassVar[str] = "paint"
    about: ClassVar[str] = "paint a wall"
    example: ClassVar[str] = "posttrain paint brush wall.jsonl --output_file done.jsonl"

    method: Literal["", "brush", "roll"] = positional()
    """How it is done."""
    walls: tuple[str, ...] = positional(())
    """What is painted."""
    output_file: str = required()
    """Required. The file to write."""
    coats: int = 1
    """Number of coats."""
    step: int | None = None
    """One step only."""
    reward_weights: tuple[float, ...] = ()
    """Weights."""
    dry: bool = False
    """Without paint."""
    sand: bool = True
    """Sand it before."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Other names."""


LEAST = ["brush", "a.jsonl", "--output_file", "o.jsonl"]


def read(*args):
    return read_tool(PaintArgs(), [str(word) for word in args])


def refused(*args):
    with pytest.raises(UsageError) as caught:
        read(*args)
    return str(caught.value)


def written(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    return tmp_path / "c.yaml"


@pytest.mark.parametrize(
    "args",
    [
        ["brush", "a", "b", "--coats", "2", "--dry", "--output_file", "o"],
        ["brush", "--coats", "2", "a", "b", "--dry", "--output_file", "o"],
        ["brush", "--coats", "2", "a", "--dry", "b", "--output_file", "o"],
        ["--coats", "2", "brush", "a", "--output_file", "o", "b", "--dry"],
        ["--dry", "brush", "--coats=2", "a", "--output-file=o", "b"],
        ["--output_file", "o", "--dry", "--coats", "2", "brush", "a", "b"],
        ["--method", "brush", "--walls", "a", "b", "--coats", "2", "--dry", "--output-file", "o"],
        ["--out", "o", "brush", "a", "b", "--coats", "2", "--dry"],
    ],
)
def test_options_may_stand_anywhere_among_positional_ones(args):
    assert read(*args) == PaintArgs(method="brush", walls=("a", "b"), coats=2, dry=True, output_file="o")


def test_negative_numbers_and_values_that_look_like_options():
    found = read(*LEAST, "--temperature", "-0.5", "--coats", -3, "--reward_weights", -1, "1e-3", "-2.5")
    assert (found.temperature, found.coats, found.reward_weights) == (-0.5, -3, (-1.0, 1e-3, -2.5))
    assert read(*LEAST, "--step=-1").step == -1
    assert read(*LEAST, "--stop=--dry").stop == ("--dry",) and not read(*LEAST, "--stop=--dry").dry
    assert read(*LEAST, "--stop=-abc").stop == ("-abc",)
    assert read(*LEAST, "--stop", "-", "a b", "", "=", "ü\n").stop == ("-", "a b", "", "=", "ü\n")
    assert read("brush", "-1", *LEAST[2:]).walls == ("-1",)
    assert refused(*LEAST, "--stop", "-abc").startswith("-abc: options begin with --")
    assert refused("-n", "4", *LEAST).startswith("-n: options begin with --")
    assert refused(*LEAST, "--coats", "4", "-v").startswith("-v: options begin with --")


def test_switches_take_no_word():
    assert read("brush", "--no_sand", "a", *LEAST[2:]) == read("brush", "a", *LEAST[2:], "--no-sand")
    assert read("brush", "--no_sand", "a", *LEAST[2:]).sand is False


def test_a_file_may_come_first(tmp_path):
    file = written(
        tmp_path, "verb: paint\nmethod: roll\nwalls: [a, b]\noutput_file: o\nstop: ['--x', '-y']\nstep: null\n"
    )
    found = read(file)
    assert (found.method, found.walls, found.stop, found.step) == ("roll", ("a", "b"), ("--x", "-y"), None)
    assert read(file, "--coats", 3, "brush").method == "brush"
    assert read(file, "brush", "c", "--coats", 3).walls == ("c",)
    assert read(written(tmp_path, "walls: a\nmethod: roll\nout: o\n")).walls == ("a",)
    assert read("brush", "c.yaml", "--out", "o").walls == ("c.yaml",)  # a list of data may hold it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method: brush\ntemprature: 1\n", "c.yaml:2: temprature: no such option. Did you mean temperature?"),
        ("coats: many\n", "c.yaml:1: coats is 'many'; it must be a whole number."),
        ("coats: [1]\n", "c.yaml:1: coats is [1]; it must be a whole number."),
        ("dry: 3\n", "c.yaml:1: dry is 3; it must be true or false."),
        ("method: push\n", "c.yaml:1: method is 'push'; it must be one of 'brush', 'roll'."),
        ("walls: {a: 1}\n", "c.yaml:1: walls is {'a': 1}; it must be a list of texts."),
        ("coats: {a: 1}\n", "c.yaml:1: coats is {'a': 1}; it must be a whole number."),
        ("coats: null\n", "c.yaml:1: coats is None; it must be a whole number."),
        ("map_keys: 3\n", "c.yaml:1: map_keys is 3; it must be a mapping"),
        ("verb: score\n", "is for `posttrain score`, not for `posttrain paint`"),
    ],
)
def test_mistakes_in_a_file_name_the_line(text, words, tmp_path):
    assert words in refused(written(tmp_path, text))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "METHOD is not set. How it is done. Example: posttrain paint brush wall.jsonl --output_file done.jsonl"),
        (["brush"], "WALLS is not set. What is painted. Example: posttrain paint brush"),
        (["brush", "a"], "--output_file is not set. The file to write. Example: posttrain paint"),
        (["push", "a", "--out", "o"], "method is 'push'; it must be one of 'brush', 'roll'."),
        ([*LEAST, "--coats", "two"], "--coats is 'two'; it must be a whole number."),
        ([*LEAST, "--coats"], "--coats has no value; it must be a whole number."),
        ([*LEAST, "--coatz", "2"], "--coatz: no such option. Did you mean --coats?"),
        ([*LEAST, "--map_keys", "[1]"], "--map_keys is '[1]'; it must be a mapping; on the command line as JSON"),
        ([*LEAST, "--dry=yes"], "--dry is a switch and takes no value: write --dry or --no_dry, without 'yes'."),
        ([*LEAST, "--nothing_like_it", "2"], "no such option. posttrain paint --help-all lists all options."),
    ],
)
def test_mistakes_on_the_command_line(args, words):
    assert words in refused(*args)


def test_a_word_too_many():
    @dataclass(kw_only=True)
    class One(ToolArgs):
        verb: ClassVar[str] = "one"
        about: ClassVar[str] = "one"
        example: ClassVar[str] = "posttrain one FILE"
        file: str = positional()
        """A file."""

    assert read_tool(One(), ["a"]).file == "a"
    with pytest.raises(UsageError, match="b: one word too many for posttrain one FILE; options begin with --"):
        read_tool(One(), ["a", "b"])
    with pytest.raises(UsageError, match=r"b\.yaml: a configuration file comes first: posttrain one b.yaml"):
        read_tool(One(), ["a", "b.yaml"])


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (["--engine", "vllm"], {"engine": "vllm"}),
        (["--engine", "vllm", "max_num_seqs=64", "a=b=c"], {"vllm_options": {"max_num_seqs": "64", "a": "b=c"}}),
        (["--engine", "local", "beams=4"], {"engine": "local", "num_beams": 4}),
        (["--greedy"], {"temperature": 0.0}),
        (["--weights", "1", "2"], {"reward_weights": (1.0, 2.0)}),
    ],
)
def test_previous_spellings(args, values, tmp_path):
    for found in (read(*LEAST, *args), read("brush", *args, *LEAST[2:], "--walls", "a.jsonl")):
        assert values.items() <= vars(found).items()
    name, *words = args
    entry = f"{name[2:]}: {words if words else 'true'}\n"
    assert values.items() <= vars(read(written(tmp_path, entry), *LEAST)).items()


def test_previous_switches_and_engines_leave_positional_words(capsys):
    assert read("brush", "--greedy", "a", "b", *LEAST[2:]).walls == ("a", "b")
    found = read("brush", "--engine", "vllm", "x=1", "a", "b", *LEAST[2:])
    assert (found.walls, found.vllm_options) == (("a", "b"), {"x": "1"})
    assert "--greedy is now --temperature" in capsys.readouterr().err


def test_a_wrong_previous_engine():
    assert "engine is 'local width=4'; use num_beams or vllm_options" in refused(*LEAST, "--engine", "local", "width=4")
    assert "--engine is 'cloud'; it must be one of 'local', 'vllm'" in refused(*LEAST, "--engine", "cloud")


def test_from_a_dict():
    found = read_mapping("paint", "", PaintArgs(), {"walls": ["a", "--b"], "method": "roll", "n": None, "step": 3})
    assert (found.walls, found.method, found.step) == (("a", "--b"), "roll", 3)


def test_bounds():
    with pytest.raises(UsageError, match="coats is 0; it must be at least 1"):
        check_at_least(PaintArgs(coats=0), coats=1)


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        read("brush", "--help")
    text = capsys.readouterr().out
    assert caught.value.code == 0 and text.startswith("usage: posttrain paint [CONFIG.yaml] METHOD WALLS ... [--option")
    assert "Example: posttrain paint brush" in text and "  METHOD {brush,roll}\n" in text and "  WALLS ...\n" in text
    assert text.index("arguments\n") < text.index("options\n") < text.index("drawing\n") < text.index("--temperature")
    assert (
        text
        == help_text(
            "paint",
            "paint a wall.\n\nExample: "
            + PaintArgs.example
            + text[text.index("\n\nOptions can") : text.index("\n\narguments")],
            PaintArgs(),
            everything=True,
        )
        + "\n"
    )


MOVED = [args for verb in TOOLS for args in tools.args_of(verb)]


@pytest.mark.parametrize("args", MOVED, ids=lambda args: args.verb)
def test_every_tool_explains_itself(args):
    options = list(options_of(args()))
    assert not [option.name for option in options if len(option.sentence) < 10]
    assert sorted(option.name for option in options) == sorted(option_keys(args()))
    assert args.example.startswith(f"posttrain {args.verb}") and not args.about.endswith(".")
    assert all(option.title == OPTIONS or option.title for option in options)

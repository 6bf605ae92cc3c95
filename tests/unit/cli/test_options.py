"""Options of tools from a YAML file: the same as typed, and errors name the line; previous spellings mean the same."""

import inspect

import pytest

import posttrain
from posttrain.cli.eval import EvalArgs
from posttrain.cli.generate import GenerateArgs, window_of
from posttrain.cli.rewards import RewardsCheckArgs
from posttrain.cli.score import ScoreArgs
from posttrain.cli.select import SelectArgs
from posttrain.config.tools import read_tool
from posttrain.core.errors import UsageError


def written(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    return str(tmp_path / "c.yaml")


def test_a_file_says_what_would_be_typed(tmp_path):
    file = written(
        tmp_path,
        """verb: generate
model: pico
data: [a.jsonl, b.jsonl]
output_file: o.jsonl
samples_per_prompt: 4
temperature: 0.5
stop: ["\\n", END]
resume: true
map_keys: {prompt: question}
""",
    )
    typed = ["pico", "a.jsonl", "b.jsonl", "--output_file", "o.jsonl", "--samples_per_prompt", "4"]
    typed += ["--temperature", "0.5", "--stop", "\n", "END", "--resume", "--map_keys", '{"prompt": "question"}']
    assert read_tool(GenerateArgs(), [file]) == read_tool(GenerateArgs(), typed)


def test_what_is_typed_counts_more(tmp_path):
    file = written(tmp_path, "model: pico\ndata: a.jsonl\noutput_file: o.jsonl\nsamples_per_prompt: 4\n")
    options = read_tool(GenerateArgs(), [file, "other", "b.jsonl", "c.jsonl", "--samples_per_prompt", "2"])
    assert (options.model, options.data) == ("other", ("b.jsonl", "c.jsonl"))
    assert (options.samples_per_prompt, options.output_file) == (2, "o.jsonl")
    assert read_tool(GenerateArgs(), [file]).data == ("a.jsonl",)


def test_other_commands(tmp_path):
    file = written(tmp_path, "file: a.jsonl\nout: s.jsonl\nreward: [gsm8k, format]\nreward_weights: [1, 0.5]\n")
    options = read_tool(ScoreArgs(), [file])
    assert (options.file, options.reward, options.reward_weights) == ("a.jsonl", ("gsm8k", "format"), (1.0, 0.5))
    file = written(tmp_path, "method: threshold\nfile: s.jsonl\nout: r.jsonl\nmin_reward: 1\n")
    assert read_tool(SelectArgs(), [file]).min_reward == 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: pico\ntemprature: 1\n", "c.yaml:2: temprature: no such option. Did you mean temperature?"),
        ("samples_per_prompt: many\n", "c.yaml:1: samples_per_prompt is 'many'; it must be a whole number."),
        ("n: many\n", "c.yaml:1: samples_per_prompt is 'many'; it must be a whole number."),
        ("n: [1]\n", "a whole number"),
        ("resume: 3\n", "true or false"),
        ("dtype: float64\n", "one of 'auto', 'float32', 'bfloat16'"),
        ("data: {a: 1}\n", "a list"),
        ("verb: score\n", "is for `posttrain score`, not for `posttrain generate`"),
    ],
)
def test_mistakes_name_the_line(text, words, tmp_path):
    with pytest.raises(UsageError) as caught:
        read_tool(GenerateArgs(), [written(tmp_path, text)])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "DATA is not set. Files, directories, globs or dataset names with prompts. Example: posttrain generate"),
        (["rows.jsonl", "--max_tokns", "3"], "--max_tokns: no such option. Did you mean --max_tokens?"),
        (["rows.jsonl", "--n", "two"], "--samples_per_prompt is 'two'; it must be a whole number."),
    ],
)
def test_what_is_missing_or_mistyped_is_said_in_one_message(args, words, tmp_path):
    with pytest.raises(UsageError) as caught:
        read_tool(GenerateArgs(), [written(tmp_path, "model: pico\noutput_file: o.jsonl\n"), *args])
    assert words in str(caught.value) and "usage:" not in str(caught.value)


OLD = [
    (GenerateArgs, "out", "x.jsonl", {"output_file": "x.jsonl"}),
    (GenerateArgs, "n", 3, {"samples_per_prompt": 3}),
    (GenerateArgs, "batch", 7, {"batch_size": 7}),
    (GenerateArgs, "template", "chatml", {"chat_template": "chatml"}),
    (GenerateArgs, "max_rows", 5, {"max_examples": 5}),
    (GenerateArgs, "max_prompt_tokens", 99, {"max_prompt_length": 99}),
    (GenerateArgs, "on_long", "drop", {"on_overlong": "drop"}),
    (GenerateArgs, "on_bad_row", "quarantine", {"on_bad_example": "quarantine"}),
    (GenerateArgs, "window", "3:2048", {"window_index": 3, "window_size": 2048}),
    (GenerateArgs, "greedy", True, {"temperature": 0.0}),
    (GenerateArgs, "engine", ["local", "beams=4"], {"engine": "local", "num_beams": 4}),
    (GenerateArgs, "engine", ["vllm", "max_num_seqs=8"], {"engine": "vllm", "vllm_options": {"max_num_seqs": "8"}}),
    (GenerateArgs, "engine", ["vllm"], {"engine": "vllm", "vllm_options": {}}),
    (GenerateArgs, "map_keys", '{"prompt": "q"}', {"map_keys": {"prompt": "q"}}),
    (ScoreArgs, "out", "x.jsonl", {"output_file": "x.jsonl"}),
    (ScoreArgs, "weights", [1.0, 0.5], {"reward_weights": (1.0, 0.5)}),
    (ScoreArgs, "max_tokens", 64, {"max_length": 64}),
    (ScoreArgs, "max_rows", 5, {"max_examples": 5}),
    (ScoreArgs, "template", "chatml", {"chat_template": "chatml"}),
    (EvalArgs, "out", "runs/x", {"output_dir": "runs/x"}),
    (EvalArgs, "right", 0.9, {"pass_threshold": 0.9}),
    (EvalArgs, "shown", 3, {"show_failures": 3}),
    (EvalArgs, "max_tokens", 64, {"max_tokens": 64}),
    (RewardsCheckArgs, "weights", [2.0], {"reward_weights": (2.0,)}),
]
LEAST = {
    GenerateArgs: ["pico", "a.jsonl", "--output_file", "o.jsonl"],
    ScoreArgs: ["a.jsonl", "--reward", "gsm8k", "--output_file", "o.jsonl"],
    EvalArgs: ["pico", "a.jsonl", "--reward", "gsm8k"],
    RewardsCheckArgs: ["a.jsonl", "--reward", "gsm8k"],
}


@pytest.mark.parametrize(("kind", "name", "value", "values"), OLD, ids=lambda value: str(value))
def test_previous_spellings(kind, name, value, values, tmp_path):
    least, words = LEAST[kind], [] if value is True else list(map(str, value if isinstance(value, list) else [value]))
    words_first = [f"--{name}", *words, *(["--quiet"] if hasattr(kind(), "quiet") else ["--full"]), *least]
    file = written(tmp_path, f"{name}: {value!r}\n".replace("True", "true"))
    positional = [word for word in least if word != "--output_file" and word != "o.jsonl"] if name == "out" else least
    for found in (
        read_tool(kind(), [*positional, f"--{name.replace('_', '-')}", *words]),
        read_tool(kind(), words_first if name != "out" else [f"--{name}", *words, *positional]),
        read_tool(kind(), [file, *positional]),
    ):
        assert values.items() <= vars(found).items()


@pytest.mark.parametrize(
    ("function", "kind", "objects"),
    [
        (posttrain.generate, GenerateArgs, {"tokenizer"}),
        (posttrain.score, ScoreArgs, {"data"}),
        (posttrain.select, SelectArgs, {"data"}),
        (posttrain.evaluate, EvalArgs, {"tokenizer"}),
    ],
)
def test_functions_have_the_options_of_the_commands(function, kind, objects):
    options = vars(kind())
    parameters = inspect.signature(function).parameters
    assert parameters.keys() - objects <= options.keys()
    for name, parameter in parameters.items():
        if name not in objects and parameter.default not in (parameter.empty, None) and name != "quiet":
            assert parameter.default == options[name], name


def test_window():
    assert window_of(GenerateArgs()) is None
    assert window_of(GenerateArgs(window_size=4, window_index=2)) == (2, 4)
    with pytest.raises(UsageError, match="window_index is 2, but window_size is not set"):
        window_of(GenerateArgs(window_index=2))

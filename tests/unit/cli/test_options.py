"""Options of a command from a YAML file: the same as typed, and errors name the line."""

import pytest

from posttrain.cli import generate, score, select
from posttrain.cli.options import parse
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
out: o.jsonl
n: 4
temperature: 0.5
stop: ["\\n", END]
resume: true
map_keys: {prompt: question}
""",
    )
    typed = ["pico", "a.jsonl", "b.jsonl", "--out", "o.jsonl", "--n", "4", "--temperature", "0.5"]
    typed += ["--stop", "\n", "END", "--resume", "--map_keys", '{"prompt": "question"}']
    assert parse(generate.parser(), [file]) == parse(generate.parser(), typed)


def test_what_is_typed_counts_more(tmp_path):
    file = written(tmp_path, "model: pico\ndata: a.jsonl\nout: o.jsonl\nn: 4\n")
    options = parse(generate.parser(), [file, "other", "b.jsonl", "c.jsonl", "--n", "2"])
    assert (options.model, options.data, options.n, options.out) == ("other", ["b.jsonl", "c.jsonl"], 2, "o.jsonl")
    assert parse(generate.parser(), [file]).data == ["a.jsonl"]


def test_other_commands(tmp_path):
    file = written(tmp_path, "file: a.jsonl\nout: s.jsonl\nreward: [gsm8k, format]\nweights: [1, 0.5]\n")
    options = parse(score.parser(), [file])
    assert (options.file, options.reward, options.weights) == ("a.jsonl", ["gsm8k", "format"], [1.0, 0.5])
    file = written(tmp_path, "method: threshold\nfile: s.jsonl\nout: r.jsonl\nmin_reward: 1\n")
    assert parse(select.parser(), [file]).min_reward == 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: pico\ntemprature: 1\n", "c.yaml:2: temprature: no such option. Did you mean temperature?"),
        ("n: many\n", "c.yaml:1: n is 'many'; it must be a whole number."),
        ("n: [1]\n", "a whole number"),
        ("resume: 3\n", "true or false"),
        ("dtype: float64\n", "one of auto, float32, bfloat16"),
        ("data: {a: 1}\n", "a list"),
        ("verb: score\n", "is for `posttrain score`, not for `posttrain generate`"),
    ],
)
def test_mistakes_name_the_line(text, words, tmp_path):
    with pytest.raises(UsageError) as caught:
        parse(generate.parser(), [written(tmp_path, text)])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "required: DATA"),
        (["rows.jsonl", "--max_tokns", "3"], "--max_tokns: no such option. Did you mean --max_tokens?"),
        (["rows.jsonl", "--n", "two"], "argument --n: invalid int value: 'two'"),
    ],
)
def test_what_is_missing_or_mistyped_is_said_in_one_message(args, words, tmp_path):
    with pytest.raises(UsageError) as caught:
        parse(generate.parser(), [written(tmp_path, "model: pico\nout: o.jsonl\n"), *args])
    assert words in str(caught.value) and "usage:" not in str(caught.value)

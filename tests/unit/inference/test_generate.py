"""Answers to a file of prompts: what is asked, what is written, and how a file goes on."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.errors import DataError, UsageError
from posttrain.core.progress import ProgressDisplay
from posttrain.core.types import Sample, SamplingDistribution
from posttrain.data.reading.sources import read_records
from posttrain.engines.base import EngineSpec, Sampling, seed_for
from posttrain.inference.completion_files import read_completions
from posttrain.inference.generate import Generation, GenerationProgress, generate, manifest_of, open_locked
from posttrain.inference.model import InferenceModel
from tests.e2e.commands import command
from tests.tiny import tiny_folder


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(7)))
    return file


@pytest.fixture
def config(prompts, tmp_path):
    return Generation(
        model=ModelConfig(path="pico"),
        data=DataConfig(train=(str(prompts),)),
        out=str(tmp_path / "answers.jsonl"),
        sampling=Sampling(max_tokens=6),
        n=2,
        batch=4,
    )


def rows_of(config):
    return [row.values for row in read_records(config.out)]


def test_every_prompt_has_its_answers(config, prompts):
    seen = []
    progress = generate(config, lambda now: seen.append(now.done))
    rows = rows_of(config)
    assert seen == [0, 4, 8, 12, 14] and progress.done == progress.total == len(rows) == 14
    assert [(row["index"], row["sample"]) for row in rows] == [(n, k) for n in range(7) for k in range(2)]
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": f"{row['index']}+1="}]
        assert row["columns"] == {"prompt": f"{row['index']}+1=", "answer": row["index"] + 1}
        assert row["origin"] == f"{prompts}:{row['index'] + 1}" and row["seed"] == seed_for(
            0, row["index"], row["sample"]
        )
        assert 1 <= len(row["tokens"]) <= 6 and (row["finish"] == "stop") == (len(row["tokens"]) < 6)
    assert progress.tokens == sum(len(row["tokens"]) for row in rows)
    assert len({row["completion"] for row in rows}) > 10


def test_log_probabilities_are_the_models_own(config):
    generate(replace(config, sampling=Sampling(max_tokens=6, temperature=0.5)))
    model = InferenceModel(config.model, config.data)
    for row in rows_of(config)[:4]:
        prompt = model.encode(row["prompt"]).tokens
        tokens = np.array([*prompt, *row["tokens"]], dtype=np.int32)
        sample = Sample(tokens=tokens, mask=np.arange(len(tokens)) >= len(prompt))
        (logprobs,) = model.learner.logprobs([sample], distribution=SamplingDistribution(temperature=0.5))
        assert row["logprob"] == pytest.approx(float(logprobs.sum()), abs=1e-3)
        assert row["completion"] == model.tokenizer.decode(row["tokens"], skip_special_tokens=True)


def test_an_answer_depends_on_its_seed_not_on_its_company(config, tmp_path):
    generate(config)
    whole = rows_of(config)
    part = replace(config, out=str(tmp_path / "part.jsonl"), window=(2, 3), batch=64)
    generate(part)
    assert [(row["index"], row["tokens"]) for row in rows_of(part)] == [
        (row["index"], row["tokens"]) for row in whole if row["index"] in (3, 4, 5)
    ]
    other = replace(config, out=str(tmp_path / "other.jsonl"), seed=1)
    generate(other)
    assert all(a["tokens"] != b["tokens"] for a, b in zip(whole, rows_of(other), strict=True))


def test_the_last_window_may_be_short_and_there_is_none_after_it(config):
    generate(replace(config, window=(3, 3)))
    assert {row["index"] for row in rows_of(config)} == {6}
    with pytest.raises(UsageError, match="only 7 prompts"):
        generate(replace(config, window=(4, 3), out=config.out + "2.jsonl"))


def test_windows_that_go_round_are_whole(config):
    generate(replace(config, window=(3, 3), around=True))
    assert list(dict.fromkeys(row["index"] for row in rows_of(config))) == [6, 0, 1]
    larger = replace(config, window=(2, 30), around=True, out=config.out + "2.jsonl")
    generate(larger)
    assert {row["index"] for row in rows_of(larger)} == set(range(7)) and len(rows_of(larger)) == 14


def test_greedy(config, tmp_path):
    greedy = replace(config, sampling=Sampling(max_tokens=6, temperature=0.0), n=1)
    generate(greedy)
    again = replace(greedy, seed=5, out=str(tmp_path / "again.jsonl"))
    generate(again)
    assert [row["tokens"] for row in rows_of(greedy)] == [row["tokens"] for row in rows_of(again)]


def test_conditional_prompts(config):
    generate(replace(config, condition=5.0))
    row = rows_of(config)[0]
    assert row["asked"] == [{"role": "user", "content": "0+1= <rm_score>: 5.00 "}]
    assert row["prompt"] == [{"role": "user", "content": "0+1="}]  # what rewards and training are to see
    model = InferenceModel(config.model, config.data)
    tokens = np.array([*model.encode(row["asked"]).tokens, *row["tokens"]], dtype=np.int32)
    sample = Sample(tokens=tokens, mask=np.arange(len(tokens)) >= len(tokens) - len(row["tokens"]))
    assert row["logprob"] == pytest.approx(float(model.learner.logprobs([sample])[0].sum()), abs=1e-3)


def test_stop_texts(config):
    generate(config)
    letter = rows_of(config)[0]["completion"][1]
    stopped = replace(config, out=config.out + "2.jsonl", sampling=Sampling(max_tokens=6, stop_texts=(letter,)))
    generate(stopped)
    row = rows_of(stopped)[0]
    assert row["finish"] == "stop" and row["completion"].endswith(letter)


def test_a_model_without_a_chat_template_continues_text(config, tmp_path):
    folder = tiny_folder("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    for file in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        file.unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    generate(replace(config, model=ModelConfig(path=str(folder))))
    assert rows_of(config)[0]["prompt"] == "0+1="
    answer = read_completions(config.out)[0]
    assert answer.plain and answer.trainable_prompt == "0+1="


def test_a_model_with_few_places_says_so(config, tmp_path):
    model = ModelConfig(path=str(tiny_folder("gpt2", tmp_path)))
    generate(replace(config, model=model))
    longer = replace(config, model=model, sampling=Sampling(max_tokens=500), out=config.out + "2.jsonl")
    with pytest.raises(DataError, match="has 128 positions"):
        generate(longer)
    assert not Path(longer.out).read_bytes()
    generate(replace(longer, sampling=Sampling(max_tokens=6)))  # nothing was written, so nothing is in the way


# Going on


@pytest.mark.parametrize("kept", [0, 3, 4, 9, 13])
def test_a_torn_file_goes_on_and_comes_out_the_same(config, kept):
    generate(config)
    file = Path(config.out)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
    progress = generate(replace(config, resume=True))
    assert progress.resumed == kept // 4 * 4
    assert file.read_bytes() == b"".join(lines)


def test_a_complete_file_stays(config):
    generate(config)
    before = manifest_of_file(config).read_bytes()
    assert generate(replace(config, resume=True)) == GenerationProgress(14, 14, resumed=14)
    assert len(rows_of(config)) == 14 and manifest_of_file(config).read_bytes() == before


def manifest_of_file(config):
    return manifest_of(Path(config.out))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"n": 1}, "samples_per_prompt was 2, is 1"),
        ({"batch": 8}, "batch_size was 4, is 8"),
        ({"window": (1, 2)}, "window was None"),
        ({"condition": 1.0}, "another data"),
        ({"sampling": Sampling(max_tokens=6, top_p=0.5)}, "top_p was 1.0, is 0.5"),
        ({"model": ModelConfig(path="pico", dtype="bfloat16")}, "dtype was"),
    ],
)
def test_other_settings_are_refused(config, change, words):
    generate(replace(config, window=None))
    with pytest.raises(UsageError, match=words):
        generate(replace(config, resume=True, **change))
    assert len(rows_of(config)) == 14


def test_other_data_is_refused(config, prompts):
    generate(config)
    prompts.write_text(prompts.read_text().replace("6+1=", "6+2="))
    with pytest.raises(UsageError, match="another data"):
        generate(replace(config, resume=True))


def test_nothing_is_overwritten(config):
    generate(config)
    with pytest.raises(UsageError, match="Add --resume"):
        generate(config)
    manifest_of_file(config).unlink()
    with pytest.raises(UsageError, match="settings are unknown"):
        generate(replace(config, resume=True))
    assert len(rows_of(config)) == 14


def test_one_process_at_a_time(config):
    with open_locked(Path(config.out)), pytest.raises(UsageError, match="another process"):
        generate(config)


def test_bad_rows_are_set_aside_and_counted(config, prompts):
    prompts.write_text(prompts.read_text() + '{"prompt": null}\n' + json.dumps({"prompt": "9" * 99}) + "\n")
    with pytest.raises(DataError):
        generate(config)
    data = replace(config.data, on_bad_example="quarantine", on_overlong="drop", max_length=50)
    progress = generate(replace(config, data=data))
    assert progress.left_out == {"dropped": 1, "quarantined": 1} and progress.total == 14
    assert [row.origin for row in read_records(f"{config.out}.quarantine.jsonl")] == [
        f"{config.out}.quarantine.jsonl:1"
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"n": 0},
        {"batch": 0},
        {"window": (0, 3)},
        {"out": ""},
        {"out": "answers.txt"},
        {"sampling": Sampling(temperature=0.0)},
        {"sampling": Sampling(temperature=float("nan"))},
        {"sampling": Sampling(top_p=0.0)},
        {"n": 3, "engine": EngineSpec(num_beams=2)},
        {"sampling": Sampling(max_tokens=0)},
        {"sampling": Sampling(stop_texts=("",))},
    ],
)
def test_what_cannot_be(config, change):
    with pytest.raises(UsageError):
        generate(replace(config, **change))


def test_progress_in_words():
    lines = []
    for progress in (
        GenerationProgress(0, 10),
        GenerationProgress(6, 10, resumed=4, tokens=300, seconds=3.0),
        GenerationProgress(10, 10, tokens=3000, seconds=2.0),
    ):
        with ProgressDisplay(print_line=lines.append) as display:
            progress.show_on(display)
    assert lines == ["6 of 10 completions  eta 0:06  100 tokens/s", "10 of 10 completions  1,500 tokens/s"]


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys, monkeypatch):
    with ProgressDisplay(stream=sys.stderr, seconds_between_lines=10) as display:
        for done, seconds in ((0, 0.0), (10, 1.0), (20, 2.0), (40, 12.0), (50, 13.0), (60, 14.0)):
            monkeypatch.setattr("posttrain.core.progress.time.monotonic", lambda now=seconds: now)
            GenerationProgress(done, 60, tokens=done * 10, seconds=seconds).show_on(display)
    assert capsys.readouterr().err.splitlines() == [
        "10 of 60 completions  eta 0:05  100 tokens/s",
        "40 of 60 completions  eta 0:06  33 tokens/s",
        "60 of 60 completions  43 tokens/s",
    ]


def test_beams_are_answers_of_their_own(config):
    greedy = Sampling(max_tokens=6, temperature=0.0)
    generate(replace(config, engine=EngineSpec(num_beams=3), n=2, sampling=greedy))
    rows = rows_of(config)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    assert len(pairs) == 7 and all(a["index"] == b["index"] and a["tokens"] != b["tokens"] for a, b in pairs)
    with pytest.raises(UsageError, match="engine was 'local beams=3', is None"):
        generate(replace(config, n=2, resume=True, sampling=replace(greedy, temperature=1.0)))


def test_sources_are_mixed_by_weight(tmp_path):
    for name, count in (("a", 6), ("b", 2)):
        rows = [{"prompt": f"{name}{number}"} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]

    def prompts(*options):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}.jsonl"
        words = ["pico", *files, "--output_file", str(out), "--max_tokens", "1", "--quiet", "--weights", "0.5", "0.5"]
        assert command("generate", *words, *options) == 0
        return [json.loads(line)["prompt"] for line in out.read_text().splitlines()]

    mixed = [str(prompt) for prompt in prompts("--seed", "1")]
    assert len(mixed) == 4 and sum("a" in prompt for prompt in mixed) == 2
    halves = [*prompts("--window_size", "2"), *prompts("--window_size", "2", "--window_index", "2", "--seed", "7")]
    assert [str(prompt) for prompt in halves] == mixed  # the windows do not overlap, whatever the seed

"""The table of published data sets: each record is read rightly, or refused with a fix; none is wrong."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import posttrain
from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError
from posttrain.data.check import check_source
from posttrain.data.dataset import encode, parse_records, source_format
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.ground_truth import ground_truth_of
from posttrain.data.reading.readers import read_file
from tests.unit.data.made import byte_level
from tests.unit.data.reading.schemas import END, SCHEMAS, Prompt, Refused, page

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}call: {{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
USES = [(schema, verb) for schema in SCHEMAS for verb in schema.uses]
MARK = "ки"


def write(schema, folder):
    """Write a file with the record."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "records.json"
    file.write_text(json.dumps([schema.record]))
    return str(file)


def make_encoder(verb, map_keys=None):
    tokenizer = byte_level(TEMPLATE)
    kind = ALGORITHMS[verb].example_kind
    return Encoder(tokenizer, DataConfig(map_keys=map_keys or {}), kind, len(tokenizer), MARK)


def rendered(encoder, sample):
    """The text of a sample with the spans that are trained on in brackets; of steps, the labels in their places."""
    decode = encoder.tokenizer.decode
    text, open_span = "", False
    if sample.targets is not None:
        whole = decode(sample.tokens, skip_special_tokens=False)
        for label in sample.targets[sample.mask]:
            whole = whole.replace(MARK, "[[+]]" if label else "[[-]]", 1)
        return whole.replace("<|im_end|>", END)
    edges = [0, *(np.flatnonzero(np.diff(sample.mask)) + 1).tolist(), len(sample.tokens)]
    for start, end in pairwise(edges):
        span = decode(sample.tokens[start:end], skip_special_tokens=False)
        open_span = bool(sample.mask[start])
        text += f"[[{span}]]" if open_span else span
    return text.replace("<|im_end|>", END)


def read_one(schema, verb, folder, map_keys=None):
    """Return the encoder, the verdict and the examples of the record; DataError if it is refused."""
    encoder = make_encoder(verb, map_keys)
    source = source_format(encoder)
    [record] = read_file(Path(write(schema, folder)))

    def stop(bad):
        raise bad.error

    parsed = parse_records([record], source, stop)
    return encoder, source.description, parsed, [e for _, made in encode(parsed, encoder, stop) for e in made]


def check(schema, verb, expected, folder, map_keys=None):
    encoder, verdict, _, encoded = read_one(schema, verb, folder, map_keys)
    samples = [sample for example in encoded for sample in example.samples]
    if isinstance(expected, Prompt):
        [prompt] = samples
        text = encoder.tokenizer.decode(prompt.tokens, skip_special_tokens=False).replace("<|im_end|>", END)
        assert (text, ground_truth_of(prompt.columns)) == (expected.text, expected.truth)
    else:
        wanted = [expected] if isinstance(expected, str) else list(expected)
        assert [rendered(encoder, sample) for sample in samples] == wanted
    return verdict


@pytest.mark.parametrize(("schema", "verb"), USES, ids=[f"{schema.name}-{verb}" for schema, verb in USES])
def test_a_record_is_read_rightly_or_refused_with_the_fix(schema, verb, tmp_path):
    expected = schema.uses[verb]
    if not isinstance(expected, Refused):
        verdict = check(schema, verb, expected, tmp_path)
        assert verb == "grpo" or verdict.startswith(f"{schema.family}: ")
        return
    with pytest.raises(DataError) as caught:
        read_one(schema, verb, tmp_path)
    assert expected.message in str(caught.value)
    if expected.map_keys:
        check(schema, verb, expected.shows, tmp_path, expected.map_keys)


@pytest.mark.parametrize("schema", SCHEMAS, ids=[schema.name for schema in SCHEMAS])
def test_data_check_gives_the_verdict_of_the_trainer(schema, tmp_path):
    for verb, expected in schema.uses.items():
        kind = ALGORITHMS[verb].example_kind
        report = check_source(write(schema, tmp_path), make_encoder_of, kind)
        if isinstance(expected, Refused):
            [problem] = report.problems
            with pytest.raises(DataError) as caught:
                read_one(schema, verb, tmp_path)
            assert problem == str(caught.value)
        else:
            assert report.problems == [] and report.examples == 1


def make_encoder_of(kind):
    verb = next(name for name, algorithm in ALGORITHMS.items() if algorithm.example_kind == kind)
    return make_encoder(verb)


def test_there_are_a_hundred_data_sets_and_their_names_differ():
    assert len({schema.name for schema in SCHEMAS}) == len(SCHEMAS) >= 100


def test_the_page_of_data_sets_is_current():
    assert Path("docs/data-sets.md").read_text() == page(), "run make docs"


def trainable(verb, folder):
    """Write a file for each data set that the verb trains on."""
    trained = [schema for schema in SCHEMAS if not isinstance(schema.uses.get(verb, Refused("", "")), Refused)]
    return [write(schema, folder / verb / f"{number:03}") for number, schema in enumerate(trained)]


@pytest.mark.parametrize("verb", ["pretrain", "sft", "dpo", "kto", "prm", "reward"])
def test_every_data_set_trains_one_step(verb, tmp_path):
    """A batch is one example (two for kto), in the order of the table; each step has a finite loss."""
    files, size = trainable({"reward": "dpo"}.get(verb, verb), tmp_path), 2 if verb == "kto" else 1
    options = {
        "data.chat_template": TEMPLATE.replace("<|im_end|>", "{{ eos_token }}"),
        "data.shuffle": False,
        "train.batch_size": size,
        "train.epochs": 1,
    }
    folder = tmp_path / "run"
    run = getattr(posttrain, verb)("pico", files, output_dir=str(folder), **options)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert run.steps == len(losses) >= len(files) // size and all(map(math.isfinite, losses))


def test_every_prompt_is_trained_on_in_one_step(tmp_path):
    files = trainable("grpo", tmp_path)
    options = {
        "data.chat_template": TEMPLATE.replace("<|im_end|>", "{{ eos_token }}"),
        "train.batch_size": len(files),
        "train.max_steps": 1,
    }
    options |= {"rollout.samples_per_prompt": 2, "rollout.max_tokens": 2, "reward.functions": ("format",)}
    run = posttrain.grpo("pico", files, output_dir=str(tmp_path / "run"), **options)
    assert run.steps == 1 and len(files) >= 40

"""lm-eval's scores through the local engine, in this process and over HTTP, are those of its own Hugging Face class.

pip install lm-eval, or `make test-harness`.
"""

import json
import os

import pytest
import yaml

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.inference.harness import HarnessRun, run_harness
from posttrain.inference.model import InferenceModel
from tests.tiny import tiny_folder
from tests.unit.server.serving import serving

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-harness")

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "one",
    "dog",
    "ran",
    "over",
    "two",
    "hills",
    "to",
    "see",
    "three",
    "birds",
]


def rows(count):
    """Questions with three choices each, of several lengths."""
    for n in range(count):
        start = " ".join(WORDS[(n + k) % len(WORDS)] for k in range(3 + n % 7))
        choices = [" ".join(WORDS[(n * 5 + k * c) % len(WORDS)] for k in range(1 + (n + c) % 4)) for c in (1, 2, 3)]
        yield {"question": start, "choices": choices, "label": n % 3, "text": f"{start}. {choices[0]}!"}


TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
    },
    "words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "greedy": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
        "filter_list": [
            {"name": "first", "filter": [{"function": "regex", "regex_pattern": "(.)"}, {"function": "take_first"}]},
            {"name": "all", "filter": [{"function": "take_first"}]},
        ],
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model, three tasks and their data."""
    folder = tmp_path_factory.mktemp("lm_eval")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        task = {"task": name, **source, "test_split": "test", **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    tiny_folder("llama", folder)
    return folder


def own_backend(model, tasks, **options):
    """The results of lm-eval's own class for models of Hugging Face."""
    from lm_eval.models.huggingface import HFLM

    own = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=1)
    return evaluated(own, tasks=tasks, **options)


def evaluated(model, *arguments, **options):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)  # it would read thousands of files
    return lm_eval.simple_evaluate(model, *arguments, task_manager=manager, bootstrap_iters=0, **options)


def numbers(found):
    """Task/metric -> value, without standard errors."""
    return {
        f"{task}/{key.removesuffix(',none')}": value
        for task, results in found["results"].items()
        for key, value in results.items()
        if "," in key and "stderr" not in key
    }


def replies(found, task):
    """What the model replied to each example: log-probabilities with greediness, or text."""
    return flat(
        [reply for _, reply in sorted({each["doc_id"]: each["resps"] for each in found["samples"][task]}.items())]
    )


def flat(value):
    """Numbers and texts of nested lists."""
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in flat(each)]
    return [value]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_scores_are_those_of_the_hugging_face_backend(place, tmp_path, name):
    folder = tiny_folder(name, tmp_path, max_position_embeddings=24)  # shorter than some of the texts
    tasks = [str(place / f"{task}.yaml") for task in TASKS]
    own = own_backend(folder, tasks, num_fewshot=0, limit=12)
    config = HarnessRun(
        harness="lm-eval", tasks=tuple(tasks), model=ModelConfig(path=str(folder)), num_fewshot=0, max_examples=12
    )
    found = run_harness(config)
    wanted = {key.replace(",first", " (first)").replace(",all", " (all)"): v for key, v in numbers(own).items()}
    assert {key: figure.value for key, figure in found.figures.items()} == pytest.approx(wanted, rel=1e-5)
    assert len(wanted) == 7 and len(found.rows) == len({row["key"] for row in found.rows}) == 36
    for task in TASKS:
        ours = [row["replies"] for row in found.rows if row["task"] == task]
        assert flat(ours) == pytest.approx(replies(own, task), abs=1e-4)


def test_scores_over_http_are_those_of_the_hugging_face_backend(place, tmp_path):
    """Also where the model's next token is a stop token: lm-eval takes the last token away."""
    folder = tiny_folder("llama", tmp_path, max_position_embeddings=128)
    tasks = [str(place / f"{task}.yaml") for task in ("choices", "greedy")]
    own = own_backend(folder, tasks, num_fewshot=1, limit=12)
    model = InferenceModel(ModelConfig(path=str(folder)), DataConfig(max_length=2**20))
    for stops in ((), tuple(range(len(model.tokenizer)))):
        asked = tasks[:1] if stops else tasks
        model.stop_ids = stops or model.stop_ids
        with serving(model, slots=4) as server:
            options = {"model": "pico", "base_url": f"http://127.0.0.1:{server.port}/v1/completions"}
            options |= {"tokenizer": str(folder), "tokenizer_backend": "huggingface", "max_length": 128}
            options |= {"num_concurrent": 1, "batch_size": 4}
            found = evaluated("local-completions", options, tasks=asked, num_fewshot=1, limit=12)
        wanted = {key: value for key, value in numbers(own).items() if stops == () or key.startswith("choices")}
        assert numbers(found) == pytest.approx(wanted, abs=1e-4) and len(wanted) == (2 if stops else 4)
        assert replies(found, "choices") == pytest.approx(replies(own, "choices"), abs=1e-4)
        assert stops or replies(found, "greedy") == replies(own, "greedy")

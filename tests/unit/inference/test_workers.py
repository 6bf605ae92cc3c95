"""Who answers: the same file from one process and from several, one of which is killed; and what is refused."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.cluster.worker_slots import WorkerSlot
from posttrain.config.sections import ClusterConfig, DataConfig, ModelConfig
from posttrain.core.errors import UsageError, WorkerError
from posttrain.data.encoding.templates import apply_template
from posttrain.engines.base import LOCAL, EngineSpec, Sampling
from posttrain.inference.generate import Generation, devices_for, generate, manifest_of
from posttrain.inference.model import InferenceModel, stop_ids_of
from posttrain.inference.workers import DEPTH, WorkerGenerators, check_workers, engine_settings
from posttrain.models.tokenizers import load_tokenizer
from tests.tiny import tiny_folder


@pytest.fixture
def config(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(7)))
    return Generation(
        model=ModelConfig(path="pico"),
        data=DataConfig(train=(str(prompts),)),
        out=str(tmp_path / "answers.jsonl"),
        sampling=Sampling(max_tokens=6),
        n=2,
        batch=4,
    )


def test_two_workers_one_killed_write_the_same_file(config, tmp_path, caplog):
    """7 batches for two workers: the first is killed once its first batch is written, and has others to answer."""
    config = replace(config, batch=2)
    generate(config)
    shared = replace(config, out=str(tmp_path / "shared.jsonl"), cluster=ClusterConfig(devices=2))
    log = Path(f"{shared.out}.logs/worker-0.log")

    def kill_one(progress):
        if progress.done == 2:
            os.kill(int(re.search(r"worker process (\d+)", log.read_text())[1]), signal.SIGKILL)

    generate(shared, kill_one)
    assert Path(shared.out).read_bytes() == Path(config.out).read_bytes()
    settings = [manifest_of(Path(found.out)).read_bytes() for found in (shared, config)]
    assert settings[0] == settings[1]
    assert "SIGKILL" in caplog.text and "the worker is replaced" in caplog.text
    assert log.read_text().count("--- worker process") == 2
    assert generate(replace(shared, cluster=ClusterConfig(), resume=True)).resumed == 14


# Without processes


class FakeWorkers:
    """Workers that return results when asked for them. A lost one fails all of its calls, as a pool does."""

    def __init__(self, log, lost):
        self.log, self.lost = log, lost

    def submit(self, method, requests, sampling):
        assert method == "generate" and sampling == "how"
        self.log.append(requests)
        return FakeCall(self, requests)

    def close(self):
        self.log.append("closed")


class FakeCall:
    def __init__(self, workers, requests):
        self.workers, self.requests = workers, requests

    def result(self):
        if self.workers.lost:
            raise WorkerError("it is gone", lost=True)
        return [[f"answer to {request}" for request in self.requests]]


def fake_slot(losses=0):
    """A slot whose first `losses` workers are lost, and the list of what its workers were given."""
    log, remaining = [], iter([True] * losses)
    return WorkerSlot(lambda: FakeWorkers(log, next(remaining, False)), lambda pool: pool), log


BATCHES = [[n, -n] for n in range(7)]
ANSWERS = [[f"answer to {n}", f"answer to {-n}"] for n in range(7)]


def test_answers_come_in_order_and_nobody_has_more_than_two_batches():
    slots = [fake_slot(), fake_slot()]
    given = 0

    def batches():
        nonlocal given
        for batch in BATCHES:
            given += 1
            yield batch

    found = []
    for answers in WorkerGenerators([slot for slot, _ in slots]).generate_batches(batches(), "how"):
        found.append(answers)
        assert given - len(found) < 2 * DEPTH
    assert found == ANSWERS
    assert [log for _, log in slots] == [BATCHES[::2], BATCHES[1::2]]


def test_what_a_lost_one_had_is_asked_again():
    (first, _), (second, log) = fake_slot(), fake_slot(losses=2)
    generators = WorkerGenerators([first, second])
    assert list(generators.generate_batches(BATCHES, "how")) == ANSWERS and generators.lost == 2
    batch = {n: BATCHES[n] for n in range(7)}
    expected = [batch[1], batch[3], "closed", batch[1], "closed", batch[1], batch[5], batch[3]]
    assert log == expected, "each batch of a lost worker is sent again when its result is needed"


def test_it_gives_up_when_they_are_lost_again_and_again():
    with pytest.raises(WorkerError, match="lost 3 times in a row"):
        list(WorkerGenerators([fake_slot(losses=9)[0]]).generate_batches(BATCHES, "how"))


@pytest.mark.parametrize(
    ("engine", "devices", "words"),
    [
        (EngineSpec("local", {"a": 1}), 1, "vllm_options is set, but engine is local"),
        (EngineSpec("local", num_beams=1), 1, "num_beams is 1; it must be at least 2, or 0 for sampling"),
        (EngineSpec("vllm", num_beams=2), 1, "only the local engine has beam search"),
        (EngineSpec("vllm", speculative_tokens=2), 1, "with vLLM set speculative_config in vllm_options"),
        (EngineSpec(num_beams=2, speculative_tokens=2), 1, "leave it out with num_beams"),
        (LOCAL, 0, "devices is 0"),
    ],
)
def test_what_cannot_be(engine, devices, words):
    with pytest.raises(UsageError, match=words):
        check_workers(ModelConfig(path="pico"), engine, ClusterConfig(devices=devices), Sampling())


@pytest.mark.parametrize(
    ("engine", "model", "sampling", "devices", "words"),
    [
        ({}, {"load_in_4bit": True}, {}, 1, "use --engine local"),
        ({"tensor_parallel_size": 2}, {}, {}, 3, "does not divide the 3 devices"),
        ({"tensor_parallel_size": "two"}, {}, {}, 3, "must be a whole number"),
    ],
)
def test_what_vllm_cannot(engine, model, sampling, devices, words, monkeypatch):
    # As if vLLM were installed.
    monkeypatch.setattr("posttrain.engines.vllm.environment.prepare_environment", lambda: None)
    with pytest.raises(UsageError, match=words):
        check_workers(
            ModelConfig(**model), EngineSpec("vllm", engine), ClusterConfig(devices=devices), Sampling(**sampling)
        )


def test_vllm_is_missing(config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs vLLM, see docs/vllm.md"):
        generate(replace(config, engine=EngineSpec("vllm")))
    assert not Path(config.out).exists()


def test_processes_of_a_launcher_are_not_doubled(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="started 2 processes"):
        generate(replace(config, cluster=ClusterConfig(devices=2)))


def test_the_engine_counts_where_it_decides_the_answers(config, monkeypatch):
    assert engine_settings(LOCAL) == {}
    assert engine_settings(EngineSpec("vllm", {"max_num_seqs": 4, "dtype": "half"})) == {"engine": "vllm dtype=half"}
    generate(config)
    monkeypatch.setattr("posttrain.engines.vllm.environment.prepare_environment", lambda: None)
    with pytest.raises(UsageError, match="engine was None, is 'vllm'"):
        generate(replace(config, engine=EngineSpec("vllm", {"max_num_seqs": 4}), resume=True))


def test_devices_without_a_batch_are_not_started_but_mentioned(config, caplog):
    config = replace(config, cluster=ClusterConfig(devices=8, ray_address="auto"), batch=512)
    assert devices_for([range(100)], config) == ClusterConfig(devices=1, ray_address="auto") and not caplog.text
    assert devices_for([range(256), range(100)], config).devices == 2
    assert "712 completions in batches of 512: 6 of 8 devices are idle" in caplog.text
    divided = replace(config, engine=EngineSpec("vllm", {"tensor_parallel_size": 4}))
    assert [devices_for([[1]] * batches, divided).devices for batches in (1, 2, 3)] == [4, 8, 8]


@pytest.mark.parametrize("template", ["", "chatml"])
@pytest.mark.parametrize("source", ["none", "generation_config.json", "config.json"])
def test_stops_are_known_without_the_weights(source, template, tmp_path):
    folder = tiny_folder("llama", tmp_path, eos_token_id=9 if source == "config.json" else 5)
    file = folder / "generation_config.json"
    if source == "config.json":
        file.unlink()
    elif source == "generation_config.json":
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [5, 9]}))
    model = ModelConfig(path=str(folder))
    tokenizer = load_tokenizer(model)
    apply_template(tokenizer, template)
    found = stop_ids_of(model, tokenizer, template)
    assert found == InferenceModel(model, DataConfig(chat_template=template)).stop_ids
    assert (9 in found) == (source != "none" and not template)

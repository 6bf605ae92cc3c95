"""inspect-ai's scores through the local engine and over HTTP are those of its own provider for models of Hugging Face.

pip install inspect-ai, or `make test-harness`.
"""

import pytest

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.errors import UsageError
from posttrain.harness.inspect_ai import text_of
from posttrain.inference.harness import HarnessRun, run_harness
from posttrain.inference.model import InferenceModel
from tests.tiny import tiny_folder
from tests.unit.server.serving import serving

inspect_ai = pytest.importorskip("inspect_ai", reason="inspect-ai is not installed: make test-harness")

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate, system_message

QUESTIONS = ["What is it?", "And where was the cat at noon, please?", "1 + 1", "Say a word.", "x"]

@task
def letters():
    samples = [Sample(input=text, target=target) for text in QUESTIONS for target in "aeiou"]
    return Task(dataset=MemoryDataset(samples), solver=[system_message("Be brief."), generate()],
                scorer=[includes(), match(location="any")], config=GenerateConfig(max_tokens=24, stop_seqs=["q"]))
"""


def test_scores_are_those_of_the_hugging_face_provider(tmp_path):
    folder = tiny_folder("llama", tmp_path, max_position_embeddings=256)
    file = tmp_path / "tasks.py"
    file.write_text(TASKS)
    own = inspect_ai.model.get_model("hf/tiny", model_path=str(folder), do_sample=False, device="cpu")
    (log,) = inspect_ai.eval(f"{file}@letters", model=own, display="none", log_dir=str(tmp_path / "own"))
    assert log.status == "success"
    config = HarnessRun(
        harness="inspect-ai",
        tasks=(f"{file}@letters",),
        model=ModelConfig(path=str(folder)),
        data=DataConfig(max_length=2**20),
        log_dir=str(tmp_path / "ours"),
    )
    found = run_harness(config)
    theirs = {sample.id: sample for sample in log.samples}
    ours = {row["index"]: row for row in found.rows}
    assert len(ours) == len(theirs) == 25 and len({row["key"] for row in found.rows}) == 25
    assert {key: row["replies"] for key, row in ours.items()} == {
        key: [sample.output.completion] for key, sample in theirs.items()
    }
    wanted = {
        f"letters/{s.name} {n}": m.value for s in log.results.scores for n, m in s.metrics.items() if n != "stderr"
    }
    assert {key: figure.value for key, figure in found.figures.items()} == wanted and len(wanted) == 2
    assert 0 < wanted["letters/includes accuracy"] < 1
    figure = found.figures["letters/includes accuracy"]
    assert figure.low < figure.value < figure.high
    assert list((tmp_path / "ours").iterdir())  # its own log, for `inspect view`
    # Over HTTP, by its provider for servers with OpenAI's API.
    with serving(InferenceModel(ModelConfig(path=str(folder)), DataConfig(max_length=2**20)), slots=4) as server:
        address = f"http://127.0.0.1:{server.port}/v1"
        greedy = inspect_ai.model.GenerateConfig(temperature=0.0)
        served = inspect_ai.model.get_model("openai-api/local/pico", base_url=address, api_key="none", config=greedy)
        (log,) = inspect_ai.eval(f"{file}@letters", model=served, display="none", log_dir=str(tmp_path / "served"))
    assert log.status == "success"
    assert {sample.id: [sample.output.completion] for sample in log.samples} == {
        key: row["replies"] for key, row in ours.items()
    }


def test_epochs_have_completions_of_their_own(tmp_path):
    """The samples of several epochs have the same prompt; with the same seed pass@k would be that of one completion."""
    folder = tiny_folder("llama", tmp_path, max_position_embeddings=256)
    file = tmp_path / "tasks.py"
    changes = {'stop_seqs=["q"])': "temperature=1.0), epochs=4", 'for target in "aeiou"': 'for target in "a"'}
    text = TASKS
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    file.write_text(text)
    config = HarnessRun(
        harness="inspect-ai",
        tasks=(f"{file}@letters",),
        model=ModelConfig(path=str(folder)),
        data=DataConfig(max_length=2**20),
        log_dir=str(tmp_path / "ours"),
    )
    first, second = run_harness(config), run_harness(config)
    replies = {number: [row["replies"][0] for row in first.rows if row["index"] == number] for number in range(1, 6)}
    assert all(len(found) == 4 == len(set(found)) for found in replies.values())
    again = {number: [row["replies"][0] for row in second.rows if row["index"] == number] for number in range(1, 6)}
    assert {number: sorted(found) for number, found in again.items()} == {n: sorted(f) for n, f in replies.items()}


def test_what_does_not_work_is_refused(tmp_path):
    for changes, complaint in (({"tasks": ("no.py",)}, "no.py"), ({"num_fewshot": 2}, "num_fewshot")):
        config = {"harness": "inspect-ai", "tasks": (), "model": ModelConfig(path="pico"), **changes}
        with pytest.raises(UsageError, match=complaint):
            run_harness(HarnessRun(**config))


def test_a_task_with_images_is_refused():
    """Their texts alone would be another task."""
    from inspect_ai.model import ChatMessageUser, ContentImage, ContentText

    text = ContentText(text="What is this?")
    assert text_of(ChatMessageUser(content=[text])) == text_of(ChatMessageUser(content="What is this?"))
    with pytest.raises(UsageError, match="messages with image"):
        text_of(ChatMessageUser(content=[text, ContentImage(image="data:image/png;base64,AA==")]))

"""The Python API: data, models and functions in memory train exactly as files and commands do."""

import asyncio
import json
import signal

import matplotlib
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.core.errors import CheckpointError, DataError, PosttrainError
from posttrain.models.pico import pico_folder
from tests.e2e.commands import command, rows_of
from tests.e2e.rows import ROWS, write_rows

matplotlib.use("agg")
FAST = {"batch_size": 3, "learning_rate": 1e-3, "quiet": True}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def weights(run):
    newest = max((run / "checkpoints").iterdir())
    (file,) = (newest / "model").glob("*.safetensors")
    return file.read_bytes()


def metrics_of(run):
    timed = ("time/", "tokens_per", "memory")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows_of(run / "metrics.jsonl")]


@pytest.fixture
def by_command(tmp_path):
    """A run of the command line, to compare with."""
    file = write_rows("chat", tmp_path)
    options = ["--train.max_steps", 4, "--train.batch_size", 3, "--train.learning_rate", 1e-3, "--quiet"]
    assert command("sft", "--model", "pico", "--data", file, *options, "--output_dir", "command") == 0
    return tmp_path / "command"


@pytest.mark.parametrize("kind", ["list", "dataset", "loaded model", "old spelling"])
def test_objects_in_memory_give_the_same_weights_as_files(kind, by_command, tmp_path):
    options = FAST | {"max_steps": 4, "output_dir": tmp_path / "python"}
    if kind == "old spelling":
        old = {"update": {"rows_per_step": 3, "learning_rate": 1e-3}, "out": "python", "quiet": True}
        posttrain.sft(model={"path": "pico"}, data={"train": [str(tmp_path / "chat.jsonl")]}, steps=4, **old)
    elif kind == "list":
        posttrain.sft("pico", ROWS["chat"], **options)
    elif kind == "dataset":
        import datasets

        posttrain.sft("pico", datasets.Dataset.from_list(ROWS["chat"]), **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(pico_folder())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        tokenizer = AutoTokenizer.from_pretrained(pico_folder())
        result = posttrain.sft(model, ROWS["chat"], tokenizer=tokenizer, **options)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        trained = result.model()
        assert type(trained) is type(model) and not torch.equal(trained.lm_head.weight, model.lm_head.weight)
    assert weights(tmp_path / "python") == weights(by_command)
    assert metrics_of(tmp_path / "python") == metrics_of(by_command)


def test_a_run_from_memory_is_resumed_by_python_and_by_the_command(by_command, tmp_path):
    half = FAST | {"max_steps": 4, "train": {"lr_scheduler": "cosine"}}

    class StopAtTwo(posttrain.Callback):
        def on_step(self, state):
            if state.step == 2:
                state.stop("half of it")

    for place in ("a", "b"):
        early = posttrain.sft("pico", ROWS["chat"], output_dir=place, callbacks=[StopAtTwo()], **half)
        assert (early.steps, early.stopped_early) == (2, "half of it")
        assert len(metrics_of(tmp_path / place)) == 2
        with pytest.raises(CheckpointError, match="the data changed since this run was started"):
            posttrain.sft(data=ROWS["chat"][1:], output_dir=place, resume=True)
    result = posttrain.sft(data=ROWS["chat"], output_dir="a", resume=True)
    assert (result.steps, result.stopped_early) == (4, "")
    assert command("sft", "--output_dir", "b", "--resume") == 0
    for place in ("a", "b"):
        assert weights(tmp_path / place) == weights(by_command)


def test_a_loaded_model_is_resumed_only_with_the_same_weights(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pico_folder())
    tokenizer = AutoTokenizer.from_pretrained(pico_folder())
    given = {"data": ROWS["pair"], "tokenizer": tokenizer, "output_dir": "run", **FAST}
    posttrain.dpo(model, max_steps=1, **given)
    assert posttrain.dpo(model, max_steps=2, resume=True, **given).steps == 2
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(CheckpointError, match="the model changed since"):
        posttrain.dpo(model, max_steps=3, resume=True, **given)
    assert posttrain.dpo(output_dir="run", max_steps=3, resume=True).steps == 3  # from the run directory alone


def test_what_cannot_be_trained_is_refused_and_leaves_nothing_behind(tmp_path):
    import peft

    model = AutoModelForCausalLM.from_pretrained(pico_folder())
    with pytest.raises(posttrain.UsageError, match="without its tokenizer"):
        posttrain.sft(model, ROWS["chat"])
    with pytest.raises(posttrain.UsageError, match="adapters of peft"):
        posttrain.sft(peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")), ROWS["chat"])
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(posttrain.UsageError, match="meta device"):
        posttrain.sft(empty, ROWS["chat"])
    with pytest.raises(DataError, match="example 0 cannot be written as JSON: it has a value of type object"):
        posttrain.sft("pico", [{"messages": object()}], output_dir="run")
    with pytest.raises(DataError, match=r"train\.jsonl:2"):
        posttrain.sft("pico", [ROWS["chat"][0], {"nothing": 1}], output_dir="run")
    assert not (tmp_path / "run").exists()


def test_lora_by_a_config_of_peft(tmp_path):
    import peft

    chosen = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
    result = posttrain.sft("pico", ROWS["chat"], peft_config=chosen, max_steps=1, output_dir="lora", **FAST)
    posttrain.sft(
        {"path": "pico", "lora_rank": 2, "lora_alpha": 4, "lora_target_modules": ["q_proj"]},
        ROWS["chat"],
        max_steps=1,
        output_dir="options",
        **FAST,
    )
    assert weights(tmp_path / "lora") == weights(tmp_path / "options")
    assert not [name for name, _ in result.model().named_parameters() if "lora" in name]


# Callbacks and metrics


class Recorder(posttrain.Callback):
    def __init__(self):
        self.events = []

    def on_start(self, state):
        self.events.append(("start", state.step, state.max_steps))

    def on_step(self, state):
        self.events.append(("step", state.step, sorted(state.metrics)[:1]))
        assert state.history[-1]["loss"] == state.metrics["loss"]

    def on_evaluate(self, state, metrics):
        self.events.append(("evaluate", state.step, sorted(metrics)))

    def on_save(self, state, path):
        assert (path / "manifest.json").is_file()
        self.events.append(("save", state.step))


def test_callbacks_are_called_in_order():
    seen = Recorder()
    posttrain.sft(
        "pico",
        ROWS["chat"],
        eval_data=ROWS["chat"],
        max_steps=2,
        eval={"every_steps": 1},
        callbacks=[seen],
        metrics={"longest": lambda predictions: max(len(p.sample) for p in predictions)},
        output_dir="run",
        **FAST,
    )
    names = [event[:2] for event in seen.events]
    assert names[:4] == [("start", 0), ("evaluate", 1), ("step", 1), ("save", 1)] and names[-1] == ("save", 2)
    assert "eval/longest" in seen.events[1][2]


def test_early_stopping_by_a_metric_continues_its_count_after_a_resume(tmp_path):
    constant = {"metrics": {"constant": lambda _: 1.0}, "eval_data": ROWS["chat"], "eval": {"every_steps": 1}}
    given = constant | FAST | {"max_steps": 9, "output_dir": "run"}

    def stopping(patience=3):
        return posttrain.EarlyStopping("eval/constant", patience=patience)

    result = posttrain.sft("pico", ROWS["chat"], callbacks=[stopping()], **given)
    assert result.steps == 4 and "eval/constant has not improved on 1 in 3" in result.stopped_early
    assert max((tmp_path / "run/checkpoints").iterdir()).name == "step-00000004"
    again = posttrain.sft("pico", ROWS["chat"], callbacks=[stopping()], resume=True, **given)
    assert again.steps == 4 and again.stopped_early == result.stopped_early  # as if it had not been interrupted
    more = posttrain.sft("pico", ROWS["chat"], callbacks=[stopping(patience=5)], resume=True, **given)
    assert more.steps == 6
    with pytest.raises(posttrain.UsageError, match="no step has logged the metric 'eval/los'"):
        wrong = posttrain.EarlyStopping("eval/los")
        posttrain.sft("pico", ROWS["chat"], callbacks=[wrong], max_steps=1, output_dir="other", **FAST)


def test_errors_of_callbacks_and_metrics_name_them(tmp_path):
    class Faulty(posttrain.Callback):
        def on_step(self, state):
            raise ValueError("no good")

    with pytest.raises(PosttrainError, match=r"step 1: the callback Faulty\.on_step raised ValueError: no good"):
        posttrain.sft("pico", ROWS["chat"], callbacks=[Faulty()], max_steps=2, output_dir="a", **FAST)
    with pytest.raises(posttrain.UsageError, match=r"Faulty is not a callback.*as Faulty\(\)"):
        posttrain.sft("pico", ROWS["chat"], callbacks=[Faulty])
    evaluated = FAST | {"eval_data": ROWS["chat"], "max_steps": 1}
    for number, (metrics, message) in enumerate(
        (
            ({"loss": len}, "'loss' is the name of a built-in metric"),
            ({"time/train": len}, "'time/train' is a name of built-in metrics"),
            ({"wrong": lambda _: "much"}, "the metric wrong raised ValueError"),
            ({"wrong": 1}, "wrong is a int; it must be a function"),
        )
    ):
        with pytest.raises(PosttrainError, match=message):
            posttrain.sft("pico", ROWS["chat"], metrics=metrics, output_dir=f"b{number}", **evaluated)
    with pytest.raises(posttrain.UsageError, match="computed on evaluation data"):
        posttrain.sft("pico", ROWS["chat"], metrics={"x": len}, max_steps=1, output_dir="c", **FAST)


def test_metrics_of_rollouts_and_of_reward_models(tmp_path):
    rollout = {"samples_per_prompt": 2, "max_tokens": 4}
    posttrain.grpo(
        "pico",
        ROWS["prompt"],
        reward=lambda text: len(text) / 4,
        eval_data=ROWS["prompt"],
        metrics={"letters": lambda rollouts: sum(len(r.text) for r in rollouts) / len(rollouts)},
        max_steps=1,
        output_dir="grpo",
        **rollout,
        **FAST,
    )
    (row,) = metrics_of(tmp_path / "grpo")
    assert row["letters"] == pytest.approx(4 * row["reward"]) and "eval/letters" in row

    def accuracy(predictions):
        pairs = zip(predictions[::2], predictions[1::2], strict=True)
        return sum(chosen.score > rejected.score for chosen, rejected in pairs) / len(predictions) * 2

    posttrain.reward(
        "pico", ROWS["pair"], eval_data=ROWS["pair"], metrics={"mine": accuracy}, max_steps=2, output_dir="r", **FAST
    )
    assert metrics_of(tmp_path / "r")[-1]["eval/mine"] == metrics_of(tmp_path / "r")[-1]["eval/accuracy"]


def test_a_reward_model_that_is_stopped_early_has_its_statistics(tmp_path):
    class StopAtOne(posttrain.Callback):
        def on_step(self, state):
            state.stop("enough")

    options = FAST | {"save": {"every_steps": 1}, "output_dir": "run", "max_steps": 3}
    assert posttrain.reward("pico", ROWS["pair"], callbacks=[StopAtOne()], **options).steps == 1
    config = json.loads((tmp_path / "run/checkpoints/step-00000001/model/config.json").read_text())
    assert config["score_std"] > 0


# Trainers


def test_a_trainer_gives_what_the_function_gives(by_command, tmp_path):
    with posttrain.SFTTrainer(
        "pico", ROWS["chat"], {"train": {"batch_size": 3}}, eval_data=ROWS["chat"], learning_rate=1e-3, max_steps=4
    ) as trainer:
        with pytest.raises(KeyboardInterrupt):  # as usual, while no step is under way
            signal.raise_signal(signal.SIGINT)
        before = trainer.evaluate()["eval/loss"]
        result = trainer.train()
        assert trainer.step == result.steps == 4
        assert trainer.evaluate()["eval/loss"] == result.metrics["eval/loss"] < before
        assert trainer.save().name == "step-00000004"
        assert torch.equal(trainer.model().lm_head.weight, result.model().lm_head.weight)
    assert weights(trainer.output_dir) == weights(by_command)


def test_a_trainer_frees_its_directory_when_it_is_dropped_or_closed():
    given = {"data": ROWS["labelled"], "max_steps": 1, "output_dir": "run", **FAST, "batch_size": 4}
    trainer = posttrain.KTOTrainer("pico", **given)
    with pytest.raises(posttrain.UsageError, match="in use by process"):
        posttrain.KTOTrainer("pico", **given | {"output_dir": "run"}, resume=True)
    trainer.train()
    trainer.close()
    with pytest.raises(posttrain.UsageError, match="give eval_data"):
        posttrain.KTOTrainer("pico", **given | {"max_steps": 2}, resume=True).evaluate()
    with posttrain.KTOTrainer(output_dir="run", resume=True, max_steps=2) as trainer:
        assert trainer.step == 1


def test_an_interrupted_run_says_how_to_go_on_and_continues(by_command, tmp_path):
    class Interrupt(posttrain.Callback):
        def on_step(self, state):
            if state.step == 2:
                signal.raise_signal(signal.SIGINT)  # what Ctrl-C and the stop button of a notebook send

    options = FAST | {"max_steps": 4, "output_dir": "run"}
    with pytest.raises(posttrain.Stopped, match=r"stopped by SIGINT after step 2; saved.*load_run\('run'\).resume\(\)"):
        posttrain.sft("pico", ROWS["chat"], callbacks=[Interrupt()], **options)
    assert posttrain.sft(output_dir="run", resume=True).steps == 4
    assert weights(tmp_path / "run") == weights(by_command)


async def train_in_a_thread(**options):
    return await asyncio.to_thread(posttrain.grpo, "pico", ROWS["prompt"], reward=lambda text: len(text) / 4, **options)


def test_training_runs_in_a_thread_of_an_event_loop(tmp_path):
    """As in a notebook or a server: signal handlers belong to the main thread and stay as they are."""
    options = FAST | {"max_steps": 1, "samples_per_prompt": 2, "max_tokens": 4}
    before = signal.getsignal(signal.SIGINT)
    result = asyncio.run(train_in_a_thread(output_dir="thread", **options))
    posttrain.grpo("pico", ROWS["prompt"], reward=lambda text: len(text) / 4, output_dir="main", **options)
    assert result.steps == 1 and weights(tmp_path / "thread") == weights(tmp_path / "main")
    assert signal.getsignal(signal.SIGINT) is before


# Runs on disk


def test_a_saved_run_is_read_plotted_and_resumed(tmp_path):
    with pytest.raises(posttrain.UsageError, match="no run in this directory"):
        posttrain.load_run("run")
    options = FAST | {"max_steps": 1, "samples_per_prompt": 2, "max_tokens": 4, "output_dir": "run"}
    posttrain.grpo("pico", ROWS["prompt"], reward=lambda text: len(text) / 4, **options)
    run = posttrain.load_run("run")
    assert run.verb == "grpo" and run.config["rollout"]["max_tokens"] == 4
    assert [row["step"] for row in run.metrics] == [1]
    assert run.model_path.absolute() == tmp_path / "run/checkpoints/step-00000001/model"
    assert [path.name for path in run.checkpoints] == ["step-00000001"]
    assert run.tokenizer().decode(run.tokenizer()("1+1=")["input_ids"]).endswith("1+1=")
    rollouts = list(run.rollouts(step=1))
    assert len(rollouts) == 6
    assert sum(r.sample.reward for r in rollouts) / 6 == pytest.approx(run.metrics[0]["reward"])
    assert run.resume(reward=lambda text: len(text) / 4, max_steps=2).steps == 2
    assert len(run.metrics) == 2 and next(iter(run.model().parameters())) is not None
    figure = run.plot()
    assert [axis.get_ylabel() for axis in figure.axes] == ["reward"]
    (line,) = figure.axes[0].get_lines()
    assert list(line.get_ydata()) == [row["reward"] for row in run.metrics]
    assert len(run.plot("loss", "length").axes) == 2
    with pytest.raises(posttrain.UsageError, match="no step has logged the metric 'los'"):
        run.plot("los")


# Tools


def test_completions_in_memory_are_those_of_the_commands(tmp_path):
    file = write_rows("prompt", tmp_path)
    sampling = {"samples_per_prompt": 2, "max_tokens": 4, "seed": 3}
    made = posttrain.generate("pico", ROWS["prompt"], **sampling, output_file="kept.jsonl")
    assert command("generate", "pico", file, "--n", 2, "--max_tokens", 4, "--seed", 3, "--out", "c.jsonl") == 0
    written = rows_of(tmp_path / "c.jsonl")
    same = ("prompt", "completion", "tokens", "logprob", "columns")
    assert [[row[name] for name in same] for row in made] == [[row[name] for name in same] for row in written]
    assert rows_of(tmp_path / "kept.jsonl") == made and len(made) == 14
    judge = "def score(text, answer):\n    return len(text) / 4 + sum(map(ord, text)) / 1000\n"
    (tmp_path / "judge.py").write_text(judge)
    by_function = posttrain.score(made, lambda text: len(text) / 4 + sum(map(ord, text)) / 1000)
    by_file = posttrain.score("c.jsonl", f"{tmp_path}/judge.py:score")
    assert [row["reward"] for row in by_function] == [row["reward"] for row in by_file]
    best = posttrain.select("best-of-n", by_function)
    assert len(best) == 7 and all("completion" in row for row in best)
    assert len(posttrain.select("top-fraction", by_function, fraction=0.5)) == 7
    for options, message in (
        ({"method": "threshold"}, "needs min_reward"),
        ({"method": "pairs", "fraction": 1}, "fraction is for the method top-fraction"),
        ({"method": "all"}, "no method 'all'"),
    ):
        with pytest.raises(posttrain.UsageError, match=message):
            posttrain.select(data=by_function, **options)


def test_a_loaded_model_generates_what_its_directory_does():
    model = AutoModelForCausalLM.from_pretrained(pico_folder())
    tokenizer = AutoTokenizer.from_pretrained(pico_folder())
    prompts = ROWS["prompt"][:2]
    loaded = posttrain.generate(model, prompts, tokenizer=tokenizer, max_tokens=4)
    assert [row["tokens"] for row in loaded] == [
        row["tokens"] for row in posttrain.generate("pico", prompts, max_tokens=4)
    ]


def test_evaluation_is_that_of_the_command(tmp_path):
    (tmp_path / "judge.py").write_text("def score(text):\n    return float(sum(map(ord, text)) % 2)\n")
    posttrain.sft("pico", ROWS["chat"], max_steps=3, output_dir="trained", **FAST)
    reward = f"{tmp_path}/judge.py:score"
    sampling = {"samples_per_prompt": 2, "max_tokens": 4, "temperature": 1.0}
    found = posttrain.evaluate("trained", ROWS["prompt"], reward, against="pico", **sampling, output_dir="kept")
    file = write_rows("prompt", tmp_path)
    options = ["--n", 2, "--max_tokens", 4, "--temperature", 1, "--against", "pico", "--out", "eval", "--quiet"]
    assert command("eval", "trained", file, "--reward", reward, *options) == 0
    report = json.loads((tmp_path / "eval/report.json").read_text())
    ours = {name: {"value": f.value, "low": f.low, "high": f.high} for name, f in found.figures.items()}
    assert ours == report["figures"][0]
    assert found.comparison["reward"].p == report["comparison"]["reward"]["p"]
    assert found.comparison["reward"].better == report["comparison"]["reward"]["better"]
    assert len(found.completions) == 14 and (tmp_path / "kept/model-scored.jsonl").is_file()


def test_export_and_convert(tmp_path):
    posttrain.sft("pico", ROWS["chat"], max_steps=1, output_dir="run", **FAST)
    assert posttrain.export("run", tmp_path / "plain")["parameters"] > 0
    report = posttrain.convert("plain", "core", target_format="mcore", tensor_parallel_size=2)
    assert report.target.tp == 2
    posttrain.convert("core", "again", target_format="hf", original="plain")
    for name in ("plain", "again"):
        assert (tmp_path / name / "model.safetensors").is_file()
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("plain", "again"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(posttrain.UsageError, match="is not divided into ranks"):
        posttrain.convert("plain", "x", target_format="hf", tensor_parallel_size=2)
    with pytest.raises(posttrain.UsageError, match="export"):
        posttrain.convert("run", "x", target_format="mcore")


def test_pipelines_take_examples_and_functions(tmp_path):
    options = {
        "iterations": 1,
        "generate": {"n": 2, "max_tokens": 4},
        "train": {"max_steps": 1, "batch_size": 3},
        "quiet": True,
    }
    reward = lambda text: len(text) + sum(map(ord, text)) / 1000  # noqa: E731
    with pytest.raises(posttrain.UsageError, match="give output_dir"):
        posttrain.rejection_sampling("pico", ROWS["prompt"], reward=reward, **options)
    result = posttrain.rejection_sampling("pico", ROWS["prompt"], reward=reward, output_dir="pipeline", **options)
    assert len(result.iterations) == 1 and result.model.is_dir()
    assert len(rows_of(tmp_path / "pipeline/data/train.jsonl")) == 7

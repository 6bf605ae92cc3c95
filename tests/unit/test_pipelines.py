"""Stages: sealed when done, passed over afterwards, never built on something else; and the lists of the commands."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from posttrain.api.arguments import prepare_pipeline
from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.errors import CheckpointError, Stopped, UsageError
from posttrain.core.jsonl import as_line
from posttrain.engines.base import EngineSpec, Sampling
from posttrain.inference.generate import Generation
from posttrain.inference.score import Scoring
from posttrain.pipelines import Generate, Score, Select, Stage, Train, run_stages
from posttrain.pipelines.recipes import check_pipeline, run_from, stages_of
from posttrain.pipelines.settings import pipeline_defaults
from posttrain.pipelines.stage import open_folder, seal_of
from posttrain.pipelines.stages import best_reward
from posttrain.pipelines.summary import by_iteration


@dataclass
class Double(Stage):
    """Twice the text of a file."""

    file: str
    out: Path
    times: int = 2
    ran: list = field(default_factory=list)
    fault: type = None

    def reads(self):
        return [self.file]

    def settings(self):
        return {"times": self.times, "place": str(self.out)}

    def run(self, quiet):
        self.ran.append(self.out.name)
        if self.fault:
            raise self.fault
        self.out.write_text(Path(self.file).read_text() * self.times)
        return {"letters": len(self.out.read_text())}


@pytest.fixture
def start(tmp_path):
    (tmp_path / "start.txt").write_text("ab")
    return str(tmp_path / "start.txt")


def doubles(folder, start, ran, **changes):
    first = Double(start, folder / "one.txt", ran=ran)
    second = Double(str(first.out), folder / "two.txt", ran=ran, **changes)
    return [first, second, Double(str(second.out), folder / "three.txt", ran=ran)]


def test_stages_run_once(tmp_path, start):
    folder, ran, lines = tmp_path / "run", [], []
    found = run_stages(folder, doubles(folder, start, ran), report=lines.append)
    assert (folder / "three.txt").read_text() == "ab" * 8 and found == [{"letters": 2 * 2**n} for n in (1, 2, 3)]
    assert ran == ["one.txt", "two.txt", "three.txt"] and lines[-1] == "[3/3] three: letters 16"
    assert run_stages(folder, doubles(folder, start, ran), report=lines.append) == found
    assert len(ran) == 3 and lines[-1] == "[3/3] three: done before; letters 16"
    run_stages(folder, [Double(start, folder / "deep/er/one.txt")])
    assert (folder / "deep/er/one.txt").read_text() == "abab"


def test_what_failed_or_was_killed_is_run_again(tmp_path, start):
    folder, ran = tmp_path / "run", []
    with pytest.raises(KeyboardInterrupt):
        run_stages(folder, doubles(folder, start, ran, fault=KeyboardInterrupt))
    assert not seal_of(doubles(folder, start, ran)[1]).exists()
    run_stages(folder, doubles(folder, start, ran))
    assert ran == ["one.txt", "two.txt", "two.txt", "three.txt"]


def test_a_folder_may_be_moved(tmp_path, start):
    folder, ran = tmp_path / "run", []
    run_stages(folder, doubles(folder, start, ran))
    folder.rename(tmp_path / "moved")
    run_stages(tmp_path / "moved", doubles(tmp_path / "moved", start, ran))
    assert len(ran) == 3


def test_other_settings_and_other_files_are_refused(tmp_path, start):
    folder, ran = tmp_path / "run", []
    run_stages(folder, doubles(folder, start, ran))
    with pytest.raises(UsageError, match="times was 2, is 3"):
        run_stages(folder, doubles(folder, start, ran, times=3))
    Path(start).write_text("abc")
    with pytest.raises(UsageError, match=r"start.txt has changed"):
        run_stages(folder, doubles(folder, start, ran))
    assert len(ran) == 3


def test_nothing_is_built_on_what_was_changed_by_others(tmp_path, start):
    folder, ran = tmp_path / "run", []
    stages = doubles(folder, start, ran)
    run_stages(folder, stages[:2])
    (folder / "two.txt").write_text("damaged!")
    with pytest.raises(CheckpointError, match=r"two.txt: damaged"):
        run_stages(folder, stages)
    (folder / "two.txt").unlink()
    with pytest.raises(CheckpointError, match=r"two.txt: cannot be read"):
        run_stages(folder, stages)
    seal_of(stages[1]).unlink()  # as the message says
    run_stages(folder, stages)
    assert (folder / "three.txt").read_text() == "ab" * 8


def test_a_stage_that_is_made_anew_otherwise_is_noticed_by_those_behind_it(tmp_path, start):
    folder, ran = tmp_path / "run", []
    run_stages(folder, doubles(folder, start, ran))
    changed = doubles(folder, start, ran, times=5)
    seal_of(changed[1]).unlink()
    with pytest.raises(UsageError, match=r"three.txt.done.json.*two.txt has changed"):
        run_stages(folder, changed)


def test_old_files_may_be_deleted_once_nobody_needs_them(tmp_path, start):
    folder, ran = tmp_path / "run", []
    run_stages(folder, doubles(folder, start, ran))
    (folder / "one.txt").unlink()
    run_stages(folder, doubles(folder, start, ran))
    assert len(ran) == 3


def test_a_folder_has_one_process_and_a_stage_its_own_place(tmp_path, start):
    folder = tmp_path / "run"
    with open_folder("eval", str(folder), {}), pytest.raises(UsageError, match="in use"):
        run_stages(folder, [])
    with pytest.raises(UsageError, match="must be inside the run directory"):
        run_stages(folder, [Double(start, tmp_path / "elsewhere.txt")])
    with pytest.raises(UsageError, match="two stages"):
        run_stages(folder, [Double(start, folder / "a.txt"), Double(start, folder / "a.txt")])


def test_the_same_command_goes_on_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_folder("eval", "", {"n": 1, "quiet": True}) as first:
        (first.path / "a.done.json").write_text("{}")
    with open_folder("eval", "", {"n": 1, "quiet": False}, free=("quiet",)) as again:
        assert again.path == first.path
    with open_folder("eval", "", {"n": 2, "quiet": True}) as other:
        assert other.path != first.path
    with pytest.raises(UsageError, match="n was 1, is 3"):
        open_folder("eval", str(first.path), {"n": 3, "quiet": False})
    (other.path / "report.json").write_text("{}")  # done: the same command is a new one
    with open_folder("eval", "", {"n": 2, "quiet": True}) as new:
        assert new.path not in (first.path, other.path)


def test_an_option_that_is_newer_than_the_folder_has_its_default(tmp_path):
    path, defaults = str(tmp_path / "run"), {"train.fit_memory": True}
    with open_folder("eval", path, {"n": 1}) as folder:
        (folder.path / "a.done.json").write_text("{}")
    with pytest.raises(UsageError, match="fit_memory was True, is False"):
        open_folder("eval", path, {"n": 1, "train": {"fit_memory": False}}, defaults=defaults)
    open_folder("eval", path, {"n": 1, "train": {"fit_memory": True}}, defaults=defaults).close()


def test_a_folder_of_another_command_is_left_alone(tmp_path):
    open_folder("sft", str(tmp_path / "run"), {"n": 1}).close()
    with pytest.raises(UsageError, match="holds a run of `posttrain sft`"):
        open_folder("eval", str(tmp_path / "run"), {"n": 1})
    assert "verb: sft" in (tmp_path / "run/config.yaml").read_text()


def test_a_start_that_made_nothing_is_in_nobodys_way(tmp_path):
    open_folder("eval", str(tmp_path / "run"), {"n": 1}).close()
    with open_folder("eval", str(tmp_path / "run"), {"n": 2}) as folder:
        assert "n: 2" in (folder.path / "config.yaml").read_text()


# The stages of the framework


def test_a_pipeline_of_ones_own(tmp_path):
    """Best-of-n distillation; what the stages count adds up."""
    folder = tmp_path / "run"
    (tmp_path / "q.jsonl").write_text("".join(as_line({"prompt": f"{n}?"}) for n in range(3)))
    (tmp_path / "r.py").write_text("def length(text): return len(text) / 10\n")
    options = {"model": {"path": "pico"}, "data": {"train": [f"{folder}/best.jsonl"]}, "steps": 1}
    reward = f"{tmp_path}/r.py:length"
    stages = [
        Generate(
            Generation(
                model=ModelConfig(path="pico"),
                data=DataConfig(train=(f"{tmp_path}/q.jsonl",)),
                out=f"{folder}/answers.jsonl",
                sampling=Sampling(max_tokens=4),
                n=2,
            )
        ),
        Score(Scoring(file=f"{folder}/answers.jsonl", out=f"{folder}/scored.jsonl", reward=(reward,))),
        Select(method="best-of-n", file=f"{folder}/scored.jsonl", out=folder / "best.jsonl"),
        Train(verb="sft", out=folder / "student", options=options),
    ]
    generated, scored, selected, trained = run_stages(folder, stages, quiet=True)
    assert generated["prompts"] * generated["n"] == generated["answers"] == scored["answers"] == selected["read"] == 6
    assert selected["used"] == selected["rows"] <= 3 and trained["steps"] == 1
    assert (folder / "student/config.json").is_file() and (folder / "student.training/metrics.jsonl").is_file()
    assert not list(folder.glob("**/checkpoints")) and not list(folder.glob("**/.tmp*"))
    warmer = Generate(replace(stages[0].config, sampling=Sampling(max_tokens=4, temperature=2.0)))
    with pytest.raises(UsageError, match=r"sampling.temperature was 1.0, is 2.0"):
        run_stages(folder, [warmer, *stages[1:]])
    longer = Train(verb="sft", out=folder / "student", options=options | {"steps": 2})
    with pytest.raises(UsageError, match="steps was 1, is 2"):
        run_stages(folder, [*stages[:3], longer])
    (tmp_path / "r.py").write_text("def length(text): return len(text) / 11\n")
    with pytest.raises(UsageError, match=r"r.py has changed"):
        run_stages(folder, stages)


def test_what_good_answers_are_worth(tmp_path):
    def worth(*rewards):
        (tmp_path / "r.jsonl").write_text("".join(as_line({"reward": reward}) for reward in rewards))
        return best_reward(str(tmp_path / "r.jsonl"))

    assert worth(*range(101)) == 95
    assert worth(*[0.0] * 98, 1.0, 1.0) == 1.0  # the few that are good
    assert worth(*[1.0] * 98, 0.0, 0.0) == 1.0 and worth(2.0) == 2.0


# The lists of the commands


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Options of a pipeline as they would be parsed, which takes long."""
    monkeypatch.chdir(tmp_path)
    for name in ("q", "h"):
        (tmp_path / f"{name}.jsonl").write_text(as_line({"prompt": "1?"}))

    def make(verb, **changes):
        config = pipeline_defaults(verb)
        given = {
            "model.path": "pico",
            "data.train": ("q.jsonl",),
            "data.eval": ("h.jsonl",),
            "reward.functions": ("gsm8k",),
        }
        for key, value in (given | {"iterations": 3} | changes).items():
            section, _, option = key.rpartition(".")
            setattr(getattr(config, section) if section else config, option, value)
        return config

    return make


@pytest.mark.parametrize("verb", ["rejection-sampling", "iterative-dpo", "conditional-sft"])
def test_every_iteration_begins_with_the_model_before(verb, configured):
    stages = stages_of(verb, configured(verb, prompts_per_iteration=2), Path("run"))
    assert len({stage.out for stage in stages}) == len(stages) == 2 + 3 * 6
    for number in (1, 2, 3):
        place = Path(f"run/iteration-{number}")
        of_iteration = {stage.out.name: stage for stage in stages if stage.out.parent == place}
        before = "pico" if number == 1 else f"run/iteration-{number - 1}/model"
        asked, trained = of_iteration["answers.jsonl"], of_iteration["model"]
        assert asked.config.model.path == trained.config.model.path == before
        assert asked.config.window == (number, 2) and asked.config.around
        assert trained.config.data.train == (f"run/iteration-{number}/selected.jsonl",)
        assert of_iteration["held-out.jsonl"].config.model.path == f"run/iteration-{number}/model"
    seeds = [stage.config.seed for stage in stages if stage.out.name in ("answers.jsonl", "model")]
    assert len(set(seeds)) == len(seeds)
    assert len({stage.config.seed for stage in stages if stage.out.name == "held-out.jsonl"}) == 1


def test_devices_and_engine_are_those_of_the_pipeline(configured, monkeypatch):
    """Only what decides the answers is sealed: a pipeline may go on with other devices."""
    monkeypatch.setattr(
        "posttrain.engines.vllm.environment.prepare_environment", lambda: None
    )  # as if it were installed
    changes = {"generate.engine": "vllm", "generate.vllm_options": {"max_num_seqs": 4}, "cluster.devices": 3}
    plain, other = (
        [stage for stage in stages_of(verb, configured(verb, **given), Path("run")) if isinstance(stage, Generate)]
        for verb, given in (("rejection-sampling", {}), ("rejection-sampling", changes))
    )
    assert all(stage.config.engine == EngineSpec("vllm", {"max_num_seqs": 4}) for stage in other)
    assert {stage.config.cluster.devices for stage in other} == {3}
    for before, now in zip(plain, other, strict=True):
        assert now.settings() == before.settings() | {"engine": "vllm"}


def test_the_reference_stays_the_initial_policy(configured):
    def references(changes):
        stages = stages_of("iterative-dpo", configured("iterative-dpo", **changes), Path("run"))
        return [stage.config.algo.reference for stage in stages if isinstance(stage, Train)]

    assert references({}) == ["", "pico", "pico"]  # the first begins with it: its reference is the model itself
    assert references({"algo.reference": "other"}) == ["other"] * 3


def test_conditional_models_are_asked_for_the_best_that_they_know(configured):
    stages = stages_of("conditional-sft", configured("conditional-sft"), Path("run"))
    asked = {str(stage.out.relative_to("run")): stage.best_of for stage in stages if isinstance(stage, Generate)}
    assert asked["iteration-0/held-out.jsonl"] == asked["iteration-1/answers.jsonl"] == ""
    assert asked["iteration-1/held-out.jsonl"] == asked["iteration-2/answers.jsonl"] == "run/iteration-1/selected.jsonl"
    normalised = [stage.config.normalize for stage in stages if stage.out.name == "scored.jsonl"]
    assert normalised == [True] * 3


def test_the_datas_own_answers(configured):
    config = configured("conditional-sft", **{"iterations": 1, "generate.samples_per_prompt": 0})
    check_pipeline("conditional-sft", config)
    stages = stages_of("conditional-sft", config, Path("run"))
    names = [stage.out.name for stage in stages if stage.out.parent.name == "iteration-1"]
    assert names == ["scored.jsonl", "selected.jsonl", "model", "held-out.jsonl", "held-out-scored.jsonl"]
    assert next(stage.config.file for stage in stages if stage.out.name == "scored.jsonl") == "q.jsonl"


def test_defaults_are_those_of_the_recipes():
    sampling, dpo = pipeline_defaults("rejection-sampling"), pipeline_defaults("iterative-dpo")
    assert (sampling.train.learning_rate, sampling.train.lr_scheduler, sampling.generate.samples_per_prompt) == (
        2e-6,
        "constant",
        16,
    )
    assert (dpo.train.learning_rate, dpo.iterations, dpo.algo.beta) == (5e-7, 5, 0.1)


@pytest.mark.parametrize(
    ("verb", "changes", "words"),
    [
        ("rejection-sampling", {"reward.functions": ()}, "reward.functions is not set"),
        ("rejection-sampling", {"reward.functions": ("gsm9k",)}, "gsm8k"),
        ("rejection-sampling", {"reward.functions": ("model:pico",)}, "no score head"),
        ("rejection-sampling", {"data.train": ()}, "data.train is not set"),
        ("rejection-sampling", {"data.train": ("nothing.jsonl",)}, "nothing.jsonl: no such file"),
        ("rejection-sampling", {"data.eval_fraction": 0.1}, "a pipeline evaluates on files"),
        ("rejection-sampling", {"model.path": "no/such/model/at/all"}, "no/such/model"),
        ("rejection-sampling", {"generate.samples_per_prompt": 1}, "at least 2"),
        (
            "rejection-sampling",
            {"generate.temperature": 0.0},
            "generate.samples_per_prompt is 16, but with generate.temperature 0",
        ),
        ("rejection-sampling", {"generate.max_tokens": 0}, "generate.max_tokens is 0"),
        ("rejection-sampling", {"eval.temperature": -1.0}, "eval.temperature is -1"),
        ("rejection-sampling", {"iterations": 0}, "iterations is 0"),
        ("rejection-sampling", {"train.batch_size": 0}, "train.batch_size is 0"),
        ("iterative-dpo", {"algo.beta": -1.0}, "algo.beta"),
        ("conditional-sft", {"generate.samples_per_prompt": 0}, "iterations must be 1"),
        (
            "conditional-sft",
            {"generate.samples_per_prompt": 0, "iterations": 1, "prompts_per_iteration": 4},
            "leave prompts_per_iteration out",
        ),
        ("conditional-sft", {"condition_template": "no place"}, "needs {prompt}"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(verb, changes, words, configured, tmp_path):
    config, before = configured(verb, **changes), sorted(tmp_path.iterdir())
    with pytest.raises(UsageError) as caught:
        check_pipeline(verb, config)
    assert words in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_an_engine_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match=r"generate.engine is 'vlm'; it must be one of"):
        prepare_pipeline("iterative-dpo", {"generate": {"engine": "vlm"}})


def test_options_from_python():
    config = prepare_pipeline(
        "iterative-dpo", {"generate": {"samples_per_prompt": 3}, "algo": {"beta": 0.2}, "reward": ["gsm8k"]}
    )
    assert (config.generate.samples_per_prompt, config.algo.beta, config.reward.functions, config.iterations) == (
        3,
        0.2,
        ("gsm8k",),
        5,
    )
    with pytest.raises(UsageError, match=r"generate.nn: no such option"):
        prepare_pipeline("iterative-dpo", {"generate": {"nn": 3}})


def test_a_stopped_pipeline_names_the_command_that_goes_on(configured):
    def report(line):
        if "done before" not in line:
            raise Stopped("stopped by SIGTERM after step 3; saved. Resume: posttrain sft --out x --resume", 15)

    with pytest.raises(Stopped) as caught:
        run_from("rejection-sampling", configured("rejection-sampling", out="run"), report)
    assert str(caught.value) == "stopped by SIGTERM after step 3; saved. Resume: the same command"
    assert caught.value.exit_code == 143


def test_lost_answers_are_noticed(tmp_path):
    def stage(name):
        return Double("", tmp_path / "iteration-1" / name)

    names = ["answers.jsonl", "scored.jsonl", "selected.jsonl"]
    figures = [{"prompts": 2, "n": 3, "answers": 6}, {"answers": 6, "failed": 1, "reward": 0.5}]
    selected = {"rows": 2, "read": 6, "used": 2, "failed": 1, "worse": 3}
    (row,) = by_iteration([stage(name) for name in names], [*figures, selected])
    assert (row["generated"], row["scored"], row["selected"], row["dropped"]) == (6, 6, 2, 4)
    with pytest.raises(AssertionError, match="got lost"):
        by_iteration([stage(name) for name in names], [*figures, selected | {"read": 5}])


def test_a_seal_that_is_none_says_so(tmp_path, start):
    folder, ran = tmp_path / "run", []
    stages = doubles(folder, start, ran)
    run_stages(folder, stages)
    seal_of(stages[0]).write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="not a seal"):
        run_stages(folder, stages)

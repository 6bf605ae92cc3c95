"""The online loop: what is sampled is what is trained, at every setting; failures, evaluation, replay, Python."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from posttrain import GRPOTrainer
from posttrain.checkpoints import checkpoint
from posttrain.checkpoints.tensor_files import TensorFiles
from posttrain.core.errors import DivergedError, RewardError, UsageError
from posttrain.train.launch import train
from tests.e2e.rows import ROWS, write_judge, write_rows
from tests.tiny import tiny_folder

SAMPLINGS = [
    {},
    {"temperature": 0.7},
    {"top_p": 0.8},
    {"top_k": 20},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01},  # MindSpeed-RL's own
]


def options(folder, **changes):
    chosen = {
        "model": {"path": "pico"},
        "data": {"train": [write_rows("prompt", folder)]},
        "reward": [write_judge(folder)],
        "rollout": {"samples_per_prompt": 4, "max_tokens": 6},
        "rewards": {"workers": 1},
        "update": {"rows_per_step": 3, "learning_rate": 1e-3},
        "save": {"every": 0},
        "steps": 2,
        "out": str(folder / "run"),
        "quiet": True,
    }
    for key, value in changes.items():
        chosen[key] = chosen[key] | value if isinstance(value, dict) and key in chosen else value
    return chosen


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def records_of(folder):
    return [json.loads(line) for line in (folder / "run/rollouts.jsonl").read_text().splitlines()]


def is_one(row, tolerance):
    assert abs(row["sampler_ratio"] - 1) < tolerance
    assert row["largest_sampler_ratio"] < 1 + 20 * tolerance  # one token in float32
    assert row["largest_sampler_ratio_inverse"] < 1 + 20 * tolerance
    assert abs(row["sampler_kl"]) < tolerance


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: "-".join(s) or "plain")
@pytest.mark.parametrize("updates", [{}, {"epochs_per_batch": 2, "mini_batch_size": 5}], ids=["one", "several"])
def test_the_ratio_is_one_at_equal_weights(sampling, updates, tmp_path):
    train("grpo", **options(tmp_path, rollout=sampling, algo=updates))
    for row in metrics_of(tmp_path):
        is_one(row, 1e-6)


def test_recorded_entropies_are_those_that_are_trained_on_and_change_nothing(tmp_path):
    found = {}
    for recorded in (False, True):
        (folder := tmp_path / str(recorded)).mkdir()
        train("grpo", **options(folder, rollout={"temperature": 0.7, "record_entropy": recorded}))
        found[recorded] = metrics_of(folder), records_of(folder)
    for plain, row in zip(found[False][1], found[True][1], strict=True):
        own = {name: row.pop(name) for name in ("old_logprobs", "entropy")}
        assert row | {"seconds": 0, "origin": ""} == plain | {"seconds": 0, "origin": ""}
        np.testing.assert_allclose(own["old_logprobs"], row["logprobs"], atol=1e-5)  # sampled with the same weights
        row["entropy"] = own["entropy"]
    for plain, metrics in zip(found[False][0], found[True][0], strict=True):
        assert (metrics["loss"], metrics["grad_norm"]) == (plain["loss"], plain["grad_norm"])
        rows = [row for row in found[True][1] if row["step"] == metrics["step"]]
        trained = [value for row in rows if any(row["advantages"]) for value in row["entropy"]]
        assert np.mean(trained) == pytest.approx(metrics["entropy"], rel=1e-5)


def test_speculative_decoding_samples_the_same_and_says_what_was_accepted(tmp_path):
    found = {}
    for tokens in (0, 4):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        rollout = {"max_tokens": 40, "temperature": 0.05, "speculative_tokens": tokens, "speculative_max_sequences": 12}
        train("grpo", **options(folder, rollout=rollout, steps=1))
        (row,) = metrics_of(folder)
        is_one(row, 1e-5)
        found[tokens] = [(record["text"], record["reward"]) for record in records_of(folder)]
        assert ("draft_acceptance" in row) == (tokens > 0)
    assert found[0] == found[4] and 0 < row["draft_acceptance"] < 1


def test_it_stays_one_for_fifty_steps_without_learning(tmp_path):
    train("grpo", **options(tmp_path, rollout=SAMPLINGS[-1], update={"learning_rate": 0.0}, steps=50))
    rows = metrics_of(tmp_path)
    assert len(rows) == 50
    for row in rows:
        is_one(row, 1e-6)


def test_the_ratio_shows_sampling_that_the_trainer_is_not_told_of(tmp_path, monkeypatch):
    """The tests above mean nothing if a mismatch would not show; and it stops the run."""
    from posttrain.core.types import SamplingDistribution
    from posttrain.train import setup

    monkeypatch.setattr(setup, "SamplingDistribution", lambda **_: SamplingDistribution())
    with pytest.raises(DivergedError, match=r"rollout.max_mismatch = 0.1"):
        train("grpo", **options(tmp_path, rollout={"temperature": 0.3}, steps=5))
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3]


def test_what_the_policy_learned_since_is_no_mismatch(tmp_path):
    """With batches ahead the weights that sampled are older by a step; that stops no healthy run."""
    slow = {"ahead": 1, "max_mismatch": 1e-5}
    train("grpo", **options(tmp_path, rollout=slow, update={"learning_rate": 1e-2}, steps=5))
    first, *others = metrics_of(tmp_path)
    assert first["sampler_kl"] < 1e-6 and "policy_drift" not in first
    assert all(row["policy_drift"] > 1e-5 and "sampler_kl" not in row for row in others)


def test_every_prompt_comes_up_once_an_epoch_and_is_recorded(tmp_path):
    train("grpo", **options(tmp_path, steps=7))
    rows = records_of(tmp_path)
    assert len(rows) == 7 * 3 * 4
    asked = [(row["step"], row["origin"]) for row in rows[::4]]
    lines = [int(origin.rpartition(":")[2]) for _, origin in asked]
    for epoch in range(3):
        assert sorted(lines[epoch * 7 : epoch * 7 + 7]) == list(range(1, 8))
    for row in rows:
        assert row["finish"] in ("stop", "length") and row["version"] == row["step"] - 1
        answer = row["tokens"][row["prompt_length"] :]
        assert 1 <= len(answer) <= 6 and row["mask"] == "0" * row["prompt_length"] + "1" * len(answer)
        assert len(row["logprobs"]) == len(row["advantages"]) == len(answer)
        assert row["rewards"] == {"judge.score": row["reward"]}
    groups = [rows[at : at + 4] for at in range(0, len(rows), 4)]
    for group in groups:
        gains = [row["advantages"][-1] for row in group]
        assert len({row["group"] for row in group}) == 1 and abs(sum(gains)) < 1e-5
        rewards = np.array([row["reward"] for row in group])
        if np.ptp(rewards):
            expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            np.testing.assert_allclose(gains, expected, atol=1e-5)


def test_phases_sum_to_the_wall_time_and_have_the_names_of_the_loop(tmp_path):
    train("grpo", **options(tmp_path, algo={"kl_coef": 0.1}, data={"eval": [write_rows("prompt", tmp_path)]}))
    for row in metrics_of(tmp_path):
        phases = {key.removeprefix("time/") for key in row if key.startswith("time/")}
        assert {"generate", "reward", "logprobs", "train", "sync"} <= phases


FAILING = """
def score(text, answer):
    if answer in ("0", "2"):
        raise ValueError(f"cannot judge {answer}")
    return sum(ord(letter) % 7 for letter in text) / 20
"""


def test_answers_that_cannot_be_scored_are_left_out_and_counted(tmp_path):
    (tmp_path / "half.py").write_text(FAILING)
    chosen = options(tmp_path, reward=[f"{tmp_path}/half.py:score"], rewards={"limits": [10, 2, 0.9]}, steps=3)
    train("grpo", **chosen)
    failed = [row for row in records_of(tmp_path) if row["failure"]]
    assert {row["columns"]["answer"] for row in failed} <= {"0", "2"} and len(failed) >= 4
    assert all("advantages" not in row and "cannot judge" in row["failure"] for row in failed)
    assert sum(row["failures"] for row in metrics_of(tmp_path)) == len(failed)
    strict = chosen | {"rewards": {"limits": [10, 2, 0.01], "workers": 1}, "out": str(tmp_path / "strict")}
    with pytest.raises(RewardError, match=r"(?s)max_failure_rate allows.*cannot judge.*posttrain samples .*--failed"):
        train("grpo", **strict)
    lines = (tmp_path / "strict" / "rollouts.jsonl").read_text().splitlines()  # what stopped it can be looked at
    assert any("cannot judge" in json.loads(line)["failure"] for line in lines)


def test_environment_variables_reach_reward_functions_in_training_and_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "0.25")
    (tmp_path / "keyed.py").write_text("import os\ndef score(text): return float(os.environ['JUDGE_KEY'])\n")
    reward = {"functions": [f"{tmp_path}/keyed.py:score"], "env": ["JUDGE_KEY"]}
    chosen = options(tmp_path, data={"eval": [write_rows("prompt", tmp_path)]}, steps=1) | {"reward": reward}
    del chosen["rewards"]
    metrics = train("grpo", **chosen).metrics
    assert metrics["reward"] == metrics["eval/reward"] == 0.25 and metrics["failures"] == 0


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (["gsm8"], "gsm8k"),
        (["nowhere.py:score"], "nowhere.py"),
        ([], "reward.functions is not set"),
        (["model:nowhere"], "nowhere"),
        (["model:pico"], "no score head"),
    ],
)
def test_wrong_rewards_are_refused(reward, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        train("grpo", **options(tmp_path, reward=reward))
    assert not (tmp_path / "run").exists()


def test_evaluation_counts_and_repeats_itself(tmp_path):
    chosen = options(
        tmp_path,
        data={"eval": [write_rows("prompt", tmp_path)]},
        eval={"every": 1, "samples_per_prompt": 4, "temperature": 1.0, "max_rows": 5},
        update={"learning_rate": 0.0},
    )
    train("grpo", **chosen)
    first, second = metrics_of(tmp_path)
    keys = [key for key in first if key.startswith("eval/")]
    assert {"eval/accuracy", "eval/accuracy_interval", "eval/pass@2", "eval/pass@4", "eval/reward"} <= set(keys)
    assert [first[key] for key in keys] == [second[key] for key in keys]
    assert 0 <= first["eval/accuracy"] <= first["eval/pass@2"] <= first["eval/pass@4"] <= 1


def test_rewards_over_their_running_deviation_are_trained_on_and_evaluation_is_as_it_is(tmp_path):
    (tmp_path / "size.py").write_text("def size(text, answer): return 10.0 * len(text) + len(str(answer))\n")
    evaluated = []
    for normalize in ("running", "none"):
        run = options(
            tmp_path,
            reward=[f"{tmp_path / 'size.py'}:size"],
            rewards={"normalize": normalize},
            update={"learning_rate": 0.0},
            data={"eval": [write_rows("prompt", tmp_path)]},
            eval={"every": 1, "max_rows": 3},
            out=str(tmp_path / normalize),
        )
        result = train("ppo", **run)
        evaluated.append(result.metrics["eval/reward"])
    records = [json.loads(line) for line in (tmp_path / "running/rollouts.jsonl").read_text().splitlines()]
    for step in (1, 2):
        seen = [row["rewards"]["size.size"] for row in records if row["step"] <= step]
        found = [row["reward"] for row in records if row["step"] == step]
        assert found == pytest.approx([reward / np.std(seen, ddof=1) for reward in seen[-len(found) :]])
        assert np.std(seen) > 1  # so that dividing does something
    assert evaluated[0] == evaluated[1] > 1


def judged(text, answer):
    return sum(ord(letter) % 7 for letter in text) / 20 + (answer in text)


def test_the_trainer_from_python_equals_the_command(tmp_path):
    chosen = options(tmp_path)
    train("grpo", **chosen)
    settings = {key: chosen[key] for key in ("rollout", "rewards", "update", "save", "steps", "quiet")}
    settings["out"] = str(tmp_path / "again")
    with GRPOTrainer("pico", rewards=judged, data=ROWS["prompt"], eval_data=ROWS["prompt"], config=settings) as trainer:
        for row in metrics_of(tmp_path):
            experience = trainer.make_experience()
            assert len(experience) == 12 and experience[0].sample.advantages is not None
            metrics = trainer.train_step(experience)
            assert (metrics["reward"], metrics["loss"]) == (row["reward"], row["loss"])
        assert 0 <= trainer.evaluate()["eval/accuracy"] <= 1
        saved = trainer.save()
    newest = next((tmp_path / "run/checkpoints").iterdir())
    weights = "model/model.safetensors"
    assert (saved / weights).read_bytes() == (newest / weights).read_bytes()
    in_memory = lambda text, answer: sum(ord(letter) % 7 for letter in text) / 20 + (answer in text)  # noqa: E731
    settings["out"] = str(tmp_path / "in-memory")
    with GRPOTrainer("pico", rewards=in_memory, data=ROWS["prompt"], config=settings) as trainer:
        metrics = trainer.train_step(trainer.make_experience())
        assert metrics["reward"] == metrics["rewards/lambda"] == metrics_of(tmp_path)[0]["reward"]


HALF = """
def score(text, answer):
    return 1.0 if answer in ("0", "2", "4") else sum(ord(letter) % 7 for letter in text) / 20
"""


def test_answers_without_a_gradient_are_left_out_and_change_nothing(tmp_path, monkeypatch):
    """Groups of equal rewards need not be computed: weights and loss are the same as if they were."""
    from posttrain.algorithms.grpo import GRPO

    (tmp_path / "half.py").write_text(HALF)
    chosen = options(tmp_path, reward=[f"{tmp_path}/half.py:score"], steps=3)
    train("grpo", **chosen)
    left_out = metrics_of(tmp_path)
    assert all(0 < row["no_signal"] < 1 for row in left_out)
    monkeypatch.setattr(GRPO, "has_gradient", lambda self, sample: True)
    train("grpo", **(chosen | {"out": str(tmp_path / "all")}))
    rows = [json.loads(line) for line in (tmp_path / "all/metrics.jsonl").read_text().splitlines()]
    for one, other in zip(left_out, rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one["reward"] == pytest.approx(other["reward"])


def test_a_batch_without_any_signal_changes_no_weight(tmp_path):
    (tmp_path / "same.py").write_text("def score(text):\n    return 1.0\n")
    train("grpo", **options(tmp_path, reward=[f"{tmp_path}/same.py:score"], save={"every": 1}, steps=2))
    one, two = sorted((tmp_path / "run/checkpoints").iterdir())
    weights = "model/model.safetensors"
    assert (one / weights).read_bytes() == (two / weights).read_bytes()
    assert [row["no_signal"] for row in metrics_of(tmp_path)] == [1, 1]


@pytest.mark.parametrize("critic", ["mixtral", "llama"])
def test_the_router_loss_is_the_policys_and_that_of_a_critic_with_experts(critic, tmp_path):
    models = {"path": str(tiny_folder("mixtral", tmp_path)), "router_loss": 0.01}
    algo = {"critic": str(tiny_folder(critic, tmp_path, seed=1)), "kl_coef": 0.0}
    train("ppo", **options(tmp_path, model=models, algo=algo, rollout={"samples_per_prompt": 1}, steps=1))
    (row,) = metrics_of(tmp_path)
    assert row["router_balance"] > 0 and ("critic/router_balance" in row) == (critic == "mixtral")


def test_a_reference_that_is_renewed(tmp_path, monkeypatch):
    """Right after every second step it is the policy: the KL is 0. A run that was stopped has the same one."""
    hashed = []
    plain = checkpoint.file_sha256
    monkeypatch.setattr(checkpoint, "file_sha256", lambda path, **how: hashed.append(path) or plain(path, **how))
    renewed = {"algo": {"kl_coef": 0.1, "reference_sync_steps": 2}, "save": {"every": 1, "keep": 2}}
    train("grpo", **options(tmp_path, steps=7, **renewed))
    kls = [row["kl"] for row in metrics_of(tmp_path)]
    assert [kl < 1e-9 for kl in kls] == [True, False, True, False, True, False, True]
    kept = sorted(folder.name for folder in (tmp_path / "run/reference").iterdir())
    assert any("checkpoints" in path.parts and path.suffix == ".safetensors" for path in hashed)
    weights_again = [path for path in hashed if "reference" in path.parts and path.suffix == ".safetensors"]
    assert not weights_again, "it is a link to the checkpoint, which has hashed it"
    assert all(checkpoint.is_valid(folder) for folder in (tmp_path / "run/reference").iterdir())
    assert kept == ["step-00000004", "step-00000006"]  # checkpoint 5 needs the first, 6 and 7 the second
    whole, stopped = tmp_path / "run", str(tmp_path / "stopped")
    for steps in (3, 7):  # from a step at which the reference is not the policy
        train("grpo", **options(tmp_path, out=stopped, **renewed, steps=steps, resume=steps > 3))
    again = [json.loads(line) for line in (tmp_path / "stopped/metrics.jsonl").read_text().splitlines()]
    assert [(row["kl"], row["loss"]) for row in again] == [(row["kl"], row["loss"]) for row in metrics_of(tmp_path)]
    weights = "step-00000006/model/model.safetensors"
    assert (whole / "reference" / weights).read_bytes() == (whole / "checkpoints" / weights).read_bytes()


def weights_of(folder):
    files = TensorFiles(folder / "model", "model")
    return {name: files.read(name) for name in files.places}


@pytest.mark.parametrize("verb", ["grpo", "dpo", "kto"])
def test_a_reference_that_follows_the_policy_slowly(verb, tmp_path):
    """Every second step it is a quarter of the policy and the rest of what it was; a stopped run has the same one."""
    first = tiny_folder("llama", tmp_path)
    algo = {"reference_sync_steps": 2, "reference_mixup_alpha": 0.25} | ({"kl_coef": 0.1} if verb == "grpo" else {})
    changes = {"model": {"path": str(first), "dtype": "float32"}, "algo": algo, "save": {"every": 1, "keep": 9}}
    changes["update"] = {"schedule": "constant"}
    chosen = options(tmp_path, **changes)
    if verb != "grpo":
        rows = [write_rows("pair" if verb == "dpo" else "labelled", tmp_path)]
        chosen |= {"data": {"train": rows, "eval": rows}, "eval": {"every_steps": 1}}
        chosen = {key: value for key, value in chosen.items() if key not in ("reward", "rollout", "rewards")}
    run, stopped = tmp_path / "run", tmp_path / "stopped"
    train(verb, **chosen | {"steps": 6})
    for steps in (2, 3, 6):  # from a step right before a new reference, and from one in between
        train(verb, **chosen | {"steps": steps, "out": str(stopped), "resume": steps > 2})
    both = [
        [
            (row["loss"], row["grad_norm"], row.get("eval/loss"))
            for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        ]
        for folder in (run, stopped)
    ]
    assert both[0] == both[1] and len(both[0]) == 6
    before = load_file(first / "model.safetensors")
    for step in ("step-00000002", "step-00000004"):
        policy, found = weights_of(run / "checkpoints" / step), weights_of(run / "reference" / step)
        assert found.keys() == policy.keys()
        for name, tensor in found.items():
            assert tensor.dtype == torch.float32
            torch.testing.assert_close(tensor, 0.25 * policy[name] + 0.75 * before[name], rtol=0, atol=1e-6)
            assert not torch.equal(tensor, before[name]) or torch.equal(policy[name], before[name]), name
        before = found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"algo": {"kl_coef": 0.1, "reference_sync_steps": -1}},
            "algo.reference_sync_steps is -1: it must be at least 0",
        ),
        ({"algo": {"reference_sync_steps": 2}}, "algo.reference_sync_steps is 2, but algo.kl_coef is 0"),
        ({"algo": {"kl_coef": 0.1, "reference_sync_steps": 2}, "model": {"lora_rank": 4}}, "leave one of them out"),
    ],
)
def test_references_that_cannot_be_renewed(changes, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        train("grpo", **options(tmp_path, **changes))


def test_a_reference_without_adapters_does_not_follow_dpo_either(tmp_path):
    with pytest.raises(UsageError, match=r"algo\.reference_sync_steps is 2, but with model.lora_rank"):
        train(
            "dpo",
            model={"path": "pico", "lora_rank": 4},
            data={"train": [write_rows("pair", tmp_path)]},
            algo={"reference_sync_steps": 2},
        )


def test_truncated_completions_can_be_left_out_of_the_loss(tmp_path):
    """The step equals one on the other completions alone, whose advantages were computed with the truncated ones."""
    grad_norms = []
    for masked in (True, False):
        algo = {"mask_truncated_completions": masked}
        with GRPOTrainer(
            "pico",
            data=ROWS["prompt"],
            reward=write_judge(tmp_path),
            max_steps=1,
            max_tokens=6,
            learning_rate=1e-3,
            algo=algo,
            output_dir=tmp_path / str(masked),
            quiet=True,
        ) as trainer:
            experience = trainer.make_experience()
            for number, rollout in enumerate(experience):
                rollout.sample.finish = "length" if number % 3 == 0 else "stop"
            if not masked:
                experience = [rollout for rollout in experience if rollout.sample.finish == "stop"]
            grad_norms.append(trainer.train_step(experience)["grad_norm"])
    assert grad_norms[0] == grad_norms[1] > 0


def test_a_step_whose_completions_are_all_truncated_changes_nothing(tmp_path, capsys):
    chosen = options(
        tmp_path, rollout={"max_tokens": 1, "min_p": 1.0}, algo={"mask_truncated_completions": True}, steps=1
    )
    result = train("grpo", **chosen)
    assert result.metrics["truncated"] == 1 and result.metrics["updates"] == 0 and "loss" not in result.metrics
    assert "all completions were truncated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "other", "message"),
    [
        ({"skip_epochs": 1}, {"samples_per_prompt": 1}, "rollout.skip_epochs compares completions"),
        ({"prompt_sampling": "difficulty"}, {"replay": "before"}, "rollout.prompt_sampling difficulty chooses prompts"),
    ],
)
def test_a_choice_of_prompts_that_cannot_work_is_refused(choice, other, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        train("grpo", **options(tmp_path, rollout=choice | other))

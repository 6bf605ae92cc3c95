"""Names, weights, reward models and the verifiers in their processes."""

import re
from pathlib import Path

import pytest

from posttrain.cli import rewards as rewards_verb
from posttrain.cli import score
from posttrain.config.sections import OnlineConfig, RewardConfig
from posttrain.core.errors import UsageError
from posttrain.rewards.base import Completion, Rewards, Verdict, combine
from posttrain.rewards.builtin import verifiers
from posttrain.train.setup import make_rewards

ROOT = Path(__file__).parents[3]


def asked(*texts, **columns):
    return [Completion(prompt="?", messages=[], text=text, finish="stop", tokens=1, columns=columns) for text in texts]


def test_names_are_unique_and_models_are_left_to_the_trainer(tmp_path):
    file = tmp_path / "my.py"
    file.write_text("def score(text): return float(text)\n", encoding="utf-8")
    with Rewards(["gsm8k", "model:runs/rm", f"{file}:score", "gsm8k"], [1, 2, 3, 4]) as rewards:
        assert rewards.names == ["gsm8k", "model.rm", "my.score", "gsm8k_2"]
        assert rewards.models == [(1, "runs/rm")] and rewards.weights == [1, 2, 3, 4]
        rewards.check()
        (row,) = rewards.score(asked("5", ground_truth="5"))
        assert row[1] is None and [verdict.value for verdict in (row[0], row[2], row[3])] == [1, 5, 1]
        rewards.check_failures([row])
        row[1] = Verdict(value=0.5, kind="ok")
        assert combine(row, rewards.weights) == 1 + 1 + 15 + 4
    assert Rewards(["format", "step"]).weights == [1, 1]


def test_a_function_that_combines_without_reward_models():
    """Without reward models nothing has to call `run_combiner`: the combined value is the sum."""
    mine = f"{ROOT}/examples/reward.py"
    with Rewards(["gsm8k", f"{mine}:short", f"combine:{mine}:gated"], workers=1, max_failure_rate=1.0) as rewards:
        rewards.check(["ground_truth"])
        assert rewards.names == ["gsm8k", "reward.short", "reward.gated"]
        rows = rewards.score(asked("5", "word " * 40 + "5", "6", ground_truth="5"))
        assert [combine(row, rewards.weights) for row in rows] == [1.0, 0.0, 0.0]
        (row,) = rewards.score(asked("5"))  # without a ground truth gsm8k fails
        assert combine(row, rewards.weights) is None and "another reward failed" in row[2].reason
    missing = pytest.raises(UsageError, match="not columns of the data: rewards")
    with Rewards([f"{mine}:gated"], workers=1) as rewards, missing:
        rewards.check(["ground_truth"])


def test_the_sum_of_a_failed_one_is_none():
    good, bad = Verdict(value=1.0, kind="ok"), Verdict(value=None, kind="error")
    assert combine([good, good], [0.5, -2]) == -1.5
    assert combine([good, bad], [1, 0]) is None and combine([good, None], [1, 1]) is None
    other = Verdict(value=None, kind="not_applicable")
    assert combine([good, other], [2, 1]) == 2.0 and combine([bad, other], [1, 1]) is None
    assert combine([other, other], [1, 1]) is None and combine([good, other], [0, 1]) is None, "no reward applies"
    assert combine([other, good], [0, 1]) == 1.0 and combine([], []) == 0.0


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        (["gsm8"], {}, "Did you mean gsm8k\\? The verifiers are acc, "),
        (["missing.py:score"], {}, "there is no file missing.py"),
        (["file.py"], {}, "expected FILE.py:FUNCTION"),
        (["a b:score"], {}, "neither a file that ends in .py nor a module"),
        (["file.py:1+1"], {}, "expected FILE.py:FUNCTION"),
        (["http://:80/"], {}, "has no host"),
        (["http://host:port/"], {}, "not an address"),
        (["model:"], {}, "give the reward model's directory"),
        (["combine:gsm8k"], {}, "expected a function after combine:"),
        ([f"combine:{ROOT}/examples/reward.py:gated", "format"], {}, "only the last reward may combine"),
        (["format", f"combine:{ROOT}/examples/reward.py:gated"], {"weights": [1, 1]}, "replaces the weighted sum"),
        (["format"], {"weights": [1, 2]}, "1 rewards but 2 weights"),
        (["format"], {"weights": [float("nan")]}, "finite"),
        (["format"], {"timeout_seconds": 0}, "reward.timeout_seconds is 0"),
        (["format"], {"workers": 0}, "reward.workers is 0"),
        (["format"], {"max_failure_rate": 2}, "max_failure_rate is 2"),
    ],
)
def test_wrong_use_is_refused_at_once(specs, options, message):
    with pytest.raises(UsageError, match=message):
        Rewards(specs, **options)


def test_a_module_and_a_file_beside_the_reward_can_be_imported(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("BONUS = 2.0\n", encoding="utf-8")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("from helper import BONUS\ndef f(text): return BONUS\n")
    (tmp_path / "file.py").write_text("import helper\ndef f(text): return helper.BONUS\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with Rewards(["package.inner:f", "file.py:f"]) as rewards:
        rewards.check()
        assert [verdict.value for verdict in rewards.score(asked("x"))[0]] == [2, 2]
        assert rewards.names == ["inner.f", "file.f"]
    for spec in ("package.nothing:f", "nothing:f"):
        with Rewards([spec]) as rewards, pytest.raises(UsageError, match="there is no module"):
            rewards.check()


def test_large_completions_and_odd_columns_travel(tmp_path):
    import numpy as np

    file = tmp_path / "my.py"
    file.write_text("def score(text, array, word): return len(text) + sum(array) + (word == '\\ud800')\n")
    with Rewards([f"{file}:score"]) as rewards:
        rows = asked(*["y" * 300_000] * 40, array=np.arange(3), word="\ud800")
        assert {row[0].value for row in rewards.score(rows)} == {300_004}
        assert rewards.score([]) == []


def test_verifiers_run_in_the_pool():
    columns = {"ground_truth": "42", "numbers": [40, 2], "target": 42, "tests": ["assert f() == 1"]}
    names = list(verifiers())
    with Rewards(names, timeout_seconds=60) as rewards:
        rewards.check()
        (row,) = rewards.score(asked(r"\boxed{42}<answer>40+2</answer>", **columns))
    found = {name: verdict.value for name, verdict in zip(names, row, strict=True)}
    assert found["acc"] == found["math"] == found["gsm8k"] == found["countdown"] == 1
    assert found["strict_format"] == -0.5 and found["format"] == found["code"] == 0


def test_the_page_lists_every_verifier():
    text = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    section = text.partition("## Built-in verifiers")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE) == list(verifiers())


@pytest.fixture
def no_isolation(tmp_path):
    """A reward that leaves its child process without libseccomp, so that programs cannot be isolated there."""
    file = tmp_path / "my.py"
    file.write_text(
        "from posttrain.sandbox import programs\n"
        "def fail(*_):\n    raise OSError('libseccomp.so.2 is not installed')\n"
        "programs.compile_filter = fail\n"
        "def one(text):\n    return 1.0\n",
        encoding="utf-8",
    )
    return f"{file}:one"


@pytest.mark.parametrize("allowed", [False, True])
def test_programs_run_without_isolation_only_if_the_user_allows_it(tmp_path, no_isolation, allowed):
    proof = tmp_path / "proof"
    program = f"open({str(proof)!r}, 'w').close()\nprint(5)"
    with Rewards([no_isolation, "code"], workers=1, timeout_seconds=60, allow_unprotected_code=allowed) as rewards:
        if not allowed:
            with pytest.raises(UsageError, match=r"libseccomp.*reward.allow_unprotected_code"):
                rewards.check()
        (row,) = rewards.score(asked(program, inputs=[""], outputs=["5"]))
        assert row[1].value == (1.0 if allowed else None), row[1]
    assert proof.exists() is allowed  # not isolated: it can write the files of this user


@pytest.mark.parametrize("verb", ["score", "rewards check"])
def test_commands_run_programs_without_isolation_only_if_the_user_allows_it(tmp_path, no_isolation, verb):
    file, out = tmp_path / "data.jsonl", tmp_path / "scored.jsonl"
    file.write_text('{"prompt": "?", "completion": "print(5)", "inputs": [""], "outputs": ["5"]}\n', encoding="utf-8")
    args = [str(file), "--reward", no_isolation, "code", "--timeout_seconds", "60", "--workers", "1"]
    if verb == "score":
        run, args = score.run, [*args, "--out", str(out)]
    else:
        run, args = rewards_verb.run, ["check", *args]
    with pytest.raises(UsageError, match=r"libseccomp.*reward.allow_unprotected_code"):
        run(args)
    assert run([*args, "--allow_unprotected_code"]) == 0


@pytest.mark.parametrize("allowed", [False, True])
def test_training_passes_the_permission_on(no_isolation, allowed):
    config = OnlineConfig()
    config.reward = RewardConfig(functions=(no_isolation, "code"), workers=1, allow_unprotected_code=allowed)
    with make_rewards(config) as rewards:
        if allowed:
            rewards.check()
        else:
            with pytest.raises(UsageError, match=r"libseccomp.*reward.allow_unprotected_code"):
                rewards.check()

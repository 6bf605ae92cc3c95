"""A reward model gives one score to one text: in its training, in reinforcement learning, in `score` and `serve`."""

import json
from copy import deepcopy

import numpy as np
import pytest

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.types import Prompt, Sample
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.encoding.templates import apply_template
from posttrain.data.reading.examples import PairExample
from posttrain.inference.score import Scoring, score_file
from posttrain.models.pico import build_tokenizer
from posttrain.rollout.records import Rollout
from posttrain.train.launch import train
from posttrain.train.reward_model import RewardModel
from tests.tiny import tiny_folder


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CONVERSATIONS = [
    ([user("3+1=")], "4"),
    ([{"role": "system", "content": "add"}, user("3+1=")], " 4 "),
    ([user("3+1="), assistant("4"), user("and 1?")], "5"),
    ([user("3+1=")], "a quoted <|im_end|> control token"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("reward-model")


@pytest.fixture(scope="module")
def path(place):
    """A reward model whose chat template writes a line break after the end-of-turn."""
    rows = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "no"} for n in range(8)]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = tiny_folder("qwen2", place)
    options = {"model": str(base), "data": {"train": [str(place / "pairs.jsonl")]}, "train": {"max_steps": 2}}
    return str(train("reward", output_dir=str(place / "run"), quiet=True, **options).output_dir)


@pytest.fixture(scope="module")
def model(path):
    return RewardModel.load(ModelConfig(path=path), DataConfig())


def trained_on(tokenizer, prompt, text):
    """A chosen completion, as the training of a reward model encodes it."""
    encoder = Encoder(tokenizer, DataConfig(), "pair", 10**6)
    pair = PairExample(origin="x", prompt=prompt, chosen=[assistant(text)], rejected=[assistant("no")])
    return encoder.encode(pair)[0]


@pytest.mark.parametrize(("prompt", "text"), CONVERSATIONS)
def test_a_completion_is_encoded_as_in_training(model, prompt, text):
    (sample,) = model.encoder.encode(model.completion(prompt, text, finish="stop", origin="x"))
    assert sample.tokens.tolist() == trained_on(model.encoder.tokenizer, prompt, text).tokens.tolist()


@pytest.mark.parametrize("template", ["", "chatml"])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(("prompt", "text"), CONVERSATIONS[:3])
def test_rollouts_files_and_requests_have_the_same_score(model, path, place, prompt, text, finish, template):
    """Whether the policy has the same chat template, so that its tokens are used, or another one."""
    policy = tiny_tokenizer(model, template)
    encoder = Encoder(policy, DataConfig(), "prompt", 10**6)
    start = encoder.chat.prompt(prompt, False, "x")
    ids = [token for of_segment in encoder.tokens.encode([start])[0] for token in of_segment]
    sampled = policy(text, add_special_tokens=False)["input_ids"] + [policy.eos_token_id] * (finish == "stop")
    tokens = np.array(ids + sampled, dtype=np.int32)
    rollout = Rollout(
        sample=Sample(tokens=tokens, mask=np.arange(len(tokens)) >= len(ids), finish=finish),
        prompt=Prompt(tokens=np.array(ids, dtype=np.int32), messages=prompt, columns={}, origin="x"),
        text=text,
    )
    in_training = RewardModel(model.model, model.encoder, policy_tokenizer=policy)
    assert in_training.takes_sampled_tokens is not bool(template)
    (verdict,) = in_training.score_rollouts([rollout])

    file, out = place / "completions.jsonl", place / "scored.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "completion": text, "finish": finish}) + "\n")
    in_file = score_file(Scoring(file=str(file), out=str(out), reward=(f"model:{path}",))).rows[0]["reward"]

    pytest.importorskip("starlette", reason="the server needs starlette and uvicorn")
    from posttrain.endpoint.metrics import ServerMetrics
    from posttrain.server.scores import ScoreService

    service = ScoreService(model, name="", queue=1, seconds=1, metrics=ServerMetrics({}))
    body = {"completions": [{"messages": prompt, "text": text, "finish": finish}]}
    (served,) = model.score(service.read(body))

    assert verdict.kind == "ok" and verdict.value == in_file == served.value
    if finish == "stop":
        assert model.model.scores([trained_on(model.encoder.tokenizer, prompt, text)]) == [verdict.value]


def tiny_tokenizer(model, template):
    tokenizer = deepcopy(model.encoder.tokenizer)
    apply_template(tokenizer, template)
    return tokenizer


@pytest.mark.parametrize("policy", ["pico", "tiny"])
def test_a_run_and_score_agree(path, place, policy, monkeypatch):
    """The rewards in rollouts.jsonl are those that `posttrain score` gives to the same texts."""
    monkeypatch.chdir(place)
    (place / "prompts.jsonl").write_text('{"prompt": "3+1="}\n{"prompt": "4+1="}\n')
    options = {
        "model": policy if policy == "pico" else str(tiny_folder("qwen2", place)),
        "data": {"train": [str(place / "prompts.jsonl")], "chat_template": "" if policy == "pico" else "chatml"},
        "train": {"max_steps": 1, "batch_size": 4},
        "rollout": {"samples_per_prompt": 2, "max_tokens": 12},
        "reward": [f"model:{path}"],
    }
    folder = train("grpo", output_dir=str(place / policy), quiet=True, **options).output_dir
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    with (place / "texts.jsonl").open("w") as file:
        for row in rollouts:
            file.write(json.dumps({"prompt": row["prompt"], "completion": row["text"], "finish": row["finish"]}) + "\n")
    scoring = Scoring(file=str(place / "texts.jsonl"), out=str(place / "out.jsonl"), reward=(f"model:{path}",))
    scored = [row["reward"] for row in score_file(scoring).rows]
    assert [row["reward"] for row in rollouts] == pytest.approx(scored, abs=1e-6) and len(set(scored)) > 1


def test_without_a_chat_template_the_completion_ends_with_eos(model):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    plain = RewardModel(model.model, Encoder(tokenizer, DataConfig(), "labelled", 10**6))
    encoded = plain.encoder.encode(plain.completion([user("ab")], "c", finish="stop", origin="x"))[0].tokens
    assert tokenizer.decode(encoded) == "abc<|end|>"
    encoded = plain.encoder.encode(plain.completion([user("ab")], "c", finish="length", origin="x"))[0].tokens
    assert tokenizer.decode(encoded) == "abc"


def test_a_score_that_is_not_finite_and_an_example_that_cannot_be_encoded_are_failures(model):
    class Broken:
        def scores(self, samples):
            return [float("nan") for _ in samples]

    completions = [model.completion([user("ab")], "c" * length, finish="stop", origin="f:1") for length in (1, 100)]
    short = DataConfig(max_length=20, on_overlong="drop")
    broken = RewardModel(Broken(), Encoder(model.encoder.tokenizer, short, "labelled", 10**6))
    verdicts = broken.score(completions)
    assert [verdict.value for verdict in verdicts] == [None, None]
    assert [verdict.reason for verdict in verdicts] == ["the reward model returned nan", "longer than max_tokens = 20"]

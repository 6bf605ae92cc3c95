"""A reward model behind HTTP gives the rewards that it gives in the same process, to our own client and to others."""

import json

import pytest

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.endpoint.metrics import ServerMetrics
from posttrain.rewards.base import Completion, Rewards
from posttrain.server import app, scores
from posttrain.server.app import ServeOptions
from posttrain.train.launch import train
from posttrain.train.reward_model import RewardModel
from tests.unit.server.serving import ask, metrics_of, running

TOKEN = "a-long-secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served-reward")
    rows = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "no"} for n in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model": {"path": "pico"}, "data": {"train": [str(folder / "pairs.jsonl")]}, "steps": 2, "quiet": True}
    path = str(train("reward", out=str(folder / "run"), **options).output_dir)
    assert scores.has_score_head(path) and not scores.has_score_head("pico")
    return RewardModel.load(ModelConfig(path=path), DataConfig(max_length=40, on_overlong="error"))


@pytest.fixture(params=["", TOKEN], ids=["open", "with a token"])
def served(model, request):
    metrics = ServerMetrics(app.METRICS | scores.METRICS)
    service = scores.ScoreService(model, name="judge", queue=8, seconds=60, metrics=metrics)
    with running(service, ServeOptions(token=request.param, name="judge"), metrics) as found:
        yield found


def completion(text, messages=None):
    messages = messages or [{"role": "user", "content": "3+1="}]
    return Completion(prompt="as the policy saw it", messages=messages, text=text, finish="stop", tokens=1, columns={})


def expected(model, text, prompt="3+1="):
    told = [{"role": "user", "content": prompt}]
    (verdict,) = model.score([model.completion(told, text, finish="stop", origin="here")])
    return verdict.value


def test_our_own_client_gets_the_models_scores(served, model, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_TOKEN", TOKEN)
    texts = ["4", "no", "forty-four", "4" * 100]
    address = f"http://127.0.0.1:{served.port}/v1/score"
    with Rewards([address], timeout_seconds=60, workers=1) as rewards:
        rewards.check()
        verdicts = [said[0] for said in rewards.score([completion(text) for text in texts])]
    assert [v.value for v in verdicts[:3]] == pytest.approx([expected(model, text) for text in texts[:3]], abs=1e-5)
    assert len({verdict.value for verdict in verdicts[:3]}) == 3
    assert verdicts[3].value is None and verdicts[3].kind == "error"  # too long: it failed, it is not worth 0


def test_without_the_token_it_fails_in_words(served, monkeypatch):
    if not served.options.token:
        return
    monkeypatch.delenv("POSTTRAIN_TOKEN", raising=False)
    with Rewards([f"http://127.0.0.1:{served.port}/v1/score"], timeout_seconds=60, workers=1) as rewards:
        ((verdict,),) = rewards.score([completion("4")])
    assert verdict.value is None and "401" in verdict.reason and "token" in verdict.reason


def test_other_shapes(served, model):
    if served.options.token:
        return

    def scored(body):
        status, _, answer = ask(served.port, "POST", "/v1/score", body)
        assert status == 200, answer
        return answer["rewards"]

    assert scored({"query": ["3+1=4"], "prompts": ["3+1="]}) == pytest.approx([expected(model, "4")], abs=1e-5)
    assert scored({"completions": [{"prompt": "3+1=", "text": "4"}]}) == pytest.approx([expected(model, "4")], abs=1e-5)
    whole = [{"role": "user", "content": "3+1="}, {"role": "assistant", "content": "4"}]
    connection = {"completions": [{"messages": whole, "text": "something else"}]}
    assert scored(connection) == pytest.approx([expected(model, "4")], abs=1e-5)
    status, _, answer = ask(served.port, "POST", "/v1/score", {"completions": [{"prompt": "a", "text": "a" * 99}]})
    assert status == 200 and answer["rewards"] == [None] and "40" in answer["reasons"][0]
    found = metrics_of(served.port)
    assert found['posttrain_scores_total{result="ok"}'] == 3 and found['posttrain_scores_total{result="failed"}'] == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"completions": []},
        {"completions": ["a"]},
        {"completions": [{"messages": "a", "text": "b"}]},
        {"completions": [{"text": "b"}]},
        {"completions": [{"prompt": "a"}]},
        {"query": ["ab"], "prompts": ["b"]},
        {"query": ["ab"], "prompts": []},
    ],
    ids=str,
)
def test_wrong_requests(served, body):
    headers = {"Authorization": f"Bearer {served.options.token}"} if served.options.token else {}
    status, _, answer = ask(served.port, "POST", "/v1/score", body, **headers)
    assert status == 400 and answer["error"]["message"]
    assert ask(served.port, "POST", "/v1/chat/completions", body, **headers)[0] == 404

"""Episodes in tokens: appended, never encoded again; the environment's do not count; all within the limit."""

import json
import textwrap
from dataclasses import replace

import numpy as np
import pytest

from posttrain.cluster.local import LocalPool
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import RewardError
from posttrain.data.encoding.chat import ChatRenderer
from posttrain.data.encoding.tokens import TokenEncoder
from posttrain.engines.base import seed_for
from posttrain.models.pico import build_tokenizer
from posttrain.rollout.environments import Environments
from posttrain.rollout.episodes import EpisodeRunner
from posttrain.rollout.records import as_row, from_row
from posttrain.rollout.rollouts import generate_rollouts
from posttrain.train.learner import Learner
from posttrain.train.learner_group import LearnerGroup
from tests.unit.rollout.made import END, SAMPLING, TOKENIZER, FakeGenerator, ids, online, prompt

CODE = textwrap.dedent(
    """
    class Count:
        def start(self, example):
            self.left = example["turns"]
            return example["messages"]

        def step(self, reply):
            if reply == "fail":
                raise ValueError("no")
            self.left -= 1
            if not self.left:
                return None, 1.0
            return [{"role": "user", "content": f"<|end|>{self.left}"}], 0.25

    class Long(Count):
        def start(self, example):
            return [{"role": "user", "content": "x" * example["size"]}]

    class Known(Count):
        def state(self):
            return f"{self.left} left"

    class Stateless(Count):
        def state(self):
            return ""

    class Tool(Count):
        def step(self, reply):
            return [{"role": "tool", "content": "7"}], 0.0
    """
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "count.py"
    path.write_text(CODE)
    return path


@pytest.fixture(scope="module")
def environments(file):
    with Environments(f"{file}:Count", workers=1, max_failure_rate=0.5) as found:
        yield found


@pytest.fixture(scope="module")
def policy():
    learner = LocalPool().start("actor", Learner, ModelConfig(path="pico"), TrainConfig(), trainable=False)
    return LearnerGroup(learner)


def runner(environments, generator, tokenizer=TOKENIZER, **sampling):
    return EpisodeRunner(
        environments, generator, online(data__max_length=100), replace(SAMPLING, **sampling), tokenizer
    )


def test_tokens_are_those_of_the_whole_conversation(environments):
    said = iter(["one", "two", "three"])
    generator = FakeGenerator(lambda _: next(said) + "<|end|>")
    [rollout] = runner(environments, generator).play([(4, prompt("go", turns=3))], [9])
    sample = rollout.sample
    environment = ["<|end|>2", "<|end|>1"]
    roles = [message["role"] for message in rollout.messages]
    assert roles == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in rollout.messages if message["role"] == "user"] == ["go", *environment]

    encoder = TokenEncoder(TOKENIZER)
    segments = ChatRenderer(TOKENIZER, encoder).segments(rollout.messages, 0, False, "f:1")
    [encoded] = encoder.encode([segments])
    assert sample.tokens.tolist() == [token for part in encoded for token in part]
    trained = [segment.trained for segment, part in zip(segments, encoded, strict=True) for _ in part]
    assert sample.mask.tolist() == trained
    assert (sample.tokens == END).sum() == 6  # what the environment quotes stays text
    assert TOKENIZER.decode(sample.tokens[sample.mask]) == "one<|end|>two<|end|>three<|end|>"

    spoken = [-0.01 * (1 + np.arange(len(ids(text)) + 1)) for text in ("one", "two", "three")]
    assert sample.logprobs[sample.mask].tolist() == pytest.approx(np.concatenate(spoken).tolist())
    assert not sample.logprobs[~sample.mask].any()
    assert (rollout.turns, rollout.text, sample.finish, sample.group) == (3, "three", "stop", 4)
    assert rollout.rewards == {"environment": 1.5} and not rollout.failure
    assert rollout.prompt.messages == [{"role": "user", "content": "go"}]


def test_turns_that_were_encoded_before_have_the_same_tokens(environments, monkeypatch):
    """The second of two equal games renders nothing after its prompt; other roles, texts or ends are other turns."""
    rendered = []
    continuation = ChatRenderer.continuation
    monkeypatch.setattr(
        ChatRenderer, "continuation", lambda *given: rendered.append(given[1:4]) or continuation(*given)
    )
    player = runner(environments, FakeGenerator(lambda request: f"r{request.seed}"[:3] + "<|end|>"))
    first, again = (player.play([(0, prompt("go", turns=3))], [seed])[0] for seed in (1, 2))
    assert len(rendered) == 2
    assert first.sample.tokens[~first.sample.mask].tolist() == again.sample.tokens[~again.sample.mask].tolist()
    fresh = runner(environments, FakeGenerator(lambda request: f"r{request.seed}"[:3] + "<|end|>"))
    assert fresh.play([(0, prompt("go", turns=3))], [2])[0].sample.tokens.tolist() == again.sample.tokens.tolist()
    for text, turns in (("a<|end|>", 4), ("a" + "STOP", 3)):  # another text; the same after another end
        asked = [(0, prompt("go", turns=turns))]
        player.policy = FakeGenerator(lambda _, text=text: text)
        [kept] = player.play(asked, [1])
        [alone] = runner(environments, player.policy).play(asked, [1])
        assert kept.sample.tokens.tolist() == alone.sample.tokens.tolist() and kept.turns == turns


def test_each_turn_has_a_seed_for_its_own_that_company_does_not_change(environments):
    def seeds(prompts, of):
        generator = FakeGenerator(lambda _: "a<|end|>")
        runner(environments, generator).play(prompts, of)
        return [request.seed for request in generator.requests]

    alone = seeds([(0, prompt("a", turns=3))], [11])
    assert alone == [11, seed_for(11, 1, 0), seed_for(11, 2, 0)] and len(set(alone)) == 3
    together = seeds([(7, prompt("b", turns=1)), (0, prompt("a", turns=3))], [12, 11])
    assert together == [12, *alone]


@pytest.mark.parametrize("limit", range(1, 40))
def test_all_turns_together_stay_within_the_limit(environments, limit):
    generator = FakeGenerator(lambda _: "four<|end|>")
    asked = [(0, prompt("go", turns=3)), (1, prompt("go", turns=1))]
    long, short = runner(environments, generator, max_tokens=limit).play(asked, [1, 2])
    reply, between = 5, len(ids("<|user|>")) + len("<|end|>2") + len(ids("<|end|><|assistant|>"))
    lengths = [len(rollout.sample) - len(rollout.prompt.tokens) for rollout in (long, short)]
    whole = 3 * reply + 2 * between
    # A turn of the environment with no room for a reply after it is left out.
    fits = [turn for turn in range(3) if turn * (reply + between) < limit]
    expected = min(whole, limit, len(fits) * reply + (len(fits) - 1) * between)
    assert lengths == [expected, min(reply, limit)]
    assert long.sample.finish == ("stop" if limit >= whole else "length")
    assert short.sample.finish == ("stop" if limit >= reply else "length")
    assert long.sample.mask[-1] and long.turns == len(fits)
    assert all(sampling.max_tokens <= limit for sampling in generator.samplings)


def test_each_has_its_own_room_left(environments):
    """One call for all turns may generate as much as the one with the most room; the others are cut."""
    opened = {"long": "x" * 30 + "<|end|>", "short": "y<|end|>"}

    def words(request):
        text = TOKENIZER.decode(request.prompt)
        first = text.count("<|assistant|>") == 1
        return opened["long" if "long" in text else "short"] if first else "z" * 60

    asked = [(0, prompt("long", turns=2)), (1, prompt("short", turns=2))]
    rollouts = runner(environments, FakeGenerator(words), max_tokens=64).play(asked, [1, 2])
    for rollout, first in zip(rollouts, (31, 2), strict=True):
        assert len(rollout.sample) - len(rollout.prompt.tokens) == 64 and rollout.sample.finish == "length"
        second = rollout.completion_tokens - first
        assert rollout.text == "z" * second and rollout.messages[-1]["content"] == rollout.text
        assert rollout.sample.logprobs[-1] == pytest.approx(-0.01 * second)


def test_a_reply_that_a_text_ended_is_ended_by_the_template(environments):
    said = iter(["x STOP", "y<|end|>"])
    generator = FakeGenerator(lambda _: next(said))
    [rollout] = runner(environments, generator).play([(0, prompt("go", turns=2))], [1])
    whole = TOKENIZER.decode(rollout.sample.tokens)
    assert whole == "<s><|user|>go<|end|><|assistant|>x STOP<|end|><|user|><|end|>1<|end|><|assistant|>y<|end|>"


def test_without_a_template_texts_follow_each_other(environments):
    plain = build_tokenizer()
    plain.chat_template = None
    said = iter(["one", "two"])
    generator = FakeGenerator(lambda _: next(said) + "STOP")
    [rollout] = runner(environments, generator, plain).play([(0, prompt("go", turns=2))], [1])
    assert plain.decode(rollout.sample.tokens) == "goone" + "STOP" + "<|end|>1" + "two" + "STOP"
    assert END not in rollout.sample.tokens


def test_a_failure_is_marked_and_left_out(environments):
    said = iter(["a", "fail", "b", "c"])
    generator = FakeGenerator(lambda _: next(said) + "<|end|>")
    asked = [(0, prompt("a", turns=2)), (0, prompt("b", turns=2))]
    good, bad = runner(environments, generator).play(asked, [1, 2])
    assert not good.failure and good.turns == 2
    assert bad.failure.startswith("environment: ") and "ValueError: no" in bad.failure
    assert bad.sample.finish == "error" and bad.text == "fail"
    with pytest.raises(RewardError, match="failed in 2 of 2"):
        runner(environments, FakeGenerator(lambda _: "fail")).play(asked, [1, 2])


def test_openings_that_cannot_be_are_failures(file):
    with Environments(f"{file}:Long", workers=1, max_failure_rate=1.0) as environments:
        play = runner(environments, FakeGenerator(lambda _: "a<|end|>"))
        sizes = (96, 97)  # and 4 control tokens; data.max_length is 100
        first, second = play.play([(0, prompt("q", turns=1, size=size)) for size in sizes], [1, 2])
        assert second.failure == "environment: the messages that start returned have 101 tokens; data.max_length is 100"
        assert "self.left" in first.failure or "AttributeError" in first.failure  # it was asked, and then failed
    with Environments(f"{file}:Tool", workers=1, max_failure_rate=1.0) as environments:
        [rollout] = runner(environments, FakeGenerator(lambda _: "a<|end|>")).play([(0, prompt("q", turns=1))], [1])
        assert "pico knows the roles" in rollout.failure


def test_one_turn_is_what_it_is_without_environment(environments, policy):
    asked = [(n, prompt(f"{n}+1=", turns=1)) for n in range(3)]
    sampling = replace(SAMPLING, max_tokens=12)
    plain = generate_rollouts(policy, asked, [5, 6, 7], sampling, TOKENIZER)
    played = runner(environments, policy, max_tokens=12).play(asked, [5, 6, 7])
    for one, other in zip(plain, played, strict=True):
        assert one.sample.tokens.tolist() == other.sample.tokens.tolist()
        assert one.sample.logprobs.tolist() == other.sample.logprobs.tolist()
        assert (one.text, one.sample.finish) == (other.text, other.sample.finish)


def test_log_probabilities_are_those_of_the_whole_sequence(environments, policy):
    """Sampler and trainer agree on every turn, whatever stands between."""
    stops = tuple(chr(letter) for letter in range(97, 123))  # a random model ends a turn soon
    play = runner(environments, policy, max_tokens=200, stop_texts=stops)
    rollouts = play.play([(n, prompt(f"{n}?", turns=3)) for n in range(4)], [1, 2, 3, 4])
    assert max(rollout.turns for rollout in rollouts) == 3
    for rollout, exact in zip(rollouts, policy.logprobs([rollout.sample for rollout in rollouts]), strict=True):
        assert np.abs(rollout.sample.logprobs - exact)[rollout.sample.mask].max() < 1e-4
    [again] = play.play([(2, prompt("2?", turns=3))], [3])
    assert again.sample.tokens.tolist() == rollouts[2].sample.tokens.tolist()


def test_greedy_takes_no_chances(environments, policy):
    play = runner(environments, policy, max_tokens=8)
    asked = [(0, prompt("1?", turns=1))] * 2
    one, other = play.play(asked, [1, 2], greedy=True)
    assert one.sample.tokens.tolist() == other.sample.tokens.tolist()


def test_turns_have_their_tokens_rewards_and_states(file):
    said = iter(["one", "two", "three"])
    with Environments(f"{file}:Known", workers=1) as environments:
        [rollout] = runner(environments, FakeGenerator(lambda _: next(said) + "<|end|>")).play(
            [(0, prompt("go", turns=3))], [1]
        )
    sample = rollout.sample
    assert [TOKENIZER.decode(sample.tokens[first:end]) for first, end, _, _ in sample.turns] == [
        "one<|end|>",
        "two<|end|>",
        "three<|end|>",
    ]
    assert [(reward, state) for _, _, reward, state in sample.turns] == [
        (0.25, "3 left"),
        (0.25, "2 left"),
        (1.0, "1 left"),
    ]
    assert sum(end - first for first, end, _, _ in sample.turns) == sample.mask.sum()
    row = as_row(rollout, 1)
    assert from_row(json.loads(json.dumps(row))).sample.turns == sample.turns


def test_a_state_must_be_a_text(file):
    with Environments(f"{file}:Stateless", workers=1, max_failure_rate=1) as environments:
        [rollout] = runner(environments, FakeGenerator(lambda _: "a<|end|>")).play([(0, prompt("go", turns=1))], [1])
    assert "it must be a text that is not empty" in rollout.failure

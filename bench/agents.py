"""Measure how busy tools leave the device: episodes of several turns, in lock step and concurrently.

    python -m bench agents [--shapes 0.5b,1.5b] [--sequences EPISODES_AT_A_TIME] [--out FILE]

Every reply has full length. After each, a tool takes a time that is log-normally distributed, with mean 2 s and a
standard deviation of 2 s; on a CPU half of that, since replies are short. The share is that of the time in which
the engine computes replies. Lock step plays the first quarter of the episodes, since it takes long.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.common import GPU, SHAPES, Options, Result
from posttrain.cluster.local import LocalPool
from posttrain.config.sections import ModelConfig, OnlineConfig, TrainConfig
from posttrain.core.types import Prompt, Sample
from posttrain.engines.base import Sampling
from posttrain.models.pico import build_tokenizer
from posttrain.rollout.environments import Environments
from posttrain.rollout.episodes import EpisodeRunner, TokenizedEpisode
from posttrain.train.learner import Learner
from posttrain.train.learner_group import LearnerGroup

EPISODES, TOGETHER, TURNS, REPLY = (512, 128, 4, 128) if GPU else (32, 8, 3, 8)
MEAN_SECONDS = 2.0 if GPU else 1.0
LOCK_STEP_SHARE = 4
ENVIRONMENT = """
import random, time

class SlowTool:
    def start(self, example):
        self.times = random.Random(str(example["number"]))
        self.left, self.seconds = example["turns"], example["seconds"]
        return example["messages"]

    def step(self, reply):
        self.left -= 1
        sigma = 0.8325546111576977  # sqrt(ln 2): the standard deviation is the mean
        time.sleep(self.times.lognormvariate(-sigma**2 / 2, sigma) * self.seconds)
        return (None, 1.0) if not self.left else ([{"role": "user", "content": "and then?"}], 0.0)
"""


def measure_agents(options: Options) -> None:
    for name in options.chosen("0.5b", "1.5b"):
        with common.saved_model(SHAPES[name]) as folder:
            compare(name, folder, options)


def compare(name: str, folder: str, options: Options) -> None:
    together = options.sequences or TOGETHER
    learner = LocalPool().start("actor", Learner, ModelConfig(path=folder), TrainConfig(), trainable=False)
    policy = LearnerGroup(learner)
    tokenizer = build_tokenizer()  # every vocabulary has at least its tokens
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "tool.py").write_text(ENVIRONMENT)
        with Environments(f"{work}/tool.py:SlowTool", workers=together, timeout_seconds=120) as environments:
            for schedule, count in (("lock_step", EPISODES // LOCK_STEP_SHARE), ("concurrent", EPISODES)):
                sampling = Sampling(max_tokens=TURNS * (REPLY + 64))
                runner = FixedLength(environments, policy, settings(schedule, together), sampling, tokenizer)
                play(runner, tokenizer, together, 0.0)  # starts the processes, captures graphs
                found[schedule] = play(runner, tokenizer, count, MEAN_SECONDS)
                print(f"agents {name} {schedule}: {found[schedule].text}", flush=True)
    work_done = f"{EPISODES}, {together} at a time, {TURNS} turns of {REPLY} tokens, tools {MEAN_SECONDS:g} s"
    result = Result(
        what=f"episodes {name}, {work_done}",
        ours="; ".join(f"{how}: {each.text}" for how, each in found.items()),
    )
    result.ratio = found["lock_step"].seconds_per_episode / found["concurrent"].seconds_per_episode
    common.record(result, options)


@dataclass(frozen=True, slots=True)
class Measured:
    episodes: int
    seconds: float
    engine_seconds: float

    @property
    def seconds_per_episode(self) -> float:
        return self.seconds / self.episodes

    @property
    def text(self) -> str:
        busy = self.engine_seconds / self.seconds
        return f"{self.episodes} episodes in {self.seconds:.3g} s, device busy {busy:.1%}"


class FixedLength(EpisodeRunner):
    """Plays episodes whose replies all have the same length; random weights end none of their turns."""

    def room(self, tokenized: TokenizedEpisode) -> int:
        return REPLY

    def add_reply(self, tokenized: TokenizedEpisode, sample: Sample, seconds: float) -> None:
        super().add_reply(tokenized, sample, seconds)
        tokenized.finish = "stop"


def play(runner: EpisodeRunner, tokenizer: Any, count: int, seconds: float) -> Measured:
    asked = episodes(tokenizer, count, seconds)
    before, began = runner.engine_seconds, time.perf_counter()
    rollouts = runner.play(asked, range(count))
    took = time.perf_counter() - began
    assert all(rollout.turns == TURNS for rollout in rollouts), "an episode ended early"
    return Measured(count, took, runner.engine_seconds - before)


def settings(schedule: Any, together: int) -> OnlineConfig:
    config = OnlineConfig()
    config.data.max_length = 256
    config.rollout.environment_schedule, config.rollout.max_concurrent_episodes = schedule, together
    return config


def episodes(tokenizer: Any, count: int, seconds: float) -> list[tuple[int, Prompt]]:
    messages = [{"role": "user", "content": "Use the tool."}]
    tokens = np.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"], dtype=np.int32)
    given = {"turns": TURNS, "seconds": seconds}
    return [
        (number, Prompt(tokens=tokens, messages=messages, columns={"number": number, **given}))
        for number in range(count)
    ]

"""What an algorithm is: the data it eats, the helpers it needs, how it scores samples, its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from posttrain.core.types import Batch, ExampleKind, Head, Loss, Objective, Outputs, Request, Sample, Unit

ALGORITHMS: dict[str, type[Algorithm]] = {}


class Algorithm:
    """One file, one subclass. `score` runs on the controller over a whole batch; `loss` on the worker over a pack."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Options of the section `algo`."""

    name: ClassVar[str]
    rows: ClassVar[ExampleKind]
    """What a data row must be."""
    unit: ClassVar[Unit]
    """What the loss is a sum over, and so what the learner divides by."""
    group_size: ClassVar[int] = 1
    """Samples of a row that the packer must keep in one pack, side by side."""
    least_rows: ClassVar[int] = 1
    """Fewest rows that a step can be made of."""
    separable: ClassVar[bool] = False
    """Each token's part of the loss reads no other token's log-probability. Then logits are computed once, not twice;
    every step checks that it is so."""
    head: ClassVar[Head] = "token"
    """token: a language model; score: a one-number head on the same trunk."""
    online: ClassVar[bool] = False
    """Learns from its own answers to the rows' prompts, instead of from the rows."""
    defaults: ClassVar[dict[str, Any]] = {}
    """Options of other sections that this algorithm wants otherwise, as {"update.learning_rate": 5e-7}."""

    def __init__(self, config: Algorithm.Config) -> None:
        self.config: Any = config
        self.check()

    def check(self) -> None:
        """Raise UsageError where two options conflict; called before any model is loaded."""

    def outputs(self) -> set[str]:
        """Fields of `Outputs` that the loss reads."""
        return {"logprobs"}

    def needs(self) -> set[str]:
        """What helpers must fill before `score`: ref_logprobs, logprobs or old_logprobs (the policy's own), values."""
        return set()

    def reference(self) -> str:
        """Path of the reference model that fills ref_logprobs; empty: the policy as it was at the start."""
        return ""

    def renewal(self) -> int:
        """The reference becomes the policy of then after every so many steps; 0: it stays what it is."""
        return 0

    def precomputes(self) -> bool:
        """Whether ref_logprobs of all rows are filled before training, so that the reference can be freed."""
        return False

    def teacher(self) -> str:
        """Path of the teacher, if there is one."""
        return ""

    def placeholder(self) -> str:
        """Text of the token that ends each step of a stepwise row."""
        return ""

    def stratum(self, sample: Sample) -> float:
        """Rows that differ in this are spread evenly over an epoch, so that every step has its share of each."""
        return 0.0

    def prepare(self, samples: list[Sample]) -> list[Sample]:
        """Add samples that only help to score, before helpers fill what is needed; `score` takes them out again."""
        return samples

    def fills(self, name: str, sample: Sample) -> bool:
        """Whether what `needs` names must be filled for this sample too."""
        return True

    def score(self, samples: list[Sample]) -> list[Sample]:
        """Write what depends on the whole batch into the samples; return those to train on."""
        return samples

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        raise NotImplementedError

    def request(self, token_id: Callable[[str], int]) -> Request:
        """What the forward pass must compute; `token_id` turns the text of one token into its id."""
        return Request(names=frozenset(self.outputs()))

    def objective(self, request: Request) -> Objective:
        """What a learner must know."""
        return Objective(
            request=request, loss=self.loss, unit=self.unit, group_size=self.group_size, separable=self.separable
        )

    def annotations(self) -> dict[str, Any]:
        """Facts that users of the trained model need, written into its config.json."""
        return {}


def register(name: str) -> Any:
    """Class decorator: make an algorithm a verb."""

    def enter(cls: type[Algorithm]) -> type[Algorithm]:
        assert name not in ALGORITHMS, f"two algorithms named {name}"
        cls.name = name
        ALGORITHMS[name] = cls
        return cls

    return enter


def groups(samples: list[Sample]) -> Iterator[list[Sample]]:
    """Neighbours that share a group."""
    for _, members in groupby(samples, key=lambda sample: sample.group):
        yield list(members)

"""Teachers that are asked about the student's completions before the update: local models, services, the policy itself.

Each prompt has one teacher, which may see more than the student (a context), or have another tokenizer. A teacher
returns its log-probability of each sampled token, which becomes `ref_logprobs`, or its likeliest tokens, which become
`teacher_ids` and `teacher_logprobs`. Nothing of the size tokens x vocabulary leaves a model.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from posttrain.algorithms.base import TeacherSettings
from posttrain.core.errors import DataError, PosttrainError, UsageError
from posttrain.core.types import Floats, Ints, Prompt, Sample, SamplingDistribution
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.examples import PromptExample
from posttrain.rewards.remote import JsonService, RefusedRequestError, RemoteError
from posttrain.rollout.records import Rollout
from posttrain.train.alignment import TextAlignment
from posttrain.train.learner_group import LearnerGroup

Listed = tuple[Ints, Floats]
SERVICE_THREADS = 8  # requests at a time
SERVICE_RESPONSE_BYTES = 256 * 2**20


class Teacher(Protocol):
    """Anything that knows probabilities of tokens."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the log-probability of each counted token, 0 elsewhere."""
        ...

    def likeliest(self, samples: Sequence[Sample], count: int, temperature: float) -> list[Listed]:
        """Return the likeliest tokens at each counted place and their log-probabilities: [tokens, count]."""
        ...


class LocalTeacher:
    """A frozen model, or the policy itself."""

    def __init__(
        self,
        model: LearnerGroup,
        on_device: Callable[[], AbstractContextManager[None]],
        distribution: SamplingDistribution,
    ) -> None:
        self.model, self.on_device, self.distribution = model, on_device, distribution

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        with self.on_device():
            return self.model.logprobs(samples, distribution=self.distribution)

    def likeliest(self, samples: Sequence[Sample], count: int, temperature: float) -> list[Listed]:
        with self.on_device():
            return self.model.likeliest(samples, count, temperature)


class ServiceTeacher:
    """A model behind an OpenAI-compatible address that returns `prompt_logprobs`: `posttrain serve`, vLLM."""

    def __init__(self, address: str, settings: TeacherSettings) -> None:
        key = settings.api_key_env
        if key and key not in os.environ:
            raise UsageError(f"algo.teacher_api_key_env: {key} is not set in this environment: export it")
        self.address, self.model = address.rstrip("/"), settings.service_model
        self.service = JsonService(
            f"{self.address}/completions", settings.timeout_seconds, token=os.environ.get(key, "") if key else ""
        )
        self.service.response_limit = SERVICE_RESPONSE_BYTES

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        found = []
        for sample, places in zip(samples, self.ask(samples, 0), strict=True):
            stream = np.zeros(len(sample), dtype=np.float32)
            for place in np.flatnonzero(sample.mask):
                stream[place] = places[place][int(sample.tokens[place])]
            found.append(stream)
        return found

    def likeliest(self, samples: Sequence[Sample], count: int, temperature: float) -> list[Listed]:
        assert temperature == 1.0, "refused by the algorithm"
        found = []
        for sample, places in zip(samples, self.ask(samples, count), strict=True):
            ids, logprobs = np.zeros((len(sample), count), np.int32), np.zeros((len(sample), count), np.float32)
            for place in np.flatnonzero(sample.mask):
                best = sorted(places[place].items(), key=lambda item: (-item[1], item[0]))[:count]
                if len(best) < count:
                    raise PosttrainError(
                        f"{self.address} returned {len(best)} likeliest tokens instead of {count}: lower "
                        "algo.divergence_top_k, or raise the limit of the service (vLLM: --max-logprobs)"
                    )
                ids[place], logprobs[place] = zip(*best, strict=True)
            found.append((ids, logprobs))
        return found

    def ask(self, samples: Sequence[Sample], count: int) -> list[list[dict[int, float]]]:
        """Return the log-probabilities by token at each place of each sample, the sampled token's among them."""
        with ThreadPoolExecutor(SERVICE_THREADS, thread_name_prefix="teacher") as threads:
            return list(threads.map(lambda sample: self.ask_one(sample, count), samples))

    def ask_one(self, sample: Sample, count: int) -> list[dict[int, float]]:
        body: dict[str, Any] = {"prompt": sample.tokens.tolist(), "max_tokens": 1, "prompt_logprobs": count}
        body |= {"model": self.model} if self.model else {}
        try:
            response = self.service.post(body | {"temperature": 0})
        except (RemoteError, RefusedRequestError) as error:
            raise PosttrainError(f"algo.teacher: {error}") from None
        try:
            listed = response["choices"][0]["prompt_logprobs"]
            places = [{int(token): float(entry["logprob"]) for token, entry in (each or {}).items()} for each in listed]
        except (LookupError, TypeError, ValueError, AttributeError):
            raise PosttrainError(
                f"{self.address} did not return prompt_logprobs: it must be a server that does, such as vLLM's or "
                f"posttrain serve; the response begins with {str(response)[:200]}"
            ) from None
        wanted = np.flatnonzero(sample.mask)
        if len(places) != len(sample) or any(int(sample.tokens[p]) not in places[p] for p in wanted):
            raise PosttrainError(
                f"{self.address} returned probabilities of {len(places)} other tokens than the {len(sample)} that were "
                "sent: does it have the student's vocabulary?"
            )
        return places


class TeacherPrompts:
    """Makes the prompt that a teacher sees, with what the student does not see."""

    def __init__(self, encoder: Encoder, column: str) -> None:
        self.encoder, self.column = encoder, column

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise DataError for the first prompt without context, or which cannot be rendered again."""
        for prompt in prompts:
            if self.column not in prompt.columns:
                raise DataError(f"{prompt.origin}: there is no column {self.column} (algo.teacher_context_column)")
            self.tokens(prompt)

    def tokens(self, prompt: Prompt) -> Ints:
        """Return the tokens of the prompt with its context."""
        plain = self.is_plain(prompt)
        return self.render(self.messages(prompt), plain, prompt.origin)

    def messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        context = prompt.columns[self.column]
        if isinstance(context, list):
            return context
        if not isinstance(context, str):
            raise DataError(
                f"{prompt.origin}: {self.column}: expected a text or a list of messages, found {type(context).__name__}"
            )
        messages = [dict(message) for message in prompt.messages]
        asked = [message for message in messages if message["role"] == "user"]
        if not asked or not isinstance(asked[-1]["content"], str):
            raise DataError(f"{prompt.origin}: {self.column} belongs before a user message of text, and there is none")
        asked[-1]["content"] = f"{context}\n\n{asked[-1]['content']}"
        return messages

    def is_plain(self, prompt: Prompt) -> bool:
        """Whether the prompt is a text without a template."""
        for plain in (False, True):
            if np.array_equal(self.render(prompt.messages, plain, prompt.origin), prompt.tokens):
                return plain
        raise DataError(
            f"{prompt.origin}: the prompt cannot be rendered again from its messages (it has tools, or a template of "
            "its own), so no context can be added for the teacher"
        )

    def render(self, messages: list[dict[str, Any]], plain: bool, origin: str) -> Ints:
        example = PromptExample(prompt=messages, plain=plain, origin=origin)
        (prompt,) = self.encoder.prompts([example])
        if prompt is None:
            raise DataError(f"{origin}: the teacher's prompt is longer than data.max_length")
        return prompt.tokens


class Teachers:
    """Asks each rollout's teacher and writes the result into the sample."""

    def __init__(
        self,
        teachers: Sequence[Teacher],
        settings: TeacherSettings,
        prompts: TeacherPrompts | None = None,
        alignment: TextAlignment | None = None,
    ) -> None:
        self.teachers, self.settings, self.prompts, self.alignment = teachers, settings, prompts, alignment
        self.metrics: dict[str, float] = {}  # of the batch that was filled last

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise DataError for the first prompt that has no teacher or no context."""
        for prompt in prompts:
            self.number_of(prompt)
        if self.prompts is not None:
            self.prompts.check(prompts)

    def number_of(self, prompt: Prompt) -> int:
        """Return the number of a prompt's teacher."""
        column, names = self.settings.column, self.settings.names
        if not column:
            return 0
        if prompt.columns.get(column) not in names:
            raise DataError(
                f"{prompt.origin}: {column}: {prompt.columns.get(column)!r} is not one of algo.teacher_names, "
                f"{', '.join(names)}"
            )
        return names.index(prompt.columns[column])

    def fill(self, rollouts: Sequence[Rollout]) -> None:
        """Ask all teachers; `logprobs` of the samples are known."""
        groups: dict[int, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            groups[self.number_of(rollout.prompt)].append(rollout)
        self.metrics = {}
        for number, members in sorted(groups.items()):
            if self.alignment is not None:
                self.fill_aligned(self.teachers[number], self.alignment, members)
                continue
            views = [self.view(rollout) for rollout in members]
            if self.settings.top_k:
                lists = self.teachers[number].likeliest(views, self.settings.top_k, self.settings.temperature)
                for rollout, view, (ids, logprobs) in zip(members, views, lists, strict=True):
                    sample = rollout.sample
                    sample.teacher_ids, sample.teacher_logprobs = (
                        moved(ids, view, sample),
                        moved(logprobs, view, sample),
                    )
            else:
                streams = self.teachers[number].logprobs(views)
                for rollout, view, stream in zip(members, views, streams, strict=True):
                    rollout.sample.ref_logprobs = moved(stream, view, rollout.sample)

    def view(self, rollout: Rollout) -> Sample:
        """Return the sample as its teacher sees it: with another prompt, if there is a context."""
        sample = rollout.sample
        if self.prompts is None:
            return Sample(tokens=sample.tokens, mask=sample.mask, origin=sample.origin)
        before, prompt = len(rollout.prompt.tokens), self.prompts.tokens(rollout.prompt)
        mask = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), sample.mask[before:]])
        return Sample(tokens=np.concatenate([prompt, sample.tokens[before:]]), mask=mask, origin=sample.origin)

    def fill_aligned(self, teacher: Teacher, alignment: TextAlignment, rollouts: Sequence[Rollout]) -> None:
        """Write log-probabilities of a teacher with another tokenizer, spread over the student's tokens."""
        aligned = [alignment.align(rollout) for rollout in rollouts]
        known = [each for each in aligned if each is not None]
        if not known:
            raise PosttrainError(
                f"algo.teacher_tokenizer: none of {len(rollouts)} completions could be aligned with the tokens of the "
                f"teacher; the first is {rollouts[0].text[:100]!r}"
            )
        streams = iter(teacher.logprobs([each.view for each in known]))
        for rollout, each in zip(rollouts, aligned, strict=True):
            sample = rollout.sample
            own = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
            assert own is not None
            sample.ref_logprobs = own.copy() if each is None else each.spread(own, next(streams))
        missing = len(aligned) - len(known)
        self.metrics["unaligned"] = self.metrics.get("unaligned", 0.0) + float(missing)


def moved(values: Any, view: Sample, sample: Sample) -> Any:
    """Move values per token from the teacher's view, whose prompt may be longer, to the sample."""
    result = np.zeros((len(sample), *values.shape[1:]), dtype=values.dtype)
    result[sample.mask] = values[view.mask]
    return result

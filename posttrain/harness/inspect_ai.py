"""inspect-ai (of the UK's AI Security Institute) through the local engine; the only module that imports it.

Its samples run concurrently; requests that wait while the engine generates are the engine's next batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import Ints, Sample
from posttrain.engines.base import GenerationRequest, Sampling, seed_for
from posttrain.harness.base import EvaluatedModel, HarnessScores, HarnessTasks, figure_of

MAX_TOKENS = 2048  # of a completion, if the task does not say; as inspect-ai's own provider for Hugging Face


def check_tasks(config: HarnessTasks) -> None:
    """Raise UsageError if inspect-ai is not installed or a file of tasks does not exist."""
    try:
        import inspect_ai  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"--harness inspect-ai needs inspect-ai: pip install inspect-ai ({error})") from None
    for name in ("num_fewshot", "apply_chat_template"):
        if getattr(config, name) != HarnessTasks.__dataclass_fields__[name].default:
            raise UsageError(
                f"{name} is an option of lm-eval: tasks of inspect-ai decide their prompts, which are chats"
            )
    for task in config.tasks:
        file = task.partition("@")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise UsageError(f"{file}: there is no such file; a task is FILE.py, FILE.py@TASK or package/TASK")


def evaluate(config: HarnessTasks, model: EvaluatedModel) -> HarnessScores:
    """Run the tasks with inspect-ai's `eval`, and return its scores."""
    from inspect_ai import eval as run_tasks

    logs = run_tasks(
        list(config.tasks),
        model=language_model(config, model),
        limit=config.max_examples or None,
        display="none",
        log_dir=config.log_dir or None,
        log_format="json",
        max_connections=config.batch_size,
        max_samples=config.batch_size,
        max_retries=0,
        fail_on_error=True,
    )
    rows: list[dict[str, Any]] = []
    figures = {}
    for log in logs:
        if log.status != "success" or log.results is None:
            reason = log.error.message if log.error else log.status
            raise PosttrainError(f"the task {log.eval.task} of inspect-ai did not end: {reason}")
        task = log.eval.task.rpartition("/")[2]
        found = rows_of(task, log.samples or [])
        rows += found
        for score in log.results.scores:
            for name, metric in score.metrics.items():
                if name in ("stderr", "std", "var"):
                    continue
                stderr = score.metrics.get("stderr")
                examples = [row["scores"][score.name] for row in found if score.name in row["scores"]]
                figures[f"{task}/{score.name} {name}"] = figure_of(
                    float(metric.value), examples, None if stderr is None else float(stderr.value)
                )
    return HarnessScores(figures, rows)


def rows_of(task: str, samples: list[Any]) -> list[dict[str, Any]]:
    """Return a row for each sample; a score that is a letter (C, P, I) is the number that inspect-ai counts it as."""
    from inspect_ai.scorer import value_to_float

    as_number = value_to_float()
    rows = []
    for sample in samples:
        messages = sample.input if isinstance(sample.input, str) else [message.text for message in sample.input]
        identity = json.dumps([task, str(sample.id), sample.epoch, messages, sample.target])
        scores = {
            name: as_number(score.value)
            for name, score in (sample.scores or {}).items()
            if isinstance(score.value, str | int | float | bool)
        }
        rows.append(
            {
                "task": task,
                "index": sample.id,
                "key": hashlib.sha256(identity.encode()).hexdigest()[:24],
                "scores": scores,
                "target": str(sample.target),
                "replies": [sample.output.completion],
            }
        )
    return rows


@dataclass(slots=True)
class Batches:
    """Collects requests while the engine generates, and generates those of the same sampling settings together."""

    model: EvaluatedModel
    waiting: list[tuple[GenerationRequest, Sampling, asyncio.Future[Sample]]] = field(default_factory=list)
    running: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest, sampling: Sampling) -> Sample:
        result: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self.waiting.append((request, sampling, result))
        if self.running is None or self.running.done():
            self.running = asyncio.create_task(self.run())
        return await result

    async def run(self) -> None:
        await asyncio.sleep(0)  # others that are ready now join the first batch
        while self.waiting:
            sampling = self.waiting[0][1]
            batch = [each for each in self.waiting if each[1] == sampling]
            self.waiting = [each for each in self.waiting if each[1] != sampling]
            requests = [request for request, _, _ in batch]
            try:
                samples = await asyncio.to_thread(self.model.generate, requests, sampling)
            except Exception as error:
                for _, _, result in batch:
                    if not result.done():
                        result.set_exception(error)
                raise
            for (_, _, result), sample in zip(batch, samples, strict=True):
                if not result.done():
                    result.set_result(sample)


def language_model(config: HarnessTasks, model: EvaluatedModel) -> Any:
    """Return inspect-ai's model, whose completions the local engine generates."""
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessageAssistant,
        ModelAPI,
        ModelOutput,
        ModelUsage,
        get_model,
        modelapi,
    )

    batches, seeds = Batches(model), RequestSeeds()

    @modelapi(name="posttrain")
    class EngineAPI(ModelAPI):  # type: ignore[misc]
        """Encodes conversations by the model's chat template and generates replies."""

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            if tools:
                raise UsageError("the task has tools: evaluate it through `posttrain serve`, which parses tool calls")
            messages = [{"role": message.role, "content": text_of(message)} for message in input]
            prompt = model.encode(messages).tokens
            sampling = sampling_of(config, model, len(prompt))
            request = GenerationRequest(prompt=prompt, seed=seeds.next_seed(prompt, config.seed or seed))
            sample = await batches.generate(request, sampling)
            tokens = sample.tokens[len(prompt) :]
            text = model.tokenizer.decode(tokens, skip_special_tokens=True)
            for stop in sampling.stop_texts:
                text = text.split(stop)[0]
            choice = ChatCompletionChoice(
                message=ChatMessageAssistant(content=text, model=self.model_name, source="generate"),
                stop_reason="max_tokens" if sample.finish == "length" else "stop",
            )
            usage = ModelUsage(
                input_tokens=len(prompt), output_tokens=len(tokens), total_tokens=len(prompt) + len(tokens)
            )
            return ModelOutput(model=self.model_name, choices=[choice], usage=usage)

        def max_connections(self) -> int:
            return batch_size

    seed, batch_size = config.seed, config.batch_size
    return get_model(f"posttrain/{model.name}", memoize=False)


def text_of(message: Any) -> str:
    """Return the content of a message; UsageError if a part of it is no text."""
    parts = [] if isinstance(message.content, str) else [part.type for part in message.content]
    if other := set(parts) - {"text", "reasoning"}:
        raise UsageError(f"the task has messages with {min(other)}, which the local engine does not read")
    return str(message.text)


@dataclass(slots=True)
class RequestSeeds:
    """Gives each request a seed by its prompt and by how often the prompt came before, as it does in several epochs."""

    counts: Counter[int] = field(default_factory=Counter)

    def next_seed(self, prompt: Ints, seed: int) -> int:
        """Return a seed that depends on the prompt, not on the order in which other prompts come."""
        digest = int.from_bytes(hashlib.sha256(prompt.astype(np.int64).tobytes()).digest()[:6], "little")
        self.counts[digest] += 1
        return seed_for(seed, digest, self.counts[digest] - 1)


def sampling_of(config: Any, model: EvaluatedModel, prompt: int) -> Sampling:
    """Translate the generation settings of a task; without a temperature the most likely tokens are taken."""
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "response_schema"):
        if getattr(config, name, None):
            raise UsageError(f"a task sets {name}, which the local engine does not have")
    if (config.num_choices or 1) != 1:
        raise UsageError("a task sets num_choices; use epochs for several completions of a sample")
    most = config.max_tokens or MAX_TOKENS
    room = most if model.context is None else min(most, model.context - prompt)
    if room < 1:
        raise UsageError(f"a prompt has {prompt} tokens; the model has {model.context} positions")
    return Sampling(
        max_tokens=room,
        temperature=config.temperature or 0.0,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        stop_ids=model.stop_ids,
        stop_texts=tuple(config.stop_seqs or ()),
    )

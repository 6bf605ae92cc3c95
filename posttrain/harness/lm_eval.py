"""lm-eval (EleutherAI's evaluation harness) through the local engine; the only module that imports it.

The model is lm-eval's own Hugging Face class with two methods replaced: log-probabilities are computed in packed
micro-batches in which choices share their context, and completions by the engine. Tokenization, truncation and chat
templates stay lm-eval's, so that scores are those of `lm_eval --model hf`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.errors import UsageError
from posttrain.core.types import Sample
from posttrain.engines.base import GenerationRequest, Sampling, seed_for
from posttrain.harness.base import EvaluatedModel, HarnessScores, HarnessTasks, figure_of
from posttrain.nn.forward import continuation_logprobs

BOOTSTRAP_SAMPLES = 1000  # for standard errors of metrics that are not means; lm-eval's 100,000 take minutes
SAMPLING_OPTIONS = {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"}


def check_tasks(config: HarnessTasks) -> None:
    """Raise UsageError if lm-eval is not installed or has no such task."""
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise UsageError(f"--harness lm-eval needs lm-eval: pip install lm-eval ({error})") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = [task for task in config.tasks if not task.endswith((".yaml", ".yml"))]
    for task in set(config.tasks) - set(names):
        if not Path(task).is_file():
            raise UsageError(f"{task}: there is no such file; a task is a name of lm-eval or a YAML file")
    known = set(TaskManager().all_tasks) if names else set()  # it reads thousands of files
    for task in names:
        if task not in known:
            raise UsageError(f"lm-eval has no task {task!r}; `lm_eval ls tasks` lists its {len(known):,} tasks")


def evaluate(config: HarnessTasks, model: EvaluatedModel) -> HarnessScores:
    """Run the tasks with `simple_evaluate`, and return its scores."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    files = {task: str(Path(task).absolute()) for task in config.tasks if Path(task).is_file()}
    found = lm_eval.simple_evaluate(
        model=language_model(config, model),
        tasks=[files.get(task, task) for task in config.tasks],
        task_manager=TaskManager(include_defaults=len(files) < len(config.tasks)),
        num_fewshot=None if config.num_fewshot < 0 else config.num_fewshot,
        limit=config.max_examples or None,
        apply_chat_template=config.apply_chat_template,
        random_seed=config.seed,
        numpy_random_seed=config.seed,
        torch_random_seed=config.seed,
        fewshot_random_seed=config.seed,
        bootstrap_iters=BOOTSTRAP_SAMPLES,
        log_samples=True,
    )
    rows = [row for task, samples in found["samples"].items() for row in rows_of(task, samples)]
    figures = {}
    for task, results in found["results"].items():
        for key, value in results.items():
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            shown = metric_name(metric, name)
            examples = [row["scores"][shown] for row in rows if row["task"] == task and shown in row["scores"]]
            stderr = results.get(f"{metric}_stderr,{name}")
            figures[f"{task}/{shown}"] = figure_of(
                float(value), examples, float(stderr) if isinstance(stderr, int | float) else None
            )
    return HarnessScores(figures, rows)


def metric_name(metric: str, of_filter: str) -> str:
    """Name a metric; lm-eval may compute it from several filters of the same completions."""
    return metric if of_filter == "none" else f"{metric} ({of_filter})"


def rows_of(task: str, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each example: the scores of all filters together."""
    rows: dict[str, dict[str, Any]] = {}
    for sample in samples:
        identity = [task, sample["doc_id"], sample["doc_hash"], sample["prompt_hash"], sample["target_hash"]]
        key = hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
        row = rows.setdefault(key, {"task": task, "index": sample["doc_id"], "key": key, "scores": {}})
        row |= {"target": str(sample["target"]), "replies": sample["resps"]}
        for metric in sample["metrics"]:
            value = sample.get(metric)
            if isinstance(value, bool | int | float | np.number):  # others are aggregated from tuples
                row["scores"][metric_name(metric, sample["filter"])] = float(value)
    return list(rows.values())


def language_model(config: HarnessTasks, model: EvaluatedModel) -> Any:
    """Return lm-eval's model of Hugging Face, computed by the local engine."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

    class EngineLM(HFLM):  # type: ignore[misc]
        """Computes requests with `model` in batches of any number."""

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            found = continuations(model, pairs, self.max_length)
            for (cached, _, _), answer in zip(requests, found, strict=True):
                if cached is not None:
                    self.cache_hook.add_partial("loglikelihood", cached, answer)
            return found

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            texts: dict[int, str] = {}
            groups: dict[str, list[int]] = {}  # requests with the same options are generated together
            for place, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(place)
            for places in groups.values():
                options = normalize_gen_kwargs(requests[places[0]].args[1], self.max_gen_toks)
                eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
                until = handle_stop_sequences(options.pop("until", None), eos=eos)
                most = options.pop("max_gen_toks")
                sampling = sampling_of(options, most, until, model.stop_ids)
                room = self.max_length - most
                if room <= 0:
                    raise UsageError(
                        f"a task asks for {most} tokens, but the model has {self.max_length} positions for prompt and "
                        "completion"
                    )
                for start in range(0, len(places), config.batch_size):
                    batch = places[start : start + config.batch_size]
                    prompts = [self.tok_encode(requests[place].args[0], left_truncate_len=room) for place in batch]
                    for place, tokens in zip(batch, complete(model, prompts, sampling, config.seed), strict=True):
                        texts[place] = postprocess_generated_text(self.tok_decode(tokens), until, None)
                        self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])
            return [texts[place] for place in range(len(requests))]

    return EngineLM(pretrained=model.runner.model, tokenizer=model.tokenizer, batch_size=config.batch_size)


def continuations(
    model: EvaluatedModel, pairs: Sequence[tuple[list[int], list[int]]], max_length: int
) -> list[tuple[float, bool]]:
    """Return the log-probability of each continuation, and whether it is what greedy decoding would generate.

    A context that does not fit is cut off at its beginning.
    """
    sequences, counts = [], []
    for context, continuation in pairs:
        if len(continuation) > max_length:
            raise UsageError(
                f"a task has a continuation of {len(continuation)} tokens, but the model has {max_length} positions"
            )
        sequences.append(np.array((context + continuation)[-(max_length + 1) :], dtype=np.int32))
        counts.append(len(continuation))
    inputs = [Sample(tokens=each[:-1], mask=np.zeros(len(each) - 1, dtype=np.bool_)) for each in sequences]
    found: dict[int, tuple[float, bool]] = {}
    for places in model.pack(inputs):
        batch = [sequences[place] for place in places]
        scored = continuation_logprobs(
            model.runner, batch, [counts[place] for place in places], model.min_shared_prefix
        )
        found |= dict(zip(places, scored, strict=True))
    return [found[place] for place in range(len(sequences))]


def sampling_of(options: dict[str, Any], most: int, until: Sequence[str], stop_ids: tuple[int, ...]) -> Sampling:
    """Translate the generation options of a task; UsageError for one that the engine does not have."""
    if unknown := set(options) - SAMPLING_OPTIONS:
        raise UsageError(f"a task sets the generation option {min(unknown)}, which the local engine does not have")
    sampled = bool(options.get("do_sample"))
    return Sampling(
        max_tokens=int(most),
        temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
        top_p=float(options.get("top_p", 1.0)) if sampled else 1.0,
        top_k=int(options.get("top_k", 0)) if sampled else 0,
        min_p=float(options.get("min_p", 0.0)) if sampled else 0.0,
        repetition_penalty=float(options.get("repetition_penalty", 1.0)),
        stop_ids=stop_ids,
        stop_texts=tuple(text for text in until if text),
    )


def complete(model: EvaluatedModel, prompts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[list[int]]:
    """Return the tokens of one completion per prompt."""
    requests = [
        GenerationRequest(prompt=np.array(prompt, dtype=np.int32), group=place, seed=seed_for(seed, place, 0))
        for place, prompt in enumerate(prompts)
    ]
    samples = model.generate(requests, sampling)
    return [sample.tokens[len(prompt) :].tolist() for prompt, sample in zip(prompts, samples, strict=True)]

"""`posttrain serve MODEL_OR_RUN`: serves a model over HTTP until Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from posttrain.cli.arguments import engine_of, model_of
from posttrain.config.sections import DataConfig
from posttrain.config.tools import (
    LoadArgs,
    SpeculativeArgs,
    TemplateArgs,
    ToolArgs,
    check_at_least,
    positional,
    read_tool,
)
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError
from posttrain.core.imports import importing_libraries

if TYPE_CHECKING:
    from posttrain.endpoint.metrics import ServerMetrics
    from posttrain.server.app import ServeOptions, Service

LONGEST_PROMPT = 2**20  # tokens: the encoder has no limit; the service checks max_length


@dataclass(kw_only=True)
class ServeArgs(TemplateArgs, LoadArgs, SpeculativeArgs, ToolArgs):
    """Options of `posttrain serve`."""

    verb: ClassVar[str] = "serve"
    about: ClassVar[str] = TOOLS["serve"]
    example: ClassVar[str] = "posttrain serve runs/sft-001 --port 8000"

    model: str = positional()
    """Model directory, Hugging Face name, run directory (newest valid checkpoint) or `pico`, a toy model."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than this machine's own needs a token."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    token: str = ""
    """Bearer token that clients must send; it is safer in the environment variable POSTTRAIN_TOKEN."""
    name: str = ""
    """Name of the model for clients; empty: MODEL."""
    adapters: tuple[str, ...] = ()
    """Adapters of the model, each as NAME=DIRECTORY; clients choose one by its name in the field `model`."""
    slots: int = 0
    """Completions that are generated at the same time; 0: 64 on CPU, and up to 512 on a GPU, as memory allows."""
    queue: int = 1024
    """Completions that may wait for a slot."""
    max_tokens: int = 1024
    """Longest completion in tokens."""
    max_length: int = 4096
    """Longest prompt and completion together, in tokens."""
    max_body_mib: float = 2.0
    """Largest request body in MiB."""
    timeout_seconds: float = 600.0
    """Time limit for one request."""
    drain_seconds: float = 30.0
    """Time to finish requests in progress after SIGTERM."""


ARGS = (ServeArgs,)


def named_adapters(options: ServeArgs) -> dict[str, str]:
    """Return the directory of each adapter by its name."""
    found: dict[str, str] = {}
    for entry in options.adapters:
        name, _, folder = entry.partition("=")
        if not (name and folder):
            raise UsageError(f"adapters: {entry!r} is not NAME=DIRECTORY")
        if name in found or name == (options.name or options.model):
            raise UsageError(f"adapters: the name {name} is used twice")
        found[name] = folder
    return found


def run(args: list[str]) -> int:
    """Serve; 0 after SIGTERM when every request was answered, 143 when some were interrupted; 130 after Ctrl-C."""
    options = read_tool(ServeArgs(), args)
    check_at_least(options, slots=0)
    engine_of(options)
    named_adapters(options)
    from posttrain.server.app import METRICS, ApiServer, ServeOptions

    server_options = ServeOptions(
        host=options.host,
        port=options.port,
        token=options.token or os.environ.get("POSTTRAIN_TOKEN", ""),
        name=options.name or options.model,
        queue=options.queue,
        max_tokens=options.max_tokens,
        max_length=options.max_length,
        max_body_mib=options.max_body_mib,
        timeout_seconds=options.timeout_seconds,
        drain_seconds=options.drain_seconds,
    )
    server_options.check()
    import asyncio

    from posttrain.core.logging import quiet_libraries
    from posttrain.endpoint.metrics import ServerMetrics

    quiet_libraries()
    with importing_libraries():
        from posttrain.server import completions, scores

    is_reward_model = scores.has_score_head(options.model)
    metrics = ServerMetrics(METRICS | (scores.METRICS if is_reward_model else completions.METRICS))
    make_service = score_service if is_reward_model else completion_service
    service = make_service(options, server_options, metrics)

    def ready(address: str) -> None:
        names, paths = ", ".join(service.names), ", ".join(service.routes)
        print(f"serving {names} on {address}: {paths}, /v1/models, /health, /metrics. Ctrl-C stops it", flush=True)

    def warn(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return asyncio.run(ApiServer(service, server_options, metrics).run(ready, warn))


def score_service(options: ServeArgs, server_options: ServeOptions, metrics: ServerMetrics) -> Service:
    """Load a reward model, which is served at /v1/score."""
    from posttrain.server.scores import ScoreService
    from posttrain.train.reward_model import RewardModel

    if options.adapters:
        raise UsageError(f"adapters: {options.model} is a reward model; they need a language model")
    data = DataConfig(chat_template=options.chat_template, max_length=options.max_length, on_overlong="error")
    return ScoreService(
        RewardModel.load(model_of(options.model, options), data),
        name=server_options.name,
        queue=server_options.queue,
        seconds=server_options.timeout_seconds,
        metrics=metrics,
    )


def completion_service(options: ServeArgs, server_options: ServeOptions, metrics: ServerMetrics) -> Service:
    """Load a language model, which is served at /v1/chat/completions and /v1/completions."""
    from posttrain.inference.model import InferenceModel
    from posttrain.server.completions import CompletionService

    data = DataConfig(chat_template=options.chat_template, max_length=LONGEST_PROMPT, on_overlong="error")
    model = InferenceModel(model_of(options.model, options), data, named_adapters(options), engine_of(options))
    if options.slots:
        model.engine.max_slots = options.slots
    return CompletionService(
        model,
        name=server_options.name,
        max_tokens=server_options.max_tokens,
        max_length=server_options.max_length,
        queue=server_options.queue,
        seconds=server_options.timeout_seconds,
        metrics=metrics,
    )

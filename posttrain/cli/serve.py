"""`posttrain serve MODEL_OR_RUN`: until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import os
import sys

from posttrain.cli.generate import add_model, add_template, model_of
from posttrain.cli.options import Parser
from posttrain.config.sections import DataConfig
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

LONGEST_PROMPT = 2**20  # tokens; max_length is what counts


def run(args: list[str]) -> int:
    """0 after SIGTERM when every request was answered, 143 when some were cut off; 130 after Ctrl-C."""
    options = parser().parse_args(args)
    from posttrain.server.app import ApiServer, ServeOptions

    asked = ServeOptions(
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
    asked.check()
    if options.slots is not None and options.slots < 1:
        raise UsageError(f"slots is {options.slots}; it must be at least 1.")
    import asyncio

    from posttrain.core.logging import quiet_libraries
    from posttrain.server import app, completions, scores
    from posttrain.server.metrics import ServerMetrics

    quiet_libraries()
    service: app.Service
    model = model_of(options.model, options)
    if scores.has_score_head(options.model):
        from posttrain.inference.score import InferenceRewardModel

        metrics = ServerMetrics(app.METRICS | scores.METRICS)
        data = DataConfig(chat_template=options.template, max_length=asked.max_length, on_overlong="error")
        service = scores.ScoreService(
            InferenceRewardModel(model, data),
            name=asked.name,
            queue=asked.queue,
            seconds=asked.timeout_seconds,
            metrics=metrics,
        )
    else:
        from posttrain.inference.model import InferenceModel

        metrics = ServerMetrics(app.METRICS | completions.METRICS)
        served = InferenceModel(
            model, DataConfig(chat_template=options.template, max_length=LONGEST_PROMPT, on_overlong="error")
        )
        if options.slots:
            served.engine.max_slots = options.slots
        service = completions.CompletionService(
            served,
            name=asked.name,
            max_tokens=asked.max_tokens,
            max_length=asked.max_length,
            queue=asked.queue,
            seconds=asked.timeout_seconds,
            metrics=metrics,
        )

    def ready(address: str) -> None:
        paths = ", ".join(service.routes)
        print(f"serving {asked.name} on {address}: {paths}, /v1/models, /health, /metrics. Ctrl-C ends it", flush=True)

    def warn(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return asyncio.run(ApiServer(service, asked, metrics).run(ready, warn))


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="posttrain serve", description=TOOLS["serve"])
    found.add_argument("model", metavar="MODEL", help="folder, hub name, run folder (its newest checkpoint) or pico")
    found.add_argument("--host", default="127.0.0.1", help="another than this machine alone needs --token (127.0.0.1)")
    found.add_argument("--port", type=int, default=8000, help="0: any free one (8000)")
    found.add_argument(
        "--token", default="", help="what clients must send; better in the environment, as POSTTRAIN_TOKEN"
    )
    found.add_argument("--name", default="", help="what clients call the model; default: MODEL")
    limits = found.add_argument_group("limits")
    limits.add_argument("--slots", type=int, default=None, help="answers made at once (64; on a GPU 512, if they fit)")
    limits.add_argument("--queue", type=int, default=1024, help="answers that may wait for a slot (1024)")
    limits.add_argument("--max_tokens", type=int, default=1024, help="longest answer (1024)")
    limits.add_argument("--max_length", type=int, default=4096, help="longest prompt and answer together (4096)")
    limits.add_argument("--max_body_mib", type=float, default=2.0, help="largest request (2)")
    limits.add_argument("--timeout_seconds", type=float, default=600.0, help="for one request (600)")
    limits.add_argument("--drain_seconds", type=float, default=30.0, help="for requests under way, at the end (30)")
    add_model(found)
    add_template(found.add_argument_group("template"))
    return found

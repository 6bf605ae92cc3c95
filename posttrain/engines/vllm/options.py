"""vLLM's options as users give them, and settings that it cannot have here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.engines.base import Sampling

OPTION = "vllm_options"
FIXED = {
    "model": "it is model.path",
    "tokenizer": "it is model.tokenizer",
    "load_format": "weights come from the trainer",
    "weight_transfer_config": "weights come from the trainer",
    "logprobs_mode": "the trainer needs the log-probabilities of the distribution that tokens are sampled from",
    "enable_lora": "it follows model.lora_rank",
    "max_lora_rank": "it follows model.lora_rank",
    "skip_tokenizer_init": "stop texts need the tokenizer",
    "trust_remote_code": "posttrain runs no code from model repositories",
    "hf_overrides": "the trainer would not apply them",
    "distributed_executor_backend": "the engine runs in the processes of its workers",
    "data_parallel_size": "each worker has an engine of its own",
    "pipeline_parallel_size": "only tensor_parallel_size divides a model here",
    "speculative_config": "the draft model would need training too",
}


def parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of options by vLLM's own names with vLLM's own parser."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class OptionParser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            raise UsageError(f"{OPTION}: {message}")

    known = set(EngineArgs.__dataclass_fields__)
    arguments, names = [], []
    for given, value in options.items():
        name, text = given.strip().lstrip("-").replace("-", "_"), value if isinstance(value, str) else json.dumps(value)
        if name in FIXED:
            raise UsageError(f"{OPTION}: {name} cannot be set: {FIXED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(f"{OPTION}: vLLM has no option {name}" + (f"; did you mean {near[0]}?" if near else ""))
        flag = name.replace("_", "-")
        if text.lower() in ("true", "false"):
            arguments.append(f"--{flag}" if text.lower() == "true" else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", text]
        names.append(name)
    if not names:
        return {}
    read = EngineArgs.add_cli_args(OptionParser()).parse_args(arguments)
    return {name: getattr(read, name) for name in names}


def check_sampling(sampling: Sampling) -> None:
    """Refuse min_p together with top_p: vLLM applies min_p first, the trainer last, which gives two distributions."""
    if sampling.temperature and sampling.min_p > 0.0 and sampling.top_p < 1.0:
        raise UsageError(
            f"top_p is {sampling.top_p:g} and min_p {sampling.min_p:g}: vLLM applies them in another order than the "
            "trainer and the local engine, so that log-probabilities would differ. Set one of them, or use the local "
            "engine."
        )

"""Parses `vllm_options` and refuses settings that do not work with posttrain."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from posttrain.core.errors import UsageError

OPTION = "vllm_options"
VLLM_SHARE = 0.9  # vLLM's own default of gpu_memory_utilization
VLLM_SHARE_BESIDE = 0.4  # with a trainer on the same device
FIXED = {  # options that posttrain sets itself, or that cannot work here, and why
    "model": "it is set by model.path",
    "tokenizer": "it is set by model.tokenizer",
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
    """Parse options under vLLM's own names with vLLM's own parser; raise UsageError for unknown and fixed ones."""
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
    parsed = EngineArgs.add_cli_args(OptionParser()).parse_args(arguments)
    return {name: getattr(parsed, name) for name in names}

"""What the options of tools have in common: verbs without sections, some of whose options are positional.

A tool's options are one dataclass, with the verb, a sentence and an example in its class. Options that several tools
have are in a class of their own here, with the title under which help lists them; names are those of training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from posttrain.config.help import field_docs, help_text
from posttrain.config.parsing import entries_of_words, is_switch, option_keys, read_args, read_entries
from posttrain.config.sections import SPECULATIVE_MAX_SEQUENCES
from posttrain.core.errors import UsageError


@dataclass(kw_only=True)
class ToolArgs:
    """The options of a tool; its subclasses add them."""

    verb: ClassVar[str]
    about: ClassVar[str]
    """What the tool does, for help."""
    example: ClassVar[str]
    """A command that works."""
    usage: ClassVar[str] = ""
    """The usage line, where it differs from that of other tools."""


T = TypeVar("T", bound=ToolArgs)


def positional(default: Any = "", *, required: bool = True) -> Any:
    """Define a positional option: it takes a word without an option name; a list takes several."""
    return field(default=default, metadata={"positional": True, "required": required})


def required(default: Any = "") -> Any:
    """Define an option that must be set."""
    return field(default=default, metadata={"required": True})


def read_tool(defaults: T, args: Sequence[str]) -> T:
    """Return `defaults` with the values of `[CONFIG.yaml] [WORD ...] [--option value ...]`; required ones are set."""
    found = read_args(defaults.verb, f"{defaults.about}.\n\nExample: {defaults.example}", defaults, args)
    check_required(found)
    return found


def read_own_options(defaults: T, args: Sequence[str], more: str = "") -> tuple[T, list[str], list[str]]:
    """Read the tool's own options from a command line that also has options of another verb.

    Returns them, the words that belong to no option, and the options of the other verb. `more`: a sentence for help.
    """
    about = f"{defaults.about}.\n\nExample: {defaults.example}" + f"\n\n{more}" * bool(more)
    if wanted := {"-h", "--help", "--help-all", "--help_all"} & set(args):
        print(help_text(defaults.verb, about, defaults, everything=not {"-h", "--help"} & wanted))
        raise SystemExit(0)
    own: list[str] = []
    words: list[str] = []
    others: list[str] = []
    target = words
    for word in args:
        if word.startswith("--"):
            name, is_, _ = word[2:].replace("-", "_").partition("=")
            if name not in option_keys(defaults):
                target = others
            else:
                own.append(word)
                target = words if is_ or is_switch(name, defaults) else own
                continue
        target.append(word)
        target = words if target is own else target
    entries = list(entries_of_words(own, defaults, defaults.verb))
    return read_entries(defaults.verb, about, defaults, entries), words, others


def check_required(config: ToolArgs) -> None:
    """Raise UsageError for the first required option without a value; positional ones come first."""
    for entry in sorted(dataclasses.fields(config), key=lambda entry: not entry.metadata.get("positional")):
        if entry.metadata.get("required") and not getattr(config, entry.name):
            name = entry.name.upper() if entry.metadata.get("positional") else f"--{entry.name}"
            sentence = field_docs(type(config))[entry.name].removeprefix("Required. ")
            raise UsageError(f"{name} is not set. {sentence} Example: {config.example}")


def check_at_least(config: Any, **bounds: float) -> None:
    """Raise UsageError for a number that is below its bound."""
    for name, low in bounds.items():
        if getattr(config, name) < low:
            raise UsageError(f"{name} is {getattr(config, name)}; it must be at least {low}.")


# Options that several tools have


@dataclass(kw_only=True)
class SamplingArgs:
    """How tokens are sampled."""

    title: ClassVar[str] = "sampling"

    max_tokens: int = 512
    """Longest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the most likely token."""
    top_p: float = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this."""
    top_k: int = 0
    """Sample only from this many of the most likely tokens; 0: from all."""
    min_p: float = 0.0
    """Sample only tokens at least this many times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that occurred before become less likely."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the end-of-turn token."""


@dataclass(kw_only=True)
class ConditionArgs:
    """Prompts of a model that conditional-sft trained."""

    title: ClassVar[str] = "conditional prompts"

    condition: float | None = None
    """Reward that prompts ask for, for a model that `posttrain conditional-sft` trained."""
    condition_template: str = ""
    """Text of such prompts; empty: "{prompt} <rm_score>: {reward:.2f} "."""


@dataclass(kw_only=True)
class SpeculativeArgs:
    """Speculative decoding of the local engine."""

    title: ClassVar[str] = "speculative decoding"

    speculative_tokens: int = 0
    """Most tokens drafted per sequence and step, from n-grams of its prompt and completions; 0: off."""
    speculative_max_sequences: int = SPECULATIVE_MAX_SEQUENCES
    """Draft tokens only while at most this many sequences are being generated, with speculative_tokens."""


@dataclass(kw_only=True)
class EngineArgs:
    """What generates, and where."""

    title: ClassVar[str] = "engine"

    batch_size: int = 512
    """Completions that are generated and written together."""
    devices: int = 1
    """Number of worker processes on this machine, one per device, each with a whole model."""
    engine: Literal["local", "vllm"] = "local"
    """What generates: the local engine or vLLM."""
    vllm_options: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM by its own names, as JSON: {"gpu_memory_utilization": 0.4, "max_num_seqs": 256}."""
    num_beams: int = 0
    """Beam search of the local engine with this many beams; 0: sampling."""


@dataclass(kw_only=True)
class LoadArgs:
    """How models are loaded."""

    title: ClassVar[str] = "model"

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: float32 on CPU, bfloat16 on an accelerator."""
    load_in_4bit: bool = False
    """Keep the weights in 4 bits; needs the package bitsandbytes."""


@dataclass(kw_only=True)
class TemplateArgs:
    title: ClassVar[str] = "data"

    chat_template: str = ""
    """Chat template by name (chatml, llama3, qwen_r1 ...), file, or text with {} such as "Human: {}\\nAssistant: ";
    empty: the model's own."""


@dataclass(kw_only=True)
class PromptArgs(TemplateArgs):
    """How prompts are read."""

    title: ClassVar[str] = "data"

    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the files by the names used here, as JSON: {"prompt": "question"}."""
    max_examples: int = 0
    """Use only this many examples; 0: all."""
    weights: tuple[float, ...] = ()
    """Parts in which the prompts of the sources are mixed, one number per source; empty: all prompts of all sources."""
    max_prompt_length: int = 2048
    """Longest prompt in tokens; on_overlong decides what happens to longer ones."""
    on_overlong: Literal["error", "drop"] = "error"
    """error: a prompt that is too long is an error; drop: it is left out and counted."""
    on_bad_example: Literal["stop", "quarantine"] = "stop"
    """stop: an unusable example is an error; quarantine: it is written to a file and counted."""


@dataclass(kw_only=True)
class RewardArgs:
    """What scores completions, and its limits."""

    title: ClassVar[str] = "reward"

    reward: tuple[str, ...] = required(())
    """Required. Verifiers by name (`posttrain rewards list`), FILE.py:FUNCTION, judge:RUBRIC.yaml, model:PATH or http://..."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward; empty: 1 each."""
    timeout_seconds: float = 10.0
    """Time limit for one completion; beyond it the completion fails."""
    memory_gib: float = 2.0
    """Memory limit of a process that runs reward functions."""
    workers: int = 2
    """Child processes that run reward functions."""
    env: tuple[str, ...] = ()
    """Names of environment variables that reward functions may read."""
    allow_unprotected_code: bool = False
    """Run programs of the model (reward code) also where they cannot be isolated, with the rights of this user."""

"""Translates how LLaMA-Factory and axolotl describe data: to data.train and data.map_keys.

data.map_keys is one mapping for all sources: descriptions that need different ones are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.foreign.meanings import DIRECTORY, Found, Given, TranslationError, is_off, items, number

MEDIA = ("images", "videos", "audios")
ROLE_TAGS = ("user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")
SHAREGPT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
CHAT_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}


def renamed_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns that have another name in the file."""
    return {ours: theirs for ours, theirs in columns.items() if theirs and ours != theirs}


def together(option: str, sources: Sequence[tuple[str, dict[str, str]]], map_keys: str) -> Found:
    """Return the sources and the mapping that they share."""
    mappings = {json.dumps(mapping, sort_keys=True) for _, mapping in sources}
    if len(mappings) > 1:
        raise TranslationError(
            f"the data sets need different {map_keys}, and one counts for all: {' and '.join(sorted(mappings))}. "
            "Rename columns in the files, or train on one of them"
        )
    mapping = sources[0][1] if sources else {}
    return {option: [name for name, _ in sources]} | ({map_keys: mapping} if mapping else {})


# LLaMA-Factory


def from_dataset_info(option: str, stage: str) -> Any:
    """Return the translation of names in dataset_info.json; `stage`: pt, sft, rm, dpo, kto or ppo."""

    def translate(value: Any, given: Given) -> Found | None:
        names = items(value)
        file, table = dataset_info(given)
        sources = []
        limits: dict[str, str] = {}
        for name in names:
            if not isinstance(entry := table.get(name), dict):
                raise TranslationError(f"{file} has no data set {name}; it has {', '.join(list(table)[:8])}")
            sources.append((source_of(name, entry, file), columns_of(name, entry, stage)))
            if (limit := number(entry.get("num_samples"))) is not None:
                limits[name] = str(round(limit))
        if limits and len(names) > 1:
            raise TranslationError(f"num_samples of {', '.join(limits)}: there is one limit for all sources")
        found = together(option, sources, "data.map_keys")
        return found | ({"data.max_examples": limits[names[0]]} if limits and option == "data.train" else {})

    return translate


def dataset_info(given: Given) -> tuple[Path, dict[str, Any]]:
    """Find and read dataset_info.json, in dataset_dir as seen from here or from the configuration."""
    folder = str(given.get("dataset_dir", "data"))
    places = [Path(folder), Path(str(given.get(DIRECTORY, "."))) / folder]
    file = next((place / "dataset_info.json" for place in places if (place / "dataset_info.json").is_file()), None)
    if file is None:
        raise TranslationError(
            f"a name in dataset_info.json, and {places[0] / 'dataset_info.json'} does not exist. "
            "Give --data.train FILES"
        )
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TranslationError(f"{file} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise TranslationError(f"{file} is not a mapping of names")
    return file, table


def source_of(name: str, entry: Mapping[str, Any], file: Path) -> str:
    """Return the path or hub name of a data set, with its subset and split."""
    part = f"@{entry['subset']}" if entry.get("subset") else ""
    split = f":{entry['split']}" if entry.get("split") else ""
    for key, prefix in (("hf_hub_url", ""), ("ms_hub_url", "modelscope://")):
        if entry.get(key):
            return f"{prefix}{entry[key]}{part}{split or ':train'}"
    if entry.get("file_name"):
        return str(file.parent / str(entry["file_name"]))
    kinds = ", ".join(key for key in ("script_url", "cloud_file_name", "om_hub_url") if entry.get(key))
    raise TranslationError(f"{file}: {name} is given by {kinds or 'nothing'}; files and hub names are read here")


def columns_of(name: str, entry: Mapping[str, Any], stage: str) -> dict[str, str]:
    """Return data.map_keys for an entry of dataset_info.json."""
    columns = dict(entry.get("columns") or {})
    if media := [kind for kind in MEDIA if columns.get(kind)]:
        raise TranslationError(f"{name} has {', '.join(media)}: models of text alone are trained")
    ranking, form = bool(entry.get("ranking")), entry.get("formatting", "alpaca")
    if form not in ("alpaca", "sharegpt", "openai"):
        raise TranslationError(f"{name}: formatting {form} is unknown")
    if stage == "pt":
        return renamed_columns({"text": columns.get("prompt") or columns.get("messages") or "text"})
    tag = str(columns.get("kto_tag") or "")
    pair = {"chosen": columns.get("chosen") or "chosen", "rejected": columns.get("rejected") or "rejected"}
    if form == "alpaca":
        prompt, query = columns.get("prompt") or "instruction", columns.get("query") or "input"
        optional = {"system": columns.get("system") or "", "history": columns.get("history") or ""}
        if tag:
            if columns.get("query"):
                raise TranslationError(f"{name}: a query column beside a label is not supported; join the columns")
            return renamed_columns({"prompt": prompt, "completion": columns.get("response") or "output", "label": tag})
        answer = pair if ranking else {"output": columns.get("response") or "output"}
        return renamed_columns({"instruction": prompt, "input": query, **answer, **optional})
    defaults = CHAT_TAGS if form == "openai" else SHAREGPT_TAGS
    tags = {**defaults, **(entry.get("tags") or {})}
    their = columns.get("messages") or ("messages" if form == "openai" else "conversations")
    plain = all(tags[key] == CHAT_TAGS[key] for key in ("role_tag", "content_tag", "user_tag", "assistant_tag"))
    optional = {"system": columns.get("system") or "", "tools": columns.get("tools") or ""}
    own = "messages" if (plain or tag) and not ranking else "conversations"
    changed = {} if plain else {key: tags[key] for key in tags if tags[key] != SHAREGPT_TAGS.get(key)}
    if changed:  # a role by another name needs both of the keys that say where it stands
        changed |= {key: tags[key] for key in ("role_tag", "content_tag")}
    label = {"label": tag} if tag else {}
    return renamed_columns({own: their, **(pair if ranking else {}), **optional, **label}) | changed


# axolotl

PAIRS = {  # the part of a type behind the dot -> columns of the prompt, the chosen and the rejected completion
    "argilla": ("instruction", "chosen_response", "rejected_response"),
    "argilla_chat": ("", "chosen", "rejected"),
    "icr": ("input", "chosen", "rejected"),
    "intel": ("question", "chosen", "rejected"),
    "prompt_pairs": ("prompt", "chosen", "rejected"),
    "ultra": ("prompt", "chosen", "rejected"),
}
KNOWN_ENTRIES = (
    *("path", "name", "type", "split", "ds_type", "data_files", "conversation", "chat_template", "trust_remote_code"),
    *("field", "field_messages", "field_chosen", "field_rejected", "field_system", "field_tools", "message_field_role"),
    *("message_field_content", "message_property_mappings", "roles", "roles_to_train", "train_on_eos", "revision"),
    *("field_human", "field_model", "drop_system_message", "step_separator", "max_completion_length"),
)


def from_datasets(option: str) -> Any:
    """Return the translation of axolotl's list of data sets."""

    def translate(value: Any, given: Given) -> Found | None:
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, dict) and entry.get("path") for entry in entries):
            return None
        sources = [(name, axolotl_columns(entry)) for entry in entries for name in axolotl_paths(entry)]
        found = together(option, sources, "data.map_keys")
        styles = {str(entry.get("type", "")).partition(":")[0] for entry in entries}
        if option == "data.train" and is_off(given.get("chat_template")) and "rl" not in given:
            if styles == {"alpaca"}:  # its prompts have the style of Alpaca, whatever the model's template is
                found["data.chat_template"] = "alpaca"
            elif "alpaca" in styles:
                raise TranslationError("type alpaca has prompts of its own style, the other types have not")
        return found

    return translate


def axolotl_paths(entry: Mapping[str, Any]) -> list[str]:
    """Return the files, or the hub name with its subset and split; a split follows after a colon."""
    files = entry.get("data_files")
    if files:
        return items(files)
    path = str(entry["path"])
    part = f"@{entry['name']}" if entry.get("name") else ""
    split = f":{entry['split']}" if entry.get("split") and not Path(path).is_file() else ""
    return [f"{path}{part}{split}"]


def axolotl_columns(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return data.map_keys for an entry of `datasets`."""
    if unknown := [key for key, value in entry.items() if key not in KNOWN_ENTRIES and not is_off(value)]:
        raise TranslationError(f"{entry['path']}: {', '.join(unknown)}: no counterpart")
    if items(entry.get("roles_to_train", "assistant")) != ["assistant"] or entry.get("train_on_eos", "turn") != "turn":
        raise TranslationError(f"{entry['path']}: all assistant turns count, with their end, and nothing else")
    kind = entry.get("type", "")
    if isinstance(kind, dict):
        raise TranslationError(
            f"{entry['path']}: a type with a format of its own. Write the format as --data.chat_template 'TEXT {{}} "
            "TEXT' and the columns as --data.map_keys, and name the files with --data.train"
        )
    kind, _, style = str(kind).partition(".")
    kind = kind.partition(":")[0]
    if kind == "completion":
        return renamed_columns({"text": str(entry.get("field") or "text")})
    if kind in ("chat_template", "sharegpt", "bradley_terry"):
        return conversation_columns(entry, kind, style)
    if style in PAIRS:
        prompt, chosen, rejected = PAIRS[style]
        ours = prompt if prompt in ("prompt", "question", "instruction") else "prompt"
        return renamed_columns({ours: prompt, "chosen": chosen, "rejected": rejected} if prompt else {})
    if kind in ("alpaca", "alpaca_chat", "stepwise_supervised", "input_output", ""):
        return {}
    raise TranslationError(
        f"{entry['path']}: type {entry['type']}: its columns are not known here. Name the files with --data.train; "
        "their format is recognised by their columns, which --data.map_keys renames"
    )


def conversation_columns(entry: Mapping[str, Any], kind: str, style: str) -> dict[str, str]:
    names = entry.get("message_property_mappings") or {}
    default = ("from", "value") if kind == "sharegpt" else ("role", "content")
    role = str(entry.get("message_field_role") or names.get("role") or default[0])
    content = str(entry.get("message_field_content") or names.get("content") or default[1])
    roles = {ours: items(theirs) for ours, theirs in (entry.get("roles") or {}).items()}
    tags = {"role_tag": role, "content_tag": content}
    for ours, theirs in roles.items():
        other = [name for name in theirs if name not in (ours, *KNOWN_ROLES.get(ours, ()))]
        if len(other) > 1 or (other and f"{ours}_tag" not in ROLE_TAGS):
            raise TranslationError(f"{entry['path']}: roles {ours}: {theirs}: one name for each role can be given")
        tags |= {f"{ours}_tag": name for name in other}
    plain = tags == {"role_tag": "role", "content_tag": "content"}
    usual = tags == {"role_tag": "from", "content_tag": "value"}
    pairs = bool(style) or kind == "bradley_terry" or "field_chosen" in entry
    their = str(entry.get("field_messages") or ("conversations" if kind == "sharegpt" else "messages"))
    system = {"system": str(entry.get("field_system") or "")}
    tools = {"tools": str(entry.get("field_tools") or "")}
    pair = {ours: str(entry.get(f"field_{ours}") or ours) for ours in ("chosen", "rejected")}
    own = "conversations" if pairs or not plain else "messages"
    if kind == "bradley_terry":
        return {} if plain else tags
    return renamed_columns({own: their, **(pair if pairs else {}), **system, **tools}) | (
        {} if plain or usual else tags
    )


KNOWN_ROLES = {"user": ("human",), "assistant": ("gpt",), "tool": ("observation",)}

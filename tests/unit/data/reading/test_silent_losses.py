"""Nothing of a record is lost without a word: text is part of the example, refused, or named in the verdict."""

import math
import re
from dataclasses import fields

import pytest

import posttrain
from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError
from posttrain.data.encoding.encoder import Encoder
from tests.unit.data.made import CHATML, byte_level
from tests.unit.data.reading.schemas import SCHEMAS, Refused
from tests.unit.data.reading.test_formats import bot, read, refusal, system, user

Q, A = "How much is 7+8?", "15"
WORD = "Zebra"
SENTENCE = f"{WORD} one two three"
FOREIGN = {
    **dict.fromkeys(("prompt", "question", "instruction", "input", "query", "context", "passage"), SENTENCE),
    **dict.fromkeys(("response", "output", "completion", "rationale", "reasoning_content", "thinking"), SENTENCE),
    **dict.fromkeys(("system", "system_prompt", "system_message", "notes"), SENTENCE),
    "history": [[SENTENCE, SENTENCE]],
    "documents": [{"text": SENTENCE}],
    "tools": [{"type": "function", "function": {"name": WORD, "description": SENTENCE, "parameters": {}}}],
    "images": [f"{WORD}.png"],
    "chat_template_kwargs": {"custom_instructions": SENTENCE},
}
USES = [(schema, verb) for schema in SCHEMAS for verb, shows in schema.uses.items() if not isinstance(shows, Refused)]


def content_of(examples):
    return repr([[getattr(e, f.name) for f in fields(e) if f.name not in ("origin", "columns")] for e in examples])


@pytest.mark.parametrize(("schema", "verb"), USES, ids=[f"{schema.name}-{verb}" for schema, verb in USES])
def test_a_further_column_of_a_data_set_is_used_refused_or_named(schema, verb):
    if not isinstance(schema.record, dict):
        pytest.skip("its records are lists")
    for column, value in FOREIGN.items():
        if column in schema.record:
            continue
        try:
            verdict, examples = read(ALGORITHMS[verb].example_kind, schema.record | {column: value})
        except DataError:
            continue
        named = re.search(r"(?:not used|only for reward functions): (.*)", verdict)
        removed = "the last completion is removed" in verdict and column in ("completion", "response")
        used = WORD in content_of(examples) or removed
        assert used or (named and column in named[1].split(", ")), (column, verdict)


@pytest.mark.parametrize("kind", ["chat", "prompt"])
def test_columns_that_only_later_records_have_are_named(kind):
    first, second = ({"prompt": "q", "completion": "a", "note": note} for note in (None, "some more text here"))
    verdict, _ = read(kind, first, second)
    assert verdict.endswith({"chat": "not used: note", "prompt": "only for reward functions: note"}[kind])
    assert "note" not in read(kind, first)[0]


def test_keys_of_messages_that_are_not_used_are_named():
    said = {**bot(A), "thought": "7 and 8 make 15", "id": "m-1"}
    assert read("chat", {"messages": [user(Q), said]})[0] == "chat: messages; not used: messages[].thought"


def test_what_map_keys_sets_must_be_used():
    record = {"question": "q?", "answer": "a", "solution": "so it is a", "context": "c"}
    joined = {"prompt": "{context}\n\n{question}"}
    with pytest.raises(DataError, match=r"prompt: data.map_keys sets it, but the format is .*; remove question with"):
        read("chat", record, map_keys=joined)
    completion = {"completion": "answer", "question": "", "solution": ""}
    assert read("chat", record, map_keys=joined | completion)[1][0].messages == [user("c\n\nq?"), bot("a")]


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("chat", {"question": "q?", "answer": A, "solution": "so it is 15"}),
        ("chat", {"prompt": "q?", "completion": A}),
        ("chat", {"problem": "q?", "answer": A}),
        ("chat", {"query": "q?", "response": A}),
        ("pair", {"question": "q?", "chosen": A, "rejected": "78"}),
        ("pair", {"prompt": "q?", "chosen": A, "rejected": "78"}),
        ("prompt", {"prompt": "q?", "ground_truth": A}),
    ],
)
def test_the_advice_about_a_context_puts_it_into_the_prompt(kind, record):
    record = record | {"context": SENTENCE}
    advice = re.search(r'data\.map_keys (\{"\w+": "[^"]*"\})', refusal(kind, record))[1]
    verdict, [example] = read(kind, record, map_keys=advice)
    messages = example.messages if kind == "chat" else example.prompt
    assert messages[0] == user(f"{SENTENCE}\n\nq?") and "not used" not in verdict


# Pairs and labels


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": Q, "chosen": A, "rejected": A},
        {"chosen": [user(Q), bot(A)], "rejected": [user(Q), bot(A)]},
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: a"},
        {"instruction": Q, "output": [A, A]},
    ],
)
@pytest.mark.parametrize("kind", ["pair", "labelled"])
def test_equal_completions_are_no_pair(kind, record):
    assert "are equal: none is preferred; data.on_bad_example: quarantine" in refusal(kind, record)


@pytest.mark.parametrize(
    ("prompt", "shows"),
    [
        ("How much is 7 and 8?", "How much is 7 and 8?"),
        ("\n\nHuman: How much is it?\n\nAssistant:", "How much is it?"),
    ],
)
def test_a_prompt_that_both_completions_repeat_is_not_trained_on(prompt, shows):
    record = {"prompt": prompt, "chosen": f"{prompt} 15", "rejected": f"{prompt} 78"}
    message = refusal("pair", record)
    assert message.startswith("f.jsonl:1: prompt: begins both completions") and '{"prompt": ""}' in message
    _, [pair] = read("pair", record, map_keys={"prompt": ""})
    assert pair.prompt == [user(shows)] and [
        pair.chosen[0]["content"].strip(),
        pair.rejected[0]["content"].strip(),
    ] == [A, "78"]


def test_whole_conversations_beside_a_prompt_need_the_prompt_removed():
    sides = {name: [system("Be brief."), user(Q), bot(text)] for name, text in (("chosen", A), ("rejected", "78"))}
    assert 'remove the prompt with data.map_keys {"prompt": ""}' in refusal("pair", {"prompt": Q} | sides)
    _, [pair] = read("pair", {"prompt": Q} | sides, map_keys={"prompt": ""})
    assert pair.prompt == [system("Be brief."), user(Q)]


def test_scores_that_prefer_the_rejected_completion_are_refused_as_margins():
    _, [pair] = read("pair", {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 7})
    margins = Encoder(byte_level(CHATML), DataConfig(), "pair", 10**6, needs_margin=True)
    with pytest.raises(DataError, match="the margin is -6: by its scores the rejected completion is better"):
        margins.encode(pair)
    assert Encoder(byte_level(CHATML), DataConfig(), "pair", 10**6).encode(pair)


@pytest.mark.parametrize("label", [True, 1, 1.0, "true", "True", " 1", "good", "desirable", "chosen", "+"])
def test_labels_in_words(label):
    assert [e.label for e in read("labelled", {"prompt": "q", "completion": "a", "label": label})[1]] == [1.0]


@pytest.mark.parametrize("label", ["yes", -1, 0.5, math.nan, [1], "1.0.0"])
def test_other_labels_are_refused_with_the_fix(label):
    message = refusal("labelled", {"prompt": "q", "completion": "a", "label": label})
    assert message.startswith("f.jsonl:1: label: expected true/false") and '{"function": "FILE.py:FUNCTION"}' in message


def test_a_labelled_conversation_keeps_its_system_prompt_whatever_the_column_is_called():
    for column, turns in (("messages", [user(Q), bot(A)]), ("conversations", [{"from": "human", "value": Q}, bot(A)])):
        verdict, [example] = read("labelled", {column: turns, "label": True, "system_prompt": "Be brief."})
        assert example.prompt == [system("Be brief."), user(Q)]
        assert verdict == f"labelled chat: {column}, label, system_prompt"


@pytest.mark.parametrize("column", ["weight", "loss_weight", "sample_weight"])
def test_weights_of_whole_examples_are_refused(column):
    record = {"prompt": "q", "completion": "a"}
    assert f"{column}: is 0.5: examples cannot be weighted" in refusal("chat", record | {column: 0.5})
    assert read("chat", record | {column: 1})[1] and read("prompt", record | {column: 0.5})[1]


# Values


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_not_an_answer(value):
    assert f"answer: expected text, found {value}" in refusal("chat", {"question": "q?", "answer": value})
    assert f"answer: expected text, found {value}" in refusal("prompt", {"question": "q?", "answer": value})


@pytest.mark.parametrize("column", ["answer", "answers", "golden_answers"])
def test_several_right_answers(column):
    record = {"question": "q?", column: ["15", "fifteen"]}
    assert read("chat", record)[1][0].messages == [user("q?"), bot("15")]
    assert read("prompt", record)[1][0].columns["ground_truth"] == ["15", "fifteen"]


def test_a_list_in_place_of_a_text_is_refused_with_the_path_of_its_first_item():
    message = refusal("chat", {"instruction": Q, "output": A, "input": ["7", "8"]})
    assert message.endswith(
        'input: expected text, found list; to take its first item: data.map_keys {"input": "input.0"}'
    )


def test_no_input():
    assert read("chat", {"instruction": "Say hi.", "input": "<noinput>", "output": "hi"})[1][0].messages[0] == user(
        "Say hi."
    )


# Messages


def test_roles_in_capitals_and_unknown_ones():
    capital = [{"role": "User", "content": Q}, {"role": "Assistant", "content": A}]
    assert read("chat", {"messages": capital})[1][0].messages == [user(Q), bot(A)]
    message = refusal("chat", {"messages": [user(Q), {"role": "ai", "content": A}]})
    tags = re.search(r'data\.map_keys (\{"tags": \{.*?\}\})', message)[1]
    assert read("chat", {"messages": [user(Q), {"role": "ai", "content": A}]}, map_keys=tags)[1][0].messages == [
        user(Q),
        bot(A),
    ]


def test_openais_earlier_function_call_is_a_tool_call():
    call = {"name": "add", "arguments": '{"a": 7}'}
    said = {"role": "assistant", "content": "Let me see.", "function_call": call}
    messages = [user(Q), said, {"role": "function", "name": "add", "content": "15"}, bot(A)]
    _, [example] = read("chat", {"messages": messages})
    [made] = example.messages[1]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": {"a": 7}} and example.messages[2]["role"] == "tool"
    both = {**said, "tool_calls": [{"function": call}]}
    assert "has both function_call and tool_calls" in refusal("chat", {"messages": [user(Q), both, bot(A)]})


def test_messages_with_the_null_fields_of_a_table():
    nulls = dict.fromkeys(("from", "value", "tool_calls", "weight", "reasoning_content"))
    table = [nulls | user(Q), nulls | {"role": None, "content": None, "from": "gpt", "value": A}]
    assert read("chat", {"messages": table})[1][0].messages == [user(Q), bot(A)]


# Records of other formats in one file


def test_formats_with_the_same_columns_are_not_mixed():
    dialogue = {"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "\n\nHuman: hi\n\nAssistant: no"}
    texts = {"chosen": "The sum is 15 now", "rejected": "The sum is 78 now"}
    assert "f.jsonl:2: this example is hh-rlhf: chosen, rejected; the first" in refusal("pair", texts, dialogue)
    assert "f.jsonl:2: this example is implicit prompt" in refusal("pair", dialogue, texts)


def test_hashes_in_some_answers_matter_for_the_ground_truth_only():
    rows = {"question": "q?", "answer": "so\n#### 15"}, {"question": "q?", "answer": "15"}
    assert len(read("chat", *rows)[1]) == len(read("chat", *rows[::-1])[1]) == 2
    assert "f.jsonl:2: this example is question and answer" in refusal("prompt", *rows)
    assert "f.jsonl:2: this example is GSM8K" in refusal("prompt", *rows[::-1])


# Prompts to which a template was applied


APPLIED = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<s>[INST] Hi [/INST]",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "<|user|>\nHi</s>\n<|assistant|>\n",
)


@pytest.mark.parametrize("prompt", APPLIED)
def test_a_template_is_not_applied_twice(prompt):
    def encode(kind, example, template=CHATML):
        return Encoder(byte_level(template), DataConfig(), kind, 10**6).encode(example)

    made = {kind: read(kind, {"prompt": prompt, "completion": "a"})[1][0] for kind in ("chat", "prompt")}
    for kind, example in made.items():
        with pytest.raises(DataError, match="a chat template was applied to it before"):
            encode(kind, example)
        assert encode(kind, example, template=None)  # plain text, as base models are trained
        passes_on = (
            "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        )
        assert encode(kind, example, template=passes_on)
    quoted = read("chat", {"prompt": f"What does {prompt} mean?", "completion": "a"})[1][0]
    assert encode("chat", quoted)


# The ground truth of a verifier


@pytest.mark.parametrize("empty", [None, "", " ", math.nan, []])
def test_an_example_without_a_ground_truth_is_found_before_the_run(empty, tmp_path):
    rows = [{"prompt": "7+8=", "ground_truth": "15"}, {"prompt": "7+9=", "ground_truth": empty}]
    with pytest.raises(DataError, match=r"train.jsonl:2: the ground truth in ground_truth is empty, and reward gsm8k"):
        posttrain.grpo("pico", rows, reward="gsm8k", output_dir=str(tmp_path / "run"))

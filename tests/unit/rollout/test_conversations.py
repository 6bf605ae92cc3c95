"""Programs send their history back as text, changed in all ways; what was sampled stays as it was sampled."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.core.errors import PosttrainError
from posttrain.core.types import Sample
from posttrain.data.encoding.chat import ChatRenderer
from posttrain.data.encoding.templates import apply_template, shipped_templates, template_stop_ids
from posttrain.data.encoding.tokens import TokenEncoder
from posttrain.data.encoding.tool_formats import format_of, parse_message, writes_reasoning
from posttrain.rollout.conversations import ConversationTree, message_key, normalised_message
from tests.chat_templates import TOOL_TEMPLATES

CONTROL = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]
CONTROL += ["<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|observation|>"]
CONTROL += ["<｜User｜>", "<｜Assistant｜>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>"]
WITHOUT_TOOLS = ["chatml", "trl", "qwen_r1", "intern2", "llama3", "zephyr", "gemma", "deepseek2", "deepseek3", "glm4"]
TEMPLATES = {**TOOL_TEMPLATES, "shipped qwen": shipped_templates()["qwen"].jinja}
TEMPLATES |= {f"shipped {name}": name for name in WITHOUT_TOOLS}
DROPS_THINKING = ("qwen3", "deepseek3")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}]


def made(template):
    """A tokenizer in which most texts can be tokenized in several ways, with this template."""
    merges = [("a", "b"), ("ab", "c"), ("{", '"'), ('"', ":"), ("Ġ", "a")]
    alphabet = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(alphabet)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    if template in shipped_templates():
        apply_template(found, template)
        ends = template_stop_ids(found)
        if "<|observation|>" in found.chat_template:  # here the mark of the next turn ends a reply
            ends = found.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    else:
        found.chat_template = template
        ends = [next((t for t in ("<|im_end|>", "<|eot_id|>", "<|end|>") if t in template), "</s>")]
        ends = found.convert_tokens_to_ids(ends)
    format = format_of(found.chat_template)
    return SimpleNamespace(
        tokenizer=found, chat=ChatRenderer(found, TokenEncoder(found)), ends=ends, end=ends[0], format=format
    )


MADE = {name: made(template) for name, template in TEMPLATES.items()}


def one_by_one(tokenizer, text):
    """A text in its shortest tokens: what a model may sample, and an encoder never writes."""
    return [token for letter in text for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]


def call_text(format, calls, spacing):
    """Calls as a model of the format writes them, with any spacing of the JSON."""
    if not calls:
        return ""
    write = [json.dumps(arguments, separators=spacing) for arguments in calls]
    if format.name == "hermes":
        return "".join(f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>' for text in write)
    if format.name == "llama3":
        return f'{{"name": "f", "parameters": {write[0]}}}'
    if format.name == "mistral":
        return (
            "[TOOL_CALLS]["
            + ", ".join(f'{{"name": "f", "arguments": {text}, "id": "{place:09}"}}' for place, text in enumerate(write))
            + "]"
        )
    if format.name == "mistral_args":
        return "".join(f"[TOOL_CALLS]f[ARGS]{text}" for text in write)
    fenced = format.name == "deepseek3"
    inside = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{text}\n```<｜tool▁call▁end｜>"
        if fenced
        else f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
        for text in write
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(inside)}<｜tool▁calls▁end｜>"


class Program:
    """A program with one history, and the tokens that were sampled for it."""

    def __init__(self, name, tools):
        self.made = MADE[name]
        self.conversation = ConversationTree(self.made.chat, self.made.ends, "row")
        self.tools = TOOLS if tools and self.made.format else None
        self.history = [{"role": "user", "content": "abc?"}]
        self.sampled = []  # of each reply: tokens, log-probabilities

    def ask(self, draw):
        """One request: returns whether it was refused by the template."""
        turn = self.conversation.request(self.history, self.tools)
        text = self.reply_text(draw)
        tokenizer = self.made.tokenizer
        encode = draw(st.sampled_from([one_by_one, lambda t, s: t(s, add_special_tokens=False)["input_ids"]]))
        tokens = encode(tokenizer, text) if text else tokenizer("c", add_special_tokens=False)["input_ids"]
        if draw(st.integers(0, 4)):  # else it was cut off
            tokens = [*tokens, self.made.end]
        logprobs = [-float(1 + len(self.sampled)) - place / 1000 for place in range(len(tokens))]
        self.sampled.append((tokens, logprobs))
        sample = Sample(
            tokens=np.concatenate([turn.prompt, np.array(tokens, dtype=np.int32)]),
            mask=np.arange(len(turn.prompt) + len(tokens)) >= len(turn.prompt),
            logprobs=np.concatenate([np.zeros(len(turn.prompt), dtype=np.float32), np.float32(logprobs)]),
            finish="stop",
        )
        format = self.made.format if self.tools else None
        shown = text if text else "c"
        parsed = parse_message(shown, format, thinks=writes_reasoning(self.made.tokenizer.chat_template))
        message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [
                {"id": f"{place:09}", "function": {"name": call.name, "arguments": call.arguments}}
                for place, call in enumerate(parsed.calls)
            ]
        self.conversation.reply(turn, sample, message)
        return turn, message

    def reply_text(self, draw):
        thinking = draw(st.sampled_from(["", "", "<think>\nab abc\n</think>\n\n"]))
        content = draw(st.sampled_from(["abc", "ab a", "no: {}", "<|im_end|>".replace("<", "< "), "é世"]))
        calls = draw(
            st.lists(
                st.dictionaries(st.sampled_from("xab"), st.integers(0, 9) | st.text('ab" {', max_size=3)), max_size=2
            )
        )
        if not self.tools:
            calls = []
        name = self.made.format.name if self.made.format else ""
        if calls and name in ("llama3", "mistral"):
            content, calls = "", calls[:1] if name == "llama3" else calls
        spacing = draw(st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")]))
        return thinking + content + call_text(self.made.format, calls, spacing)

    def spelled(self, draw, message):
        """The message as some client sends it back."""
        found = dict(message)
        if draw(st.booleans()):
            found.pop("reasoning_content", None)
        if found.get("tool_calls"):
            found["content"] = found["content"] or draw(st.sampled_from([None, ""]))
            calls = []
            for place, call in enumerate(found["tool_calls"]):
                arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
                calls.append(
                    {"id": f"{place:09}", "type": "function", "function": {"name": "f", "arguments": arguments}}
                )
            found["tool_calls"] = calls
        elif draw(st.booleans()):
            found["content"] = [{"type": "text", "text": found["content"]}]
        return {**found, "refusal": None, "audio": None}

    def following(self, draw, message):
        """What the program adds after a reply."""
        if message.get("tool_calls"):
            return [
                {
                    "role": "tool",
                    "tool_call_id": f"{place:09}",
                    "content": draw(st.sampled_from(["42", '{"a": "b"}', ""])),
                }
                for place in range(len(message["tool_calls"]))
            ]
        return [{"role": "user", "content": draw(st.sampled_from(["abc", "more ab", "<|user|>"]))}]


def check_samples(program, expected_branches):
    """Every sampled token is in exactly one sample with its log-probability, and nothing else counts."""
    samples = [sample for _, sample in program.conversation.samples(group=7)]
    assert len(samples) == expected_branches and program.conversation.forks == expected_branches - 1
    trained = [
        pair for s in samples for pair in zip(s.logprobs[s.mask].tolist(), s.tokens[s.mask].tolist(), strict=True)
    ]
    sampled = [
        pair for tokens, logprobs in program.sampled for pair in zip(np.float32(logprobs).tolist(), tokens, strict=True)
    ]
    assert sorted(trained) == sorted(sampled)
    for sample in samples:
        assert sample.group == 7 and not sample.logprobs[~sample.mask].any()


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_every_sampled_token_is_trained_as_it_was_sampled(name, data):
    """Linear conversations with tool calls, changed spellings, forks, and histories that the program compacts."""
    program = Program(name, tools=data.draw(st.booleans()))
    branches = 1
    turn, message = program.ask(data.draw)
    assert turn.parent is None
    for _ in range(data.draw(st.integers(0, 3))):
        step = data.draw(st.sampled_from(["on", "on", "on", "again", "compact"]))
        if step == "again":  # the same request once more
            parent = turn.parent
            turn, message = program.ask(data.draw)
            assert turn.parent is parent
            branches += 1
            continue
        if step == "compact":
            program.history = [{"role": "user", "content": f"So far {len(program.sampled)}: ab"}]
            turn, message = program.ask(data.draw)
            assert turn.parent is None
            branches += 1
            continue
        before = turn
        program.history = [
            *program.history,
            program.spelled(data.draw, message),
            *program.following(data.draw, message),
        ]
        turn, message = program.ask(data.draw)
        assert not program.conversation.refusals, program.conversation.refusals
        assert turn.parent is not None and message_key(turn.parent.reply) == message_key(before.reply)
        assert turn.prompt[: len(turn.parent.sampled.tokens)].tolist() == turn.parent.sampled.tokens.tolist()
    check_samples(program, branches)


# mistral moves its tools to the newest question; the others write a reply otherwise than after their generation prompt.
REWRITES = ("mistral", "shipped deepseek2", "shipped trl", "shipped glm4")


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in REWRITES])
def test_what_is_added_is_what_the_template_writes(name):
    """With replies as the template itself would write them, all tokens decode to the template's rendering."""
    made = MADE[name]
    conversation = ConversationTree(made.chat, made.ends, "row")
    tools = TOOLS if made.format else None
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {"x": "ab"}}}],
    }
    replies = [{"role": "assistant", "content": "abc"}, called if tools else {"role": "assistant", "content": "ab"}]
    replies.append({"role": "assistant", "content": "a"})
    messages = [{"role": "user", "content": "q"}]
    for reply in replies:
        turn = conversation.request(messages, tools)
        rendered = made.tokenizer.apply_chat_template(
            [normalised_message(m) for m in messages], tools=tools, tokenize=False, add_generation_prompt=True
        )
        decoded = made.tokenizer.decode(turn.prompt.tolist())
        if name not in ("deepseek3",):  # its generation prompt opens <think>, which is then left out
            assert decoded.removeprefix("<s>") == rendered.removeprefix("<s>")
        text = call_text(made.format, [{"x": "ab"}], (", ", ": ")) if "tool_calls" in reply else reply["content"]
        tokens = [*one_by_one(made.tokenizer, text), made.end]
        sample = Sample(
            tokens=np.append(turn.prompt, np.int32(tokens)).astype(np.int32),
            mask=np.arange(len(turn.prompt) + len(tokens)) >= len(turn.prompt),
            logprobs=np.zeros(len(turn.prompt) + len(tokens), dtype=np.float32),
        )
        conversation.reply(turn, sample, reply)
        result = {"role": "tool", "tool_call_id": "000000000", "content": "7"}
        messages = [*messages, reply, result if "tool_calls" in reply else {"role": "user", "content": "and"}]
    assert conversation.forks == 0


def test_thinking_decides_between_equal_replies():
    """Two samples of one prompt differ in their thinking only: a client that sends it back means that one."""
    program = Program("thinker", tools=False)
    for thought in ("ab", "abc"):
        turn = program.conversation.request(program.history)
        tokens = np.int32([*one_by_one(program.made.tokenizer, f"<think>{thought}</think>c"), program.made.end])
        whole = np.concatenate([turn.prompt, tokens])
        mask = np.arange(len(whole)) >= len(turn.prompt)
        sample = Sample(tokens=whole, mask=mask, logprobs=np.zeros(len(whole), dtype=np.float32))
        program.conversation.reply(turn, sample, {"role": "assistant", "content": "c", "reasoning_content": thought})
    first, second = program.conversation.turns
    asked = {"role": "user", "content": "and?"}
    for reply, expected in (({"reasoning_content": "ab"}, first), ({"reasoning_content": "abc"}, second), ({}, second)):
        history = [*program.history, {"role": "assistant", "content": "c", **reply}, asked]
        assert program.conversation.request(history).parent is expected


def test_other_tools_and_edited_replies_begin_branches():
    program = Program("hermes", tools=True)
    turn = program.conversation.request(program.history, TOOLS)
    tokens = np.concatenate([turn.prompt, np.int32([*one_by_one(program.made.tokenizer, "abc"), program.made.end])])
    mask = np.arange(len(tokens)) >= len(turn.prompt)
    sample = Sample(tokens=tokens, mask=mask, logprobs=np.zeros(len(tokens), dtype=np.float32))
    program.conversation.reply(turn, sample, {"role": "assistant", "content": "abc"})
    asked = {"role": "user", "content": "and?"}
    history = [*program.history, {"role": "assistant", "content": " abc\n"}, asked]
    assert program.conversation.request(history, TOOLS).parent is turn
    assert program.conversation.request(history, None).parent is None
    history[1] = {"role": "assistant", "content": "abd"}
    assert program.conversation.request(history, TOOLS).parent is None
    history[1:] = [{"role": "assistant", "content": "abc"}, {"role": "user", "content": "</s><|im_end|> is text"}]
    tokens = program.conversation.request(history, TOOLS).added.tolist()
    assert tokens.count(program.made.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    with pytest.raises(PosttrainError):
        program.conversation.request([{"role": "user", "content": "a"}, {"role": "tool", "content": 3}], TOOLS)


def test_a_stop_text_may_be_added_again():
    """Clients get a reply without its stop text; some write it back, and it was sampled."""
    program = Program("hermes", tools=False)
    for ended, expected in ((["</code>"], True), ([], False)):
        turn = program.conversation.request(program.history)
        text = "abc</code>" if ended else "abc"
        tokens = np.concatenate([turn.prompt, np.int32(one_by_one(program.made.tokenizer, text))])
        mask = np.arange(len(tokens)) >= len(turn.prompt)
        sample = Sample(tokens=tokens, mask=mask, logprobs=np.zeros(len(tokens), dtype=np.float32))
        program.conversation.turns.clear()
        program.conversation.reply(turn, sample, {"role": "assistant", "content": "abc"}, ["</code>"])
        for content, found in (("abc", True), ("abc</code>", expected), ("abc</", False)):
            history = [*program.history, {"role": "assistant", "content": content}, {"role": "user", "content": "b"}]
            assert (program.conversation.request(history).parent is turn) == found

"""Shapes of public data sets that a reader could misunderstand without a word: each is read rightly or refused."""

import json

import pytest

from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.ground_truth import ground_truth_of
from tests.unit.data.made import CHATML, byte_level
from tests.unit.data.reading.test_formats import bot, read, refusal, system, user

REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and (loop.last or not drop) %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trained_text(messages, template=CHATML):
    """The text of a conversation that is trained on, segment by segment."""
    _, [example] = read("chat", {"messages": messages})
    encoder = Encoder(byte_level(template), DataConfig(), "chat", 10**6)
    segments = encoder.chat.segments(example.messages, 0, False, "f:1")
    return [segment.text for segment in segments if segment.trained], "".join(s.text for s in segments)


# 1, 10: the ground truth


@pytest.mark.parametrize(
    ("columns", "truth"),
    [
        ({"answer": "36", "solution": "Of these, none of the 7 others: \\boxed{36}"}, "36"),
        ({"solution": "36", "answer": "First 6 times 6, which is 36."}, "36"),
        ({"solution": "", "answer": "36"}, "36"),
        ({"solution": "x = 7"}, "x = 7"),
        ({"answer": 36, "solution": "so it is 7"}, 36),
        ({"ground_truth": "1", "answer": "2", "solution": "3"}, "1"),
        ({"prompt": "q"}, None),
    ],
)
def test_the_short_answer_is_the_ground_truth(columns, truth):
    assert ground_truth_of(columns) == truth


def test_a_conversation_with_an_answer_of_its_own_is_scored_against_that():
    openr1 = {
        "problem": "6*6?",
        "solution": "6 * 6 = 36",
        "answer": "36",
        "messages": [user("6*6?"), bot("<think>6 and 6 ... maybe 7?</think> 36, not 7")],
    }
    verdict, [example] = read("prompt", openr1)
    assert example.columns["ground_truth"] == "36"
    assert verdict == "chat: messages; the last completion is removed; only for reward functions: solution"


def test_a_solution_is_trained_on_and_its_answer_is_the_ground_truth():
    limo = {"question": "6*6?", "solution": "Six sixes are 36, so \\boxed{36}.", "answer": "36"}
    verdict, [example] = read("chat", limo)
    assert example.messages == [user("6*6?"), bot(limo["solution"])]
    assert verdict == "question, solution and answer: question, solution, answer"
    verdict, [example] = read("prompt", limo)
    assert example.prompt == [user("6*6?")] and ground_truth_of(example.columns) == "36"


# 2: messages that are not trained on


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"loss_weight": 0.0}])
def test_a_message_that_is_not_to_be_trained_on_is_masked(flag):
    messages = [user("a"), bot("one") | flag, user("b"), bot("two"), user("c"), bot("three") | flag]
    trained, whole = trained_text(messages)
    assert trained == ["two<|im_end|>"]
    assert "one<|im_end|>" in whole and "three" not in whole


def test_weights_that_mean_something_else_are_refused():
    assert "messages[1].weight: is 0.5" in refusal("chat", {"messages": [user("a"), bot("b") | {"weight": 0.5}]})
    assert "only the assistant's text" in refusal("chat", {"messages": [user("a") | {"train": True}, bot("b")]})
    assert "train_detail" in refusal("chat", {"messages": [user("a"), bot("b") | {"train_detail": [{}]}]})
    assert "no message of the assistant" in refusal("chat", {"messages": [user("a"), bot("b") | {"weight": 0}]})
    pair = {"prompt": "q", "chosen": [bot("a") | {"weight": 0}], "rejected": "b"}
    assert "chosen: a completion is trained on whole" in refusal("pair", pair)
    _, [example] = read("prompt", {"messages": [user("a") | {"weight": 1}, bot("b"), user("c") | {"weight": 0}]})
    assert example.prompt == [user("a"), bot("b"), user("c")]


# 3: reasoning


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_trained_on_where_the_template_writes_it(key):
    trained, _ = trained_text([user("a"), bot("4") | {key: "2 and 2"}], REASONING)
    assert trained == ["<think>\n2 and 2\n</think>\n\n4<|im_end|>"]


def test_reasoning_that_the_template_would_drop_is_refused():
    thought = bot("4") | {"reasoning_content": "2 and 2"}
    with pytest.raises(DataError, match="message 1 has reasoning_content, which the chat template does not write"):
        trained_text([user("a"), thought])
    dropping = REASONING.replace("not drop", "false")
    with pytest.raises(DataError, match="no exact mask: the chat template changes the text of message 1"):
        trained_text([user("a"), thought, user("b"), thought], dropping)
    trained, _ = trained_text([user("a"), thought | {"weight": 0}, user("b"), thought], dropping)
    assert trained == ["<think>\n2 and 2\n</think>\n\n4<|im_end|>"]


# 4, 8: prompts beside conversations, system messages


def test_a_prompt_beside_messages_must_be_a_part_of_them():
    messages = '[{"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}]'
    roll = {"prompt": "You are a helpful assistant.", "messages": messages}
    assert "prompt: is not a part of messages" in refusal("prompt", roll)
    _, [example] = read("prompt", roll, map_keys={"prompt": ""})
    assert example.prompt == [system("s"), user("1+1?")]
    for indent in (None, 1):
        text = json.dumps([system("s"), user("1+1?")], indent=indent)
        assert read("prompt", {"prompt": text})[1][0].prompt == [system("s"), user("1+1?")]
    no_robots = {"prompt": "q", "messages": [system("Be brief."), user("q"), bot("a")]}
    assert read("prompt", no_robots)[1][0].prompt == [system("Be brief."), user("q")]
    assert read("chat", no_robots)[1][0].messages == no_robots["messages"]


def test_the_column_system_is_a_part_of_every_prompt():
    orca = {"system": "Be brief.", "question": "q", "chosen": "a", "rejected": "b"}
    _, [pair] = read("pair", orca)
    assert pair.prompt == [system("Be brief."), user("q")] and not pair.plain
    _, [mapped] = read("pair", orca, map_keys={"prompt": "question"})
    assert mapped.prompt == pair.prompt
    _, [example] = read("prompt", {"system": "s", "prompt": "q"})
    assert example.prompt == [system("s"), user("q")] and not example.plain
    _, [example] = read("chat", {"system": "s", "prompt": "q", "completion": "a"})
    assert example.messages == [system("s"), user("q"), bot("a")]
    differing = {"system": "s", "messages": [system("other"), user("q"), bot("a")]}
    assert "system: differs from the system message in messages" in refusal("chat", differing)


# 5: tools


def test_calls_and_results_written_as_text_become_tool_calls_and_results():
    hermes = {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "gpt", "value": 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'},
            {"from": "tool", "value": '<tool_response>\n{"y": 2}\n</tool_response>'},
            {"from": "gpt", "value": "Fine."},
        ]
    }
    _, [example] = read("chat", hermes)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert example.messages[1:3] == [
        {**bot("Wait."), "tool_calls": [call]},
        {"role": "tool", "content": '{"y": 2}'},
    ]
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f(1)"}]
    assert "conversations[1].value: cannot be read as JSON" in refusal("chat", {"conversations": turns})


# 6: pictures


def test_pictures_are_refused():
    chat = {"messages": [user("What is this?"), bot("A cat.")]}
    for column in ("image", "images", "videos", "audios"):
        assert f"{column}: only text can be trained on" in refusal("chat", chat | {column: [b"\x89PNG"]})
        assert read("chat", chat | {column: []})[1] and read("chat", chat | {column: None})[1]
    _, [example] = read("chat", chat | {"images": ["a.png"]}, map_keys={"images": ""})
    assert example.messages == chat["messages"]
    for cell in (b"\x89PNG", {"bytes": b"\x89PNG", "path": None}, [{"bytes": b"\x89PNG"}]):
        assert "photo: holds bytes; only text" in refusal("prompt", {"prompt": "q", "photo": cell})
    llava = {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]}
    assert "conversations[0].value: contains <image>" in refusal("chat", llava)
    html = {"messages": [user("Explain <image> in SVG."), bot("<image> embeds a picture.")]}
    assert read("chat", html)[1][0].messages == html["messages"]


# 7: margins


@pytest.mark.parametrize(
    "scores",
    [
        {"margin": 2.5},
        {"score_chosen": 8.5, "score_rejected": 6.0},
        {"chosen_rating": "8.5", "rejected_rating": "6"},
        {"chosen-rating": 8.5, "rejected-rating": 6},
    ],
)
def test_margins_are_read_in_all_spellings(scores):
    _, [pair] = read("pair", {"prompt": "q", "chosen": "a", "rejected": "b"} | scores)
    assert pair.margin == 2.5


def test_a_margin_that_is_asked_for_and_missing_is_an_error():
    _, [pair] = read("pair", {"prompt": "q", "chosen": "a", "rejected": "b"})
    encoder = Encoder(byte_level(CHATML), DataConfig(), "pair", 10**6, needs_margin=True)
    with pytest.raises(DataError, match=r"f.jsonl:1: algo.use_margin is set, but this example has no margin"):
        encoder.encode(pair)


# 10: dialogues inside a prompt


def test_a_dialogue_inside_a_prompt_is_read_as_turns():
    prompt = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    _, [pair] = read("pair", {"prompt": prompt, "chosen": " good", "rejected": " bad"})
    assert pair.prompt == [user("a"), bot("b"), user("c")] and not pair.plain
    _, [example] = read("prompt", {"prompt": prompt.strip()})
    assert example.prompt == pair.prompt
    _, [example] = read("prompt", {"prompt": "Human: is a word"})
    assert example.prompt == [user("Human: is a word")] and example.plain


# What is not used is named


def test_columns_with_text_that_are_not_used_are_named():
    verdict, _ = read(
        "chat",
        {"prompt": "q", "completion": "a", "critique": "This is a long text.", "id": "x-1", "url": "http://x"},
    )
    assert verdict == "prompt and completion: prompt, completion; not used: critique"

"""Formats: recognised by columns, each with its verdict; whatever does not fit is refused with its place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError
from posttrain.data.reading.examples import (
    ChatExample,
    LabelledExample,
    PairExample,
    PromptExample,
    StepwiseExample,
    TextExample,
)
from posttrain.data.reading.formats import FORMATS, VERBS, SourceFormat
from posttrain.data.reading.records import Record

MARK = "ки"


def read(kind, *rows, map_keys=""):
    """Verdict and examples of rows that are lines 1, 2 ... of a file."""
    source = SourceFormat(kind, MARK, map_keys)
    examples = [
        example for line, values in enumerate(rows, 1) for example in source.examples(Record(values, f"f.jsonl:{line}"))
    ]
    return source.description, examples


def refusal(kind, *rows):
    with pytest.raises(DataError) as caught:
        read(kind, *rows)
    return str(caught.value)


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


CALL = {**bot(""), "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
CHATS = {
    "chat: messages": ({"messages": [system("s"), user("q"), bot("a")]}, [system("s"), user("q"), bot("a")]),
    "prompt and completion: prompt, completion": ({"prompt": "q", "completion": "a"}, [user("q"), bot("a")]),
    "Alpaca: instruction, input, output": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "id": 7},
        [user("Add.\n1 2"), bot("3")],
    ),
    "Alpaca: instruction, output, history, system": (
        {"instruction": "Add.", "input": None, "output": "3", "history": [["h", "g"]], "system": "s"},
        [system("s"), user("h"), bot("g"), user("Add."), bot("3")],
    ),
    "ShareGPT: conversations": (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": "a"},
                {"from": "user", "value": "q"},
                {"from": "assistant", "value": "b"},
            ]
        },
        [system("s"), user("q"), CALL, {"role": "tool", "content": "1"}, bot("a"), user("q"), bot("b")],
    ),
    "GSM8K: question, answer": ({"question": "q", "answer": "a\n#### 1"}, [user("q"), bot("a\n#### 1")]),
    "multiple choice: question, A, B, C, answer": (
        {"question": "q", "A": 1, "B": " y ", "C": "z", "answer": "b "},
        [user("q\nA. 1\nB. y\nC. z"), bot("B")],
    ),
    "multiple choice: question, choices, answer": (
        {"question": "q", "choices": ["x", "y"], "answer": 1},
        [user("q\nA. x\nB. y"), bot("B")],
    ),
    "question and answer: question, answer": ({"question": "q", "answer": "a"}, [user("q"), bot("a")]),
    "prompt and response: prompt, query, response, system, history": (
        {"prompt": "p", "query": "q", "response": "a", "system": "s", "history": [["h", "g"]]},
        [system("s"), user("h"), bot("g"), user("p\nq"), bot("a")],
    ),
}


@pytest.mark.parametrize("verdict", CHATS)
def test_conversations(verdict):
    values, messages = CHATS[verdict]
    found, [example] = read("chat", values)
    assert found == verdict
    assert isinstance(example, ChatExample) and example.messages == messages and example.origin == "f.jsonl:1"
    assert example.plain == (verdict.startswith("prompt and completion"))


def test_the_right_option_in_other_words_and_questions_that_have_none():
    _, [example] = read("chat", {"question": "q", "choices": ["x", "y"], "answer": "y", "A": "?"})
    assert example.messages == [user("q\nA. x\nB. y"), bot("B")]
    for further in ({"choices": {"text": ["x"]}}, {"A": "x"}):
        verdict, [example] = read("chat", {"question": "q", "answer": "a", **further})
        assert verdict == "question and answer: question, answer" and example.messages == [user("q"), bot("a")]


@pytest.mark.parametrize("verdict", CHATS)
def test_conversations_serve_as_prompts_with_a_known_answer(verdict):
    values, messages = CHATS[verdict]
    found, [example] = read("prompt", values)
    assert found == verdict + "; the last completion is removed and kept as ground_truth"
    assert isinstance(example, PromptExample) and example.prompt == messages[:-1]
    truth = "1" if verdict.startswith("GSM8K") else messages[-1]["content"]
    assert example.columns == {**values, "ground_truth": truth}


VERL = {"prompt": [user("q")], "reward_model": {"style": "rule", "ground_truth": {"target": 3}}, "extra_info": {"i": 0}}
PROMPTS = {
    "prompt: prompt": ({"prompt": "q", "answer": "4", "level": 2}, None),
    "prompt: prompt, tools": ({"prompt": [user("q")], "tools": '[{"name": "f"}]'}, None),
    "prompt messages: messages": ({"messages": [user("q")], "id": 1}, None),
    "verl: prompt, reward_model, extra_info": (
        # as the countdown files: whatever else is there, the prompt is the prompt
        {**VERL, "question": "q?", "answer": "a", "nums": [1]},
        {"target": 3},
    ),
}


@pytest.mark.parametrize("verdict", PROMPTS)
def test_prompts_keep_all_columns(verdict):
    values, truth = PROMPTS[verdict]
    found, [example] = read("prompt", values)
    assert found == verdict
    assert isinstance(example, PromptExample) and example.prompt == [user("q")]
    assert example.columns == (values if truth is None else {**values, "ground_truth": truth})
    assert example.plain == (values.get("prompt") == "q") and example.tools == (
        [{"name": "f"}] if "tools" in values else None
    )


def test_content_as_parts():
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    _, [example] = read("chat", {"messages": [user(parts), bot(["a", "b"])]})
    assert example.messages == [user("two parts"), bot("ab")]


CALL = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "written",
    [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c1", "function": CALL},
        {"id": "c1", **CALL},
    ],
)
def test_tool_calls(written):
    asked = {"role": "assistant", "content": None, "tool_calls": [written]}
    result = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add", "other": 4}
    tools = [{"type": "function", "function": {"name": "add"}}]
    verdict, [example] = read("chat", {"messages": [user("1+2"), asked, result, bot("3")], "tools": tools})
    assert verdict == "chat: messages, tools" and example.tools == tools
    assert example.messages[1] == {**bot(""), "tool_calls": [{"type": "function", "id": "c1", "function": CALL}]}
    assert example.messages[2] == {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"}


def test_alpaca_without_input_has_no_line_end():
    _, [example] = read("chat", {"instruction": "Hi", "input": "", "output": "a"})
    assert example.messages[0] == user("Hi")


def test_prompt_and_completion_as_messages_are_not_plain():
    _, [example] = read("chat", {"prompt": [system("s"), user("q")], "completion": [bot("a")]})
    assert example.messages == [system("s"), user("q"), bot("a")] and not example.plain


def test_text():
    verdict, [example] = read("text", {"text": "Once upon", "label": 3})
    assert verdict == "text: text" and isinstance(example, TextExample) and example.text == "Once upon"


PAIRS = {
    "preference: prompt, chosen, rejected": (
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        [user("q")],
        None,
    ),
    "preference: prompt, chosen, rejected, margin": (
        {"prompt": [user("q")], "chosen": [bot("good")], "rejected": bot("bad"), "margin": 2},
        [user("q")],
        2.0,
    ),
    "preference: prompt, chosen, rejected, chosen_score, rejected_score": (
        # as in UltraFeedback: the prompt again at the head of both
        {
            "prompt": "q",
            "chosen": [user("q"), bot("good")],
            "rejected": [user("q"), bot("bad")],
            "chosen_score": 8.5,
            "rejected_score": 6,
        },
        [user("q")],
        2.5,
    ),
    "hh-rlhf: chosen, rejected": (
        {
            "chosen": "\n\nHuman: a: b\n\nAssistant: c\n\nd\n\nHuman: q\n\nAssistant: good",
            "rejected": "\n\nHuman: a: b\n\nAssistant: c\n\nd\n\nHuman: q\n\nAssistant: bad ",
        },
        [user("a: b"), bot("c\n\nd"), user("q")],
        None,
    ),
    "ShareGPT pairwise: conversations, chosen, rejected": (
        {
            "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        [system("s"), user("q")],
        None,
    ),
    "Alpaca pairwise: instruction, input, chosen, rejected": (
        {"instruction": "i", "input": "j", "chosen": "good", "rejected": "bad"},
        [user("i\nj")],
        None,
    ),
    "Alpaca pairwise, output a list of two: instruction, output": (
        {"instruction": "i", "output": ["good", "bad"]},
        [user("i")],
        None,
    ),
}


@pytest.mark.parametrize("verdict", PAIRS)
def test_pairs_and_their_use_as_labelled_examples(verdict):
    values, prompt, margin = PAIRS[verdict]
    found, [pair] = read("pair", values)
    assert found == verdict
    assert isinstance(pair, PairExample)
    assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, [bot("good")], [bot("bad")])
    assert pair.margin == margin

    found, examples = read("labelled", values)
    assert found == verdict
    assert [(type(e), e.prompt, e.completion, e.label) for e in examples] == [
        (LabelledExample, prompt, [bot("good")], 1.0),
        (LabelledExample, prompt, [bot("bad")], 0.0),
    ]


def test_hh_quirks_of_the_real_files():
    repeated = "\n\nHuman: q\n\nAssistant: one\n\nAssistant: two"
    silent = "\n\nHuman: q\n\nAssistant: "
    _, [pair] = read("pair", {"chosen": silent, "rejected": repeated})
    assert (pair.prompt, pair.chosen, pair.rejected) == ([user("q")], [bot("")], [bot("one\n\ntwo")])


@pytest.mark.parametrize(("label", "number"), [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0), ("True", 1), ("0", 0)])
def test_labels(label, number):
    verdict, [example] = read("labelled", {"messages": [user("a"), bot("b"), user("q"), bot("x")], "label": label})
    assert verdict == "labelled chat: messages, label"
    assert (example.prompt, example.completion, example.label) == ([user("a"), bot("b"), user("q")], [bot("x")], number)
    verdict, [example] = read("labelled", {"prompt": "q", "completion": "x", "label": label})
    assert verdict == "labelled completion: prompt, completion, label"
    assert (example.prompt, example.completion, example.label, example.plain) == ([user("q")], [bot("x")], number, True)


STEPS = {
    "steps: prompt, completions, labels": (
        {"prompt": "q", "completions": ["a", "b", "c"], "labels": [True, "-", 0.25]},
        [user("q")],
        ["a", "b", "c"],
        [1.0, 0.0, 0.25],
    ),
    "ProcessBench: problem, steps, label": (
        {"problem": "q", "steps": ["a", "b", "c"], "label": 1, "id": "x"},
        [user("q")],
        ["a", "\n\nb"],
        [1.0, 0.0],
    ),
    "marked steps: input, value": (
        {"input": f"q a {MARK}\nb {MARK} rest", "value": ["+", "-"]},
        [],
        ["q a ", "\nb "],
        [1.0, 0.0],
    ),
    "marked steps: input, label": ({"input": f"q{MARK}", "label": [0.5]}, [], ["q"], [0.5]),
}


@pytest.mark.parametrize("verdict", STEPS)
def test_steps(verdict):
    values, prompt, steps, labels = STEPS[verdict]
    found, [example] = read("stepwise", values)
    assert found == verdict
    assert isinstance(example, StepwiseExample)
    assert (example.prompt, example.steps, example.labels) == (prompt, steps, labels)


@pytest.mark.parametrize(("label", "labels"), [(-1, [1, 1, 1]), (0, [0]), (2, [1, 1, 0]), ("1", [1, 0])])
def test_processbench_leaves_out_what_follows_the_first_error(label, labels):
    _, [example] = read("stepwise", {"problem": "q", "steps": ["a", "b", "c"], "label": label})
    assert example.labels == labels and len(example.steps) == len(labels)


def test_a_file_for_other_verbs_says_which():
    message = refusal("chat", {"prompt": "q", "chosen": "a", "rejected": "b"})
    assert message.startswith(
        "f.jsonl:1: the format is preference: prompt, chosen, rejected, which is data for reward, dpo"
    )
    assert "Usual formats for sft, distill: chat: messages; " in message and "Alpaca: instruction, output" in message
    # Labels say that some answers are bad: not to be learned by imitation.
    assert "data for kto" in refusal("chat", {"messages": [user("q"), bot("a")], "label": False})
    assert "data for prm" in refusal("text", {"problem": "q", "steps": ["a"], "label": 0})
    assert "data for sft" in refusal("pair", {"question": "q", "answer": "a"})
    assert "the format is verl: prompt, reward_model, extra_info, which is data for reinforcement learning." in refusal(
        "chat", VERL
    )
    assert "Usual formats for reinforcement learning: chat: " in refusal("prompt", {"text": "t"})


def test_unknown_and_ambiguous_columns_are_never_guessed():
    message = refusal("chat", {"query": "q", "reply": "a"})
    assert message == (
        "f.jsonl:1: no known format has the columns query, reply. Formats that come near: query and answer (answer "
        "missing); query and response (response missing); xLAM (answers, tools missing). If these columns are meant, "
        "map them: --data.map_keys "
        '\'{"prompt": "query", "completion": "reply"}\'. docs/data.md lists all formats.'
    )
    assert "Map the columns to prompt and chosen and rejected, for example" in refusal("pair", {"foo": 1})
    message = refusal("chat", {"prompt": "q", "completion": "a", "messages": [user("q"), bot("a")]})
    assert "ambiguous columns: chat: messages or prompt and completion: prompt, completion" in message
    assert message.endswith('remove one of the columns, for example with --data.map_keys \'{"messages": ""}\'')
    assert 'for example --data.map_keys \'{"text": "COLUMN"}\'' in refusal("text", {"input_ids": [1, 2]})


def test_text_without_spaces_between_words_counts_as_text():
    verdict, _ = read("chat", {"instruction": "q", "output": "a", "output_zh": "七加八等于十五", "lang": "zh"})
    assert verdict.endswith("; not used: output_zh")


def test_every_row_must_have_the_format_of_the_first():
    good = {"prompt": "q", "completion": "a"}
    message = refusal("chat", good, {"prompt": "q"})
    verdict = "prompt and completion: prompt, completion"
    assert message == f"f.jsonl:2: completion: missing column; the first example was {verdict}"
    assert "f.jsonl:2: " in refusal("chat", good, {**good, "messages": []})
    assert "f.jsonl:3: prompt: missing column" in refusal("chat", good, good, {"messages": [user("q"), bot("a")]})
    assert len(read("chat", good, {**good, "id": 3})[1]) == 2


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("text", {"text": None}, "text: null"),
        ("text", {"text": 3}, "text: expected text, found int"),
        ("text", {"text": " \n"}, "text: empty text"),
        ("chat", {"prompt": None, "completion": "a"}, "prompt: null"),
        ("chat", {"prompt": "", "completion": "a"}, "prompt: empty prompt"),
        ("chat", {"prompt": "q", "completion": " "}, "completion: empty completion"),
        ("chat", {"prompt": "q", "completion": {"a": 1}}, "completion: the message has no 'role'"),
        ("chat", {"prompt": "q", "completion": [user("a")]}, "completion: expected the assistant's message"),
        ("chat", {"prompt": [bot("q")], "completion": "a"}, "prompt: the last message of a prompt"),
        ("chat", {"messages": "hello"}, "messages: expected a list, found str"),
        ("chat", {"messages": []}, "messages: empty list"),
        ("chat", {"messages": [user("q"), "a"]}, "messages[1]: expected a message"),
        ("chat", {"messages": [user("q")]}, "messages: the last message must be the assistant's, not the user's"),
        ("chat", {"messages": [user("q"), bot("")]}, "messages[1]: empty completion"),
        ("chat", {"messages": [user("q"), bot(None)]}, "messages[1].content: null"),
        ("chat", {"messages": [{"role": "alien", "content": "q"}]}, "messages[0].role: unknown role 'alien'"),
        ("chat", {"messages": [user("q"), {**bot("a"), "tool_calls": [1]}]}, "messages[1].tool_calls[0]: expected a"),
        ("chat", {"messages": [user("q"), {**bot("a"), "tool_calls": 1}]}, "messages[1].tool_calls: expected a list"),
        (
            "chat",
            {"messages": [{**user("q"), "tool_calls": [1]}, bot("a")]},
            "messages[0]: only messages of the assistant",
        ),
        (
            "chat",
            {"messages": [user("q"), {**bot(""), "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "messages[1].tool_calls[0].arguments: cannot be read as JSON",
        ),
        ("chat", {"messages": [user("q"), bot("a")], "tools": "x"}, "tools: cannot be read as JSON"),
        ("chat", {"messages": [user("q"), bot("a")], "tools": [3]}, "tools: expected a list of tool definitions"),
        (
            "labelled",
            {"messages": [user("q"), bot("a")], "label": 1, "tools": [{}]},
            "tools: this format does not support",
        ),
        (
            "chat",
            {"messages": [user([{"type": "image", "url": "x"}]), bot("a")]},
            "messages[0].content[0]: a part of type 'image'; only text is supported",
        ),
        ("chat", {"messages": [user([{"type": "text"}]), bot("a")]}, "messages[0].content[0]: null"),
        ("prompt", {"prompt": [user("q"), bot("a")]}, "prompt: the last message of a prompt"),
        ("prompt", {"prompt": None}, "prompt: null"),
        ("prompt", {"question": "q", "answer": "no number ####"}, 'answer: no text after "####"'),
        ("chat", {"conversations": [{"from": "gpt"}]}, "conversations[0]: the message has no 'value'"),
        ("chat", {"instruction": "i", "output": None}, "output: null"),
        ("chat", {"instruction": " ", "output": "a"}, "instruction: empty prompt"),
        ("chat", {"instruction": "i", "output": "a", "history": 3}, "history: expected a list"),
        ("chat", {"instruction": "i", "output": "a", "history": [["q"]]}, "history[0]: expected a list of [prompt"),
        ("pair", {"prompt": "q", "chosen": "a", "rejected": None}, "rejected: null"),
        ("pair", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "x"}, "margin: expected a number"),
        ("pair", {"instruction": "q", "output": ["a"]}, "output: expected [chosen, rejected]"),
        ("pair", {"chosen": "a", "rejected": "b"}, r'chosen: expected "\n\nHuman:'),
        (
            "pair",
            {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"},
            "rejected: does not begin with the same prompt as chosen",
        ),
        ("pair", {"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: a"}, "chosen: expected a prompt followed"),
        (
            "labelled",
            {"prompt": "q", "completion": "a", "label": 0.5},
            "label: expected true/false, 0/1 or good/bad, found 0.5",
        ),
        ("labelled", {"prompt": "q", "completion": "a", "label": None}, "label: null"),
        ("labelled", {"messages": [user("q"), bot(" ")], "label": 1}, "messages[1]: empty completion"),
        ("stepwise", {"prompt": "q", "completions": ["a"], "labels": [1, 0]}, "labels: 2 labels for 1 completions"),
        ("stepwise", {"prompt": "q", "completions": ["a"], "labels": [1.5]}, "labels[0]: expected true/false"),
        ("stepwise", {"prompt": "q", "completions": ["a "], "labels": [float("nan")]}, "labels[0]: expected"),
        ("stepwise", {"prompt": "q", "completions": [f"a{MARK}"], "labels": [1]}, "completions[0]: the step contains"),
        ("stepwise", {"prompt": "q", "completions": ["a", ""], "labels": [1, 1]}, "completions[1]: empty step"),
        ("stepwise", {"problem": "q", "steps": ["a"], "label": 1}, "label: expected -1 or the index"),
        ("stepwise", {"input": "no mark", "value": [1]}, "input: the placeholder"),
        ("stepwise", {"input": f"a{MARK}b{MARK}", "value": [1]}, "value: 1 labels for 2 placeholders"),
        ("stepwise", {"input": f"{MARK}b{MARK}", "value": [1, 1]}, "input: empty step"),
        ("chat", {"question": "q", "A": "x", "B": "y", "answer": "C"}, "answer: is 'C'; it must be one of A, B, the"),
        ("chat", {"question": "q", "A": "x", "B": "y", "answer": "AB"}, "answer: is 'AB'"),
        ("chat", {"question": "q", "choices": ["x", "y"], "answer": True}, "answer: is True"),
        ("chat", {"question": "q", "choices": ["x"], "answer": 0}, "choices: must be a list of 2 to 10 options"),
        ("chat", {"question": "q", "A": "x", "B": " ", "answer": "A"}, "B: an option is empty"),
        (
            "chat",
            {"question": "q", "A": "x", "B": "y", "D": "z", "answer": "A"},
            "A: the options are A, B, D: an option",
        ),
    ],
)
def test_faults_name_line_column_and_reason(kind, values, message):
    assert refusal(kind, values).startswith(f"f.jsonl:1: {message}")


def test_every_kind_has_formats_and_verbs():
    for kind in VERBS:
        assert any(form.provides(kind) for form in FORMATS)


COLUMNS = sorted({column for form in FORMATS for column in (*form.columns, *form.optional, "tools", "x")})
CELLS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["\n\nHuman: a\n\nAssistant: b", f"a{MARK}b{MARK}", "user", "human", "assistant", "gpt"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["role", "content", "from", "value", "tool_calls"]), inner, max_size=3),
        st.builds(lambda a, b: [user("q"), {"role": a, "content": b}], st.sampled_from(["assistant", "user"]), inner),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", VERBS)
def test_random_rows_give_examples_or_one_clear_refusal(kind):
    forms = [form for form in FORMATS if form.provides(kind)]

    @settings(max_examples=150, deadline=None)
    @given(st.sampled_from(forms), st.lists(CELLS, min_size=8), st.sets(st.sampled_from(COLUMNS), max_size=2))
    def check(form, cells, extra):
        names = [*form.columns, *sorted(extra - set(form.columns))]
        try:
            _, examples = read(kind, dict(zip(names, cells, strict=False)))
        except DataError as error:
            assert str(error).startswith("f.jsonl:1: ")
        else:
            assert examples

    check()

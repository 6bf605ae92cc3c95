"""A conversation: what is told again, commands, two models, an answer that is stopped."""

import json
from dataclasses import replace

import numpy as np
import pytest

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import Sample
from posttrain.data.reading.sources import read_records
from posttrain.engines.base import Sampling
from posttrain.inference.chat import Chat, ChatOptions, with_setting
from posttrain.inference.model import InferenceModel

DATA = DataConfig(max_length=2**20)


@pytest.fixture(scope="module")
def model():
    return InferenceModel(ModelConfig(path="pico"), DATA)


@pytest.fixture
def chat(model, monkeypatch):
    """With a list of what was written, and of the prompts that the model saw."""
    talk = Chat([model], ChatOptions(sampling=Sampling(max_tokens=8)), lambda text: talk.written.append(text))
    talk.written, talk.prompts = [], []
    generate = model.engine.generate

    def watched(requests, sampling, on_token):
        talk.prompts.append(model.tokenizer.decode(requests[0].prompt))
        return generate(requests, sampling, on_token)

    monkeypatch.setattr(model.engine, "generate", watched)
    return talk


def test_the_answer_is_what_the_model_generates(chat, model):
    assert chat.handle(" 7+8= \n")
    assert chat.prompts == ["<s><|user|>7+8=<|end|><|assistant|>"]
    ((question, answer),) = chat.conversations[0].turns
    assert question == "7+8=" and len(chat.written) >= len(answer)  # piece by piece
    chat.conversations[0].turns.clear()
    chat.handle("7+8=")
    assert chat.conversations[0].turns == [(question, answer)]


def test_what_was_said_is_told_again_as_far_as_wanted(chat):
    chat.options = replace(chat.options, history_turns=2, system="be brief")
    chat.conversations[0].turns = [("q1", "a1"), ("q2", "a2"), ("q3", "a3")]
    chat.handle("q4")
    assert chat.prompts[-1] == (
        "<s><|system|>be brief<|end|><|user|>q2<|end|><|assistant|>a2<|end|><|user|>q3<|end|><|assistant|>a3<|end|>"
        "<|user|>q4<|end|><|assistant|>"
    )
    chat.handle("/set history_turns 0")
    chat.handle("q5")
    assert "q1" in chat.prompts[-1]


def test_old_turns_make_room(chat):
    chat.conversations[0].turns = [("x" * 300, "old"), ("y" * 100, "new")]
    chat.handle("z" * 150)  # pico has 512 places
    assert "new" in chat.prompts[-1] and "old" not in chat.prompts[-1]


def test_clear_and_system(chat):
    chat.conversations[0].turns = [("q1", "a1")]
    chat.handle("clear")
    chat.handle("/system Only numbers.")
    chat.handle("q2")
    assert chat.prompts == ["<s><|system|>Only numbers.<|end|><|user|>q2<|end|><|assistant|>"]
    chat.handle("/clear")
    chat.handle("/system")
    chat.handle("q3")
    assert chat.prompts[-1] == "<s><|user|>q3<|end|><|assistant|>"


def test_save(chat, tmp_path):
    chat.handle(f"/save {tmp_path}/talk.jsonl")
    assert "the conversation is empty" in chat.written[-1] and not list(tmp_path.iterdir())
    chat.conversations[0].turns = [("q1", "a1")]
    chat.handle("/system s")
    chat.handle(f"/save {tmp_path}/talk.jsonl")
    chat.handle(f"/save {tmp_path}/talk.jsonl")
    rows = [row.values for row in read_records(tmp_path / "talk.jsonl")]
    told = [("system", "s"), ("user", "q1"), ("assistant", "a1")]
    assert rows == [{"model": "pico", "messages": [{"role": r, "content": c} for r, c in told]}] * 2
    chat.handle(f"/save {tmp_path}/no/such/folder.jsonl")
    assert f"{tmp_path}/no/such/folder.jsonl cannot be written: No such file" in chat.written[-1]


def test_set():
    options = ChatOptions()
    assert with_setting(options, "temperature", "0.2").sampling.temperature == 0.2
    assert with_setting(options, "max_tokens", "7").sampling.max_tokens == 7
    assert (
        with_setting(options, "seed", "3").seed == 3 and with_setting(options, "history_turns", "0").history_turns == 0
    )
    asked = with_setting(options, "condition", "5")
    assert asked.condition == 5.0 and with_setting(asked, "condition", "none").condition is None
    for name, value in (("temperature", "hot"), ("temperature", "-1"), ("top_p", "0"), ("warmth", "1"), ("seed", "-1")):
        with pytest.raises(UsageError):
            with_setting(options, name, value)


def test_a_condition_is_asked_for(chat):
    chat.handle("/set condition 5")
    chat.handle("why")
    assert chat.prompts[-1] == "<s><|user|>why <rm_score>: 5.00 <|end|><|assistant|>"
    assert chat.conversations[0].turns[0][0] == "why"  # the conversation is what people said


@pytest.mark.parametrize(
    ("text", "finish", "remark"), [("ab", "length", "stopped at max_tokens = 8"), ("", "stop", "empty completion")]
)
def test_what_there_is_to_say_about_an_answer(text, finish, remark, chat, model, monkeypatch):
    def said(requests, sampling, on_token):
        tokens = np.array([*model.tokenizer.encode(text, add_special_tokens=False), model.stop_ids[0]], dtype=np.int32)
        for token in tokens.tolist():
            on_token(0, token)
        asked = np.concatenate([requests[0].prompt, tokens])
        return [Sample(tokens=asked, mask=np.arange(len(asked)) >= len(requests[0].prompt), finish=finish)]

    monkeypatch.setattr(model, "generate", said)
    chat.handle("7+8=")
    assert "".join(chat.written) == f"{text}\n", "nothing, where only answers are wanted"
    chat.remarks = True
    chat.handle("7+8=")
    assert remark in chat.written[-1]


def test_all_settings_are_shown(chat):
    chat.handle("/set condition 2")
    chat.handle("/set")
    assert "max_tokens is 8\n" in chat.written[-1] and "condition is 2.0\n" in chat.written[-1]


@pytest.mark.parametrize("line", ["/dance", "/set", "/set temperature", "/save", "/set top_p 2"])
def test_mistakes_are_said_and_the_chat_goes_on(chat, line):
    assert chat.handle(line) and chat.written and not chat.prompts


def test_leaving_and_help(chat):
    assert not any(chat.handle(word) for word in ("exit", "quit", "q", "/exit"))
    assert chat.handle("/help") and "/system TEXT" in chat.written[-1]
    assert chat.handle("") and not chat.prompts


def test_an_answer_can_be_stopped(chat, monkeypatch):
    write = chat.write

    def interrupt(text):
        write(text)
        if sum(map(len, chat.written)) > 2:
            chat.write = write
            raise KeyboardInterrupt

    chat.options = replace(chat.options, sampling=Sampling(max_tokens=2000))
    chat.write = interrupt
    assert chat.handle("q1")
    assert chat.written[-1] == "\n[stopped]\n"
    ((_, answer),) = chat.conversations[0].turns
    assert 0 < len(answer) < 20
    chat.options = replace(chat.options, sampling=Sampling(max_tokens=4))
    chat.handle("q2")
    assert answer in chat.prompts[-1] and len(chat.conversations[0].turns) == 2


def test_two_models_have_a_conversation_each(model, tmp_path):
    written = []
    other = InferenceModel(ModelConfig(path="pico"), DATA)
    with pytest.raises(UsageError, match="given twice"):
        Chat([model, other], ChatOptions(), written.append)
    other.name = "other\x1b"
    with_noise = next(other.learner.model.parameters())
    with_noise.data += 0.5 * with_noise.data.roll(1, 0)
    chat = Chat([model, other], ChatOptions(sampling=Sampling(max_tokens=8)), written.append)
    chat.handle("q1")
    text = "".join(written)
    assert text.startswith("[pico]\n") and "\n[other\\x1b]\n" in text and "\x1b" not in text
    first, second = (conversation.turns for conversation in chat.conversations)
    assert first != second and len(first) == len(second) == 1
    chat.handle(f"/save {tmp_path}/talk.jsonl")
    assert [json.loads(line)["model"] for line in (tmp_path / "talk.jsonl").read_text().splitlines()] == [
        "pico",
        "other\x1b",
    ]


def test_named_templates(tmp_path):
    data = replace(DATA, chat_template="chatml")
    prompt = InferenceModel(ModelConfig(path="pico"), data).encode([{"role": "user", "content": "Hi"}])
    tokenizer = InferenceModel(ModelConfig(path="pico"), DATA).tokenizer
    assert tokenizer.decode(prompt.tokens).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.tokens.dtype == np.int32


def test_a_model_without_a_template_needs_one(model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    with pytest.raises(UsageError, match="--chat_template chatml"):
        model.encode([{"role": "user", "content": "Hi"}])

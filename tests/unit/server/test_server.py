"""The API against the engine itself, through the official client: many users, each gets what it would get alone."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from posttrain.engines.base import EngineSpec, GenerationRequest, Sampling, seed_for
from posttrain.engines.kv_cache import BLOCK_SIZE
from tests.unit.server.serving import PATIENCE, RawConnection, ask, metrics_of, pico, serving, wait_for

openai = pytest.importorskip("openai")

ASKED = [{"role": "user", "content": "12+30="}]


@pytest.fixture(scope="module")
def alone():
    """The model by itself: what the server must say."""
    return pico()


@pytest.fixture(scope="module")
def server():
    with serving(pico(), max_tokens=200) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as found:
        yield found


def client_of(server, **options):
    options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", **options)


def expected(alone, prompt, seed, n=1, **settings):
    """Samples of the engine and their texts."""
    settings = {"max_tokens": 40, "stop_ids": alone.stop_ids, **settings}
    requests = [GenerationRequest(prompt=prompt, seed=seed_for(seed, 0, k)) for k in range(n)]
    samples = alone.generate(requests, Sampling(**settings))
    return samples, [alone.tokenizer.decode(s.tokens[s.mask], skip_special_tokens=True) for s in samples]


def chat_prompt(alone, messages=ASKED):
    return alone.encode(messages).tokens


def streamed(stream):
    """(texts by index, finish reasons, usage) of a stream of chunks."""
    texts, finishes, usage = {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            more = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (more or "")
            finishes.setdefault(choice.index, []).append(choice.finish_reason)
    assert all(reasons[-1] and not any(reasons[:-1]) for reasons in finishes.values())
    return texts, {index: reasons[-1] for index, reasons in finishes.items()}, usage


def test_answers_are_the_engines_own(client, alone):
    samples, texts = expected(alone, chat_prompt(alone), seed=7, n=3, temperature=0.8, top_p=0.9)
    options = {"model": "pico", "messages": ASKED, "n": 3, "seed": 7, "max_completion_tokens": 40}
    answer = client.chat.completions.create(**options, temperature=0.8, top_p=0.9)
    assert [choice.message.content for choice in answer.choices] == texts and len(set(texts)) == 3
    assert [choice.finish_reason for choice in answer.choices] == [sample.finish for sample in samples]
    assert answer.usage.prompt_tokens == len(chat_prompt(alone))
    assert answer.usage.completion_tokens == sum(int(sample.mask.sum()) for sample in samples)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stream = client.chat.completions.create(
        **options, temperature=0.8, top_p=0.9, stream=True, stream_options={"include_usage": True}
    )
    told, finishes, usage = streamed(stream)
    assert [told[index] for index in range(3)] == texts and usage == answer.usage
    assert [finishes[index] for index in range(3)] == [sample.finish for sample in samples]


def test_greedy_answers_need_no_seed(client, alone):
    _, (text,) = expected(alone, chat_prompt(alone), seed=0, temperature=0.0)
    for _ in range(2):
        answer = client.chat.completions.create(model="pico", messages=ASKED, temperature=0, max_tokens=40)
        assert answer.choices[0].message.content == text


def test_without_a_seed_answers_differ(client):
    answers = {
        client.chat.completions.create(model="pico", messages=ASKED, max_tokens=20).choices[0].message.content
        for _ in range(4)
    }
    assert len(answers) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client, alone, stream):
    (sample,), (text,) = expected(alone, chat_prompt(alone), seed=5, max_tokens=12)
    tokens, logprobs = sample.tokens[sample.mask], sample.logprobs[sample.mask]
    answer = client.chat.completions.create(
        model="pico", messages=ASKED, seed=5, max_tokens=12, logprobs=True, top_logprobs=3, stream=stream
    )
    if stream:
        told = [c.choices[0].logprobs.content for c in answer if c.choices[0].logprobs]
        entries = list(itertools.chain(*told))
    else:
        entries = answer.choices[0].logprobs.content
    assert np.abs(np.array([entry.logprob for entry in entries]) - logprobs).max() < 1e-5
    assert bytes(itertools.chain(*(entry.bytes for entry in entries))).decode("utf-8", "replace") == text
    assert [entry.token for entry in entries] == [alone.tokenizer.decode([token]) for token in tokens]
    for entry in entries:
        chances = [other.logprob for other in entry.top_logprobs]
        assert len(chances) == 3 and chances == sorted(chances, reverse=True)
        assert entry.logprob <= chances[0] + 1e-6


def test_completions_of_texts_and_of_tokens(client, alone):
    texts = ["<s>ab", "<s>cde"]
    ids = [alone.tokenizer(text)["input_ids"] for text in texts]
    assert [len(found) for found in ids] == [3, 4]  # control tokens are control tokens here
    for prompt in (texts, ids):
        answer = client.completions.create(model="pico", prompt=prompt, n=2, seed=3, max_tokens=9, logprobs=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == 7
        for choice, (place, k) in zip(answer.choices, itertools.product(range(2), range(2)), strict=True):
            request = GenerationRequest(prompt=np.array(ids[place], dtype=np.int32), seed=seed_for(3, place, k))
            (sample,) = alone.generate([request], Sampling(max_tokens=9, stop_ids=alone.stop_ids))
            assert choice.text == alone.tokenizer.decode(sample.tokens[sample.mask], skip_special_tokens=True)
            assert np.allclose(choice.logprobs.token_logprobs, sample.logprobs[sample.mask], atol=1e-5)
            assert choice.logprobs.text_offset[0] == 0
            assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)
            assert all(1 <= len(top_logprobs) <= 2 for top_logprobs in choice.logprobs.top_logprobs)
    assert client.completions.create(model="pico", prompt="a").usage.completion_tokens <= 16  # as OpenAI's
    told, _, _ = streamed(client.completions.create(model="pico", prompt=texts, n=2, seed=3, max_tokens=9, stream=True))
    assert [told[index] for index in range(4)] == [choice.text for choice in answer.choices]


def test_text_ends_before_a_stop_text(client, alone):
    _, (text,) = expected(alone, chat_prompt(alone), seed=11, max_tokens=60)
    plain = [place for place in range(10, len(text) - 2) if text[place : place + 2].isascii()]
    stop = text[plain[0] : plain[0] + 2]
    assert text.index(stop) < len(text) - 2
    options = {"model": "pico", "messages": ASKED, "seed": 11, "max_tokens": 60, "stop": [stop, "never said"]}
    answer = client.chat.completions.create(**options, logprobs=True).choices[0]
    assert answer.message.content == text[: text.index(stop)] and answer.finish_reason == "stop"
    said = bytes(itertools.chain(*(entry.bytes for entry in answer.logprobs.content))).decode("utf-8", "replace")
    assert said == answer.message.content
    told, finishes, _ = streamed(client.chat.completions.create(**options, stream=True))
    assert told == {0: answer.message.content} and finishes == {0: "stop"}


def test_many_users_with_settings_of_their_own(client, alone):
    """In one batch, each gets the answer that it would get alone."""
    kinds = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.7},
        {"top_k": 5},
        {"min_p": 0.2},
        {"repetition_penalty": 1.3},
    ]

    def one(number):
        messages = [{"role": "user", "content": f"{number}+{number}="}]
        settings = {"max_tokens": 5 + number % 7 * 5, **kinds[number % len(kinds)]}
        extra = {name: settings[name] for name in ("top_k", "min_p", "repetition_penalty") if name in settings}
        usual = {name: value for name, value in settings.items() if name not in extra}
        answer = client.chat.completions.create(
            model="pico", messages=messages, seed=number, stream=number % 2 == 0, extra_body=extra, **usual
        )
        text = streamed(answer)[0][0] if number % 2 == 0 else answer.choices[0].message.content
        return messages, number, settings, text

    with ThreadPoolExecutor(24) as threads:
        found = list(threads.map(one, range(24)))
    same = 0
    for messages, seed, settings, text in found:
        same += expected(alone, chat_prompt(alone, messages), seed, **settings)[1] == [text]
    assert same >= 23  # in other company a last bit may put a boundary between two tokens elsewhere


def test_two_hundred_at_once(server):
    async def everybody():
        options = {"base_url": f"http://127.0.0.1:{server.port}/v1", "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**options, timeout=PATIENCE) as client:
            asked = [
                client.chat.completions.create(model="pico", messages=ASKED, max_tokens=4, temperature=0)
                for _ in range(200)
            ]
            return await asyncio.gather(*asked)

    import asyncio

    answers = asyncio.run(everybody())
    assert len(answers) == 200 and len({answer.choices[0].message.content for answer in answers}) == 1


def test_models(client):
    assert [model.id for model in client.models.list()] == ["pico"]
    assert client.models.retrieve("pico").owned_by == "posttrain"


GOOD = {"model": "pico", "messages": ASKED}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"messages": ASKED, "model": "gpt"}, 404, "this server has pico"),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": [{"role": "user", "content": ""}] * 20_000}, 400, "a conversation may have 1,024"),
        ({"messages": [{"role": "king", "content": "a"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "pico knows the roles"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text only"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
        ({**GOOD, "temperature": -1}, 400, "temperature"),
        ({**GOOD, "temperature": True}, 400, "temperature"),
        ({**GOOD, "top_p": 0}, 400, "top_p"),
        ({**GOOD, "n": 0}, 400, "n is 0"),
        ({**GOOD, "n": 100000}, 400, "n is 100000"),
        ({**GOOD, "seed": 1.5}, 400, "seed"),
        ({**GOOD, "stop": ["", "a"]}, 400, "stop"),
        ({**GOOD, "stop": 5}, 400, "stop"),
        ({**GOOD, "stream": "yes"}, 400, "stream"),
        ({**GOOD, "max_tokens": 0}, 400, "max_tokens"),
        ({**GOOD, "max_tokens": 201}, 400, "allows 200"),
        ({**GOOD, "max_tokens": None, "messages": [{"role": "user", "content": "a" * 600}]}, 400, "512 together"),
        ({**GOOD, "max_tokens": 200, "messages": [{"role": "user", "content": "a" * 400}]}, 400, "more than 512"),
        ({**GOOD, "top_logprobs": 3}, 400, "logprobs: true"),
        ({**GOOD, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({**GOOD, "frequency_penalty": 0.5}, 400, "frequency_penalty is not supported"),
        ({**GOOD, "tools": [{"type": "function"}]}, 400, "tools[0]: expected"),
        ({**GOOD, "temprature": 1}, 400, "unknown field 'temprature'"),
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "JSON object"),
        (b'{"temperature": NaN}', 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "not JSON"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_requests_are_refused_in_words(server, body, status, words):
    found, _, answer = ask(server.port, "POST", "/v1/chat/completions", body)
    assert found == status and words in answer["error"]["message"], answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "prompt"), ("", "prompt"), ([[]], "prompt"), ([999], "from 0 to"), ([-1], "from 0 to")]
)
def test_wrong_prompts(server, prompt, words):
    status, _, answer = ask(server.port, "POST", "/v1/completions", {"prompt": prompt})
    assert status == 400 and words in answer["error"]["message"]


def test_fields_that_change_nothing_are_taken(client):
    answer = client.chat.completions.create(
        model="pico",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "12"}, {"type": "text", "text": "+30="}]},
        ],
        max_tokens=2,
        frequency_penalty=0,
        presence_penalty=0,
        user="me",
        logit_bias={},
        response_format={"type": "text"},
        extra_body={"top_k": -1},
    )
    assert answer.usage.completion_tokens <= 2


def long_stream(port, **more):
    """A connection with an answer that takes long, begun."""
    connection = RawConnection(port)
    body = {"messages": ASKED, "stream": True, "max_tokens": 490, "ignore_eos": True, **more}
    status, _ = connection.send("POST", "/v1/chat/completions", body).head()
    assert status == 200
    return connection


def test_who_hangs_up_frees_the_slot():
    with serving(pico(), slots=1, queue=1, max_tokens=490) as server:
        for stream in (True, False):
            connection = RawConnection(server.port)
            connection.send("POST", "/v1/chat/completions", {"messages": ASKED, "stream": stream, "ignore_eos": True})
            wait_for(lambda: server.service.engine.running == 1)
            before = server.service.engine.steps
            connection.close()
            wait_for(lambda: not server.service.engine.open)
            wait_for(lambda: server.service.engine.running == 0)
            assert server.service.engine.steps - before < 480  # generation stopped with the connection
        status, _, _ = ask(server.port, "POST", "/v1/chat/completions", {"messages": ASKED, "max_tokens": 3})
        assert status == 200
        found = metrics_of(server.port)
        assert found['posttrain_completions_total{finish="dropped"}'] == 2
        assert found["posttrain_running"] == found["posttrain_waiting"] == 0


def test_a_full_queue_is_said_and_not_waited_for():
    with serving(pico(), slots=1, queue=1, max_tokens=490) as server:
        with long_stream(server.port) as first, long_stream(server.port) as second:
            status, headers, answer = ask(server.port, "POST", "/v1/chat/completions", {"messages": ASKED})
            assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")
            too_many = {"messages": ASKED, "n": 3}
            assert ask(server.port, "POST", "/v1/chat/completions", too_many)[0] == 400  # it would never fit
            first.close()
            second.chunk()
        wait_for(lambda: not server.service.engine.open)
        client = client_of(server, max_retries=2)
        assert client.chat.completions.create(model="pico", messages=ASKED, max_tokens=3).usage


def test_time_is_limited():
    with serving(pico(), slots=1, max_tokens=490, timeout_seconds=0.05) as server:
        body = {"messages": ASKED, "ignore_eos": True}
        status, _, answer = ask(server.port, "POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        with pytest.raises(openai.APIError, match="longer than"):
            stream = client_of(server).chat.completions.create(
                model="pico", messages=ASKED, stream=True, extra_body={"ignore_eos": True}
            )
            list(stream)
        wait_for(lambda: server.service.engine.running == 0)


def test_answers_that_run_long_do_not_hold_up_short_ones():
    """Fair: everybody gets a token in every step."""
    with serving(pico(), slots=4, max_tokens=490) as server, long_stream(server.port), long_stream(server.port) as long:
        for _ in range(3):
            status, _, answer = ask(server.port, "POST", "/v1/chat/completions", {"messages": ASKED, "max_tokens": 3})
            assert status == 200 and answer["usage"]["completion_tokens"] <= 3
        assert server.service.engine.running >= 1
        rest = b"".join(iter(long.chunk, b""))
        assert rest.endswith(b"data: [DONE]\n\n") and rest.count(b'"finish_reason":"length"') == 1


def test_a_dead_engine_is_told_to_all_who_wait():
    model = pico()
    with serving(model, slots=2, max_tokens=490) as server:
        connection = long_stream(server.port)
        waiting = threading.Thread(target=lambda: found.append(ask(server.port, "POST", "/v1/chat/completions", GOOD)))
        found = []
        waiting.start()
        wait_for(lambda: server.service.engine.running == 2)

        def broken():
            raise MemoryError("no room")

        model.engine.executor.slots.summary = lambda *_: broken()
        rest = b"".join(iter(connection.chunk, b""))
        waiting.join(PATIENCE)
        assert b'"error"' in rest and b"the engine has failed" in rest
        assert found[0][0] == 500 and "the engine has failed" in found[0][2]["error"]["message"]
    assert isinstance(server.engine_error, MemoryError)


def test_metrics_add_up():
    with serving(pico(), slots=2) as server:
        client = client_of(server)
        for number in range(3):
            client.chat.completions.create(model="pico", messages=ASKED, max_tokens=4 + number, temperature=0)
        list(client.chat.completions.create(model="pico", messages=ASKED, max_tokens=6, temperature=0, stream=True))
        ask(server.port, "POST", "/v1/chat/completions", b"{")
        ask(server.port, "GET", "/nothing/here")
        found = metrics_of(server.port)
        prompt = len(chat_prompt(pico()))
        assert found["posttrain_prompt_tokens_total"] == 4 * prompt
        assert found["posttrain_generated_tokens_total"] == 4 + 5 + 6 + 6
        assert found['posttrain_completions_total{finish="length"}'] == 4
        assert found['posttrain_requests_total{path="/v1/chat/completions",status="200"}'] == 4
        assert found['posttrain_requests_total{path="/v1/chat/completions",status="400"}'] == 1
        assert found['posttrain_requests_total{path="other",status="404"}'] == 1
        assert (
            found['posttrain_completion_seconds_bucket{le="+Inf"}'] == found["posttrain_completion_seconds_count"] == 4
        )
        assert found["posttrain_first_token_seconds_count"] == 1
        assert found["posttrain_slots"] == 2 and found["posttrain_preemptions_total"] == 0
        assert found["posttrain_prompt_tokens_reused_total"] == 3 * ((prompt - 1) // BLOCK_SIZE * BLOCK_SIZE)
        buckets = [value for name, value in found.items() if name.startswith("posttrain_completion_seconds_bucket")]
        assert buckets == sorted(buckets)
        page = ask(server.port, "GET", "/metrics")[2]
        named = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
        assert {name.partition("{")[0] for name in found} - named == {
            f"posttrain_{kind}_seconds_{part}"
            for kind in ("completion", "first_token")
            for part in ("bucket", "sum", "count")
        }


def test_well_formed_events(server):
    """Exactly what the standard says, whatever bytes the model babbles."""
    body = {"messages": ASKED, "stream": True, "max_tokens": 100, "seed": 1}
    with RawConnection(server.port) as connection:
        status, headers, raw = connection.send("POST", "/v1/chat/completions", body).response()
    assert status == 200 and headers["content-type"] == "text/event-stream; charset=utf-8"
    events = raw.decode("utf-8").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_drafted_completions_are_the_same_and_counted(alone):
    """Whole and streamed, and what was accepted is in the metrics."""
    _, (text,) = expected(alone, chat_prompt(alone), 0, max_tokens=40, temperature=0.0)
    with serving(pico(EngineSpec(speculative_tokens=4)), slots=2) as server:
        client = client_of(server)
        how = {"model": "pico", "messages": ASKED, "max_tokens": 40, "temperature": 0, "seed": 0}
        for _ in range(2):  # the second time it is known what was said
            assert client.chat.completions.create(**how).choices[0].message.content == text
            assert streamed(client.chat.completions.create(**how, stream=True))[0] == {0: text}
        found = metrics_of(server.port)
    drafted, accepted = found["posttrain_draft_tokens_total"], found["posttrain_accepted_draft_tokens_total"]
    assert 3 * 30 < accepted <= drafted
    assert found["posttrain_generated_tokens_total"] == 4 * 40 > found["posttrain_engine_steps_total"]

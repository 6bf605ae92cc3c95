"""Encoding of every kind of row, limits on length, checks, fingerprints, splits and the resumable stream."""

import copy
import json

import numpy as np
import pytest

from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError, UsageError
from posttrain.core.types import Sample
from posttrain.data import dataset
from posttrain.data.dataset import Encoder, ExampleStream, load_dataset, split_examples
from posttrain.data.encoding import encoder as encoding
from posttrain.data.reading.examples import ChatExample, LabelledExample, PairExample, StepwiseExample, TextExample
from tests.unit.data.made import CHATML, byte_level

MARK = "ки"
QUESTION = [{"role": "user", "content": "Hello there"}]


def encoder(kind, template=CHATML, tokenizer=None, vocab_size=None, **options):
    tokenizer = tokenizer or byte_level(template)
    return Encoder(tokenizer, DataConfig(**options), kind, vocab_size or len(tokenizer), MARK)


def bot(text):
    return [{"role": "assistant", "content": text}]


def trained(made, sample):
    return made.tokenizer.decode(sample.tokens[sample.mask])


def whole(made, sample):
    return made.tokenizer.decode(sample.tokens)


def write(tmp_path, rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_chat():
    made = encoder("chat")
    [sample] = made.encode(ChatExample(origin="f:1", messages=QUESTION + bot("I am well")))
    assert whole(made, sample) == "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\nI am well<|im_end|>"
    assert trained(made, sample) == "I am well<|im_end|>"
    assert sample.tokens.dtype == np.int32 and sample.origin == "f:1" and sample.targets is None


def test_plain_strings_without_a_template():
    made = encoder("chat", template=None)
    messages = [{"role": "user", "content": "2 + 2 ="}, *bot(" 4")]
    [sample] = made.encode(ChatExample(origin="f:1", messages=messages, plain=True))
    assert (whole(made, sample), trained(made, sample)) == ("2 + 2 = 4</s>", " 4</s>")


def test_pair_shares_its_prompt_and_masks_both_answers():
    made = encoder("pair")
    history = [*QUESTION, *bot("earlier"), *QUESTION]
    pair = PairExample(origin="f:1", prompt=history, chosen=bot("good"), rejected=bot("bad"), margin=1.5)
    chosen, rejected = made.encode(pair)
    assert (trained(made, chosen), trained(made, rejected)) == ("good<|im_end|>", "bad<|im_end|>")
    start = int(chosen.mask.argmax())
    assert start == rejected.mask.argmax() and np.array_equal(chosen.tokens[:start], rejected.tokens[:start])
    assert chosen.margin == rejected.margin == 1.5


@pytest.mark.parametrize("label", [1.0, 0.0])
def test_labelled(label):
    made = encoder("labelled")
    [sample] = made.encode(LabelledExample(origin="f:1", prompt=QUESTION, completion=bot("good"), label=label))
    assert trained(made, sample) == "good<|im_end|>" and sample.label == label


def test_steps_count_at_the_last_token_of_each_placeholder():
    made = encoder("stepwise")
    width = len(made.tokenizer(MARK)["input_ids"])
    example = StepwiseExample(origin="f:1", prompt=QUESTION, steps=["First.", "\n\nThen 4."], labels=[1.0, 0.25])
    [sample] = made.encode(example)
    prompt = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    assert whole(made, sample) == f"{prompt}First.{MARK}\n\nThen 4.{MARK}"
    assert sample.mask.sum() == 2 and sample.mask[-1]
    for at in np.flatnonzero(sample.mask):
        assert made.tokenizer.decode(sample.tokens[at - width + 1 : at + 1]) == MARK
    assert sample.targets.dtype == np.float32
    assert sample.targets[sample.mask].tolist() == [1.0, 0.25] and sample.targets[~sample.mask].sum() == 0


def test_steps_without_a_template():
    made = encoder("stepwise", template=None)
    prompt = [{"role": "user", "content": "2 + 2?"}]
    for first, expected in (("It is", "2 + 2?\nIt is"), (" It is", "2 + 2? It is")):
        [sample] = made.encode(
            StepwiseExample(origin="f:1", prompt=prompt, steps=[first, " 4"], labels=[1, 0], plain=True)
        )
        assert whole(made, sample) == f"{expected}{MARK} 4{MARK}"
    [sample] = made.encode(StepwiseExample(origin="f:1", prompt=[], steps=["q a"], labels=[1], plain=True))
    assert whole(made, sample) == f"q a{MARK}"


def test_a_placeholder_may_be_a_control_token():
    made = encoder("stepwise")
    made.placeholder = "<|im_end|>"
    [sample] = made.encode(StepwiseExample(origin="f:1", prompt=QUESTION, steps=["a"], labels=[1]))
    assert sample.tokens[-1] == made.tokenizer.convert_tokens_to_ids("<|im_end|>") and sample.mask[-1]


def test_text_begins_with_bos_and_ends_with_eos():
    made = encoder("text")
    [sample] = made.encode(TextExample(origin="f:1", text="Hello </s> there"))
    assert whole(made, sample) == "<s>Hello </s> there</s>"
    assert (sample.tokens == made.tokenizer.eos_token_id).sum() == 1  # the quoted one is text
    assert not sample.mask[0] and sample.mask[1:].all()
    made = encoder("text", tokenizer=byte_level(adds_bos=True))
    [sample] = made.encode(TextExample(origin="f:1", text="Hello"))
    assert whole(made, sample) == "<s>Hello</s>"


@pytest.mark.parametrize("has_bos", [True, False])
def test_long_texts_are_split_and_nothing_is_lost(has_bos):
    tokenizer = byte_level() if has_bos else byte_level(bos_token=None)
    long = TextExample(origin="f:1", text="The quick brown fox jumps over the lazy dog. " * 5)
    [sample] = encoder("text", tokenizer=tokenizer, max_length=10_000).encode(long)
    for limit in (2, 7, len(sample) - 1, len(sample)):
        parts = encoder("text", tokenizer=tokenizer, max_length=limit).encode(long)
        assert all(len(part) <= limit and part.origin == "f:1" for part in parts)
        counted = np.concatenate([part.tokens[part.mask] for part in parts])
        assert np.array_equal(counted, sample.tokens[1:])
        assert all(not part.mask[0] and part.mask[1:].all() for part in parts)
        seen = np.cumsum([0, *(part.mask.sum() for part in parts[:-1])])
        before = [tokenizer.bos_token_id if has_bos else sample.tokens[count] for count in seen]
        assert [part.tokens[0] for part in parts] == before
    assert encoder("text", tokenizer=tokenizer, max_length=7, on_overlong="drop").encode(long) == []


PAIR = PairExample(origin="f:7", prompt=QUESTION, chosen=bot("good " * 10), rejected=bot("bad"))


def test_truncate_cuts_the_end():
    full = encoder("pair").encode(PAIR)
    limit = len(full[0]) - 3
    made = encoder("pair", max_length=limit)
    [encoded] = made.encode_all([PAIR])
    assert encoded.truncated and not encoded.dropped
    assert np.array_equal(encoded.samples[0].tokens, full[0].tokens[:limit])
    assert np.array_equal(encoded.samples[0].mask, full[0].mask[:limit])
    assert np.array_equal(encoded.samples[1].tokens, full[1].tokens)


def test_a_response_truncated_away_is_refused():
    start = int(encoder("pair").encode(PAIR)[0].mask.argmax())
    assert len(encoder("pair", max_length=start + 1).encode(PAIR)) == 2
    with pytest.raises(DataError, match=rf"^f:7: no token of the completion .*token {start + 1}. Raise data.max_len"):
        encoder("pair", max_length=start).encode(PAIR)
    [encoded] = encoder("pair", max_length=start, on_overlong="drop").encode_all([PAIR])
    assert encoded.dropped and encoded.samples == []
    with pytest.raises(DataError, match=r"^f:7: \d+ tokens, more than data.max_length"):
        encoder("pair", max_length=start, on_overlong="error").encode(PAIR)


def test_truncated_steps_keep_the_placeholders_that_fit():
    example = StepwiseExample(origin="f:7", prompt=QUESTION, steps=["First."] * 3, labels=[1.0, 0.5, 0.0])
    [full] = encoder("stepwise").encode(example)
    ends = np.flatnonzero(full.mask)
    [cut] = encoder("stepwise", max_length=int(ends[1]) + 1).encode(example)
    assert cut.targets[cut.mask].tolist() == [1.0, 0.5]
    with pytest.raises(DataError, match="f:7: no token of the first step"):
        encoder("stepwise", max_length=int(ends[0])).encode(example)


def test_ids_outside_the_vocabulary_are_named():
    example = ChatExample(origin="f:3", messages=QUESTION + bot("a"))
    end = byte_level().convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(DataError, match=rf"^f:3: token id {end} \('<\|im_end\|>'\) is outside"):
        encoder("chat", vocab_size=end).encode(example)
    assert encoder("chat", vocab_size=end + 1).encode(example)


def test_a_response_without_tokens_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"Hello": 0, "<|im_end|>": 1, "a": 2}, unk_token="<|im_end|>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>")
    made = encoder("chat", tokenizer=tokenizer)
    messages = [{"role": "user", "content": "Hello"}, *bot("unheard")]
    with pytest.raises(DataError, match=r"^f:1: the tokenizer has no tokens for the completion 'unheard'"):
        made.encode(ChatExample(origin="f:1", messages=messages, plain=True))


def test_silence_is_an_answer_where_a_format_allows_it():
    made = encoder("pair")
    silent, _ = made.encode(PairExample(origin="f:1", prompt=QUESTION, chosen=bot(""), rejected=bot("bad")))
    assert trained(made, silent) == "<|im_end|>"


def test_options_that_cannot_work():
    with pytest.raises(UsageError, match=r"data.max_length is 1"):
        encoder("chat", max_length=1)
    tokenizer = byte_level(template=None, eos_token=None)
    with pytest.raises(UsageError, match="no end-of-sequence token"):
        encoder("text", tokenizer=tokenizer).encode(TextExample(origin="f:1", text="a"))


def test_load_counts_and_verdicts(tmp_path):
    rows = [{"prompt": f"Hello {i}", "chosen": "good", "rejected": "bad " * (i % 3 * 20 + 1)} for i in range(30)]
    rows[4]["chosen"] = "</s>"
    files = [write(tmp_path, rows[:20]), write(tmp_path, rows[20:], "more.jsonl")]
    heard = []
    data = load_dataset(files, encoder("pair", max_length=125, on_overlong="drop"), None, heard.append)
    assert data.counts == {"read": 30, "kept": 20, "truncated": 0, "dropped": 10, "quoted": 1, "quarantined": 0}
    assert data.descriptions == [f"{file}: preference: prompt, chosen, rejected" for file in files]
    assert heard == [20, 30]
    assert [sample.group for row in data.examples for sample in row] == [i for i in range(20) for _ in "ab"]
    assert data.examples[1][0].origin == f"{files[0]}:2" and data.examples[-1][1].origin == f"{files[1]}:9"
    data = load_dataset(files, encoder("pair", max_length=125), None, None)
    assert data.counts == {"read": 30, "kept": 30, "truncated": 10, "dropped": 0, "quoted": 1, "quarantined": 0}
    data = load_dataset(files, encoder("pair"), 22, None)
    assert data.counts["read"] == 22 and len(data.examples) == 22
    data = load_dataset(files, encoder("labelled"), None, None)
    assert data.counts["read"] == 30 and len(data.examples) == 60
    assert [row[0].label for row in data.examples[:4]] == [1.0, 0.0, 1.0, 0.0]


def test_parts_of_a_text_are_rows(tmp_path):
    file = write(tmp_path, [{"text": "Hello there " * 40}, {"text": "Hi"}])
    data = load_dataset([file], encoder("text", max_length=16), None, None)
    assert all(len(row) == 1 for row in data.examples) and data.counts["kept"] == len(data.examples) > 5
    assert data.counts["read"] == 2 and data.counts["truncated"] == 0


def test_a_bad_row_anywhere_stops_the_load(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}] * 700
    file = write(tmp_path, [*rows, {"prompt": "a", "completion": None}])
    with pytest.raises(DataError, match=r"rows.jsonl:701: completion: null$"):
        load_dataset([file], encoder("chat"), None, None)
    assert load_dataset([file], encoder("chat"), 700, None).counts["read"] == 700


GOOD = {"prompt": "a", "completion": "b"}


def damaged(tmp_path):
    """Seven rows, of which the reader refuses two, the format two and the encoder one."""
    path = tmp_path / "rows.jsonl"
    rows = [GOOD, {"prompt": "a"}, {"prompt": "a", "completion": None}, GOOD, {**GOOD, "prompt": "long " * 99}]
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows) + b'{"a": "\xff"}\n{"prompt": "cut')
    return str(path)


def test_quarantine_sets_bad_rows_aside_with_exact_counts(tmp_path):
    file, aside = damaged(tmp_path), tmp_path / "quarantine.jsonl"
    data = load_dataset([file], encoder("chat", max_length=60, on_bad_example="quarantine"), quarantine=aside)
    assert data.counts == {"read": 7, "kept": 2, "truncated": 0, "dropped": 0, "quoted": 0, "quarantined": 5}
    assert [row[0].origin for row in data.examples] == [f"{file}:1", f"{file}:4"]
    kept = {int(row["origin"].rpartition(":")[2]): row for row in map(json.loads, aside.read_text().splitlines())}
    assert sorted(kept) == [2, 3, 5, 6, 7]
    assert kept[3]["reason"] == "completion: null" and kept[3]["row"] == {"prompt": "a", "completion": None}
    assert "missing column" in kept[2]["reason"] and "no token of the completion" in kept[5]["reason"]
    assert kept[6]["row"] == '{"a": "\\xff"}\n' and kept[7]["row"] == '{"prompt": "cut'
    assert "UTF-8" in kept[6]["reason"] and "is it truncated?" in kept[7]["reason"]
    only_counted = load_dataset([file], encoder("chat", max_length=60, on_bad_example="quarantine"))
    assert only_counted.counts == data.counts and only_counted.fingerprint == data.fingerprint


def test_without_quarantine_the_first_bad_row_stops(tmp_path):
    aside = tmp_path / "quarantine.jsonl"
    with pytest.raises(DataError, match=r"rows.jsonl:\d+: "):
        load_dataset([damaged(tmp_path)], encoder("chat", max_length=60), quarantine=aside)
    assert not aside.exists()


@pytest.mark.parametrize("how", ["stop", "quarantine"])
def test_a_file_of_which_all_rows_are_bad_is_an_error(tmp_path, how):
    good, bad = write(tmp_path, [GOOD] * 3), write(tmp_path, [{"prompt": "a", "completion": ""}] * 3, "bad.jsonl")
    with pytest.raises(DataError, match=r"bad.jsonl.*completion: empty completion"):
        load_dataset([good, bad], encoder("chat", on_bad_example=how))


def test_a_row_that_is_two_examples_is_set_aside_whole(tmp_path):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "long " * 99}]
    options = {"max_length": 60, "on_overlong": "error", "on_bad_example": "quarantine"}
    data = load_dataset([write(tmp_path, rows)], encoder("labelled", **options))
    assert len(data.examples) == 2 and data.counts["quarantined"] == 1


@pytest.mark.parametrize("damage", range(6))
def test_rows_out_and_rows_aside_are_rows_in(tmp_path, damage):
    rng = np.random.default_rng(damage)
    lines = [bytearray(json.dumps({**GOOD, "n": n}).encode()) for n in range(60)]
    for line in lines[1:]:
        if rng.random() < 0.5:
            line[rng.integers(len(line))] = rng.choice(list(b'\xff\0x"{,'))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    aside = tmp_path / "aside.jsonl"
    data = load_dataset([str(path)], encoder("chat", on_bad_example="quarantine"), quarantine=aside)
    origins = [row[0].origin for row in data.examples]
    origins += [json.loads(line)["origin"] for line in aside.read_text().splitlines()]
    assert sorted(origins) == sorted(f"{path}:{n + 1}" for n in range(60)) and data.counts["quarantined"] > 5


def test_sources_with_weights(tmp_path):
    one = write(tmp_path, [{**GOOD, "prompt": f"one {n}"} for n in range(10)], "one.jsonl")
    two = write(tmp_path, [{**GOOD, "prompt": f"two {n}"} for n in range(40)], "two.jsonl")
    data = load_dataset([one, two], weights=[1, 3], encoder=encoder("chat"))
    assert (data.mixture.sizes, data.mixture.counts) == ((10, 40), (10, 30)) and len(data.examples) == 50
    plain = load_dataset([one, two], encoder("chat"))
    assert plain.mixture is None and plain.fingerprint != data.fingerprint
    assert load_dataset([one, two], weights=[1, 2], encoder=encoder("chat")).fingerprint != data.fingerprint
    again = load_dataset([one, two], weights=[1, 3], encoder=encoder("chat", repeat=True))
    assert again.mixture.counts == (13, 40) and again.fingerprint != data.fingerprint
    few = load_dataset([one, two], weights=[1, 3], encoder=encoder("chat"), max_examples=5)
    assert few.mixture.sizes == (5, 5)  # of each source
    short = load_dataset([one, two], weights=[1, 3], encoder=encoder("chat", max_mixture_examples=8))
    assert short.mixture.counts == (2, 6) and short.fingerprint != data.fingerprint  # of the mixture
    assert load_dataset(
        [one, two], weights=[1, 3], encoder=encoder("chat", max_mixture_examples=99)
    ).mixture.counts == (
        10,
        30,
    )
    train, held_out = split_examples(data, 0.2, seed=1)
    assert sum(train.mixture.sizes) == len(train.examples) == 40 and held_out.mixture is None
    firsts = {train.examples.origin(row).rpartition(":")[0] for row in range(train.mixture.sizes[0])}
    assert firsts == {one}
    long = write(tmp_path, [{**GOOD, "completion": "long " * 99}], "long.jsonl")
    with pytest.raises(DataError, match=r"long.jsonl: no examples of this source are left"):
        load_dataset([one, long], weights=[1, 1], encoder=encoder("chat", max_length=60, on_overlong="drop"))


def test_large_rows_are_encoded_few_at_a_time_and_the_largest_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "BYTES_PER_CHUNK", 300)
    file = write(tmp_path, [{**GOOD, "prompt": "word " * 50}] * 7)
    sizes = []
    made = encoder("chat")
    plain = made.encode_all
    monkeypatch.setattr(made, "encode_all", lambda examples: sizes.append(len(examples)) or plain(examples))
    assert len(load_dataset([file], made).examples) == 7 and max(sizes) == 2
    monkeypatch.setattr(encoding, "MAX_CHARACTERS", 100)
    with pytest.raises(DataError, match=r"rows.jsonl:1: \d+ characters; an example may have at most 100"):
        load_dataset([file], made)
    monkeypatch.setattr(encoding, "MAX_MESSAGES", 3)
    with pytest.raises(DataError, match="4 messages; a conversation may have at most 3"):
        made.encode(ChatExample(origin="f:1", messages=(QUESTION + bot("a")) * 2))


def test_nothing_to_load(tmp_path):
    file = write(tmp_path, [{"prompt": "a", "completion": "b " * 50}])
    with pytest.raises(DataError, match="no examples are left: 1 read, 1 dropped"):
        load_dataset([file], encoder("chat", max_length=20, on_overlong="drop"), None, None)
    with pytest.raises(UsageError, match="no data files"):
        load_dataset([], encoder("chat"), None, None)
    with pytest.raises(UsageError, match=r"gone.jsonl: no such file"):
        load_dataset([file, str(tmp_path / "gone.jsonl")], encoder("chat"), 1, None)


def test_encoding_in_a_batch_is_encoding_one_by_one(tmp_path):
    contents = ["Hello", " a", "\n", "<|im_end|>", "你好", "x" * 50, "Hello"]
    examples = [
        PairExample(origin="f:1", prompt=QUESTION, chosen=bot(c + "."), rejected=bot("." + c)) for c in contents
    ]
    made = encoder("pair")
    together = [encoded.samples for encoded in made.encode_all(examples)]
    for pair, alone in zip(together, map(made.encode, examples), strict=True):
        for one, other in zip(pair, alone, strict=True):
            assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.mask, other.mask)


def test_fingerprint_changes_with_everything_that_is_trained_on(tmp_path):
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0.5]}

    def print_of(rows, kind="stepwise"):
        return load_dataset([write(tmp_path, rows)], encoder(kind), None, None).fingerprint

    base = print_of([row, {**row, "prompt": "r"}])
    assert base == print_of([row, {**row, "prompt": "r", "id": 3}])
    assert base != print_of([{**row, "prompt": "r"}, row])
    assert base != print_of([{**row, "labels": [1, 0.25]}, {**row, "prompt": "r"}])
    assert base != print_of([row])
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert print_of([pair], "pair") != print_of([{**pair, "margin": 1}], "pair")
    labelled = {"prompt": "q", "completion": "a", "label": True}
    assert print_of([labelled], "labelled") != print_of([{**labelled, "label": False}], "labelled")
    # The same tokens, trained on in other places.
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant")]
    as_chat, as_answer = (
        print_of([{"messages": chat}], "chat"),
        print_of([{"messages": chat, "label": False}], "labelled"),
    )
    assert as_chat != as_answer


def test_split(tmp_path):
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(50)]
    data = load_dataset([write(tmp_path, rows)], encoder("labelled"), None, None)
    train, held_out = split_examples(data, 0.1, seed=3)
    origins = [{row[0].origin for row in part.examples} for part in (train, held_out)]
    assert len(held_out.examples) == 10 and not origins[0] & origins[1] and len(origins[0] | origins[1]) == 50
    assert held_out.counts["kept"] == 10 and train.fingerprint != data.fingerprint
    again = split_examples(data, 0.1, seed=3)
    assert (again[0].fingerprint, again[1].fingerprint) == (train.fingerprint, held_out.fingerprint)
    assert split_examples(data, 0.1, seed=4)[1].fingerprint != held_out.fingerprint
    for fraction, size in ((0.001, 1), (0.999, 49)):
        assert len(split_examples(data, fraction, seed=0)[1].examples) == 2 * size
    with pytest.raises(UsageError, match="above 0 and below 1"):
        split_examples(data, 1.0, seed=0)
    one = load_dataset([write(tmp_path, rows[:1])], encoder("pair"), None, None)
    with pytest.raises(UsageError, match="one example cannot be divided"):
        split_examples(one, 0.5, seed=0)


def test_one_long_text_can_be_split(tmp_path):
    file = write(tmp_path, [{"text": "Hello there " * 100}])
    data = load_dataset([file], encoder("text", max_length=20), None, None)
    train, held_out = split_examples(data, 0.2, seed=0)
    assert len(held_out.examples) == round(0.2 * len(data.examples)) and len(train.examples) + len(
        held_out.examples
    ) == len(data.examples)


def stream_of(rows, batch_size, shuffle=True, seed=5, per_row=1):
    def sample(number):
        return Sample(tokens=np.array([number, 0], dtype=np.int32), mask=np.array([False, True]))

    return ExampleStream([[sample(r) for _ in range(per_row)] for r in range(rows)], batch_size, seed, shuffle)


def numbers(samples):
    return [int(sample.tokens[0]) for sample in samples]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 23])
def test_every_row_comes_once_an_epoch_over_the_edges(batch_size):
    stream = stream_of(10, batch_size)
    seen = [number for _ in range(30) for number in numbers(stream.take())]
    epochs = [seen[i : i + 10] for i in range(0, len(seen) - 9, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert stream.position == 30 * batch_size
    assert seen != [n for _ in range(30) for n in numbers(stream_of(10, batch_size, seed=6).take())]


def test_position_is_the_whole_state():
    stream, expected = stream_of(10, 3), stream_of(10, 3)
    order = [numbers(expected.take()) for _ in range(20)]
    for step in (0, 3, 7, 19):
        resumed = stream_of(10, 3)
        resumed.position = 3 * step
        assert numbers(resumed.take()) == order[step]
        stream.position = 3 * step  # also backwards, in one that was used
        assert numbers(stream.take()) == order[step]


def test_without_shuffling_rows_come_in_order():
    assert numbers(stream_of(4, 6, shuffle=False).take()) == [0, 1, 2, 3, 0, 1]
    assert numbers(stream_of(4, 6, shuffle=False).take(2)) == [0, 1]


def test_each_row_is_a_group_of_its_own_even_twice_in_a_step():
    stream = stream_of(3, 7, per_row=2)
    stream.take(2)
    samples = stream.take()
    assert [sample.group for sample in samples] == [g for g in range(2, 9) for _ in "ab"]
    assert len({id(sample) for sample in samples}) == 14
    arrays = {id(sample.tokens) for sample in samples}
    assert len(arrays) == 6  # tokens are never copied


def test_what_is_written_into_a_sample_stays_in_the_data():
    stream = stream_of(4, 4)
    for sample in stream.take():
        sample.ref_logprobs = np.zeros(2, dtype=np.float32)
    assert all(sample.ref_logprobs is not None for sample in stream.take())


def test_encoder_leaves_the_tokenizer_as_it_was():
    tokenizer = byte_level()
    before = copy.deepcopy(tokenizer("say <|im_end|>")["input_ids"])
    encoder("chat", tokenizer=tokenizer).encode(ChatExample(origin="f:1", messages=QUESTION + bot("</s>")))
    assert tokenizer("say <|im_end|>")["input_ids"] == before


@pytest.mark.parametrize("shuffle", [True, False])
def test_strata_are_spread_evenly_over_every_epoch(shuffle):
    rows = [[Sample(tokens=np.array([i, 1], dtype=np.int32), mask=np.array([False, True]))] for i in range(40)]
    strata = [float(i < 10) for i in range(40)]  # a quarter, all at the front
    stream = ExampleStream(rows, 8, seed=3, shuffle=shuffle, strata=strata)
    orders = []
    for _ in range(2):
        steps = [[int(sample.tokens[0]) for sample in stream.take()] for _ in range(5)]
        assert all(sum(i < 10 for i in step) == 2 for step in steps)
        orders.append([i for step in steps for i in step])
        assert sorted(orders[-1]) == list(range(40))
    assert (orders[0] != orders[1]) == shuffle

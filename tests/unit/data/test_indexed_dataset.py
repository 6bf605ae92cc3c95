"""Indexed files give the samples that their rows give, and what is wrong with them shows when they are opened."""

import json

import numpy as np
import pytest

from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError, UsageError
from posttrain.data import indexed_dataset
from posttrain.data.dataset import Encoder, load_dataset
from posttrain.data.indexed_dataset import is_indexed, load_indexed
from posttrain.data.preprocessing.handlers import PreprocessConfig
from posttrain.data.preprocessing.indexed import IndexedWriter
from posttrain.data.preprocessing.preprocess import preprocess
from posttrain.models.pico import build_tokenizer
from tests.unit.data.made import byte_level

PICO = build_tokenizer()
CHAT = [{"instruction": f"{i}+{i}=", "output": str(2 * i) * (i % 5 + 1)} for i in range(40)]
PAIRS = [{"instruction": f"{i}+1=", "chosen": str(i + 1), "rejected": "x" * (i % 7 + 1)} for i in range(40)]
STEPS = [{"prompt": f"{i}+1=", "completions": ["a", "bc"], "labels": [i % 2, 1]} for i in range(40)]
TEXTS = [{"text": "To add, count on. " * (i % 9 + 1)} for i in range(40)]
KINDS = {
    "text": ("GeneralPretrainHandler", TEXTS, {"append_eod": True}),
    "chat": ("AlpacaStyleInstructionHandler", CHAT, {}),
    "pair": ("AlpacaStylePairwiseHandler", PAIRS, {}),
    "labelled": ("AlpacaStylePairwiseHandler", PAIRS, {}),
    "stepwise": ("AlpacaStyleProcessRewardHandler", STEPS, {}),
}


def written(folder, handler, rows, tokenizer=PICO, **options):
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prefix = str(folder / "out")
    config = PreprocessConfig(input=(str(source),), output_prefix=prefix, handler_name=handler, **options)
    preprocess(config, tokenizer, lambda _: None)
    return str(source), prefix


def plain(rows):
    """All that a trainer sees of rows, but for where they come from."""
    return [
        [
            (
                sample.tokens.tolist(),
                sample.mask.tolist(),
                None if sample.targets is None else sample.targets.tolist(),
                sample.label,
                sample.tokens.dtype,
            )
            for sample in row
        ]
        for row in rows
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("max_length", "on_overlong"), [(500, "truncate"), (21, "truncate"), (21, "drop")])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_same_samples_as_from_the_rows(tmp_path, monkeypatch, kind, max_length, on_overlong, adds_bos):
    monkeypatch.setattr(indexed_dataset, "BLOCK", 64)  # so that there are many blocks
    handler, rows, options = KINDS[kind]
    tokenizer = PICO if adds_bos else byte_level(bos_token=None)
    source, prefix = written(tmp_path, handler, rows, tokenizer, **options)
    encoder = Encoder(tokenizer, DataConfig(max_length=max_length, on_overlong=on_overlong), kind, len(tokenizer))
    try:
        direct = load_dataset([source], encoder)
    except DataError as error:
        told = (
            "no examples are left" if "no examples are left" in str(error) else r"out:\d+: no token to train on within"
        )
        with pytest.raises(DataError, match=told):
            load_indexed(prefix, kind, len(tokenizer), max_length=max_length, on_overlong=on_overlong)
        return
    options = {"max_length": max_length, "on_overlong": on_overlong, "bos_id": tokenizer.bos_token_id}
    indexed = load_indexed(prefix, kind, len(tokenizer), **options)
    assert plain(indexed) == plain(direct.examples)
    assert {name: indexed.counts[name] for name in ("read", "kept", "truncated")} == {
        name: direct.counts[name] for name in ("read", "kept", "truncated")
    }
    assert indexed.lengths().tolist() == direct.examples.lengths().tolist()
    assert indexed.counted() == direct.examples.counted()
    assert indexed.origin(0) == indexed[0][0].origin == f"{prefix}:0"


def test_a_choice_of_rows(tmp_path):
    _, prefix = written(tmp_path, "AlpacaStyleInstructionHandler", CHAT, seq_length=60, neat_pack=True)
    rows = load_indexed(prefix, "chat", len(PICO))
    assert "packed documents separated" in rows.description and len(rows[0]) > 1
    some = rows.subset([3, 1])
    assert plain(some) == plain([rows[3], rows[1]]) and [sample.group for sample in some[1]] == [1] * len(rows[1])
    assert some.lengths().tolist() == [len(sample) for row in some for sample in row]
    assert some.counted() == sum(int(sample.mask.sum()) for row in some for sample in row)
    assert (
        some.fingerprint()
        != rows.fingerprint()
        != load_indexed(prefix, "chat", len(PICO), max_examples=3).fingerprint()
    )
    assert rows.fingerprint() == load_indexed(prefix, "chat", len(PICO)).fingerprint()
    assert len(load_indexed(prefix, "chat", len(PICO), max_examples=3)) == 3
    rows.hold()
    rows[0][0].reward = 3.0
    assert rows[0][0].reward == 3.0


def test_names_and_what_they_stand_for(tmp_path):
    _, prefix = written(tmp_path, "GeneralPretrainHandler", [{"text": "ab", "title": "c"}], json_keys=("text", "title"))
    assert is_indexed(prefix) and not is_indexed(str(tmp_path)) and not is_indexed(str(tmp_path / "rows.jsonl"))
    with pytest.raises(UsageError, match=r"give the name of one of them, for instance .*out_text_document"):
        load_indexed(prefix, "text", len(PICO))
    assert is_indexed(f"{prefix}_title_document")
    assert PICO.decode(load_indexed(f"{prefix}_title_document", "text", len(PICO))[0][0].tokens) == "<s>c"
    written(tmp_path, "AlpacaStyleInstructionHandler", CHAT)
    with pytest.raises(UsageError, match="both"):
        load_indexed(prefix, "chat", len(PICO))


def test_rows_for_another_verb(tmp_path):
    _, prefix = written(tmp_path, "AlpacaStylePairwiseHandler", PAIRS)
    with pytest.raises(UsageError, match="kind pair: for reward, dpo, simpo, orpo, cpo, not for sft"):
        load_indexed(prefix, "chat", len(PICO))
    (tmp_path / "more").mkdir()
    _, prefix = written(tmp_path / "more", "R1AlpacaStyleInstructionHandler", CHAT)
    with pytest.raises(UsageError, match="prompts without completions"):
        load_indexed(prefix, "chat", len(PICO))


def test_prompts_for_reinforcement_learning(tmp_path):
    """What the R1 handler writes is asked as it was tokenised; the answer comes back as a column, and so do others."""
    rows = [{"instruction": f"{i}+{i}=", "output": str(2 * i), "level": "l" * i} for i in range(1, 5)]
    source, prefix = written(
        tmp_path, "R1AlpacaStyleInstructionHandler", rows, dataset_additional_keys=("labels", "level")
    )
    encoder = Encoder(PICO, DataConfig(), "prompt", len(PICO))
    direct, indexed = load_dataset([source], encoder), load_dataset([prefix], encoder)
    assert [row[0].tokens.tolist() for row in indexed.examples] == [row[0].tokens.tolist() for row in direct.examples]
    assert [row[0].columns for row in indexed.examples] == [{"labels": r["output"], "level": r["level"]} for r in rows]
    assert indexed.examples[2][0].origin == f"{prefix}:2" and "5" not in indexed.examples[0][0].messages[0]["content"]
    assert indexed.descriptions == [f"{prefix}: indexed prompt: input_ids, labels, level"]
    assert len(load_dataset([prefix], encoder, max_examples=3).examples) == 3
    longest = len(direct.examples[3][0].tokens)
    with pytest.raises(DataError, match=r"out:\d+: the prompt has .* cannot be truncated"):
        load_dataset([prefix], Encoder(PICO, DataConfig(max_length=longest - 1), "prompt", len(PICO)))
    with pytest.raises(DataError, match="no examples are left: 4 read"):
        load_dataset([prefix], Encoder(PICO, DataConfig(max_length=3, on_overlong="drop"), "prompt", len(PICO)))
    with pytest.raises(DataError, match="outside the model's vocabulary"):
        load_dataset([prefix], Encoder(PICO, DataConfig(), "prompt", 20))


def test_prompts_of_other_tools(tmp_path):
    """They have no manifest, and often an attention mask: their labels are told from those of a conversation."""
    five, six = PICO.convert_tokens_to_ids(["5", "6"])
    prefix = columns(tmp_path, input_ids=[[7, 8], [9]], labels=[[five], [six, five]], attention_mask=[[1, 1], [1]])
    rows = load_dataset([prefix], Encoder(PICO, DataConfig(), "prompt", len(PICO))).examples
    assert [row[0].columns for row in rows] == [{"labels": "5"}, {"labels": "65"}]
    columns(tmp_path, labels=[[five]])
    with pytest.raises(DataError, match=r"has 1 examples, but .* has 2"):
        load_dataset([prefix], Encoder(PICO, DataConfig(), "prompt", len(PICO)))
    columns(tmp_path, labels=[[-100, 8], [9]])
    with pytest.raises(UsageError, match="kind chat: for sft, distill, not for reinforcement learning"):
        load_dataset([prefix], Encoder(PICO, DataConfig(), "prompt", len(PICO)))


def columns(folder, **rows):
    for key, values in rows.items():
        with IndexedWriter(folder / f"a_packed_{key}_document", np.int32) as writer:
            for row in values:
                writer.add(np.array(row, dtype=np.int32))
    return str(folder / "a")


@pytest.mark.parametrize(
    ("ids", "labels", "mask", "message"),
    [
        ([[1, 2], [1, 99]], [[-100, 2], [-100, 99]], None, r"a:1: token 1: token id 99 is outside .* vocabulary of 50"),
        ([[1, -1]], [[-100, 2]], None, "token id -1"),
        ([[1, 2]], [[-100, 3]], None, r"a:0: token 1: a label differs from its token"),
        ([[1, 2, 3]], [[1, 2, 3]], None, r"a:0: token 0: a label on the first token"),
        ([[1, 2, 3, 4]], [[-100, 2, 3, 4]], [[1, 1, 2, 2]], r"a:0: token 2: a label on the first token"),
        ([[1, 2], [3, 4]], [[-100, 2], [-100, -100]], None, "a:1: no token to train on"),
        ([[1, 2]], [[-100, 2, 2]], None, "its sequences have other lengths"),
        ([[1, 2], []], [[-100, 2], []], None, "a:1: no tokens"),
    ],
)
def test_numbers_that_cannot_be(tmp_path, ids, labels, mask, message):
    mask = mask or [[1] * len(row) for row in ids]
    prefix = columns(tmp_path, input_ids=ids, labels=labels, attention_mask=mask)
    with pytest.raises(DataError, match=message):
        load_indexed(prefix, "chat", 50)


def test_files_of_other_tools_without_a_manifest(tmp_path):
    prefix = columns(tmp_path, input_ids=[[1, 2]], labels=[[-100, 2]], attention_mask=[[1, 1]])
    assert plain(load_indexed(prefix, "chat", 50)) == [[([1, 2], [False, True], None, 0.0, np.dtype(np.int32))]]
    with pytest.raises(UsageError, match="for sft, distill, not for prm"):
        load_indexed(prefix, "stepwise", 50)

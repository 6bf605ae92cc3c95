"""Preprocessing: each handler's columns by hand; the same bytes however it runs and however often it is killed."""

import json
import os
import shutil
from itertools import pairwise

import numpy as np
import pytest

from posttrain.cli.preprocess import run as command
from posttrain.core.errors import DataError, UsageError
from posttrain.data.indexed_dataset import is_indexed, load_indexed, open_files
from posttrain.data.preprocessing import preprocess as module
from posttrain.data.preprocessing.handlers import HANDLERS, PreprocessConfig
from posttrain.data.preprocessing.indexed import IndexedReader
from posttrain.data.preprocessing.preprocess import pack_sequences, preprocess
from posttrain.models.pico import SPECIALS, build_tokenizer
from tests.unit.data.made import byte_level
from tests.unit.data.preprocessing.test_indexed import die_at, megatron, write_with_megatron

PICO = build_tokenizer()
NOT = -100


def ids(*pieces):
    """Control tokens of pico by name, all else letter by letter."""
    vocabulary = PICO.get_vocab()
    letters = [[piece] if piece in SPECIALS else list(piece.replace(" ", "Ġ").replace("\n", "Ċ")) for piece in pieces]
    return [vocabulary[letter] for piece in letters for letter in piece]


def asked(question):
    return ids("<s>", "<|user|>", question, "<|end|>", "<|assistant|>")


def answered(question, answer):
    """Token ids and labels of an exchange."""
    prompt, response = asked(question), ids(answer, "<|end|>")
    return prompt + response, [NOT] * len(prompt) + response


def write_rows(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / name)


def run(tmp_path, handler, rows, log=lambda _: None, tokenizer=PICO, **options):
    """Preprocess rows; the columns that were written, as lists, by the names of the files."""
    config = PreprocessConfig(
        input=(write_rows(tmp_path, rows),), output_prefix=str(tmp_path / "out"), handler_name=handler, **options
    )
    manifest = preprocess(config, tokenizer, log)
    return read(tmp_path), manifest


def read(folder, stem="out"):
    files = sorted(folder.glob(f"{stem}_*_document.idx"))
    return {
        file.name[len(stem) + 1 : -len("_document.idx")]: [
            list(map(int, row)) for row in IndexedReader(str(file)[: -len(".idx")])
        ]
        for file in files
    }


# Handlers

ALPACA = {"instruction": "Add.", "input": "1+2", "output": "3"}


def test_pretraining_text(tmp_path):
    rows = [{"text": "ab", "title": "T", "other": 1}, {"text": "c", "title": "U", "other": None}]
    columns, manifest = run(tmp_path, "GeneralPretrainHandler", rows, json_keys=("text", "title"))
    assert columns == {
        "text": [ids("<s>", "ab"), ids("<s>", "c")],
        "title": [ids("<s>", "T"), ids("<s>", "U")],
    }
    assert manifest["counts"]["kept"] == 2 and manifest["kind"] == "text"
    assert IndexedReader(tmp_path / "out_text_document").dtype == np.uint16


def test_pretraining_text_with_its_end(tmp_path):
    columns, _ = run(tmp_path, "GeneralPretrainHandler", [{"text": "ab"}], append_eod=True)
    assert columns == {"text": [ids("<s>", "ab", "<|end|>")]}


def test_pretraining_leaves_nothing_out(tmp_path):
    columns, _ = run(tmp_path, "GeneralPretrainHandler", [{"text": "abcdefgh"}], seq_length=4)
    assert columns == {"text": [ids("<s>", "abcdefgh")]}


@pytest.mark.parametrize("append_eod", [False, True])
def test_sentences_are_the_sequences_of_their_document(tmp_path, append_eod):
    rows = [{"text": "a. B! C", "title": "T"}, {"text": "d", "title": "Up. V"}] * 300  # several chunks
    run(
        tmp_path,
        "GeneralPretrainHandler",
        rows,
        json_keys=("text", "title"),
        split_sentences=True,
        append_eod=append_eod,
        n_subs=2,
    )
    end = ids("<|end|>") if append_eod else []
    text = [[ids("<s>", "a."), ids("B!"), [*ids("C"), *end]], [[*ids("<s>", "d"), *end]]] * 300
    title = [[[*ids("<s>", "T"), *end]], [ids("<s>", "Up."), [*ids("V"), *end]]] * 300
    for key, documents in {"text": text, "title": title}.items():
        theirs = megatron().IndexedDataset(str(tmp_path / f"out_{key}_sentence"))
        edges = theirs.document_indices.tolist()
        assert edges == [0, *np.cumsum([len(document) for document in documents]).tolist()]
        found = [[theirs[i].tolist() for i in range(*pair)] for pair in pairwise(edges)]
        assert found == documents
        ours = [tmp_path / f"out_{key}_sentence.{end}" for end in ("bin", "idx")]
        assert write_with_megatron(tmp_path / "theirs", documents) == [file.read_bytes() for file in ours]
    assert not read(tmp_path)  # no file says that its sequences are documents
    (tmp_path / "out_title_sentence.idx").unlink()
    [found] = open_files(str(tmp_path / "out")).readers.values()  # one is left, so the prefix names it
    assert len(found) == len([sentence for document in text for sentence in document])


def test_alpaca_instructions(tmp_path):
    history = {**ALPACA, "system": "Be brief.", "history": [["1+1", "2"]]}
    columns, _ = run(tmp_path, "AlpacaStyleInstructionHandler", [ALPACA, history])
    first, labels = answered("Add.\n1+2", "3")
    prompt = ids("<s>", "<|system|>", "Be brief.", "<|end|>", "<|user|>", "1+1", "<|end|>", "<|assistant|>")
    between = ids("<|user|>", "Add.\n1+2", "<|end|>", "<|assistant|>")
    old, new = ids("2", "<|end|>"), ids("3", "<|end|>")
    second = prompt + old + between + new
    assert columns == {
        "packed_input_ids": [first, second],
        "packed_attention_mask": [[1] * len(first), [1] * len(second)],
        "packed_labels": [labels, [NOT] * len(prompt) + old + [NOT] * len(between) + new],
    }
    assert IndexedReader(tmp_path / "out_packed_labels_document").dtype == np.int32
    assert IndexedReader(tmp_path / "out_packed_input_ids_document").dtype == np.uint16


def test_columns_under_other_names(tmp_path):
    rows = [{"problem": "1+2", "answer": "3", "query": "not this", "output": "nor this", "text": "nor this"}]
    keys = {"prompt": "problem", "query": "", "response": "answer", "system": ""}
    columns, _ = run(tmp_path, "AlpacaStyleInstructionHandler", rows, map_keys=keys)
    assert columns["packed_input_ids"] == [answered("1+2", "3")[0]]


def test_sharegpt_instructions(tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": "1+2"}, {"from": "gpt", "value": "3"}]},
        {"messages": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]},
    ]
    columns, _ = run(tmp_path, "SharegptStyleInstructionHandler", rows)
    tokens, labels = answered("1+2", "3")
    assert columns["packed_input_ids"] == [tokens] * 2 and columns["packed_labels"] == [labels] * 2


def test_sharegpt_in_other_words(tmp_path):
    rows = [{"talk": [{"who": "me", "what": "1+2"}, {"who": "it", "what": "3"}]}]
    tags = {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "it"}
    keys = {"messages": "talk", "tags": tags}
    columns, _ = run(tmp_path, "SharegptStyleInstructionHandler", rows, map_keys=keys)
    assert columns["packed_input_ids"] == [answered("1+2", "3")[0]]


def test_prompts_for_reinforcement_learning(tmp_path):
    rows = [{"problem": "1+2", "answer": "3", "level": 5, "source": "book"}]
    keys = {"prompt": "problem", "query": "", "response": "answer", "system": ""}
    more = ("labels", "level", "source")
    columns, manifest = run(
        tmp_path, "R1AlpacaStyleInstructionHandler", rows, map_keys=keys, dataset_additional_keys=more
    )
    assert columns == {
        "packed_input_ids": [asked("1+2")],
        "packed_labels": [ids("3")],
        "packed_level": [ids("5")],
        "packed_source": [ids("book")],
    }
    assert manifest["kind"] == "prompt"


@pytest.mark.parametrize(
    ("handler", "row"),
    [
        ("AlpacaStylePairwiseHandler", {"instruction": "1+2", "chosen": "3", "rejected": "12"}),
        ("AlpacaStylePairwiseHandler", {"instruction": "1+2", "input": "", "output": ["3", "12"]}),
        (
            "SharegptStylePairwiseHandler",
            {
                "conversations": [{"from": "human", "value": "1+2"}],
                "chosen": {"from": "gpt", "value": "3"},
                "rejected": {"from": "gpt", "value": "12"},
            },
        ),
    ],
)
def test_pairs(tmp_path, handler, row):
    columns, _ = run(tmp_path, handler, [row])
    (chosen, chosen_labels), (rejected, rejected_labels) = answered("1+2", "3"), answered("1+2", "12")
    assert columns == {
        "packed_chosen_input_ids": [chosen],
        "packed_chosen_labels": [chosen_labels],
        "packed_rejected_input_ids": [rejected],
        "packed_rejected_labels": [rejected_labels],
    }


def test_process_rewards(tmp_path):
    rows = [{"input": "1+2 is# 12#", "value": ["+", "-"]}]
    columns, manifest = run(tmp_path, "AlpacaStyleProcessRewardHandler", rows, placeholder="#")
    tokens = ids("1+2 is# 12#")
    labels = [NOT] * len(tokens)
    labels[tokens.index(ids("#")[0])], labels[-1] = ids("+")[0], ids("-")[0]
    assert columns == {
        "packed_input_ids": [tokens],
        "packed_attention_mask": [[1] * len(tokens)],
        "packed_labels": [labels],
    }
    assert manifest["reward_ids"] == ids("+", "-")


def test_process_rewards_have_no_token_for_a_half_right_step(tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: a label between 0 and 1"):
        run(tmp_path, "AlpacaStyleProcessRewardHandler", [{"prompt": "1", "completions": ["2"], "labels": [0.5]}])
    with pytest.raises(UsageError, match="'good' is 4 tokens"):
        run(tmp_path, "AlpacaStyleProcessRewardHandler", [], reward_tokens=("good", "-"))


def test_a_template_by_name(tmp_path):
    tokenizer = byte_level(template=None)
    columns, _ = run(tmp_path, "AlpacaStyleInstructionHandler", [ALPACA], tokenizer=tokenizer, chat_template="chatml")
    tokens, labels = columns["packed_input_ids"][0], columns["packed_labels"][0]
    assert tokenizer.decode(tokens).rstrip() == (
        "<|im_start|>user\nAdd.\n1+2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )
    assert tokenizer.decode([token for token in labels if token != NOT]).rstrip() == "3<|im_end|>"


# What is left out, and what is refused


def test_rows_of_seq_length_are_dropped_and_counted(tmp_path):
    length = len(answered("q", "a")[0])
    rows = [{"instruction": "q", "output": "a" * extra} for extra in (1, 2, 3)]
    messages = []
    columns, manifest = run(tmp_path, "AlpacaStyleInstructionHandler", rows, messages.append, seq_length=length + 1)
    assert columns["packed_input_ids"] == [answered("q", "a")[0]]
    assert manifest["counts"]["dropped"] == 2 and f"2 dropped: seq_length {length + 1} or longer" in messages[-1]
    columns, _ = run(tmp_path, "R1AlpacaStyleInstructionHandler", rows, seq_length=len(asked("q")) + 1)
    assert len(columns["packed_input_ids"]) == 3
    with pytest.raises(DataError, match="nothing to write: 3 examples read, 3 dropped"):
        run(tmp_path, "R1AlpacaStyleInstructionHandler", rows, seq_length=len(asked("q")))


def test_a_bad_row_stops_or_is_set_aside(tmp_path):
    rows = [ALPACA, {"instruction": "", "output": "x"}, {"instruction": "x"}, ALPACA]
    with pytest.raises(DataError, match=r"rows\.jsonl:[23]: "):
        run(tmp_path, "AlpacaStyleInstructionHandler", rows)
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl"}
    columns, manifest = run(tmp_path, "AlpacaStyleInstructionHandler", rows, on_bad_example="quarantine")
    assert len(columns["packed_input_ids"]) == 2 and manifest["counts"]["bad"] == 2
    aside = [json.loads(line) for line in (tmp_path / "out_packed_quarantine.jsonl").read_text().splitlines()]
    assert [row["row"] for row in aside] == rows[1:3] and "rows.jsonl:2" in aside[0]["reason"]


def test_a_line_that_is_no_row_is_set_aside(tmp_path):
    write_rows(tmp_path, [ALPACA])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{broken\n" + json.dumps(ALPACA) + "\n")
    config = PreprocessConfig(
        input=(str(tmp_path / "rows.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        handler_name="AlpacaStyleInstructionHandler",
    )
    with pytest.raises(DataError, match=r"rows\.jsonl:2: broken JSON"):
        preprocess(config, PICO, lambda _: None)
    config.on_bad_example = "quarantine"
    counts = preprocess(config, PICO, lambda _: None)["counts"]
    assert (counts["read"], counts["kept"], counts["bad"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"handler_name": "Nobody"}, "no handler 'Nobody'. Handlers: GeneralPretrainHandler, Alpaca"),
        ({"handler_name": ""}, "handler_name is not set. Handlers: General"),
        ({"input": ()}, "input is not set"),
        ({"output_prefix": ""}, "output_prefix is not set"),
        ({"pack": True}, "pack needs the length"),
        ({"handler_name": "GeneralPretrainHandler", "neat_pack": True}, "pack works with instruction handlers"),
        ({"split_sentences": True}, "split_sentences works with GeneralPretrainHandler, not with Alpaca"),
        ({"workers": 0}, "workers is 0"),
        ({"seq_length": 2}, "seq_length is 2"),
        ({"map_keys": {"nothing": "x"}}, "unknown column 'nothing'; known are prompt, query"),
        ({"chat_template": "chatnl"}, "Did you mean chatml"),
        ({"input": ("nowhere.jsonl",)}, r"nowhere\.jsonl"),
    ],
)
def test_settings_that_cannot_work(tmp_path, options, message):
    given = {
        "input": (write_rows(tmp_path, [ALPACA]),),
        "output_prefix": str(tmp_path / "out"),
        "handler_name": "AlpacaStyleInstructionHandler",
    }
    with pytest.raises(UsageError, match=message):
        preprocess(PreprocessConfig(**(given | options)), build_tokenizer(), lambda _: None)


def test_the_command_reads_a_file_and_options(tmp_path, capsys):
    source = write_rows(tmp_path, [{"problem": "1+2", "answer": "3"}] * 3)
    (tmp_path / "c.yaml").write_text(
        f"input: {source}\ntokenizer_name_or_path: pico\noutput_prefix: {tmp_path}/out\nworkers: 1\nlog_interval: 2\n"
        "handler_name: R1AlpacaStyleInstructionHandler\ntokenizer_type: HuggingFaceTokenizer\n"
        "dataset_additional_keys: [labels]\n"
        'map_keys: {"prompt": "problem", "query": "", "response": "answer", "system": ""}\n'
    )
    assert command([str(tmp_path / "c.yaml"), "--seq-length", "64"]) == 0
    assert read(tmp_path)["packed_input_ids"] == [asked("1+2")] * 3
    printed = capsys.readouterr().out
    assert "examples/s" in printed and "done: 3 examples read, 3 kept" in printed
    (tmp_path / "d.yaml").write_text("handler_nam: x\n")
    with pytest.raises(UsageError, match=r"d\.yaml:1: handler_nam: no such option. Did you mean handler_name"):
        command([str(tmp_path / "d.yaml")])
    with pytest.raises(UsageError, match=r"tokenizer is not set\. Give a directory, .*--tokenizer MODEL"):
        command(["--input", source, "--handler_name", next(iter(HANDLERS)), "--output_prefix", "x"])


# Commands of MindSpeed-LLM and MindSpeed-RL as their users have them, places replaced.
MINDSPEED = [
    "--input ROWS --tokenizer-name-or-path pico --tokenizer-type PretrainedFromHF --cache-dir CACHE --handler-name "
    "GeneralPretrainHandler --output-prefix OUT --json-keys output --workers 1 --n-subs 16 --log-interval 1000",
    "--input ROWS --tokenizer-name-or-path pico --output-prefix OUT --workers 1 --log-interval 1000 --tokenizer-type "
    "PretrainedFromHF --handler-name AlpacaStyleInstructionHandler --prompt-type chatml --seed 1234",
    "--input ROWS --tokenizer-name-or-path pico --output-prefix OUT --tokenizer-type PretrainedFromHF --handler-name "
    "AlpacaStyleInstructionHandler --map-keys KEYS --seq-length 64 --append-eod --neat-pack",
]


@pytest.mark.parametrize("line", MINDSPEED)
def test_commands_of_mindspeed(tmp_path, line, capsys):
    places = {"ROWS": write_rows(tmp_path, [ALPACA]), "OUT": f"{tmp_path}/out", "CACHE": f"{tmp_path}/cache"}
    places["KEYS"] = '{"prompt":"instruction","query":"input","response":"output"}'
    assert command([places.get(word, word) for word in line.split()]) == 0
    assert read(tmp_path) and not capsys.readouterr().err


def test_the_template_of_mindspeed_is_ours(tmp_path):
    rows = write_rows(tmp_path, [ALPACA])
    for out, option in (("a", "--prompt-type"), ("b", "--chat_template")):
        words = ["--input", rows, "--tokenizer", "pico", "--handler_name", "AlpacaStyleInstructionHandler"]
        assert command([*words, "--output_prefix", f"{tmp_path}/{out}", option, "chatml"]) == 0
    assert read(tmp_path, "a") == read(tmp_path, "b") != {}


# Packing


def test_packs_are_filled_with_what_fits_best():
    lengths = np.array([3, 9, 4, 4, 1, 6])
    assert list(pack_sequences(lengths, 10)) == [[1, 4], [5, 2], [3, 0]]
    lengths = np.random.default_rng(0).integers(1, 500, 2000)
    packs = list(pack_sequences(lengths, 1024))
    assert sorted(row for pack in packs for row in pack) == list(range(2000))
    assert all(lengths[pack].sum() <= 1024 for pack in packs)
    assert len(packs) <= -(-lengths.sum() // 1024) + 1


@pytest.mark.parametrize("neat", [False, True])
def test_packed_rows(tmp_path, neat):
    rows = [{"instruction": "q", "output": "a" * n} for n in (1, 5, 2)]
    (one, one_labels), (five, five_labels), (two, two_labels) = (answered("q", "a" * n) for n in (1, 5, 2))
    room = len(one) + len(five) + 1
    options = {"neat_pack": True} if neat else {"pack": True}
    columns, manifest = run(tmp_path, "AlpacaStyleInstructionHandler", rows, seq_length=room, **options)
    pad = PICO.pad_token_id
    assert columns == {
        "packed_input_ids": [five + two, one + [pad] * (room - len(one))],
        "packed_labels": [five_labels + two_labels, one_labels + [NOT] * (room - len(one))],
        "packed_attention_mask": [
            [1] * len(five) + [2 if neat else 1] * len(two),
            [1] * len(one) + [0] * (room - len(one)),
        ],
    }
    assert manifest["counts"]["rows"] == 2
    loaded = load_indexed(str(tmp_path / "out"), "chat", len(PICO))
    documents = [sample.tokens.tolist() for row in loaded for sample in row]
    assert documents == ([five, two, one] if neat else [five + two, one])
    assert [len(row) for row in loaded] == ([2, 1] if neat else [1, 1])


# However it runs


def many_rows(n=60):
    rng = np.random.default_rng(0)
    return [{"instruction": f"{i}+{i}=", "output": str(2 * i) * int(rng.integers(1, 6))} for i in range(n)]


def files_of(folder, stem="out"):
    """All files of a result; its manifest says where they are, so only what else it says is compared."""
    return {file.name: file.read_bytes() for file in folder.glob(f"{stem}_*") if not file.name.endswith(".json")}


def configured(folder, source, **options):
    folder.mkdir(exist_ok=True)
    given = {"handler_name": "AlpacaStyleInstructionHandler", "seq_length": 40, "neat_pack": True} | options
    return PreprocessConfig(input=(source,), output_prefix=str(folder / "out"), **given)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_RECORDS", 7)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # takes time, and a kill is no power cut


@pytest.mark.usefixtures("small_chunks")
def test_workers_and_parts_do_not_change_a_byte(tmp_path):
    source = write_rows(tmp_path, many_rows())
    expected = None
    for number, options in enumerate(
        ({}, {"workers": 3, "n_subs": 3}, {"n_subs": 5, "cache_dir": str(tmp_path / "c")})
    ):
        folder = tmp_path / str(number)
        preprocess(configured(folder, source, **options), PICO, lambda _: None)
        found = files_of(folder)
        assert len(found) == 6 and (expected is None or found == expected)
        expected = found
        assert {file.suffix for file in folder.iterdir()} == {".bin", ".idx", ".json"}, "something was left behind"
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("packs", [False, True])
def test_killed_at_every_change_of_the_disk_and_started_again(tmp_path, packs):
    """A child dies at its n-th such call. Then nothing looks complete that is not, and the next start ends well."""
    source = write_rows(tmp_path, many_rows())
    folder = tmp_path / "killed"
    older = configured(tmp_path / "old", source, neat_pack=packs, seq_length=17)
    newer = configured(folder, source, n_subs=2, neat_pack=packs)
    preprocess(older, PICO, lambda _: None)
    before, after = tokens_of(tmp_path / "old"), None
    outcomes = set()
    for moment in range(200):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "old", folder)
        child = os.fork()
        if child == 0:
            die_at(moment)
            preprocess(newer, PICO, lambda _: None)
            os._exit(0)
        died = os.waitpid(child, 0)[1] != 0
        left = None
        if is_indexed(str(folder / "out")):
            try:
                left = tokens_of(folder)
            except UsageError as error:
                assert "interrupted" in str(error)
        messages = []
        preprocess(newer, PICO, messages.append)
        after = after or tokens_of(folder)
        assert left in (None, before, after) and before != after, f"killed at {moment}: old and new are mixed"
        outcomes.add("nothing" if left is None else "old" if left == before else "new")
        outcomes.add(
            "resumed" if "resuming after example" in messages[0] else "from the start" if len(messages) > 1 else "done"
        )
        assert {file.suffix for file in folder.iterdir()} == {".bin", ".idx", ".json"}, "something was left behind"
        if moment == 0:
            whole = files_of(folder)
        assert files_of(folder) == whole
        if not died:
            break
    assert outcomes == {"nothing", "old", "new", "resumed", "done"}


def tokens_of(folder):
    return [sample.tokens.tolist() for row in load_indexed(str(folder / "out"), "chat", len(PICO)) for sample in row]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("change", ["nothing", "rows", "options", "tokenizer", "a part"])
def test_finished_parts_are_reused_only_if_nothing_changed(tmp_path, change):
    source = write_rows(tmp_path, many_rows())
    folder = tmp_path / "out"
    options = {"n_subs": 3}
    child = os.fork()
    if child == 0:
        module.write_packed = lambda *_: os._exit(9)  # all parts are there, the whole is not
        preprocess(configured(folder, source, **options), PICO, lambda _: None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not is_indexed(str(folder / "out"))
    tokenizer = build_tokenizer()
    if change == "rows":
        write_rows(tmp_path, many_rows()[::-1])
    elif change == "options":
        options["append_eod"] = True
    elif change == "tokenizer":
        tokenizer.chat_template = tokenizer.chat_template.replace("<|system|>", "<|user|>") + " "
    elif change == "a part":
        (folder / ".out_packed.parts" / "000001.labels.bin").write_bytes(b"1234")
    messages = []
    preprocess(configured(folder, source, **options), tokenizer, messages.append)
    reused = [line for line in messages if "resuming after example" in line]
    expected = {"nothing": ["resuming after example 60: "], "a part": ["resuming after example 2"]}.get(change, [])
    assert len(reused) == len(expected)
    assert all(line.startswith(start) for line, start in zip(reused, expected, strict=True))
    preprocess(configured(tmp_path / "fresh", source, **options), tokenizer, lambda _: None)
    assert files_of(folder) == files_of(tmp_path / "fresh")


def test_two_at_once_do_not_disturb_each_other(tmp_path):
    config = configured(tmp_path / "out", write_rows(tmp_path, many_rows()))

    def second(line):
        if "examples/s" in line:  # the first is at work
            with pytest.raises(UsageError, match="another process is writing"):
                preprocess(config, PICO, lambda _: None)

    config.log_interval = 60
    preprocess(config, PICO, second)
    assert len(tokens_of(tmp_path / "out")) == 60


def test_nothing_is_done_twice(tmp_path, monkeypatch):
    config = configured(tmp_path / "out", write_rows(tmp_path, many_rows()))
    first = preprocess(config, PICO, lambda _: None)
    monkeypatch.setattr(module, "encode_parts", None)
    messages = []
    assert preprocess(config, PICO, messages.append) == first and "already complete" in messages[0]


@pytest.mark.parametrize("flag", ["--slow_tokenizer", "--tokenizer-not-use-fast"])
def test_a_script_with_a_flag_without_effect_and_without_a_handler_runs(flag, tmp_path, capsys):
    """38 of MindSpeed-LLM's 94 examples name no handler, 13 have --tokenizer-not-use-fast."""
    source = write_rows(tmp_path, [{"text": "one two"}])
    assert command(["--input", source, "--output_prefix", str(tmp_path / "x"), "--tokenizer", "pico", flag]) == 0
    told = capsys.readouterr().err
    assert "has no effect" in told and "GeneralPretrainHandler, for plain text" in told
    assert (tmp_path / "x_text_document.bin").is_file()

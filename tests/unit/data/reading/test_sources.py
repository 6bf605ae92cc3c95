"""Readers: every kind of file gives its rows with their places; every fault is one message with the place."""

import gzip
import json
import re
import struct
import sys
import types

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError, UsageError
from posttrain.data.reading import sources
from posttrain.data.reading.sources import READERS, find_files, read_records

ROWS = [{"prompt": "Hé \u2028llo", "completion": "a\nb"}, {"prompt": "x", "completion": "y", "n": 3}]


def write(tmp_path, name, data):
    path = tmp_path / name
    if isinstance(data, str):
        data = data.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def rows_of(path):
    return [(row.values, row.origin.removeprefix(str(path))) for row in read_records(path)]


def refusal(path, error=DataError):
    with pytest.raises(error) as caught:
        list(read_records(path))
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize("zipped", ["", ".gz"])
def test_jsonl_with_bom_crlf_blank_lines_and_unicode_separators(tmp_path, zipped):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path = write(tmp_path, f"a.jsonl{zipped}", "\ufeff" + lines[0] + "\r\n\r\n" + lines[1])
    assert rows_of(path) == [(ROWS[0], ":1"), (ROWS[1], ":3")]


@pytest.mark.parametrize("zipped", ["", ".gz"])
def test_json_list_knows_the_line_of_each_object(tmp_path, zipped):
    path = write(tmp_path, f"a.json{zipped}", "\ufeff" + json.dumps(ROWS, indent=2))
    assert rows_of(path) == [(ROWS[0], ":2"), (ROWS[1], ":6")]
    path = write(tmp_path, f"b.json{zipped}", '\n[{"a": 1},{"a":\n2}\n,\n\n {"a": NaN, "b": 12345678901234567890}]\n')
    assert [place for _, place in rows_of(path)] == [":2", ":row 2", ":6"]  # no two have one name


def test_json_with_an_object_a_line(tmp_path):
    path = write(tmp_path, "a.json", '{"a": 1}\n{"a": 2}\n')
    assert rows_of(path) == [({"a": 1}, ":1"), ({"a": 2}, ":2")]


def test_csv_with_quoted_line_ends_counts_lines_not_rows(tmp_path):
    path = write(tmp_path, "a.csv", '\ufeffprompt,completion\r\n"one\nline, two","say ""hi"""\r\n\r\nx,y\r\n')
    first = {"prompt": "one\nline, two", "completion": 'say "hi"'}
    assert rows_of(path) == [(first, ":2"), ({"prompt": "x", "completion": "y"}, ":5")]


def test_csv_fields_may_be_large(tmp_path):
    path = write(tmp_path, "a.csv", "text\n" + "x" * 300_000 + "\n")
    assert len(rows_of(path)[0][0]["text"]) == 300_000


def test_txt_gives_lines_and_skips_blank_ones(tmp_path):
    path = write(tmp_path, "a.txt", "one \r\n\n  two")
    assert rows_of(path) == [({"text": "one "}, ":1"), ({"text": "  two"}, ":3")]


@pytest.mark.parametrize("zipped", ["", ".gz"])
@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream"])
def test_parquet_and_both_layouts_of_arrow(tmp_path, kind, zipped):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    rows = [{"messages": [{"role": "user", "content": f"{i}"}], "label": None if i == 1 else True} for i in range(3000)]
    table = pyarrow.Table.from_pylist(rows)
    sink = pyarrow.BufferOutputStream()
    if kind == "parquet":
        parquet.write_table(table, sink)
    else:
        with (ipc.new_file if kind == "arrow file" else ipc.new_stream)(sink, table.schema) as writer:
            writer.write_table(table)
    path = write(tmp_path, f"a.{kind.split()[0]}{zipped}", sink.getvalue().to_pybytes())
    found = rows_of(path)
    assert [values for values, _ in found] == rows
    assert found[0][1] == ":row 1" and found[2999][1] == ":row 3000"


def test_folder_and_glob_in_the_order_of_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", ".hidden/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, name, json.dumps({"name": name}))
    write(tmp_path, "README.md", "no data")
    names = [row.values["name"] for row in read_records(tmp_path)]
    assert names == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert [row.values["name"] for row in read_records(str(tmp_path / "[ab]*.jsonl"))] == ["a.jsonl", "b.jsonl"]
    assert [row.values["name"] for row in read_records(str(tmp_path / "*" / "c.jsonl"))] == ["deep/c.jsonl"]


def test_splits_of_a_folder(tmp_path):
    names = ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl", "validation/part.jsonl")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, name, json.dumps({"name": name}))

    def names_of(split):
        return [row.values["name"] for row in read_records(f"{tmp_path}:{split}")]

    assert names_of("train") == list(names[:2]) and names_of("test") == ["test.jsonl"]
    assert names_of("validation") == ["validation/part.jsonl"]
    assert "several splits (test, train, validation); choose one, " in refusal(tmp_path, UsageError)
    with pytest.raises(UsageError, match=r"no file named dev .*its splits are test, train, validation"):
        names_of("dev")
    with pytest.raises(UsageError, match="a file has no splits"):
        list(read_records(f"{tmp_path / 'test.jsonl'}:test"))


def test_a_folder_of_training_files_needs_no_split(tmp_path):
    for name in ("train.jsonl", "more.jsonl"):
        write(tmp_path, name, "{}")
    assert len(list(read_records(tmp_path))) == 2
    write(tmp_path, "test.jsonl", "{}")
    assert "several splits" in refusal(tmp_path, UsageError)


# Hubs


def stand_in(monkeypatch, **functions):
    """A module `datasets` with these functions; nothing asks the net."""
    module = types.ModuleType("datasets")
    module.config = types.SimpleNamespace(HF_HUB_OFFLINE=False, HF_ENDPOINT="https://hub.invalid")
    module.disable_progress_bars = lambda: None
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(sources, "_is_reachable", lambda address: True)
    return module


def test_a_data_set_of_the_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []

    def load_dataset(name, part=None, data_dir=None):
        asked.append((name, part, data_dir))
        return {"train": [{"a": 1}, {"a": 2}], "test": [{"a": 3}]}

    stand_in(monkeypatch, load_dataset=load_dataset, get_dataset_config_names=lambda name: ["main"])
    found = {
        name: [row.values["a"] for row in read_records(name)] for name in ("o/n", "o/n:test", "o/n@main", "o/n@sub/x")
    }
    assert found == {"o/n": [1, 2], "o/n:test": [3], "o/n@main": [1, 2], "o/n@sub/x": [1, 2]}
    assert asked == [("o/n", None, None)] * 2 + [("o/n", "main", None), ("o/n", None, "sub/x")]
    assert [row.origin for row in read_records("o/n:test")] == ["o/n:test:row 1"]
    assert refusal("o/n:dev", UsageError) == "FILE: the dataset has no split dev; choose one of o/n:{train,test}"


def test_what_is_here_comes_before_the_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "owner/name").mkdir(parents=True)
    write(tmp_path, "owner/name/test.jsonl", '{"a": 1}')
    assert len(list(read_records("owner/name"))) == len(list(read_records("owner/name:test"))) == 1


def test_hubs_that_cannot_be_asked(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", None)
    message = refusal("owner/name", UsageError)
    assert message.startswith("FILE: no such file or folder") and "pip install datasets" in message
    assert "pip install 'modelscope" in refusal("modelscope://owner/name", UsageError)
    assert "expected modelscope://owner/name, optionally with" in refusal("modelscope://a b", UsageError)

    def fails(name):
        raise ConnectionError("no route\nto host")

    stand_in(monkeypatch, load_dataset=fails)
    assert refusal("owner/name", UsageError) == "FILE: no such file or folder, and from the hub: no route"


def test_modelscope(monkeypatch):
    class MsDataset:
        @staticmethod
        def load(name, split, subset_name=None):
            return [{"name": name, "split": split, "subset": subset_name}]

    module = types.ModuleType("modelscope.msdatasets")
    module.MsDataset = MsDataset
    monkeypatch.setitem(sys.modules, "modelscope", types.ModuleType("modelscope"))
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", module)
    (row,) = read_records("modelscope://owner/name@part:test")
    assert row.values == {"name": "owner/name", "split": "test", "subset": "part"}
    (row,) = read_records("modelscope://owner/name")
    assert row.values["split"] == "train" and row.origin == "modelscope://owner/name:row 1"


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path):
    path = write(tmp_path, "a[1].jsonl", '{"a": 1}')
    assert find_files(path) == [path]


def test_places_that_cannot_be_read(tmp_path):
    assert refusal(tmp_path / "none.jsonl", UsageError) == "FILE: no such file or folder"
    assert refusal(tmp_path / "no*.jsonl", UsageError) == "FILE: no file matches"
    assert "no data files" in refusal(tmp_path, UsageError)
    message = refusal(write(tmp_path, "a.xml", "<a/>"), UsageError)
    assert message.startswith("FILE: unknown file type") and all(name in message for name in READERS)
    write(tmp_path, "a.jsonl", "{}")
    write(tmp_path, "b.csv", "a\n1\n")
    assert "several types (.csv, .jsonl)" in refusal(tmp_path, UsageError)


@pytest.mark.parametrize("name", [f"a{kind}{zipped}" for kind in READERS for zipped in ("", ".gz")])
def test_empty_files(tmp_path, name):
    assert refusal(write(tmp_path, name, "")) == "FILE: the file has no examples"


@pytest.mark.parametrize(("name", "data"), [("a.jsonl", "\n \n"), ("a.json", "[ ]"), ("a.csv", "a\n"), ("a.txt", "\n")])
def test_files_without_a_row(tmp_path, name, data):
    assert refusal(write(tmp_path, name, data)) == "FILE: the file has no examples"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": }\n{"a": 1}\n', "FILE:2: broken JSON at character 7"),
        ("a.jsonl", '{"a": 1}\n{"a": "tex', "FILE:2: broken JSON at character 7: .* is it truncated"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "FILE:2: expected an object with named columns, found list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "FILE:2: invalid UTF-8 at byte 8"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\0"}\n', "FILE:2: NUL byte at byte 8"),
        ("a.jsonl", '{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d"}\n', "FILE:2: invalid text: half of a surrogate pair"),
        ("a.jsonl", "[" * 100_000, "FILE:1: broken JSON: nested too deeply"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}", "FILE:1: broken JSON: .*digits"),
        ("a.json", '[\n{"a": 1},\n{"a": x}]', "FILE:3: broken JSON"),
        ("a.json", '[\n{"a": 1},\n{"a": 2}', "FILE:3: broken JSON: expected .* is it truncated"),
        ("a.json", '[\n{"a": 1}\n{"a": 2}]', "FILE:3: broken JSON: expected ',' or ']' after an object, found '{'"),
        ("a.json", '[\n{"a": 1},\n]', "FILE:3: broken JSON"),
        ("a.json", '[{"a": 1}]\n\nx', "FILE:3: broken JSON: text after the end"),
        ("a.json", '[\n{"a": 1},\n"b"]', "FILE:3: expected an object with named columns, found str"),
        ("a.json", '"a"', "FILE:1: expected a list of objects"),
        ("a.json", b'[{"a": 1},\n\n{"a": "\xff"}]', "FILE:3: invalid UTF-8 at byte 8"),
        ("a.csv", 'a,b\n"x\ny",1\n1,2,3\n', "FILE:4: 3 fields, but the header names 2 columns"),
        ("a.csv", 'a,b\n1,2\n"open,3\n', "FILE:3: broken CSV"),
        ("a.csv", "a,a\n1,2\n", "FILE:1: two columns have the same name"),
        ("a.txt", b"fine\nbro\xc3\nken", "FILE:2: invalid UTF-8 at byte 4"),
        ("a.parquet", "PAR1 not really PAR1", "FILE:row 1: damaged or unsupported"),
        ("a.arrow", "ARROW1 not really", "FILE:row 1: damaged or unsupported"),
    ],
)
def test_faults_name_file_and_line(tmp_path, name, data, message):
    found = refusal(write(tmp_path, name, data))
    assert re.match(message, found), found


def test_damaged_gzip(tmp_path):
    whole = gzip.compress(json.dumps({"a": "x" * 1000}).encode())
    cut, foreign = tmp_path / "cut.jsonl.gz", tmp_path / "foreign.jsonl.gz"
    cut.write_bytes(whole[:-20])
    foreign.write_bytes(b'{"a": 1}')
    assert "truncated" in refusal(cut)
    assert "not a valid gzip file" in refusal(foreign)


def test_arrow_offsets_that_point_outside_are_not_followed(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist([{"text": "Hello"}, {"text": "there"}])
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    offsets, foreign = struct.pack("<3i", 0, 5, 10), struct.pack("<3i", 0, 5, 5000)
    assert data.count(offsets) == 1
    assert re.match(
        r"FILE:row 2: damaged.*out of bounds", refusal(write(tmp_path, "a.arrow", data.replace(offsets, foreign)))
    )


def _seeds():
    """Valid files to damage: pure noise would stop at the first byte."""
    import pyarrow
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist([{"text": "Hello", "n": [1, 2]}, {"text": "there", "n": None}])
    sinks = [pyarrow.BufferOutputStream() for _ in range(3)]
    parquet.write_table(table, sinks[0])
    for sink, layout in zip(sinks[1:], (ipc.new_file, ipc.new_stream), strict=True):
        with layout(sink, table.schema) as writer:
            writer.write_table(table)
    parquets, files, streams = (sink.getvalue().to_pybytes() for sink in sinks)
    lines = b'\xef\xbb\xbf{"a": "\\ud83d\\ude00", "b": [1, {}]}\r\n{"a": "x", "b": null}\n'
    return {
        ".jsonl": [lines],
        ".json": [b'[\n{"a": 1.5, "b": "\xc3\xa9"},\n {"a": NaN}]\n', lines],
        ".csv": [b'a,b\n"x\n""y""",1\n2,3\n'],
        ".txt": ["one\r\n\nzwei ü\n".encode()],
        ".parquet": [parquets],
        ".arrow": [files, streams],
    }


SEEDS = _seeds()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("extension", list(READERS))
def test_random_damage_never_ends_in_another_error(tmp_path, extension, zipped):
    path = tmp_path / f"a{extension}{'.gz' if zipped else ''}"

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(SEEDS[extension]),
        st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=4),
        st.floats(0, 1),
        st.one_of(st.none(), st.binary(max_size=60)),
    )
    @example(SEEDS[extension][-1], [], 1.0, None)
    def check(seed, damage, kept, noise):
        data = bytearray(gzip.compress(seed) if zipped else seed) if noise is None else bytearray(noise)
        for place, patch in damage:
            at = int(place * len(data))
            data[at : at + len(patch)] = patch
        path.write_bytes(bytes(data[: int(kept * len(data)) + 1]))
        try:
            rows = list(read_records(path))
        except (DataError, UsageError) as error:
            assert str(error).startswith(str(path))
        else:
            assert rows and all(row.origin.startswith(f"{path}:") for row in rows)

    check()


def test_no_row_is_lost_where_the_file_is_whole(tmp_path):
    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), min_size=1, max_size=3), min_size=1))
    def check(rows):
        lines = [json.dumps(row, ensure_ascii=True) for row in rows]
        for name, text in (("a.jsonl", "\r\n".join(lines)), ("a.json", "[" + ",\n".join(lines) + "]")):
            assert [row.values for row in read_records(write(tmp_path, name, text))] == rows

    check()


# Files that are not what their names say, and folders with files that would be left out


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "FILE: the file is text in UTF-16: convert it"),
        ("a.csv", b"\xfe\xff" + "a,b\n1,2\n".encode("utf-16-be"), "FILE: the file is text in UTF-16"),
        ("a.json", gzip.compress(b"[{}]", mtime=0), "FILE: the file is compressed with gzip: its name must end in .gz"),
        ("a.jsonl", b"(\xb5/\xfd0123", "FILE: the file is compressed with zstd: decompress it with zstd -d"),
        ("a.jsonl", b"PAR1\x15\x04", "FILE: the file is a parquet file: its name must end in .parquet"),
        ("a.csv", b"PK\x03\x04\x14", "FILE: the file is a zip archive or an Excel file"),
        ("a.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "FILE: .* run git lfs pull"),
        ("a.jsonl", "<!DOCTYPE html><html>", "FILE: the file is a web page"),
        ("a.jsonl", '{"a": "gro\udcdf"}'.encode("utf-8", "surrogateescape"), "FILE:1: invalid UTF-8 .* iconv"),
        ("a.json", json.dumps({"version": "1", "data": [{"a": 1}]}, indent=1), r"FILE:1: .* jq -c '\.data\[\]' FILE"),
        ("a.json", json.dumps({"a": 1}, indent=1), r"FILE:1: one object over several lines; .* jq -c \. FILE"),
        ("a.jsonl", json.dumps({"a": 1}, indent=1), r"FILE:1: each object must be on one line"),
        ("a.jsonl", json.dumps([{"a": 1}], indent=1), r"FILE:1: each object must be on one line: .* jq -c '\.\[\]'"),
        ("a.csv", "prompt;completion\nq;a\n", "FILE:1: the columns are separated by ';'; write the file with commas"),
    ],
)
def test_contents_of_another_type_are_refused_with_the_fix(tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    assert re.match(message, refusal(path)), refusal(path)


@pytest.mark.parametrize("other", ["b.jsonl.zst", "b.tsv", "b.ndjson", "b.json.bz2", "b.zip"])
def test_a_folder_with_data_that_cannot_be_read_is_refused(tmp_path, other):
    write(tmp_path, "a.jsonl", '{"a": 1}')
    write(tmp_path, "README.md", "# About")
    assert [row.values for row in read_records(tmp_path)] == [{"a": 1}]
    (tmp_path / other).write_bytes(b"x")
    message = refusal(tmp_path, UsageError)
    assert f"{other}: unknown file type" in message and "/*.jsonl'" in message
    assert [row.values for row in read_records(str(tmp_path / "*.jsonl"))] == [{"a": 1}]
    if other.endswith("zst"):
        assert "decompress it first: zstd -d b.jsonl.zst" in message


def test_datasets_that_were_saved_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS[:1] * 3)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(tmp_path / "both")
    datasets.load_from_disk(tmp_path / "one").map(lambda row: {"prompt": "cached"})  # writes a cache beside it
    assert any(file.name.startswith("cache-") for file in (tmp_path / "one").iterdir())
    assert [row.values for row in read_records(tmp_path / "one")] == ROWS[:1] * 3
    assert [row.values for row in read_records(f"{tmp_path / 'both'}:test")] == ROWS[:1]
    assert "choose one, for example" in refusal(tmp_path / "both", UsageError)


def test_metadata_beside_the_data_is_not_data(tmp_path):
    write(tmp_path, "train.jsonl", '{"a": 1}')
    for name in ("dataset_infos.json", "dataset_info.json"):
        write(tmp_path, name, '{"default": {}}')
    assert [row.values for row in read_records(tmp_path)] == [{"a": 1}]


def test_fields_of_other_tool_calls_are_not_arguments(tmp_path):
    """In a table every call has the fields of all calls; outside of tools, nulls stay."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def call(**arguments):
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}], "x": None}

    rows = [{"messages": [call(a=1), call(b={"c": [2]})], "extra": {"y": None}, "tools": [{"name": "f"}, {"z": 1}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    [row] = read_records(tmp_path / "a.parquet")
    assert row.values == rows[0]

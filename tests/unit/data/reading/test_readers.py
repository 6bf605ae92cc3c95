"""Readers: bad records are reported and reading continues; nothing is lost silently; memory stays bounded."""

import csv
import gzip
import io
import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError, UsageError
from posttrain.data.reading import csv_files, json_array, text_lines
from posttrain.data.reading.readers import READERS, read_file
from posttrain.data.reading.records import BadRecord, ReadProgress, Record


def write(tmp_path, name, data):
    path = tmp_path / name
    if isinstance(data, str):
        data = data.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def scan(path):
    """(position, values or reason) of every record."""
    return [
        (row.origin.removeprefix(f"{path}:"), row.values if isinstance(row, Record) else row.reason)
        for row in read_file(path)
    ]


@pytest.mark.parametrize("zipped", ["", ".gz"])
def test_reading_continues_after_bad_lines(tmp_path, zipped):
    lines = [
        b'\xef\xbb\xbf{"a": 1}\r\n',
        b'{"a": }\n',
        b"\r\n",
        b'{"a": "\xff"}\n',
        b'{"a": "\0"}\n',
        b"[1]\n",
        b'{"a": "\\ud83d"}\n',
        b'{"a": 2}\n',
        b'{"a": "cut',
    ]
    found = scan(write(tmp_path, f"a.jsonl{zipped}", b"".join(lines)))
    assert [place for place, _ in found] == ["1", "2", "4", "5", "6", "7", "8", "9"]
    assert found[0][1] == {"a": 1} and found[6][1] == {"a": 2}
    reasons = [found[at][1] for at in (1, 2, 3, 4, 5, 7)]
    words = ("character 7", "UTF-8 at byte 8", "NUL byte at byte 8", "found list", "surrogate", "is it truncated?")
    assert all(word in reason for word, reason in zip(words, reasons, strict=True)), reasons


def test_the_raw_text_of_a_bad_record_is_kept(tmp_path):
    path = write(tmp_path, "a.jsonl", b'{"a": "\xff"}\n')
    (bad,) = read_file(path)
    assert (
        isinstance(bad, BadRecord) and bad.raw == '{"a": "\\xff"}\n' and str(bad.error).startswith(f"{path}:1: invalid")
    )


def test_reading_a_list_continues_after_broken_objects(tmp_path):
    text = b'[{"a": 1},\n{"a": x, "b": "}, {"},\n{"a": "\xff"},\n"b", 7, [{}],\n{"a": 2} {"a": 3},\n{"a": 4}\n]'
    found = scan(write(tmp_path, "a.json", text))
    assert [place for place, _ in found] == ["1", "2", "3", "4", "row 5", "row 6", "5", "row 8", "6"]
    assert [values for _, values in found if isinstance(values, dict)] == [{"a": 1}, {"a": 2}, {"a": 4}]
    assert "broken JSON at line 2" in found[1][1] and "UTF-8 at byte 8" in found[2][1]
    assert [found[at][1].split()[-1] for at in (3, 4, 5)] == ["str", "int", "list"]
    assert "expected ','" in found[7][1]


@pytest.mark.parametrize("tail", ['{"a": "x', '{"a": [1, 2', "{", '{"a": 2}', "tru", '"'])
def test_a_truncated_list_is_reported(tmp_path, tail):
    *good, last = scan(write(tmp_path, "a.json", '[{"a": 1},\n' + tail))
    assert good[0] == ("1", {"a": 1}) and "is it truncated?" in last[1]


def test_lists_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(json_array, "BLOCK", 7)
    rows = [{"a": "é" * n, "b": [n, {"c": '"]}\\'}], "d": 12345.5, "e": True} for n in range(40)]
    path = write(tmp_path, "a.json", json.dumps(rows, ensure_ascii=False, indent=1))
    assert [values for _, values in scan(path)] == rows
    numbers = write(tmp_path, "b.json", "[123456789, true, {}]")
    assert [found for _, found in scan(numbers)][2] == {} and len(scan(numbers)) == 3


def test_reading_csv_continues_after_bad_rows(tmp_path):
    text = b'a,b\n1,2\n1,2,3\n"x"y,2\n"two\nlines \xff",2\n3,4\n'
    found = scan(write(tmp_path, "a.csv", text))
    assert [place for place, _ in found] == ["2", "3", "4", "5", "7"]
    assert found[0][1] == {"a": "1", "b": "2"} and found[4][1] == {"a": "3", "b": "4"}
    assert "3 fields" in found[1][1] and "broken CSV" in found[2][1] and "line 6: invalid UTF-8" in found[3][1]


def test_arrow_rows_are_checked_one_by_one(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    good, bad = pyarrow.array(["fine", "also"]), pyarrow.array([b"\xff\xfe"]).cast(pyarrow.binary())
    broken = pyarrow.StringArray.from_buffers(1, bad.buffers()[1], bad.buffers()[2])
    table = pyarrow.table({"text": pyarrow.chunked_array([pyarrow.concat_arrays([good, broken, good])])})
    path = tmp_path / "a.arrow"
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    found = scan(path)
    assert [place for place, _ in found] == [f"row {n}" for n in range(1, 6)]
    assert "UTF8" in found[2][1] and [v["text"] for _, v in found if isinstance(v, dict)] == ["fine", "also"] * 2


# Large records


def peak_of(path):
    tracemalloc.start()
    try:
        rows = sum(1 for _ in read_file(path))
        return rows, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.arrow"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    peaks = []
    for count in (2_000, 20_000):
        values = [{"text": f"{n} " + "word " * 60} for n in range(count)]
        path = tmp_path / name
        if name.endswith((".parquet", ".arrow")):
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            table = pyarrow.Table.from_pylist(values)
            if name.endswith(".parquet"):
                parquet.write_table(table, path)
            else:
                with pyarrow.ipc.new_file(str(path), table.schema) as writer:
                    writer.write_table(table, max_chunksize=1000)
        elif name == "a.csv":
            text = io.StringIO()
            writer = csv.writer(text)
            writer.writerows([["text"], *([row["text"]] for row in values)])
            path.write_text(text.getvalue())
        else:
            text = "\n".join(map(json.dumps, values)) if name == "a.jsonl" else json.dumps(values)
            path.write_text("\n".join(row["text"] for row in values) if name == "a.txt" else text)
        found, peak = peak_of(path)
        assert found == count
        peaks.append(peak)
    assert peaks[1] < 1.5 * peaks[0] + 2**22, peaks  # 6 MB, ten times as much as before


def test_a_line_beyond_the_limit_is_refused_without_being_held(tmp_path, monkeypatch):
    for module in (text_lines, json_array, csv_files):
        monkeypatch.setattr(module, "RECORD_LIMIT", 2**20)
    long = '{"a": "' + "x" * 20_000_000 + '"}\n'
    path = write(tmp_path, "a.jsonl", '{"a": 1}\n' + long + '{"a": 2}\n')
    (_, first), (place, reason), (_, last) = scan(path)
    assert (first, place, last) == ({"a": 1}, "2", {"a": 2}) and "19 MiB; at most 1 MiB" in reason
    assert peak_of(path)[1] < 5 * 2**20
    for name, text in (("a.json", f"[{long}]"), ("a.csv", f'a\n"{long}')):
        with pytest.raises(DataError, match="at most 1 MiB"):
            scan(write(tmp_path, name, text))
        with pytest.raises(DataError):
            tracemalloc.start()
            try:
                list(read_file(tmp_path / name))
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        assert peak < 16 * 2**20


def test_lines_up_to_the_limit_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lines, "RECORD_LIMIT", 100)
    row = json.dumps({"a": "x" * 91})
    assert len(row) == 100
    assert len(scan(write(tmp_path, "a.jsonl", row + "\n" + row))) == 2
    found = scan(write(tmp_path, "b.jsonl", row + " \n" + row + "\n"))
    assert "the example has" in found[0][1] and found[1][1] == {"a": "x" * 91}


def test_progress_ends_at_the_size_of_the_file(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz"):
        path = write(tmp_path, name, '{"a": 1}\n' * 3000)
        progress = ReadProgress(total=path.stat().st_size)
        half = [progress.done for _ in read_file(path, progress)][1500]
        assert progress.done == progress.total and 0 <= half <= progress.total


# Nothing is lost


@pytest.mark.parametrize("extension", [".jsonl", ".csv", ".txt"])
def test_every_line_of_damaged_text_is_accounted_for(tmp_path, extension):
    """Bytes are overwritten, but not line ends and quotes: the number of records, good or bad, stays the same."""
    path = tmp_path / f"a{extension}"
    lines = {
        ".jsonl": [json.dumps({"a": n, "b": "text é" * (n % 3)}) for n in range(12)],
        ".csv": ["a,b", *(f"{n},text é" for n in range(12))],
        ".txt": [f"line {n} é" for n in range(12)],
    }[extension]
    whole = "\n".join(lines).encode()
    header = len(lines[0]) + 1 if extension == ".csv" else 0
    noise = st.binary(min_size=1, max_size=6).map(
        lambda b: b.translate(bytes.maketrans(b'\r\n" \t\v\f', b"xxxxxxx"))  # and no line becomes blank
    )

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.floats(0, 1), noise), max_size=6))
    def check(damage):
        data = bytearray(whole)
        for place, patch in damage:
            at = header + int(place * (len(data) - header - len(patch)))
            if b"\n" not in data[at : at + len(patch)] and b'"' not in data[at : at + len(patch)]:
                data[at : at + len(patch)] = patch
        path.write_bytes(bytes(data))
        rows = list(read_file(path))
        assert len(rows) == 12
        assert [row.origin for row in rows] == [f"{path}:{n + 1 + bool(header)}" for n in range(12)]

    check()


def test_every_character_of_a_damaged_list_is_in_a_record(tmp_path):
    """Text that is neither in a good record nor between records is in the raw text of a bad one."""
    path = tmp_path / "a.json"
    whole = json.dumps([{"a": n, "b": ["x,y", {"c": "]"}]} for n in range(6)]).encode()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.integers(1, len(whole) - 1), st.sampled_from(b'{}[],":x\xff\0')), max_size=3))
    def check(damage):
        data = bytearray(whole)
        for at, byte in damage:
            data[at] = byte
        path.write_bytes(bytes(data))
        try:
            rows = list(read_file(path))
        except DataError as error:
            assert str(error).startswith(str(path))
            return
        good = sum(len(json.dumps(row.values)) for row in rows if isinstance(row, Record))
        bad = sum(len(row.raw) for row in rows if isinstance(row, BadRecord))
        between = 2 * len(rows) + 4
        assert good + bad + between + len(damage) * 4 >= len(whole)

    check()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("extension", list(READERS))
def test_noise_never_ends_in_another_error(tmp_path, extension, zipped):
    path = tmp_path / f"a{extension}{'.gz' if zipped else ''}"

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(st.binary(max_size=200), st.text(alphabet='[]{}",:\n\r \\ux01é\0', max_size=60).map(str.encode)))
    def check(data):
        path.write_bytes(gzip.compress(data) if zipped else data)
        try:
            rows = list(read_file(path))
        except (DataError, UsageError) as error:
            assert str(error).startswith(str(path))
        else:
            assert rows and all(row.origin.startswith(f"{path}:") for row in rows)

    check()

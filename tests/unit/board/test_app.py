"""The board's server: what it answers, to whom, and what a hostile run directory can do to it: nothing."""

import csv
import http.client
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.board.app import BoardOptions, static_files
from posttrain.board.curves import MAX_POINTS, thinned
from posttrain.cli.main import main
from posttrain.core.errors import UsageError
from tests.unit.board.made import PATIENCE, ask, board, get, make_run, row

TOKEN = "a-long-secret"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rows = [row(step=s, group=s, reward=s / 3, asked=f"{s}+1=") for s in (1, 2, 3)]
    make_run(folder / "a", rows=rows)
    make_run(folder / "b", rows=rows[1:], rate=0.2, steps=5)
    make_run(folder / "c")
    return folder


@pytest.fixture(scope="module")
def server(runs):
    with board(runs) as found:
        yield found


@pytest.fixture(scope="module")
def ids(server):
    return {run["name"]: run["id"] for run in get(server, "runs")["runs"]}


def test_every_response_forbids_what_the_page_does_not_need(server):
    for path in ("/", "/static/main.js", "/api/runs", "/api/run?run=x", "/no-such-page"):
        _, headers, _ = ask(server, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


def test_the_page_names_no_other_machine_and_has_no_inline_code():
    for path, (body, kind) in static_files().items():
        text = body.decode()
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), path
        if kind.startswith("text/html"):
            assert "<style" not in text and "onclick" not in text and text.count("<script") == 1
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
            assert unsafe not in text, f"{path} uses {unsafe}"


def test_runs_and_run(server, ids):
    assert set(ids) == {"a", "b", "c"}
    found = get(server, "run", run=ids["a"])
    assert found["state"] == "finished" and found["control"] is False
    assert {phase["name"] for phase in found["phases"]} == {"train", "generate"}


def test_curves_are_those_of_posttrain_plot(server, ids):
    found = get(server, "curves", runs=f"{ids['a']},{ids['b']}", metrics="loss,reward", smoothing=0.5)["runs"]
    curve = found[0]["curves"]["loss"]
    assert curve["x"] == [1, 2, 3] and curve["raw"] == [1, 1 / 2, 1 / 3]
    assert curve["y"] == pytest.approx([1, (0.25 + 0.25) / 0.75, (0.125 + 0.125 + 1 / 6) / 0.875])
    minutes = get(server, "curves", runs=ids["a"], metrics="loss", x_axis="time")["runs"][0]["curves"]["loss"]["x"]
    assert minutes == pytest.approx([0.05, 0.1, 0.15])
    (part,) = get(server, "curves", runs=ids["a"], metrics="loss", smoothing=0.5, x_from=1.5, x_to=3)["runs"]
    assert part["ends"] == [1, 3] and part["curves"]["loss"]["x"] == [2, 3]
    assert part["curves"]["loss"]["y"] == curve["y"][1:]  # smoothed like the whole curve
    names = {entry["name"] for entry in get(server, "metrics", runs=ids["a"])["metrics"]}
    assert names == {"loss", "reward", "tokens", "time/train", "time/generate"}


def test_csv_has_every_value(server, ids):
    status, headers, body = ask(server, f"/api/csv?runs={ids['a']},{ids['b']}&metrics=loss")
    rows = list(csv.reader(io.StringIO(body.decode())))
    assert status == 200 and headers["Content-Type"].startswith("text/csv")
    assert rows[0] == ["run", "step", "loss"] and len(rows) == 1 + 3 + 5 and rows[3] == ["a", "3", str(1 / 3)]


def test_long_curves_keep_first_last_lowest_and_highest():
    values = [float(n % 7) for n in range(100_000)]
    values[777], values[99_000] = 50.0, -50.0
    kept = thinned(values, values)
    assert len(kept) <= MAX_POINTS + 1 and {0, 777, 99_000, 99_999} <= set(kept)


def test_completions_groups_and_comparisons(server, ids):
    found = get(server, "completions", run=ids["a"], min_reward=0.5)
    assert [one["step"] for one in found["rows"]] == [3, 2]
    assert get(server, "group", run=ids["a"], number=1)["step"] == 2
    assert get(server, "completion", run=ids["a"], number=0)["text"] == "four"
    both = f"{ids['a']},{ids['b']}"
    shared = get(server, "prompts", runs=both)
    assert shared["shared"] == 2
    compared = get(server, "prompt", runs=both, prompt=shared["prompts"][0]["prompt"])["runs"]
    assert [len(one["completions"]) for one in compared] == [1, 1]
    assert get(server, "completions", run=ids["c"])["rows"] == []


def test_configurations_are_compared(server, ids):
    options = get(server, "config", runs=f"{ids['a']},{ids['b']}")["options"]
    differing = {option["name"]: option["values"] for option in options if len(set(option["values"])) > 1}
    assert differing == {"train.max_steps": ["3", "5"], "train.learning_rate": ["0.1", "0.2"]}
    alone = get(server, "config", runs=ids["a"])["options"]
    assert [one["name"] for one in alone if one["changed"]] == ["model.path", "train.max_steps", "train.learning_rate"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/run?run=nothing", 404),
        ("/api/run?run=../../etc", 404),
        ("/api/curves?runs=", 400),
        ("/api/completions?run={a}&step=x", 400),
        ("/api/completions?run={a}&order=random", 400),
        ("/api/completions?run={a}&limit=100000", 400),
        ("/api/completions?run={a}&failed=perhaps", 400),
        ("/api/completions?run={a}&min_reward=nan", 400),
        ("/api/curves?runs={a}&smoothing=2", 400),
        ("/api/group?run={a}&number=99", 404),
        ("/api/log?run={a}&file=../config.yaml", 200),
        ("/static/../app.py", 404),
        ("/static/%2e%2e/app.py", 404),
        ("/api/nothing", 404),
    ],
)
def test_wrong_requests_get_an_answer_and_no_file(server, ids, path, status):
    found, _, body = ask(server, path.format(**ids))
    assert found == status and b"verb" not in body and b"import" not in body


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8400", "evil.example:127.0.0.1", "0.0.0.0"],
)
def test_without_a_token_only_this_machine_is_answered(server, host):
    """A name of another site that leads to this machine (DNS rebinding) is not answered."""
    for path in ("/", "/api/runs"):
        status, _, body = ask(server, path, Host=host)
        assert status == 403 and b"localhost only" in body


def test_other_sites_cannot_use_the_control_routes(runs):
    """Browsers send text without asking first, and JSON only after a request for permission, which is refused."""
    with board(runs, token=TOKEN, allow_control=True) as server:
        allowed = {"Authorization": f"Bearer {TOKEN}", "Origin": "http://evil.example"}
        for action in ("stop", "resume", "launch", "check", "preview"):
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                assert ask(server, f"/api/{action}", {}, **allowed, Content_Type=kind)[0] == 415
            connection = http.client.HTTPConnection(server.address.removeprefix("http://"))
            connection.request("OPTIONS", f"/api/{action}", headers=allowed)
            reply = connection.getresponse()
            assert reply.status == 405 and reply.getheader("Access-Control-Allow-Origin") is None
            connection.close()


def test_with_a_token_the_api_needs_it(runs):
    with board(runs, token=TOKEN) as server:
        assert ask(server, "/")[0] == 200  # the page itself says nothing about runs
        assert ask(server, "/api/runs")[0] == 401
        assert ask(server, "/api/runs", Authorization="Bearer wrong-token")[0] == 401
        assert ask(server, "/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_other_machines_need_a_token():
    with pytest.raises(UsageError, match="needs a --token"):
        BoardOptions(runs=(), host="0.0.0.0").check()
    assert main(["board", str(Path(__file__).parent), "--host", "0.0.0.0"]) == 2
    assert main(["board", "no-such-directory"]) == 2


def test_a_board_that_only_reads_refuses_control(server, ids):
    for action in ("stop", "resume"):
        status, _, body = ask(server, f"/api/{action}", {"run": ids["a"]})
        assert status == 403 and b"--allow_control" in body


SLEEPER = """
import signal, sys, time
from posttrain.train.run_directory import RunDirectory
with RunDirectory.open(sys.argv[1], "sft", resume=True):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("locked", flush=True)
    while True:
        time.sleep(60)
"""


def test_stop_signals_the_process_that_holds_the_lock_and_no_other(tmp_path):
    folder = make_run(tmp_path / "run")
    with board(tmp_path, token=TOKEN, allow_control=True) as server:
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        (run,) = json.loads(ask(server, "/api/runs", **allowed)[2])["runs"]
        body = {"run": run["id"]}
        assert ask(server, "/api/stop", body)[0] == 401
        assert ask(server, "/api/stop", body, Content_Type="text/plain", **allowed)[0] == 415
        assert ask(server, "/api/stop", body, **allowed)[0] == 409  # nothing runs
        # A lock file that names a process which does not hold the lock: this test itself.
        (folder / "lock").write_text(f"process {os.getpid()} on {os.uname().nodename}\n")
        status, _, reply = ask(server, "/api/stop", body, **allowed)
        assert status == 409 and b"does not hold its lock" in reply
        process = subprocess.Popen([sys.executable, "-c", SLEEPER, folder], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "locked\n"
            status, _, reply = ask(server, "/api/resume", body, **allowed)
            assert status == 409 and b"is running already" in reply
            status, _, reply = ask(server, "/api/stop", body, **allowed)
            assert status == 200 and json.loads(reply) == {"process": process.pid}
            assert process.wait(PATIENCE) == 7
        finally:
            process.kill()
            process.communicate()


def test_a_run_is_resumed_as_from_the_command_line(tmp_path):
    """A real run of two steps, whose configuration then asks for three."""
    data, folder = tmp_path / "data.jsonl", tmp_path / "runs/sft"
    data.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    words = ["--model", "pico", "--data", str(data), "--data.repeat", "--train.max_steps", "2", "--quiet"]
    assert main(["sft", *words, "--output_dir", str(folder)]) == 0
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("max_steps: 2", "max_steps: 3"))
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    with board(tmp_path / "runs", token=TOKEN, allow_control=True) as server:
        (run,) = server.board.list.find()
        assert ask(server, "/api/resume", {"run": run.id})[0] == 401
        status, _, reply = ask(server, "/api/resume", {"run": run.id}, **allowed)
        assert status == 200 and json.loads(reply)["command"] == f"posttrain sft --output_dir {folder} --resume"
        started = server.board.control.started[run.id]
        assert started.process.wait(PATIENCE) == 0, started.describe()
        found = json.loads(ask(server, f"/api/run?run={run.id}", **allowed)[2])
        assert (found["step"], found["state"], found["resumed_at"]) == (3, "finished", [2])
        assert found["started"]["exit_code"] == 0 and "done: 3 steps" in found["started"]["output"]
        (folder / "config.yaml").write_text("verb: rm -rf")
        assert ask(server, "/api/resume", {"run": run.id}, **allowed)[0] == 409


@pytest.fixture
def hostile(tmp_path):
    """A run directory that tries to show files outside it, to run scripts, and to exhaust the reader."""
    secret = tmp_path / "secret"
    secret.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "rollouts.jsonl", "run.log", "step-00000000.jsonl", "tokenizer.json"):
        (secret / name).write_text('{"step": 1, "loss": 1, "text": "TOP SECRET"}\n')
    runs = tmp_path / "runs"
    linked = runs / "linked"
    linked.mkdir(parents=True)
    (linked / "config.yaml").write_text(f"verb: {json.dumps(HOSTILE)}\nmodel: {{path: ../../secret}}\n")
    for name in ("metrics.jsonl", "rollouts.jsonl", "lock"):
        (linked / name).symlink_to(secret / name)
    for name in ("logs", "samples", "checkpoints"):
        (linked / name).symlink_to(secret)
    (runs / "folder").symlink_to(secret)
    (runs / "\x1b[31m\n\udce9").mkdir()  # control characters and a byte that is not UTF-8
    (runs / "\x1b[31m\n\udce9/config.yaml").write_text("verb: sft")
    big = make_run(
        runs / HOSTILE.replace("/", ""), rows=[row(text=HOSTILE + "\x00\x1b" + "A" * 10_000_000), row(text="\ud800")]
    )
    (big / "metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 1.0, "__proto__": 2.0}) + "\n")
    return runs


def test_a_hostile_directory_shows_nothing_outside_it(hostile):
    with board(hostile) as server:
        found = get(server, "runs")["runs"]
        assert len(found) == 3 and {run["state"] for run in found} <= {"killed", "unknown", "finished"}
        for run in found:
            pages = [
                f"{name}?run={run['id']}" for name in ("run", "completions", "group", "completion", "log", "examples")
            ]
            pages += [
                f"{name}?runs={run['id']}" for name in ("metrics", "config", "csv", "prompts", "prompt", "curves")
            ]
            for page in pages:
                status, headers, body = ask(server, f"/api/{page}&number=0&metrics=loss&prompt=0&file=run.log")
                assert status in (200, 404), (page, body)
                assert b"SECRET" not in body and len(body) < 2_000_000, page
                assert headers["Content-Type"].split(";")[0] in ("application/json", "text/csv")


def test_the_command_prints_its_address_and_ends_on_a_signal(runs, tmp_path):
    words = [
        sys.executable,
        "-m",
        "posttrain",
        "board",
        runs,
        "--port",
        "0",
        "--cache_dir",
        tmp_path,
        "--allow_control",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("board of 3 runs on http://127.0.0.1:") and "/#token=" in line
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    process.communicate()

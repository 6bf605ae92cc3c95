"""The board in a real browser, over runs of the real commands: what people see, and what hostile text cannot do."""

import json
import re
import string
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.board_pictures import PICTURES, take
from tests.e2e.chromium import PROGRAM, Chromium
from tests.e2e.commands import command
from tests.unit.board.made import PATIENCE, board, make_run, row
from tests.unit.board.test_app import HOSTILE, SLEEPER, TOKEN
from tests.unit.board.test_evaluations import evaluated

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium: apt-get install chromium")

ROOT = Path(__file__).parents[2]
BROKEN = 'def broken(completion, **columns):\n    raise ValueError("no reward for <b>this</b>")\n'
ROWS = [{"prompt": f"How much is {n}+1?", "completion": str(n + 1)} for n in range(6)]
SMALL = ("--model", "pico", "--data.max_length", 400, "--quiet")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of sft, grpo with an environment, one that failed and one that was resumed; and a hostile directory."""
    folder = tmp_path_factory.mktemp("board")
    data, reward = folder / "questions.jsonl", folder / "reward.py"
    data.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    reward.write_text(BROKEN)
    runs = folder / "runs"
    online = ("grpo", *SMALL, "--data", data, "--train.batch_size", 2, "--rollout.samples_per_prompt", 2)
    online = (*online, "--rollout.max_tokens", 60, "--train.max_steps", 2)
    assert command("sft", *SMALL, "--data", data, "--train.max_steps", 2, "--output_dir", runs / "resumed") == 0
    more = ("--resume", "--train.max_steps", 4)
    assert command("sft", *SMALL, "--data", data, "--output_dir", runs / "resumed", *more) == 0
    # A model that has learned nothing ends a reply by chance: at any of these letters.
    for step, scores in ((2, [0, 0, 1, 1]), (4, [1, 1, 1, 0])):
        evaluated(runs / f"resumed/evals/step-{step:08}", scores)
    environment = (
        "--rollout.environment",
        "examples/environment.py:SecondChance",
        "--rollout.stop",
        *string.ascii_letters,
    )
    recorded = ("--rollout.record_entropy", "--output_dir", runs / "environment")
    assert command(*online, *environment, *recorded) == 0
    assert command(*online, "--reward", f"{reward}:broken", "--output_dir", runs / "failed") == 1
    texts = [HOSTILE, "\x1b[31m\u202ered\x00", "A" * 10_000_000]
    calls = [{"function": {"name": "search", "arguments": '{"city": "<i>Rome</i>"}'}}]
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "search", "content": "sunny"},
    ]
    rows = [row(step=1, text=text, reward=n, asked=HOSTILE) for n, text in enumerate(texts)]
    rows += [row(step=2, group=1, messages=messages, turns=2)]
    make_run(runs / HOSTILE.replace("/", ""), rows=rows)
    return runs


@pytest.fixture(scope="module")
def shown(runs):
    """The board and the browser; ids of runs by name."""
    with board(runs) as server:
        ids = {run.name: run.id for run in server.board.list.find()}
        profile = runs.parent / "profile"
        browser = Chromium(profile)
        browser.size(1200, 900)
        try:
            yield SimpleNamespace(browser=browser, server=server, address=server.address, ids=ids)
        finally:
            browser.close()


@pytest.fixture
def browser(shown):
    """The browser; whatever a page did, it asked this machine only and broke no rule of the content policy."""
    shown.browser.messages.clear()
    yield shown.browser
    assert shown.browser.messages == []
    assert all(address.startswith((shown.address, "blob:", "about:", "data:")) for address in shown.browser.requests)


def visit(shown, route, condition):
    shown.browser.open(f"{shown.address}/#/{route}")
    shown.browser.wait(condition)


def test_the_list_shows_states_as_they_are(shown, browser):
    visit(shown, "", "document.querySelectorAll('.runs tbody tr').length === 4")
    rows = browser.evaluate("[...document.querySelectorAll('.runs tbody tr')].map(row => row.innerText)")
    by_name = {line.split("\n")[0].strip(): line for line in rows}
    assert "finished" in by_name["resumed"] and "resumed at 2" in by_name["resumed"] and "4 / 4" in by_name["resumed"]
    assert "failed" in by_name["failed"] and "finished" in by_name["environment"]
    assert HOSTILE.replace("/", "") in by_name  # a name is text


def test_runs_are_chosen_and_compared_by_keys(shown, browser):
    visit(shown, "", "document.querySelectorAll('.runs tbody tr').length === 4")
    browser.evaluate("document.body.focus()")
    for key in ("j", "x", "j", "x", "c"):
        browser.key(key)
    browser.wait("location.hash.startsWith('#/compare/curves?runs=') && document.querySelector('.chart canvas')")
    browser.evaluate("document.querySelector('button.toggle').click()")
    browser.wait("location.hash.includes('hidden=')")
    drawn = "document.querySelector('canvas').getAttribute('aria-label').split('Last values: ')[1].includes(', ')"
    browser.wait(f"!{drawn}")  # of two runs one is left
    browser.key("2")
    browser.wait("document.querySelector('table.options') && document.body.innerText.includes('options differ')")


def test_the_first_link_leads_to_the_content_and_a_wrong_address_to_the_list(shown, browser):
    page = f"run/{shown.ids['resumed']}/logs"
    visit(shown, page, "document.querySelector('pre.log')")
    browser.evaluate("document.querySelector('.skip').click()")
    assert browser.evaluate("document.activeElement.id") == "main" and page in browser.evaluate("location.hash")
    visit(shown, "%E0%A4%A", "document.querySelector('h1').innerText === 'Runs'")


def test_curves_follow_the_pointer_and_become_pictures(shown, browser):
    visit(shown, f"run/{shown.ids['resumed']}/curves?metrics=loss&smoothing=0.5", "document.querySelector('canvas')")
    browser.wait("document.querySelector('canvas').getAttribute('aria-label').includes('Last values: resumed')")
    browser.evaluate("document.querySelector('canvas').focus()")
    browser.key("ArrowRight")
    browser.wait("document.querySelector('.tip:not([hidden])')?.innerText.includes('step 1')")
    # A part of the axis: by keys around the value that is shown, or by dragging; then all of it again.
    whole_axis = "[...document.querySelectorAll('button')].find(b => b.textContent === 'Whole axis')"
    browser.key("+")
    browser.wait("location.hash.includes('x_from=0&x_to=2')")
    browser.wait(f"!{whole_axis}.hidden")  # the part is loaded and drawn, and the chart still has the focus
    browser.key("0")
    browser.wait("!location.hash.includes('x_from')")
    browser.drag("document.querySelector('canvas')", 0.45, 0.95)
    browser.wait("location.hash.includes('x_from=2&x_to=4')")
    browser.evaluate(f"{whole_axis}.click()")
    browser.wait("!location.hash.includes('x_from')")
    saved = (
        "new Promise(done => { URL.createObjectURL = blob => { done(`${blob.type} ${blob.size > 2000}`); return '#'; };"
        "[...document.querySelectorAll('button')].find(b => b.textContent === 'PNG').click(); })"
    )
    assert browser.evaluate(saved) == "image/png true"
    browser.evaluate("[...document.querySelectorAll('label')].find(l => l.innerText === 'log scale').click()")
    browser.wait("location.hash.includes('log=yes')")
    assert "log=yes" in browser.evaluate("location.hash") and "smoothing=0.5" in browser.evaluate("location.hash")


def test_conversations_of_an_environment_and_their_tokens(shown, browser):
    run = shown.ids["environment"]
    visit(shown, f"run/{run}/completions?many_turns=yes", "document.querySelectorAll('a.completion').length")
    browser.evaluate("document.querySelector('a.completion').click()")
    browser.wait("document.querySelectorAll('.side .tokens').length === 2")
    said = browser.evaluate("document.querySelector('.side').innerText")
    assert "That is not it. Try again." in said and "ASSISTANT" in said.upper()
    tokens = browser.evaluate("document.querySelectorAll('.side .tokens')[0].querySelectorAll('[data-i]').length")
    assert tokens > 6
    coloured = "[...document.querySelectorAll('.tokens [data-i]')].filter(t => t.style.backgroundColor).length"
    assert browser.evaluate(coloured) > 0
    over = "dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    browser.evaluate(f"document.querySelector('.tokens [data-i]').{over}")
    browser.wait("document.querySelector('.about-token').innerText.includes('log-probability')")
    kinds = browser.evaluate("[...document.querySelector('main select').options].map(o => o.value)")
    assert {"mask", "logprobs", "ratio", "entropy", "advantages"} <= set(kinds)
    choose = "{ const s = document.querySelector('main select'); s.value = 'entropy'; "
    browser.evaluate(f"{choose} s.dispatchEvent(new Event('change')); }}")
    browser.wait("location.hash.includes('color=entropy')")
    assert browser.evaluate(coloured) > 0


def test_a_failed_run_says_why(shown, browser):
    visit(shown, f"run/{shown.ids['failed']}", "document.querySelector('.notice.bad')")
    assert "no reward for <b>this</b>" in browser.text()
    visit(
        shown,
        f"run/{shown.ids['failed']}/completions?failed=yes",
        "document.querySelectorAll('.completion').length === 4",
    )
    visit(shown, f"run/{shown.ids['failed']}/logs", "document.querySelector('pre.log .error')")


def test_examples_are_marked_where_they_are_trained_on(shown, browser):
    visit(shown, f"run/{shown.ids['resumed']}/examples", "document.querySelectorAll('.tokens mark').length >= 1")
    assert "1<|end|>" in browser.evaluate("document.querySelector('.tokens mark').textContent")


def test_evaluations_are_compared_on_the_same_examples(shown, browser):
    page = f"run/{shown.ids['resumed']}/evaluations"
    visit(shown, page, "document.querySelector('table.pairs')")
    assert browser.evaluate("document.querySelectorAll('.forest .point').length") == 2
    said = browser.evaluate("document.querySelector('table.pairs').innerText")
    assert "sums/acc" in said and "+0.25" in said and "2 / 1 / 1" in said and "no clear difference" in said
    browser.evaluate("document.querySelector('main details').open = true")
    assert "onerror" in browser.text() and browser.evaluate("document.querySelectorAll('main img').length") == 0


def test_hostile_text_stays_text(shown, browser):
    run = shown.ids[HOSTILE.replace("/", "")]
    inside = "document.querySelectorAll('main script, main img, main b b, main i i, main iframe').length"
    pages = {
        f"run/{run}": "document.querySelector('.facts')",
        f"run/{run}/completions": "document.querySelectorAll('.completion').length === 4",
        f"run/{run}/completions?text=%3Cscript": "document.querySelectorAll('.completion').length === 3",
        f"group/{run}/0": "document.querySelectorAll('.side .card').length === 3",
        f"group/{run}/3": "document.querySelector('.call')",
        f"run/{run}/config": "document.querySelectorAll('.options tr').length > 2",
        f"run/{run}/logs": "document.querySelector('pre.log')",
    }
    for page, condition in pages.items():
        visit(shown, page, condition)
        assert browser.evaluate(inside) == 0, page
        if page == f"group/{run}/0":
            found = browser.text()
            assert HOSTILE in found and "\x1b" not in found and "\u202e" not in found and "\\u202e" in found
            assert "10,000,000 letters" in found
        if page == f"group/{run}/3":
            assert '"city": "<i>Rome</i>"' in browser.text() and "sunny" in browser.text()


def test_names_show_their_control_characters(tmp_path, shown, browser):
    """Names of runs and of metrics, in texts, titles and attributes: none can hide or reorder what surrounds it."""
    metrics = [{"step": n, "lo\u202ess\x1b": 1.0 / n} for n in (1, 2)]
    make_run(tmp_path / "runs/a\u202eb\x1b", metrics=metrics)
    with board(tmp_path / "runs") as server:
        (run,) = server.board.list.find()
        pages = {
            "": "document.querySelector('.runs tbody tr .pill')",
            f"run/{run.id}": "document.querySelector('.facts')",
            f"run/{run.id}/curves?metrics=lo%E2%80%AEss%1B": "document.querySelector('canvas[aria-label*=Last]')",
            f"compare/config?runs={run.id}": "document.querySelector('table.options')",
        }
        for page, condition in pages.items():
            browser.open(f"{server.address}/#/{page}")
            browser.wait(condition)
            read = "[...document.querySelectorAll('[title], [aria-label]')].flatMap(e => [e.title, e.ariaLabel])"
            said = browser.evaluate(f"[document.title, document.body.textContent, ...{read}].join(' ')")
            assert "a\\u202eb\u241b" in said and "\u202e" not in said and "\x1b" not in said, page
        browser.call("Page.navigate", url="about:blank")
    shown.browser.requests.clear()


def test_ratios_that_only_rounding_made_differ_from_1_have_no_colour(tmp_path, shown, browser):
    def ratios(*shifts):
        return {"logprobs": [-0.5] * 4, "old_logprobs": [-0.5 + shift for shift in shifts]}

    rows = [row(step=1, **ratios(0, 1e-6, -1e-6, 0)), row(step=2, **ratios(0, 0.4, -0.4, 1e-6))]
    make_run(tmp_path / "runs/a", rows=rows)
    colours = (
        "[...document.querySelectorAll('.tokens [data-i]')].map(t => "
        "Number(/([\\d.e-]+)\\)$/.exec(getComputedStyle(t).backgroundColor)[1]) > 0.05)"
    )
    with board(tmp_path / "runs") as server:
        (run,) = server.board.list.find()
        for number, expected in ((0, [False] * 4), (1, [False, True, True, False])):
            browser.open(f"{server.address}/#/group/{run.id}/{number}?color=ratio")
            browser.wait("document.querySelectorAll('.tokens [data-i]').length === 4")
            assert browser.evaluate(colours) == expected
            ends = "[e.firstChild, e.lastChild].map(n => Number(n.textContent))"
            low, high = browser.evaluate(f"(e => {ends})(document.querySelector('.scale').parentElement)")
            assert low < high
        browser.call("Page.navigate", url="about:blank")
    shown.browser.requests.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_phone(shown, browser, scheme):
    browser.size(390, 844, mobile=True)
    browser.colours(scheme)
    run, other = shown.ids["environment"], shown.ids["failed"]
    routes = [
        "",
        *(
            f"run/{run}{tab}"
            for tab in ("", "/curves", "/completions", "/config", "/examples", "/logs", "/evaluations")
        ),
    ]
    routes += [
        "launch",
        f"launch?from={run}",
        f"group/{run}/0",
        f"run/{shown.ids['resumed']}/evaluations",
        f"compare/config?runs={run},{other}",
        f"compare/completions?runs={run},{other}",
    ]
    try:
        for route in routes:
            visit(shown, route, "document.querySelector('main').innerText.length > 60")
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), route
            tab = "document.querySelector('.tabs [aria-current]')"
            browser.wait(f"!{tab} || {tab}.getBoundingClientRect().right <= innerWidth")
            cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
            assert browser.evaluate(cut) == 0, route
            narrow = "[...document.querySelectorAll('.options td:last-child')].filter(e => e.clientWidth < 120).length"
            assert browser.evaluate(narrow) == 0, route
            assert browser.evaluate("document.documentElement.dataset.theme") == scheme
    finally:
        browser.size(1200, 900)


def test_the_pictures_of_the_documentation(shown, browser, tmp_path):
    """`python -m tests.e2e.board_pictures RUNS docs` takes those of docs/board.md in the same way."""
    try:
        take(browser, shown.server, tmp_path)
    finally:
        browser.size(1200, 900)
    page = (ROOT / "docs/board.md").read_text()
    assert sorted(re.findall(r"\((board-\w+)\.png\)", page)) == sorted(PICTURES)
    for name, (_, size, _, _) in PICTURES.items():
        taken, kept = (tmp_path / f"{name}.png").read_bytes(), (ROOT / f"docs/{name}.png").read_bytes()
        for picture in (taken, kept):  # width and height are in the first chunk of a PNG file
            assert picture.startswith(b"\x89PNG") and len(picture) > 5_000
        assert struct.unpack(">II", taken[16:24]) == size


def test_the_form_shows_the_command_and_starts_the_run(tmp_path, shown, browser):
    data = tmp_path / f"{HOSTILE.replace('/', '')}.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    (tmp_path / "runs").mkdir()
    field = "document.getElementById('option-{}')"

    def enter(option, text):
        value = f"f.value = {json.dumps(text)}; f.dispatchEvent(new Event('input'));"
        browser.evaluate(f"{{ const f = {field.format(option)}; {value} }}")

    def button(name):
        browser.evaluate(f"[...document.querySelectorAll('button')].find(b => b.textContent === '{name}').click()")

    visit(shown, "launch", "document.querySelector('.code').textContent.includes('posttrain sft')")
    assert browser.evaluate("[...document.querySelectorAll('.result button')].filter(b => b.disabled).length") == 3
    with board(tmp_path / "runs", token=TOKEN, allow_control=True) as server:
        browser.open(f"{server.address}/#token={TOKEN}")
        browser.wait("document.querySelector('h1')?.innerText === 'Runs'")
        browser.evaluate("document.body.focus()")
        for key in ("g", "n"):
            browser.key(key)
        browser.wait("document.querySelector('.notice')?.innerText.includes('model.path is not set')")
        enter("model.path", "pico")
        enter("data.train", str(data))
        enter("train.max_steps", "two")
        browser.wait("document.querySelector('.notice.bad')?.innerText.includes('must be a whole number')")
        enter("train.max_steps", "2")
        browser.wait("document.querySelector('.code').innerText.includes('--train.max_steps 2')")
        browser.wait("!document.querySelector('.result button.primary').disabled")
        assert browser.evaluate("location.hash.includes('max_steps')")  # a reload keeps the form
        assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
        button("Start the run")
        browser.wait("document.querySelector('dialog[open] .primary')")
        assert not server.board.launcher.jobs  # not before it is confirmed
        browser.evaluate("document.querySelector('dialog[open] .primary').click()")
        browser.wait("[...document.querySelectorAll('.result a')].some(a => a.innerText === 'Open the run')")
        (job,) = server.board.launcher.jobs.values()
        assert job.started.process.wait(PATIENCE) == 0
        browser.evaluate(
            "[...document.querySelectorAll('.result a')].find(a => a.innerText === 'Open the run').click()"
        )
        browser.wait("document.querySelector('.pill.finished')")
        assert (tmp_path / "runs/sft-001/config.yaml").is_file()
        browser.call("Page.navigate", url="about:blank")  # nothing asks this server after its end
    shown.browser.requests.clear()


def test_a_run_is_stopped_with_the_token_and_not_without(tmp_path, shown, browser):
    folder = make_run(tmp_path / "run")
    with board(tmp_path, token=TOKEN, allow_control=True) as server:
        process = subprocess.Popen([sys.executable, "-c", SLEEPER, folder], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "locked\n"
            (run,) = server.board.list.find()
            browser.open(f"{server.address}/#token={TOKEN}")
            browser.wait("document.querySelector('.pill.running')")
            assert TOKEN not in browser.evaluate("location.href")
            browser.evaluate(f"location.hash = '#/run/{run.id}'")
            browser.wait("document.querySelector('button.danger')")
            browser.evaluate("document.querySelector('button.danger').click()")
            browser.wait("document.querySelector('dialog[open] .primary')")
            assert process.poll() is None  # not before it is confirmed
            browser.evaluate("document.querySelector('dialog[open] .primary').click()")
            assert process.wait(PATIENCE) == 7
            browser.evaluate("sessionStorage.clear()")
            browser.open(f"{server.address}/")
            browser.wait("document.body.innerText.includes('needs its token')")
            browser.evaluate(f"location.hash = '#token={TOKEN}'")  # pasted into the open page
            browser.wait("document.querySelector('.runs tbody tr .pill')")
            assert TOKEN not in browser.evaluate("location.href")
            browser.call("Page.navigate", url="about:blank")
        finally:
            process.kill()
            process.communicate()
    shown.browser.requests.clear()
    browser.messages[:] = [text for text in browser.messages if "401" not in text]

"""The documentation tells the truth: every command and Python block in it runs, every link, option and row is right."""

import gzip
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.config.parsing import option_keys, verb_of_file
from posttrain.config.sections import DataConfig, ModelConfig, with_algorithm
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.core.errors import DataError
from posttrain.data.dataset import Encoder
from posttrain.data.reading.formats import FORMATS, SourceFormat, recognise
from posttrain.data.reading.records import Record
from posttrain.models.loading import vocabulary_size
from posttrain.models.tokenizers import load_tokenizer
from posttrain.pipelines.settings import pipeline_defaults
from tests.e2e.commands import PATIENCE, command, rows_of, start
from tests.unit.data.reading.test_schemas import TEMPLATE

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "CHANGELOG.md",
    *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "docs").rglob("*.md")) if file.parent.name != "zh"),
]  # pages in Chinese have the commands of those in English: test_chinese.py
SAVED_AS = re.compile(r"Save this[\w\s]* as `(\w+\.py)`")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Not run here: they install, test or build this very repository, or take minutes and have a test of their own.
LEFT_OUT = re.compile(
    r"(make|pip install|\S*ruff|\S*python -m pytest|posttrain demo|posttrain rewards audit --verifiers)\b"
)
ASSIGNMENT = re.compile(r"\w+=\S*")
STEPS = "--train.max_steps"
FEW_STEPS = 10


def text_of(document):
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document, *languages):
    """(language, text) of the fenced blocks, in order."""
    return [(language, body) for language, body in FENCE.findall(text_of(document)) if language in languages]


def file_names(document, language):
    """For each block of a language the name that the text before it gives the file (`Save this ... as `name.py``)."""
    text = text_of(document)
    found = [match for match in FENCE.finditer(text) if match[1] == language]
    names = [SAVED_AS.findall(text[: match.start()].rpartition("```")[2]) for match in found]
    return [name[-1] if name else f"block_{number}.py" for number, name in enumerate(names)]


def commands(body, console=False):
    """The commands of a block as lists of words, comments and assignments to variables left out."""
    lines = body.replace("\\\n", " ").splitlines()
    if console:
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        words = shlex.split(os.path.expandvars(line), comments=True)
        while words and ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        if words and not LEFT_OUT.match(shlex.join(words)):
            yield words


def shortened(arguments):
    """The same command with few steps, of short completions unless it sets their length, if it trains."""
    if arguments[0] in PIPELINES:
        return [*arguments, "--quiet", STEPS, "1"]
    if arguments[0] not in ALGORITHMS or "--help" in arguments:
        return arguments
    preset = any(argument.endswith(".yaml") for argument in arguments)
    if ALGORITHMS[arguments[0]].online and not preset and "--rollout.max_tokens" not in arguments:
        arguments = [*arguments, "--rollout.max_tokens", "16"]
    steps = int(arguments[arguments.index(STEPS) + 1]) if STEPS in arguments else 0
    return [*arguments, *(["--quiet"] if 0 < steps <= FEW_STEPS else ["--quiet", STEPS, "2"])]


class Servers:
    """`posttrain serve` and `posttrain board` of a document, alive until its end, on a port that is free here."""

    def __init__(self):
        self.processes, self.port = [], 8000  # which the documentation names

    def start(self, words):
        self.processes.append(start(*words, "--port", 0))
        line = self.processes[-1].stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)", line)[1])
        self.port = port if words[0] == "serve" else self.port
        return 0

    def translate(self, text):
        return text.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{self.port}")

    def end(self):
        for process in self.processes:
            process.terminate()
        return [process.wait(PATIENCE) for process in self.processes]


@pytest.fixture
def servers():
    found = Servers()
    yield found
    codes = found.end()
    for process in found.processes:
        process.communicate()
    assert not any(codes)


def run_words(words, servers):
    """The exit code of one command of the documentation."""
    program = Path(words[0]).name
    words = [servers.translate(word) for word in words]
    if program == "posttrain" and words[1] in ("serve", "board"):
        return servers.start(words[1:])
    if program == "posttrain":
        return command(*shortened(words[1:]))
    assert program == "python", f"the documentation shows {shlex.join(words)}: neither run nor left out by this test"
    return subprocess.run([sys.executable, *words[1:]]).returncode


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder like the top of the repository, with stand-ins for what the documentation asks readers to have."""
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MODEL", "pico")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    write_stand_ins(tmp_path / "data")
    return tmp_path


def write_stand_ins(folder):
    """Small files with the names and columns of the public ones."""
    folder.mkdir()
    numbers = range(4)
    asked = [{"from": "human", "value": "How much is 1+1?"}]
    files = {
        "alpaca_en_demo.json": [{"instruction": f"Add 1 to {n}.", "input": "", "output": f"{n + 1}"} for n in numbers],
        "dpo_en_demo.json": [
            {
                "conversations": asked,
                "chosen": {"from": "gpt", "value": f"{n}, or rather 2."},
                "rejected": {"from": "gpt", "value": f"{n + 3}."},
            }
            for n in numbers
        ],
        "kto_en_demo.json": [
            {
                "messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": f"{n + n % 2}"}],
                "label": n % 2 == 1,
            }
            for n in numbers
        ],
        "gsm8k.json": [
            {
                "id": f"gsm8k-{n}",
                "problem": f"How much is {n}+2?",
                "steps": [f"{n}+1={n + 1}", f"so {n + 2}"],
                "final_answer_correct": True,
                "label": n % 3 - 1,
            }
            for n in numbers
        ],
    }
    for name, rows in files.items():
        (folder / name).write_text(json.dumps(rows), encoding="utf-8")
    said = "\n\nHuman: Hello\n\nAssistant: "
    with gzip.open(folder / "harmless-base-test.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"chosen": f"{said}Hi {n}", "rejected": f"{said}{n}"}) + "\n" for n in numbers)


RUN_HERE = [name for name in DOCUMENTS if name != "README.md"]  # which test_readme.py runs, without shortening


@pytest.mark.parametrize("document", [name for name in RUN_HERE if blocks(name, "bash", "console", "python")])
def test_everything_shown_runs(document, workplace, servers):
    names = iter(file_names(document, "python"))
    for language, body in blocks(document, "bash", "console", "python"):
        if language == "python":
            file = workplace / next(names)  # reward functions are found by their file
            file.write_text(servers.translate(body), encoding="utf-8")
            runpy.run_path(str(file), run_name="__main__")
            continue
        for words in commands(body, console=language == "console"):
            assert run_words(words, servers) == 0, f"{document}: {shlex.join(words)}"


def test_every_trainer_and_tool_is_shown():
    bodies = [body for _, body in blocks("docs/tasks.md", "bash")]
    shown = {words[1] for body in bodies for words in commands(body) if words[0] == "posttrain"}
    assert shown == {*ALGORITHMS, *PIPELINES, *TOOLS} - {"demo"}
    assert "make demo" in text_of("README.md") and "make test" in text_of("README.md")


@pytest.mark.parametrize("name", sorted({file.stem for file in (ROOT / "configs").glob("*.yaml")} - {*PIPELINES}))
def test_presets_run(name, workplace):
    preset = Path(f"configs/{name}.yaml")
    verb = verb_of_file(preset)
    assert verb == name.split("-")[-1]
    assert command(verb, preset, STEPS, 2, "--quiet", "--output_dir", "run") == 0
    rows = rows_of(Path("run/metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2]
    assert "reward" in rows[-1] if ALGORITHMS[verb].online else "eval/loss" in rows[-1]


@pytest.mark.parametrize("name", PIPELINES)
def test_presets_of_pipelines_run(name, workplace):
    assert verb_of_file(Path(f"configs/{name}.yaml")) == name
    assert command(name, f"configs/{name}.yaml", STEPS, 1, "--iterations", 1, "--quiet", "--output_dir", "run") == 0
    assert [row["iteration"] for row in json.loads(Path("run/report.json").read_text())] == [0, 1]


def test_there_is_a_preset_for_each_trainer_and_pipeline():
    assert {file.stem for file in (ROOT / "configs").glob("*.yaml")} >= {*ALGORITHMS, *PIPELINES}


def test_the_custom_algorithm_is_sft_when_its_option_says_so(workplace):
    options = ["--model", "pico", "--data", "examples/data/chat.jsonl", STEPS, "2", "--quiet"]
    script = [sys.executable, "examples/custom_algorithm.py", *options, "--algo.power", "0", "--output_dir", "custom"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert command("sft", *options, "--output_dir", "plain") == 0
    custom, plain = rows_of(Path("custom/metrics.jsonl")), rows_of(Path("plain/metrics.jsonl"))
    assert [row["loss"] for row in custom] == pytest.approx([row["loss"] for row in plain])
    assert [row["weight"] for row in custom] == [1, 1]


def test_the_variant_of_grpo_assigns_ranks(workplace, monkeypatch):
    monkeypatch.setattr("posttrain.algorithms.base.ALGORITHMS", dict(ALGORITHMS))  # what it registers is removed again
    variant = runpy.run_path("examples/rank_grpo.py", run_name="examples.rank_grpo")["RankGRPO"]
    advantages = variant(variant.Config()).group_advantages(np.array([0.5, 100.0, 0.5, 0.0]))
    assert advantages.tolist() == [0, 1, 0, -1]
    (shown,) = [body for _, body in blocks("docs/rl.md", "py")]
    assert shown in Path("examples/rank_grpo.py").read_text(encoding="utf-8")


def test_the_python_example_runs(workplace, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_from_python.py", "runs/example"])
    runpy.run_path("examples/train_from_python.py", run_name="__main__")
    assert Path("runs/example/model/config.json").is_file()


def test_the_example_of_a_pipeline_goes_on(workplace, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["best_of_n.py", "runs/example"])
    for _ in range(2):
        runpy.run_path("examples/best_of_n.py", run_name="__main__")
    first, again = capsys.readouterr().out.split("the student is ")[:2]
    assert first.count("done before") == 0 and again.count("done before") == 5
    kept = [(row["index"], row["completion"].strip()) for row in rows_of(Path("runs/example/different.jsonl"))]
    assert len(set(kept)) == len(kept) and Path("runs/example/student/config.json").is_file()


SPECIAL_TEMPLATE = (  # a template that writes tools and reasoning
    "xLAM",
    "glaive-v2",
    "s1K",
    "OpenThoughts, reasoning apart",
    "GeneralThought",
    "input, reasoning and content",
    "medical-o1",
)
REFUSED = ("s1K-1.1", "oasst messages", "LeetCodeDataset")


def test_rows_in_the_data_page_are_what_their_headings_say():
    formats = "".join(re.findall(r"^## Formats.*?(?=^## |\Z)", text_of("docs/data.md"), flags=re.MULTILINE | re.DOTALL))
    parts = re.split(r"^### (.+)$", formats, flags=re.MULTILINE)[1:]
    shown = {}
    for name, text in zip(parts[0::2], parts[1::2], strict=True):
        shown[name] = [
            json.loads(line) for body in re.findall(r"```json\n(.*?)```", text, re.DOTALL) for line in body.splitlines()
        ]
    assert set(shown) == {form.name for form in FORMATS} and all(shown.values())
    model = ModelConfig(path="pico")
    vocabulary = vocabulary_size(model)
    for name, rows in shown.items():
        kind = next(form.kind for form in FORMATS if form.name == name)
        template = TEMPLATE.replace("<|im_end|>", "{{ eos_token }}") if name in SPECIAL_TEMPLATE else ""
        encoder = Encoder(load_tokenizer(model), DataConfig(chat_template=template), kind, vocab_size=vocabulary)
        for number, values in enumerate(rows, start=1):
            row = Record(values, f"docs/data.md, {name}, row {number}")
            assert recognise(row, kind).name == name
            if name in REFUSED:
                with pytest.raises(DataError):
                    SourceFormat(kind, encoder.placeholder).examples(row)
                continue
            for example in SourceFormat(kind, encoder.placeholder).examples(row):
                if kind == "prompt":
                    assert encoder.prompts([example])[0].columns.items() >= values.items()
                else:
                    assert all(sample.mask.any() for sample in encoder.encode(example)), row.origin


def test_options_named_in_the_documentation_exist():
    known = {key for algorithm in ALGORITHMS.values() for key in option_keys(with_algorithm(algorithm))}
    sections = "|".join(sorted({key.split(".")[0] for key in known if "." in key}))
    known |= {key for verb in PIPELINES for key in option_keys(pipeline_defaults(verb))}
    end = r"(?=[`\s,;.)])(?!\.\d)"  # the last: not model.layers.1
    named = re.compile(rf"[`\s(]-{{0,2}}(({sections})\.(?!py\b|md\b|jsonl\b|short\b|\*)(?:no_)?\w+){end}")
    found = 0
    for document in sorted({*DOCUMENTS} - {"CHANGELOG.md", "docs/coming-from.md"}):  # previous and foreign names
        for match in named.finditer(text_of(document)):
            key = match.group(1).replace(".no_", ".")
            assert key in known, f"{document}: {match.group(1)}"
            found += 1
    assert found > 100  # the pattern still finds them


def test_the_container_is_made_of_what_is_there():
    text = text_of("Dockerfile")
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {"posttrain", "constraints.txt"} < set(copied) and all((ROOT / name).exists() for name in copied)
    ignored = text_of(".dockerignore").splitlines()
    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    assert set(re.search(r"'\.\[(.+)\]'", text)[1].split(",")) < set(extras)
    table = text_of("docs/install.md").partition("\n| extra | for |\n")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`([\w-]+)`", row.split(" | ")[0])]
    assert sorted(named) == sorted(set(extras) - {"test", "docs"})


OTHERWISE = {"defaults: [model.yaml]", "GRPOTrainer", "PPOTrainer"}  # of coming-from.md: not options


def ours(document):
    """(line, text) of what stands in backticks in the second column of a document's tables."""
    rows = [line for line in text_of(document).splitlines() if line.startswith("| ") and "---" not in line]
    return [(row, text) for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ", 1)[1])]


def test_what_others_options_are_called_here_exists():
    keys = {verb: set(option_keys(with_algorithm(ALGORITHMS[verb]))) for verb in ALGORITHMS}
    known = set[str]().union(*keys.values())
    found = 0
    for row, text in ours("docs/coming-from.md"):
        words = text.split()
        if words[0] == "posttrain":
            assert words[1] in {*ALGORITHMS, *PIPELINES, *TOOLS}, row
            options = {word[2:].replace(".no_", ".") for word in words if word.startswith("--")}
            assert options <= keys.get(words[1], set()), row
        elif text not in OTHERWISE:
            assert words[0].replace(".no_", ".") in known, f"{text} in {row}"
        found += 1
    assert found > 200


def test_the_architecture_page_names_every_package_and_only_modules_that_exist():
    text = text_of("docs/architecture.md")
    packages = [folder.parent.name for folder in (ROOT / "posttrain").glob("*/__init__.py")]
    assert not [name for name in packages if f"| `{name}/` |" not in text]
    modules = re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)+\.py)", text)
    assert len(modules) > 40
    assert not [name for name in modules if not (ROOT / "posttrain" / name).is_file() and not (ROOT / name).is_file()]


def anchors(document):
    headings = re.findall(r"^#+ (.+)$", re.sub(FENCE, "", text_of(document)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(FENCE, "", text_of(document))):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / document).parent / path if path else ROOT / document
        assert place.exists(), f"{document}: {target}"
        if anchor:
            assert anchor in anchors(place.resolve().relative_to(ROOT)), f"{document}: {target}"


def test_the_site_builds_without_a_warning(tmp_path):
    """The navigation names every page, and every link and anchor between pages is right."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "<math" in (tmp_path / "site/losses.html").read_text(encoding="utf-8")
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 100_000

"""The wheel is complete: installed into an empty environment, `posttrain` works without the repository."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import posttrain
from tests.e2e.commands import PATIENCE, rows_of

ROOT = Path(__file__).parents[2]
SOURCES = ["posttrain", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "constraints.txt"]


def run(*words, cwd, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built by way of the source archive from a copy of the tree."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:  # a copy, because setuptools would also add files that an older posttrain.egg-info lists
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source, cwd=target)
    assert [file.suffixes[-2:] for file in target.glob("*.tar.gz")] == [[".tar", ".gz"]]
    (file,) = target.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The folder of programs of an environment that holds the wheel; other libraries are those of this environment."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    # The .pth files in the added directory are not read, so an editable install of the repository stays invisible.
    (site / "libraries.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    pip = [sys.executable, "-m", "pip", "--python", home / "bin/python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    return home / "bin"


def test_the_wheel_holds_every_file_of_the_package(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "posttrain").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert packed == tracked
    assert {Path(name).suffix for name in tracked} >= {".py", ".yaml"}


def test_the_wheel_trains_from_an_empty_folder(programs, tmp_path):
    """Help, version and a training run, with nothing of the repository on the path."""
    where = run(programs / "python", "-c", "import posttrain; print(posttrain.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(programs.parent)
    assert run(programs / "posttrain", "--version", cwd=tmp_path) == f"posttrain {posttrain.__version__}\n"
    assert "posttrain demo" in run(programs / "posttrain", "demo", "--help", cwd=tmp_path)
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    # A named chat template is read from templates.yaml, the package's data file.
    options = ["--data.chat_template", "chatml", "--steps", 2, "--out", "run"]
    run(programs / "posttrain", "sft", "--model", "pico", "--data", "chat.jsonl", *options, cwd=tmp_path)
    assert [row["step"] for row in rows_of(tmp_path / "run/metrics.jsonl")] == [1, 2]

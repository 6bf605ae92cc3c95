"""`posttrain doctor`: what it finds wrong, and the command it gives."""

from __future__ import annotations

import os
import platform
import pty
import select
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from posttrain.cli import doctor
from posttrain.cli.doctor import Finding


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def installed(monkeypatch, versions: dict[str, str | None]) -> None:
    """Pretend that these versions (None: nothing) are installed; the rest stays as it is."""
    real = metadata.version

    def version(name: str) -> str:
        found = versions[name] if name in versions else real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("posttrain.cli.doctor.metadata.version", version)


def test_a_sound_machine_exits_with_0(capsys):
    assert doctor.doctor() == 0
    out = capsys.readouterr().out
    assert f"python: {platform.python_version()} (>=3.11)" in out
    for name in ("posttrain", "torch", "transformers", "tokenizers", "safetensors", "peft", "wandb", "ray", "vllm"):
        assert f" {name}: " in out
    checked = ("device", "cores", "memory", "run directory", "hub cache", "hub: ", "sandbox: ")
    assert all(word in out for word in checked)
    assert "\x1b" not in out
    assert out.splitlines()[-1] == "All requirements are met."


def test_a_required_package_that_is_old_or_missing_is_a_problem_with_one_command(monkeypatch, capsys):
    installed(monkeypatch, {"transformers": "4.57.0", "safetensors": None})
    assert doctor.doctor() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  problem transformers: 4.57.0 (>=5.16.1,<5.20); fix: pip install 'transformers>=5.16.1,<5.20'" in lines
    assert "  problem safetensors: missing (>=0.6); fix: pip install 'safetensors>=0.6'" in lines
    assert lines[-1] == "2 problems: run the commands after `fix`"


def test_an_optional_package_is_only_noted(monkeypatch):
    installed(monkeypatch, {"wandb": None, "peft": "0.1", "ray": None})
    found = by_name(doctor.check_packages())
    assert found["wandb"] == Finding(
        "wandb", "missing, for log.report_to wandb", "note", ">=0.20", "pip install 'wandb>=0.20'"
    )
    assert (found["peft"].state, found["peft"].found) == ("note", "0.1")
    assert found["ray"].fix == "pip install 'ray>=2.60,<2.61'"


def test_ranges_come_from_the_source_tree_when_nothing_is_installed(monkeypatch):
    expected = doctor.requirements(), doctor.python_range(), doctor.own_version()

    def nothing(name: str):
        raise metadata.PackageNotFoundError(name)

    real = metadata.requires
    monkeypatch.setattr("posttrain.cli.doctor.metadata.requires", lambda n: nothing(n) if n == "posttrain" else real(n))
    monkeypatch.setattr("posttrain.cli.doctor.metadata.metadata", nothing)
    installed(monkeypatch, {"posttrain": None})
    assert (doctor.requirements(), doctor.python_range(), doctor.own_version()) == expected
    required, optional = expected[0]
    assert {"torch", "transformers", "tokenizers"} <= required.keys() and required["torch"].startswith(">=")
    assert "wandb" in optional and "wandb" not in required


def test_an_unsupported_python_is_a_problem(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    assert doctor.check_packages()[0].state == "problem"


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [("2.13.0+cpu", ">=2.11", True), ("2.10.1", ">=2.11", False), ("5.20.0", ">=5.16.1,<5.20", False),
     ("2.14.0.dev20260101", ">=2.11", True), ("1.0", "", True)],
)  # fmt: skip
def test_ranges(version, wanted, fits):
    assert doctor.in_range(version, wanted) is fits


def test_a_folder_that_cannot_be_written_to():
    finding = doctor.check_disk("run directory", Path("/proc"), fix="x", state="problem")
    assert finding.state == "problem" and "cannot be written to" in finding.found and finding.fix == "cd ~"


def test_a_full_disk(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10 * 2**20})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    finding = doctor.check_disk(
        "hub cache", tmp_path / "not" / "yet", fix="export HF_HOME=/a/larger/disk", state="note"
    )
    assert (finding.state, finding.fix) == ("note", "export HF_HOME=/a/larger/disk")
    assert doctor.check_disk("run directory", tmp_path, fix="df -h", state="problem").state == "problem"


def test_hub_settings(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HF_HOME", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor.hub_cache() == tmp_path / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert doctor.hub_cache() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert by_name(doctor.check_machine(tmp_path, tmp_path))["hub"].found == "offline (HF_HUB_OFFLINE is set)"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert by_name(doctor.check_machine(tmp_path, tmp_path))["hub"].found.startswith("online")


def test_a_torch_that_cannot_be_imported_is_a_problem(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libfoo.so: cannot open shared object file')")
    program = "from posttrain.cli.doctor import check_devices; print(check_devices()[0])"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(doctor.__file__).parents[2]}"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "libfoo.so" in run.stdout and "state='problem'" in run.stdout and "pip install" in run.stdout


def read_until(end: str, controller: int) -> str:
    """What a terminal shows; it arrives in pieces."""
    seen = ""
    while end not in seen:
        assert select.select([controller], [], [], 30)[0], f"the terminal went silent after {seen!r}"
        seen += os.read(controller, 10000).decode()
    return seen


def test_a_table_on_a_terminal(monkeypatch):
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("TERM", "xterm")
        finding = Finding("wandb", "missing [for log.wandb]", "note", ">=0.20", "pip install 'wandb>=0.20'")
        doctor.print_findings({"packages": [finding]})
        out.flush()
        seen = read_until("wandb>=0.20'", controller)
    os.close(controller)
    row = next(line for line in seen.splitlines() if "wandb" in line)
    assert row.split()[:4] == ["wandb", "missing", "[for", "log.wandb]"] and "pip install 'wandb>=0.20'" in row
    assert "\x1b[33m" in row, "colour"


def test_no_optional_package_is_imported():
    program = "from posttrain.cli.doctor import doctor; import sys; doctor()\n"
    program += "print([m for m in ('transformers', 'peft', 'bitsandbytes', 'wandb', 'pyarrow') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_what_protects_from_programs_of_a_model_is_shown(monkeypatch):
    monkeypatch.setattr("posttrain.sandbox.programs.isolation", lambda: ("user", ""))
    monkeypatch.setattr("posttrain.sandbox.cgroups.parent_groups", lambda: ())
    found = doctor.check_sandbox()
    assert found.state == "ok" and "in user namespaces" in found.found and "no control group" in found.found
    monkeypatch.setattr("posttrain.sandbox.programs.isolation", lambda: ("unprotected", "unshare: not permitted"))
    found = doctor.check_sandbox()
    assert found.state == "note" and "refuses to run them: unshare: not permitted" in found.found and found.fix


def test_libraries_without_compiled_code_are_noted(monkeypatch, tmp_path):
    assert doctor.check_bytecode().state == "ok"
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    monkeypatch.setattr("sys.pycache_prefix", str(tmp_path))  # where nothing was compiled yet
    found = doctor.check_bytecode()
    assert found.state == "note" and "PYTHONPYCACHEPREFIX" in found.fix
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert doctor.check_bytecode().fix == "unset PYTHONDONTWRITEBYTECODE"

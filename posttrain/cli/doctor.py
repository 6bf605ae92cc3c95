"""`posttrain doctor`: checks packages, devices and this machine, and prints the command that fixes each problem."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import posttrain
from posttrain.config.tools import ToolArgs, read_tool
from posttrain.config.verbs import TOOLS
from posttrain.core.host import host_memory

if TYPE_CHECKING:  # doctor itself checks whether these can be imported
    from packaging.requirements import Requirement

GIB = 2**30

# What each optional package is for. Required ones are those that the package's own metadata names without an extra.
OPTIONAL = {
    "peft": "LoRA",
    "bitsandbytes": "QLoRA (model.load_in_4bit)",
    "accelerate": "QLoRA (model.load_in_4bit)",
    "pyarrow": "parquet files",
    "datasets": "datasets of the Hugging Face Hub",
    "tensorboard": "log.report_to tensorboard",
    "wandb": "log.report_to wandb",
    "trackio": "log.report_to trackio",
    "mlflow-skinny": "log.report_to mlflow",
    "swanlab": "log.report_to swanlab",
    "ray": "clusters",
    "vllm": "the vLLM engine",
    "math-verify": "rewards for mathematics",
}

State = Literal["ok", "note", "problem"]


@dataclass(slots=True)
class Finding:
    """One line: what was checked, what was found, and the command that fixes it if it is not ok."""

    name: str
    found: str
    state: State = "ok"
    wanted: str = ""
    fix: str = ""


@dataclass(kw_only=True)
class DoctorArgs(ToolArgs):
    """Options of `posttrain doctor`: none."""

    verb: ClassVar[str] = "doctor"
    about: ClassVar[str] = TOOLS["doctor"]
    example: ClassVar[str] = "posttrain doctor"


ARGS = (DoctorArgs,)


def run(args: list[str]) -> int:
    read_tool(DoctorArgs(), args)
    return doctor()


def doctor() -> int:
    """Print all findings; 0 if all requirements are met."""
    sections = {
        "packages": check_packages(),
        "devices": check_devices(),
        "machine": check_machine(Path.cwd(), hub_cache()),
    }
    if sys.stdout.isatty():
        print_findings(sections)
    else:
        print_plain(sections)
    problems = [finding for findings in sections.values() for finding in findings if finding.state == "problem"]
    print(
        f"{len(problems)} problem{'s' * (len(problems) != 1)}: run the commands after `fix`"
        if problems
        else "All requirements are met."
    )
    return 1 if problems else 0


def check_packages() -> list[Finding]:
    """Check Python and all required and optional packages against the versions that posttrain supports."""
    required, optional = requirements()
    findings = [
        Finding("python", platform.python_version(), wanted=python_range()),
        Finding("posttrain", own_version()),
    ]
    if not in_range(findings[0].found, findings[0].wanted):
        findings[0].state, findings[0].fix = "problem", "make setup PYTHON=python3.12"
    findings += [check_package(name, wanted) for name, wanted in required.items()]
    for name, purpose in OPTIONAL.items():
        finding = check_package(name, optional.get(name, ""))
        if finding.state == "problem":  # an optional package is needed by its feature alone
            finding.state = "note"
        finding.found += f", for {purpose}" * (finding.found == "missing")
        findings.append(finding)
    return findings


def check_package(name: str, wanted: str) -> Finding:
    fix = f"pip install '{name}{wanted}'" if wanted else f"pip install {name}"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", "problem", wanted, fix)
    if not in_range(version, wanted):
        return Finding(name, version, "problem", wanted, fix)
    return Finding(name, version, wanted=wanted)


def requirements() -> tuple[dict[str, str], dict[str, str]]:
    """Return the version ranges of required and of optional packages, by name."""
    from packaging.requirements import Requirement

    required: dict[str, str] = {}
    optional: dict[str, str] = {}
    for line in requirement_lines():
        requirement = Requirement(line)
        needed = required if "extra" not in str(requirement.marker) else optional
        needed[requirement.name] = spelled(requirement)
    if "transformers" in required:  # transformers decides which tokenizers it works with
        required["tokenizers"] = tokenizers_range()
    return required, optional


def requirement_lines() -> list[str]:
    """Read the requirements from the installed package's metadata, or from pyproject.toml in a source tree."""
    try:
        return metadata.requires("posttrain") or []
    except metadata.PackageNotFoundError:
        project = source_project()
        extras: dict[str, list[str]] = project.get("optional-dependencies", {})
        lines = [f"{line}; extra == '{extra}'" for extra, lines in extras.items() for line in lines]
        return [*project.get("dependencies", []), *lines]


def source_project() -> dict:
    import tomllib

    file = Path(__file__).parents[2] / "pyproject.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))["project"] if file.is_file() else {}


def python_range() -> str:
    try:
        return metadata.metadata("posttrain")["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        return source_project().get("requires-python", "")


def own_version() -> str:
    return posttrain.__version__


def tokenizers_range() -> str:
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("transformers") or []
    except metadata.PackageNotFoundError:
        return ""
    plain = [Requirement(line) for line in lines if "extra" not in line]
    return next((spelled(requirement) for requirement in plain if requirement.name == "tokenizers"), "")


def spelled(requirement: Requirement) -> str:
    """Return the version range, lower bound first."""
    return ",".join(sorted(map(str, requirement.specifier), reverse=True))


def in_range(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def check_devices() -> list[Finding]:
    """Check every accelerator that torch finds with a small computation; without one, report the CPU."""
    try:
        import torch

        from posttrain.core.devices import device_memory
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries is missing
        return [Finding("torch", f"cannot be imported: {error}", "problem", fix="pip install --force-reinstall torch")]
    threads = f"cpu, {torch.get_num_threads()} threads"
    if not torch.accelerator.is_available():
        if not Path("/dev/nvidia0").exists():
            return [Finding("device", threads)]
        if torch.version.cuda is None:
            found = f"{threads}; there is an NVIDIA GPU, but this torch ({torch.__version__}) is built for CPUs only"
            return [Finding("device", found, "note", fix="pip install --force-reinstall torch")]
        found = f"{threads}; there is an NVIDIA GPU, but its driver does not support CUDA {torch.version.cuda}"
        return [Finding("device", found, "note", fix="nvidia-smi")]
    kind = torch.accelerator.current_accelerator().type
    findings = []
    for index in range(torch.accelerator.device_count()):
        device = torch.device(kind, index)
        try:
            works = float((torch.ones(2, device=device) + 1).sum()) == 4.0
        except RuntimeError as error:  # no kernels for this GPU, or a hardware fault
            findings.append(Finding(str(device), str(error).splitlines()[0], "problem", fix="nvidia-smi"))
            continue
        name, total = device_memory(device)
        state: State = "ok" if works else "problem"
        findings.append(Finding(str(device), f"{name}, {total / GIB:.1f} GiB", state))
    return findings


def check_machine(folder: Path, cache: Path) -> list[Finding]:
    """Check cores, memory, disk space and permissions for runs and downloads, the hub setting and the sandbox."""
    findings = [
        Finding("system", f"{platform.system()} {platform.machine()}"),
        Finding("cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())),
        Finding("memory", f"{host_memory() / GIB:.1f} GiB"),
        check_disk("run directory", folder, fix=f"df -h {folder}", state="problem"),
        check_disk("hub cache", cache, fix="export HF_HOME=/a/larger/disk", state="note"),
    ]
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        finding = Finding("shared memory", f"{size / GIB:.1f} GiB")
        if size < GIB:  # containers have 64 MiB by default, too little for processes that share tensors
            finding.state, finding.fix = "note", "docker run --shm-size=8g ..."
        findings.append(finding)
    offline = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")
    ]
    findings.append(Finding("hub", f"offline ({offline[0]} is set)" if offline else "online (not checked)"))
    findings += [check_sandbox(), check_bytecode()]
    return findings


def check_bytecode() -> Finding:
    """Check whether Python keeps the compiled code of large libraries; without it every start compiles them."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists():
        return Finding("start-up", "Python keeps compiled code")
    found = "Python keeps no compiled code of the libraries, so every start compiles them, which takes seconds"
    if sys.dont_write_bytecode:
        return Finding(
            "start-up", f"{found}: PYTHONDONTWRITEBYTECODE is set", "note", fix="unset PYTHONDONTWRITEBYTECODE"
        )
    return Finding("start-up", found, "note", fix="export PYTHONPYCACHEPREFIX=~/.cache/python")


def check_sandbox() -> Finding:
    """Check whether the verifier `code` can isolate programs that a model writes, and how it limits their memory."""
    from posttrain.sandbox.cgroups import parent_groups
    from posttrain.sandbox.programs import isolation

    mode, problem = isolation()
    if mode == "unprotected":
        found = f"programs cannot be isolated, so the reward `code` refuses to run them: {problem}"
        return Finding("sandbox", found, "note", fix="see docs/rewards.md, The sandbox of `code`")
    rights = "without user namespaces, as root" if mode == "root" else "in user namespaces"
    grouped = any("memory" in group.files for group in parent_groups())
    memory = "limited by a control group" if grouped else "measured every 20 ms (no control group)"
    return Finding("sandbox", f"programs are isolated {rights}; their memory is {memory}")


def check_disk(name: str, folder: Path, fix: str, state: State) -> Finding:
    """Check free space and write permission in a directory, or in the nearest existing one above it."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    finding = Finding(name, f"{folder}, {free / GIB:.1f} GiB free")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        fix = "cd ~" if state == "problem" else "export HF_HOME=/a/directory/of/yours"
        return Finding(name, f"{folder} cannot be written to: {error.strerror}", state, fix=fix)
    if free < GIB:
        finding.state, finding.fix = state, fix
    return finding


def hub_cache() -> Path:
    """Return the directory of Hugging Face downloads, by the rule of huggingface_hub, which is slow to import."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    home = Path(os.environ.get("HF_HOME") or home)
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def print_findings(sections: dict[str, list[Finding]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colors = {"ok": "green", "note": "yellow", "problem": "bold red"}
    table = Table("", "found", "supported", "", "fix", box=None, pad_edge=False)
    for section, findings in sections.items():
        table.add_row(Text(section, style="bold"))
        for f in findings:
            table.add_row(f.name, Text(f.found), Text(f.wanted), Text(f.state, style=colors[f.state]), Text(f.fix))
    Console().print(table)


def print_plain(sections: dict[str, list[Finding]]) -> None:
    for section, findings in sections.items():
        print(f"{section}:")
        for f in findings:
            wanted = f" ({f.wanted})" if f.wanted else ""
            fix = f"; fix: {f.fix}" if f.fix else ""
            print(f"  {f.state:<7} {f.name}: {f.found}{wanted}{fix}")

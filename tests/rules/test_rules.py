"""The rules that protect everybody: import order, heavy libraries, nothing unsafe, a frozen option list."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "posttrain"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own layer and from those below it.
LAYERS = [
    {"__init__", "core"},
    {"config"},
    {"sandbox", "checkpoints", "data", "plots"},
    {"rewards", "algorithms", "parallel"},
    {"nn"},
    {"models"},
    {"engines", "convert", "publish"},
    {"endpoint"},
    {"rollout", "cluster", "harness"},
    {"train"},
    {"inference"},
    {"server", "pipelines", "board"},
    {"api"},
    {"mindrlhf"},
    {"cli", "__main__"},
]
HEAVY = {
    "ray",
    "vllm",
    "wandb",
    "tensorboard",
    "trackio",
    "mlflow",
    "swanlab",
    "peft",
    "bitsandbytes",
    "datasets",
    "pyarrow",
    "tyro",
    "matplotlib",
    "math_verify",
    "flash_attn",
    "llguidance",
    "mcp",
    "gguf",
    "lm_eval",
    "inspect_ai",
    "reasoning_gym",
    "gymnasium",
    "websockets",
}
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def tree(file):
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imported_modules(file):
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "posttrain":
                yield from ((node.lineno, f"posttrain.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def layer(name):
    found = [index for index, names in enumerate(LAYERS) if name in names]
    assert found, f"posttrain/{name} has no place in the import order; give it one in tests/rules"
    return found[0]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_down(file):
    if file == PACKAGE / "__init__.py":
        return  # exports the API
    mine = layer(room(module_name(file)))
    for line, module in imported_modules(file):
        if module.startswith("posttrain"):
            if module.removeprefix("posttrain.") == "__version__":
                continue
            assert layer(room(module)) <= mine, f"{file}:{line} imports {module}, which stands above it"


@pytest.mark.parametrize("file", sorted((PACKAGE / "algorithms").glob("*.py")), ids=lambda f: f.name)
def test_algorithms_import_little(file):
    allowed = (
        "posttrain.algorithms",
        "posttrain.core.types",
        "posttrain.core.ops",
        "posttrain.core.lazy",
        "posttrain.core.errors",
        "numpy",
    )
    for line, module in imported_modules(file):
        standard = module.split(".")[0] in sys.stdlib_module_names
        assert standard or module.startswith(allowed), f"{file}:{line} imports {module}"


def test_each_heavy_library_has_one_home():
    homes = defaultdict(set)
    for file in FILES:
        for _, module in imported_modules(file):
            if module.startswith("posttrain."):  # ours are named after what they use
                continue
            for part in (module.split(".")[0], module.split(".")[-1]):  # torch.utils.tensorboard
                if part in HEAVY:
                    homes[part].add(file.parent.name if file.parent.name == part else file.name)  # or one package
    assert all(len(files) == 1 for files in homes.values()), dict(homes)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_nothing_unsafe_or_silent(file):
    for line, module in imported_modules(file):
        # Functions that this process sends to its own children: nothing else is ever loaded there.
        own_functions = file == PACKAGE / "sandbox/callables.py" and module == "cloudpickle"
        assert own_functions or module.split(".")[0] not in FORBIDDEN_IMPORTS, f"{file}:{line} imports {module}"
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"{file}:{node.lineno} calls {node.func.id}"
            if isinstance(node.func, ast.Attribute):
                text = ast.unparse(node.func)
                # Megatron's checkpoints are such files; there the restricted unpickler alone reads them.
                megatron = file == PACKAGE / "convert/files.py" and is_restricted(node)
                unsafe = text in ("torch.load", "torch.save", "os.system") and not megatron
                assert not unsafe, f"{file}:{node.lineno} calls {text}"
            for keyword in node.keywords:
                on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                unsafe = keyword.arg in ("shell", "trust_remote_code") and on
                assert not unsafe, f"{file}:{node.lineno} {keyword.arg}=True"
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            handled = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            assert not broad or handled, f"{file}:{node.lineno}: a broad except that does not raise again"


def is_restricted(call):
    """torch.save, or torch.load that makes nothing but tensors and listed classes."""
    limits = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func) == "torch.save" or limits.get("weights_only") == "True"


def loaded_after(code):
    code = f"import sys; {code}; print([m for m in ('torch', 'transformers', 'rich', 'tyro') if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_help_imports_nothing_heavy():
    assert loaded_after("from posttrain.cli.main import main; main(['--help'])").endswith("[]")


def test_importing_the_package_imports_nothing_heavy():
    assert loaded_after("import posttrain") == "[]"


def test_algorithms_and_configuration_do_not_import_torch():
    assert loaded_after("import posttrain.algorithms, posttrain.config.parsing, posttrain.config.sections") == "[]"


def test_every_algorithm_has_a_line_of_help():
    from posttrain.algorithms import ALGORITHMS

    assert all(algorithm.help for algorithm in ALGORITHMS.values())


def test_importing_the_package_needs_no_optional_library():
    blocked = sorted(HEAVY - {"tyro"})
    code = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
        "import posttrain.train.offline, posttrain.cli.main, posttrain.cli.tools\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_paths_of_a_machine_and_no_addresses_of_registries():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    words = ["/" + "work/", "/" + "root/", "pypi." + "org", "files.python" + "hosted"]
    for name in listed:
        file = ROOT / name
        if file.suffix in (".py", ".md", ".toml", ".txt", ".yaml", "") and file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            assert not [word for word in words if word in text], name


def test_a_class_name_means_one_thing():
    """Nested `Config` dataclasses hold the options of their algorithm; every other name is defined once."""
    homes = defaultdict(list)
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef) and node.name != "Config":
                homes[node.name].append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}

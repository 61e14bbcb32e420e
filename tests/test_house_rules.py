"""The rules of the house: what no reviewer should have to look for.

What ruff and pyrefly can see is theirs; this file holds the rest.
"""

import ast
import importlib
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jaxft

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jaxft"
FOLDERS = ("jaxft", "configs", "benchmarks", "tests")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
# Config files and their classes need real annotations; see jaxft/config.py.
SETTINGS = [PACKAGE / f"{name}.py" for name in ("config", "settings", "safeguards")]
NO_FUTURE = [*SETTINGS, *sorted((ROOT / "configs").glob("*.py"))]
DEVICE_LIBRARIES = ("jax", "flax", "optax", "orbax", "grain")


def _name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _package_files() -> list[pathlib.Path]:
    return [path for path in FILES if PACKAGE in path.parents]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )


def test_there_is_something_to_look_at():
    names = {_name(path) for path in FILES}
    assert {"jaxft/config.py", "configs/tiny_lm.py", "tests/conftest.py"} <= names


def test_imports_go_only_downwards():
    # The API of import-linter in a process of its own: it caches what it parsed.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit("
    result = _run(sys.executable, "-c", f"{code}lint_imports(no_cache=True))")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_nobody_inside_imports_the_root():
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in _package_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(a.name == "jaxft" for a in node.names))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "jaxft"
            # A module of the root folder, not a name of the lazy table.
            and any(not (PACKAGE / f"{a.name}.py").exists() for a in node.names)
        )
    ]
    assert not found


def test_files_and_functions_stay_small():
    found = []
    for path in FILES:
        text = path.read_text()
        if (lines := text.count("\n")) > 500:
            found.append(f"{_name(path)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 80:
                    found.append(f"{_name(path)}: {node.name} has {length} lines")
    assert not found


def test_no_file_is_a_drawer_for_everything():
    banned = {"utils", "util", "helpers", "helper", "common", "misc"}
    folders = {
        parent for path in FILES for parent in path.parents if ROOT in parent.parents
    }
    names = {_name(path): path.stem for path in FILES}
    names |= {_name(folder): folder.name for folder in folders}
    assert not [name for name, stem in names.items() if stem in banned]


def test_no_root_name_is_also_a_subpackage():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert not packages & set(jaxft.__all__)


def test_modules_say_what_they_are_for_and_where_they_live():
    found = []
    for path in _package_files():
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        if not doc:
            found.append(f"{_name(path)}: no docstring")
        elif path.name != "__init__.py":
            found += [
                f"{_name(path)}: no {word!r}"
                for word in ("World:", "Floor:")
                if word not in doc
            ]
    assert not found


def test_text_is_ascii_and_fits_the_page():
    found = []
    for path in [*FILES, ROOT / "pyproject.toml", ROOT / "setup.cfg"]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.isascii():
                found.append(f"{_name(path)}:{number}: not ASCII")
            # A line that is one long word (an address) cannot be broken.
            if len(line) > 88 and " " in line.strip("# "):
                found.append(f"{_name(path)}:{number}: {len(line)} columns")
    assert not found


def test_annotations_are_postponed_except_in_configs():
    found = []
    for path in [*_package_files(), *NO_FUTURE]:
        tree = ast.parse(path.read_text())
        postponed = any(
            isinstance(node, ast.ImportFrom) and node.module == "__future__"
            for node in tree.body
        )
        only_docstring = all(isinstance(node, ast.Expr) for node in tree.body)
        if postponed == (path in NO_FUTURE) and not only_docstring:
            found.append(_name(path))
    assert not found


def test_private_imports_say_why():
    found = []
    for path in _package_files():
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
            if any("_src" in module.split(".") for module in modules):
                found += (
                    [] if above.startswith("#") else [f"{_name(path)}:{node.lineno}"]
                )
    assert not found


def test_the_repository_speaks_of_itself_alone():
    """No path of the machine that something was written on."""
    places = [re.escape(f"/{name}/") for name in ("work", "opt/venvs", "root")]
    pattern = re.compile(rf"(?<![\w.}}]){'|'.join(places)}|/tmp/(brief|wt)")
    suffixes = {".py", ".md", ".toml", ".cfg", ".ipynb", ".yaml", ".yml", ".sh", ""}
    roots = [*(ROOT / name for name in (*FOLDERS, "colabs", ".ci")), ROOT]
    found = []
    for root in roots:
        paths = root.glob("*") if root == ROOT else root.rglob("*")
        for path in sorted(paths):
            if path == pathlib.Path(__file__) or not path.is_file():
                continue
            if path.name == ".git":  # A worktree's, which says where the rest is.
                continue
            # A stored checkpoint has files that are no text.
            text = path.read_text(errors="replace") if path.suffix in suffixes else ""
            if pattern.search(text):
                found.append(_name(path))
    assert not found


_FRESH = """
import importlib, importlib.util, pathlib, sys
libraries, modules, configs = (text.split(",") for text in sys.argv[1:])
def check(name):
    loaded = [library for library in libraries if library in sys.modules]
    if loaded:
        sys.exit(f"{name} loads {loaded}")
for name in modules:
    importlib.import_module(name)
    check(name)
from jaxft import config as config_lib
from jaxft import settings
for path in configs:
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings.flatten(config_lib.resolve(module.get_config()))
    check(path)
"""


def _host_only_modules() -> list[str]:
    """The modules behind the linter's list, and the two everyone starts with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = (c for c in contracts if "never load jax" in c["name"])
    assert set(contract["forbidden_modules"]) == set(DEVICE_LIBRARIES)
    modules = ["jaxft", "jaxft.main"]
    for source in contract["source_modules"]:
        base = ROOT / source.replace(".", "/")
        paths = sorted(base.glob("*.py")) if base.is_dir() else [base]
        modules += [_name(path.with_suffix("")).replace("/", ".") for path in paths]
    return [name.removesuffix(".__init__") for name in modules]


def test_host_only_modules_and_configs_load_no_jax():
    """In a fresh interpreter: import-linter does not see what `__init__` runs."""
    modules = _host_only_modules()
    assert {"jaxft.config", "jaxft.recovery.supervisor"} <= set(modules)
    configs = [str(path) for path in NO_FUTURE[len(SETTINGS) :]]
    result = _run(
        sys.executable,
        "-c",
        _FRESH,
        *map(",".join, (DEVICE_LIBRARIES, modules, configs)),
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.device
@pytest.mark.parametrize("name", jaxft._HOMES)
def test_public_names_are_where_the_table_says(name):
    value = getattr(jaxft, name)
    assert value is getattr(importlib.import_module(jaxft._HOMES[name]), name)
    assert value.__module__ == jaxft._HOMES[name]
    assert value.__doc__


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jaxft.nothing


def test_the_command_helps():
    result = _run(sys.executable, "-m", "jaxft.main", "--help")
    assert result.returncode == 0, result.stderr
    assert "--workdir" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_installed_commands_point_at_something():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for target in project["project"]["scripts"].values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))

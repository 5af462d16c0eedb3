"""The rules of the house: what may import what, and one set of versions everywhere."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("dalle_lean", "preprocessing", "training", "inference", "demo")
MAY_IMPORT = {
    "dalle_lean": set(),
    "preprocessing": {"dalle_lean"},
    "training": {"dalle_lean", "preprocessing", "inference"},
    "inference": {"dalle_lean"},
    "demo": {"dalle_lean", "inference", "training"},
}
SHARDS = {"preprocessing.shards.files", "preprocessing.shards.manifest"}
TERMINAL = {"typer", "rich"}


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def imports_of(path):
    """The names of all modules that a file imports."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def sources(room):
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room):
    for path in sources(room):
        rooms = {name.split(".")[0] for name in imports_of(path)} & set(ROOMS)
        assert rooms <= MAY_IMPORT[room] | {room}, path


def test_training_reads_shards_through_the_one_reader():
    for path in sources("training"):
        for name in imports_of(path):
            assert not name.startswith("preprocessing") or name in SHARDS, path


def test_training_draws_its_previews_through_the_one_sampler():
    for path in sources("training"):
        for name in imports_of(path):
            assert not name.startswith("inference") or path.name == "previews.py", path


@pytest.mark.parametrize("room", ROOMS)
def test_only_the_command_line_speaks_to_the_terminal(room):
    for path in sources(room):
        if path.name in ("cli.py", "terminal.py", "__main__.py", "commands.py") or path.parent.name == "commands":
            continue
        assert not {name.split(".")[0] for name in imports_of(path)} & TERMINAL, path
        assert "dalle_lean.terminal" not in imports_of(path), path


def test_a_bare_gpu_machine_can_draw():
    script = """
import sys
for name in ("typer", "rich", "hivemind", "bitsandbytes", "numba", "datasets", "pyarrow", "open_clip", "taming",
             "gradio", "torchvision", "tensorboard", "brotli", "yaml", "tqdm"):
    sys.modules[name] = None
import dalle_lean
from dalle_lean import Dalle, DalleConfig, load_model
import dalle_lean.images.vqgan, dalle_lean.tokenizer, dalle_lean.clip.scorer, dalle_lean.optim.lamb, dalle_lean.convert
from inference import Generator
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirement_names(requirements):
    return {re.split(r"[\[<>=!~; ]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        line.split("==")[0]: line.split("==")[1].split(" ")[0] for line in lines if line and not line.startswith("#")
    }


def test_every_requirement_is_pinned():
    extras = project()["optional-dependencies"]
    wanted = requirement_names(project()["dependencies"])
    for name, requirements in extras.items():
        if name != "all":
            wanted |= requirement_names(requirements)
    assert wanted <= set(pinned())


def test_numpy_stays_below_what_breaks_hiveminds_8_bit_compression():
    assert tuple(int(part) for part in pinned()["numpy"].split(".")[:2]) < (2, 4)


def test_conda_installs_the_same_extras_with_the_same_pins():
    environment = (ROOT / "environment.yml").read_text()
    assert "--constraint constraints.txt" in environment
    assert "--editable .[all]" in environment
    assert set(requirement_names(project()["optional-dependencies"]["all"])) == {"dalle-lean"}
    everything = re.fullmatch(r"dalle-lean\[(.+)\]", project()["optional-dependencies"]["all"][0])[1]
    # Weights & Biases is for those who have an account.
    assert set(everything.split(",")) == set(project()["optional-dependencies"]) - {"all", "wandb"}


def test_ci_runs_the_readmes_checks_and_nothing_else():
    commands = [
        line
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if line and not line.startswith("#") and not line.startswith(("set ", "cd ", "command -v chromium"))
    ]
    assert commands == ["make lint", "make test", "make test-long", "make test-browser"]
    assert all(command in (ROOT / "README.md").read_text() for command in commands)


def test_the_map_names_every_file():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text.split("```text\n")[1].split("\n```")[0]
    folders, named = [], set()
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name] if name.endswith("/") else []
        if name.endswith(".py"):
            named.add("".join(folders[:depth]) + name)
    real = {
        path.relative_to(ROOT).as_posix()
        for room in (*ROOMS, "benchmarks")
        for path in sources(room)
        if path.name != "__init__.py"
    }
    assert named == real


def imports_by_module():
    """The modules of the house that each of them imports anywhere, lazily too; not those for type checkers alone."""
    paths = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
        for room in ROOMS
        for path in sources(room)
    }

    def names(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in paths else node.module
        for child in ast.iter_child_nodes(node):
            yield from names(child)

    return {module: set(names(tree_of(path))) & set(paths) for module, path in paths.items()}


def test_no_imports_go_in_a_circle():
    try:
        tuple(graphlib.TopologicalSorter(imports_by_module()).static_order())
    except graphlib.CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))

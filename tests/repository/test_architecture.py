"""The folders are the architecture: what each may import, and what may lie beside the engine."""

import ast
import graphlib
from pathlib import Path

import ferryman

ROOT = Path(ferryman.__file__).parent
# From the top to the bottom: each imports only from those below it.
LAYERS = [
    "cli", "integrations", "verify", "forecast", "engine", "training", "checkpoint", "relay", "server", "options",
    "observe", "data", "distributed", "exactness", "plan", "model", "runtime", "_version",
]  # fmt: skip


def imports():
    """Pairs of a module and what it imports when it runs, by its full name; annotations do not count."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        unused = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        hidden = {id(node) for branch in unused for node in ast.walk(branch)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and id(node) not in hidden
                and (node.module or "").startswith("ferryman")
            ):
                for name in node.names:
                    yield path.relative_to(ROOT), [*node.module.split(".")[1:], name.name]


def layer_of(path):
    return path.parts[0].removesuffix(".py")


def test_imports_go_one_way():
    upwards = [
        (str(path), ".".join(imported))
        for path, imported in imports()
        if path.name != "__init__.py" and LAYERS.index(imported[0]) < LAYERS.index(layer_of(path))
    ]
    assert upwards == []


def test_no_file_imports_itself_through_others():
    """Also within a folder. (`import ferryman`, for the version, is not counted: it is needed only when code runs.)"""
    files = {path.relative_to(ROOT).with_suffix("").parts for path in ROOT.rglob("*.py")} - {("__init__",)}
    graph = {file: set() for file in files}
    for path, imported in imports():
        *folders, last = imported
        named = [(*folders, last), tuple(folders), (*folders, "__init__")]  # a file, or something in one
        graph.get(path.with_suffix("").parts, set()).update([file for file in named if file in files][:1])
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError


def test_relay_and_server_do_not_know_each_other():
    """They meet in a protocol, `relay/parameter_server.py`, and are wired together in `training/assembly.py`."""
    pairs = {(layer_of(path), imported[0]) for path, imported in imports()}
    assert not pairs & {("relay", "server"), ("server", "relay")}


def test_every_folder_has_its_layer():
    found = {layer_of(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")}
    assert found - {"__init__"} == set(LAYERS)


def test_only_the_engine_and_its_options_lie_beside_the_folders():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "_version.py", "engine.py", "options.py"}


def files_in_the_map():
    """Paths of the Python files in the tree of docs/architecture.md, from its indentation."""
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    tree = page.split("src/ferryman/\n")[1].split("\nnative/")[0]
    folders: list[str] = []
    for line in tree.splitlines():
        name, _, description = line.strip().partition(" ")
        assert description.strip(), f"{name} has no description"
        folders = folders[: (len(line) - len(line.lstrip())) // 2 - 1]
        if name.endswith("/"):
            folders.append(name)
        else:
            yield "".join(folders) + name


def test_the_map_lists_every_file():
    there = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")}
    there = {path for path in there if not path.endswith("/__init__.py")}
    listed = list(files_in_the_map())
    assert len(listed) == len(set(listed))
    assert set(listed) == there


def test_no_two_files_share_a_name():
    names = [path.stem for path in ROOT.rglob("*.py") if path.stem != "__init__"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_two_public_classes_share_a_name():
    trees = [ast.parse(path.read_text()) for path in ROOT.rglob("*.py")]
    classes = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert sorted({name for name in classes if classes.count(name) > 1 and not name.startswith("_")}) == []


FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
}
OF_ANY_TYPE = {"arange", "as_tensor", "randint", "tensor"}  # their values decide


def test_tensors_are_made_where_and_as_the_code_says():
    """The user may have set a default device and a default dtype, which the engine's own tensors must not follow."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
                kind, given = ast.unparse(node.func).removeprefix("torch."), {word.arg for word in node.keywords}
                needed = {"device"} if kind in OF_ANY_TYPE else {"device", "dtype"}
                if kind in FACTORIES and not needed <= given:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not found

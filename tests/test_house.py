"""The house of design.md: who imports whom, what is pure, what is exported, and that it stays readable."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pimm_ray
from pimm_ray import errors

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pimm_ray"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {"checkpoint", "elastic", "runtime", "weights", "observe"}
DOORS = {("weights", "checkpoint"), ("runtime", "checkpoint"), ("observe", "checkpoint.store")}
"""Which room may look into which other one."""
PURE = [
    "checkpoint/documents.py", "checkpoint/layout.py", "elastic/plan.py", "elastic/windows.py", "elastic/order.py",
    "policy.py", "progress.py", "weights/address.py", "weights/rules.py",
]  # fmt: skip
PUBLIC = [
    "CheckpointInfo", "CheckpointManager", "ElasticLoader", "ElasticPolicy", "ElasticStream", "KeepPolicy",
    "LoadReport", "Position", "Problem", "ResumePlan", "RunShape", "SavePolicy", "TensorBoardTracker", "TorchTrainer",
    "Tracker", "TrainState", "WandbTracker", "WarmStart", "errors", "export_weights", "find_checkpoint", "load_weights",
    "open_checkpoint", "plan_resume", "testing", "verify_checkpoint",
]  # fmt: skip

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(node: ast.AST) -> Iterator[str]:
    """Full dotted names; `from a import b` counts as a.b, which may be a module."""
    for found in ast.walk(node):
        if isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            assert found.level == 0, "imports are written in full"
            yield from (f"{found.module}.{alias.name}" for alias in found.names)


def calls(node: ast.AST) -> Iterator[str]:
    return (ast.unparse(found.func) for found in ast.walk(node) if isinstance(found, ast.Call))


def room_of(file: Path) -> str | None:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def wrong_arrows(file: Path) -> list[str]:
    # The trainer lives among Ray's own, but stands above the rooms.
    room, wrong = None if file.name == "trainer.py" else room_of(file), []
    for name in imports(tree_of(file)):
        whole, _, inside = name.partition(".")
        if whole != "pimm_ray":
            continue
        if file.name == "errors.py" or (room and inside.split(".")[0] not in {*ROOMS, "errors"}):
            wrong.append(name)
        elif room and (other := inside.split(".")[0]) in ROOMS and other != room:
            if not any(room == a and f"{inside}.".startswith(f"{b}.") for a, b in DOORS):
                wrong.append(name)
    return wrong


@every_file
def test_imports_go_down_only_and_rooms_use_their_own_doors(file):
    assert wrong_arrows(file) == []


def test_every_folder_is_a_room_of_the_plan():
    assert {room_of(file) for file in FILES} - {None} <= ROOMS


@every_file
def test_ray_is_imported_in_the_runtime_room_only(file):
    named = [name for name in imports(tree_of(file)) if name.split(".")[0] == "ray"]
    if file.relative_to(PACKAGE) == Path("observe/metrics.py"):
        at_import = [n for n in tree_of(file).body if isinstance(n, ast.Import | ast.ImportFrom)]
        named = [name for node in at_import for name in imports(node) if name.split(".")[0] == "ray"]
    assert named == [] or room_of(file) == "runtime"


@every_file
def test_private_names_of_ray_stand_in_one_file(file):
    private = re.findall(r"\bray(?:\.\w+)*\._\w+", file.read_text())
    assert private == [] or file.relative_to(PACKAGE) == Path("runtime/ray_private.py")


@every_file
def test_faults_for_tests_may_use_everything_and_nothing_uses_them(file):
    used = [name for name in imports(tree_of(file)) if f"{name}.".startswith("pimm_ray.testing.")]
    assert used == [] or file == PACKAGE / "__init__.py"


@pytest.mark.parametrize("name", PURE)
def test_pure_files_compute_and_nothing_else(name):
    if not (PACKAGE / name).exists():
        pytest.skip("its issue has not come yet")
    tree = tree_of(PACKAGE / name)
    outside = {"torch", "ray", "numpy", "pyarrow", "os", "io", "pathlib", "shutil", "tempfile", "socket", "subprocess",
               "sys", "logging", "time", "random", "threading"}  # fmt: skip
    if name == "elastic/order.py":
        outside.remove("numpy")  # integers modulo 2**64, by the million
    pure = {f"pimm_ray.{path.removesuffix('.py').replace('/', '.')}" for path in PURE} | {"pimm_ray.errors"}
    for imported in imports(tree):
        assert imported.split(".")[0] not in outside, imported
        assert not imported.startswith("pimm_ray") or imported.rpartition(".")[0] in pure, imported
    assert not {"open", "print", "input", "exec", "eval"} & set(calls(tree))


DOOR = Path("checkpoint/legacy.py")
"""The one file that reads other people's pickles, and writes what only such programs read."""
THROUGH_THE_DOOR = {
    Path(name) for name in ("checkpoint/pimm.py", "checkpoint/pimm_read.py", "cli.py", "weights/source.py")
}
"""Who asks it to read."""


@every_file
def test_nothing_can_run_code_from_a_checkpoint(file):
    tree = tree_of(file)
    modules = {"cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "serialization"}
    forbidden = {"np.load", "numpy.load", "eval", "exec", "safe_globals", "add_safe_globals"}
    if file.relative_to(PACKAGE) != DOOR:
        modules |= {"pickle"}
        forbidden |= {"torch.load", "torch.save"}
        if file.relative_to(PACKAGE) not in THROUGH_THE_DOOR:
            forbidden |= {"load_file", "load_dcp", "load_pickle"}
            assert "allow_pickle" not in file.read_text()
    assert not [name for name in imports(tree) if modules & set(name.split("."))]
    assert not [name for name in imports(tree) if name in ("torch.load", "torch.save", "numpy.load")]
    assert not forbidden & set(calls(tree))


@pytest.mark.parametrize("name", sorted(map(str, THROUGH_THE_DOOR)))
def test_whoever_asks_the_door_passes_on_what_the_user_said(name):
    """Never a word of its own: `allow_pickle` comes from a caller, and is False when that says nothing."""
    if not (PACKAGE / name).exists():
        pytest.skip("it has not come yet")
    for node in ast.walk(tree_of(PACKAGE / name)):
        for word in node.keywords if isinstance(node, ast.Call) else ():
            assert word.arg != "allow_pickle" or ast.unparse(word.value).split(".")[-1] == "allow_pickle"
        if isinstance(node, ast.FunctionDef):
            words = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            assert all(ast.unparse(default) == "False" for word, default in words if word.arg == "allow_pickle")


def test_the_door_reads_pickle_only_where_the_user_says_so():
    """Each call that may run code stands under `if allow_pickle`, every other one is `weights_only=True`."""
    tree = tree_of(PACKAGE / DOOR)
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    unsafe = [load for load in loads if "weights_only=True" not in map(ast.unparse, load.keywords)]
    plain = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "pickle.load" in ast.unparse(node.func)]
    asked = [
        call
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.IfExp) and ast.unparse(node.test) == "allow_pickle"
        for part in (node.body if isinstance(node.body, list) else [node.body])
        for call in ast.walk(part)
    ]
    assert len(loads) == 2 and len(unsafe) == 1 and len(plain) == 2
    assert all(call in asked for call in unsafe + plain)
    defaults = [
        ast.unparse(default)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if argument.arg == "allow_pickle"
    ]
    assert defaults == ["False"] * 3
    pickler = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named = {"pickle.loads", "pickle.dumps", "pickle._Unpickler", "pickle.UnpicklingError"}
    assert {name for name in pickler if name.startswith("pickle.")} == named


@every_file
def test_a_file_that_grows_too_long_becomes_two(file):
    assert len(file.read_text().splitlines()) <= 450


def test_the_public_names_are_these_and_each_is_there():
    assert PUBLIC == sorted(PUBLIC) == sorted(pimm_ray.__all__)
    for name in PUBLIC:
        assert name == "TorchTrainer" or hasattr(pimm_ray, name), name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = pimm_ray.nothing


def test_importing_the_package_starts_neither_ray_nor_a_process_group():
    script = (
        "import sys, pimm_ray, torch.distributed as dist; assert 'ray' not in sys.modules and not dist.is_initialized()"
        "; assert 'pimm_ray.testing' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def told(thing: object, name: str) -> bool:
    """Written for people, not made by dataclass or inherited."""
    text = vars(thing).get("__doc__") if isinstance(thing, type) else getattr(thing, "__doc__", None)
    return bool(text) and not text.startswith(f"{name}(")


def test_every_public_name_and_each_of_its_methods_says_what_it_is_for():
    silent = []
    things = {name: getattr(pimm_ray, name) for name in PUBLIC if name != "TorchTrainer"}
    things |= {name: getattr(module, name) for module in (errors, pimm_ray.testing) for name in module.__all__}
    for name, thing in things.items():
        if not told(thing, name):
            silent.append(name)
        for member, value in vars(thing).items() if isinstance(thing, type) else ():
            public = not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
            if public and name != "CheckpointInfo" and not value.__doc__:
                silent.append(f"{name}.{member}")
    assert silent == []


def test_the_trainer_says_what_it_is_for():
    (trainer,) = (
        node
        for node in tree_of(PACKAGE / "runtime" / "trainer.py").body
        if isinstance(node, ast.ClassDef) and node.name == "TorchTrainer"
    )
    assert "resume_from_checkpoint" in (ast.get_docstring(trainer) or "")


@every_file
def test_every_file_says_in_its_first_line_what_it_is_for(file):
    assert ast.get_docstring(tree_of(file))


def test_every_error_is_listed_and_has_one_base():
    made = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert made == set(errors.__all__)
    assert all(issubclass(getattr(errors, name), errors.PimmRayError) for name in errors.__all__)


def requirements() -> dict[str, list]:
    tomllib = pytest.importorskip("tomllib")
    requirement = pytest.importorskip("packaging.requirements").Requirement
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {group: [requirement(line) for line in lines] for group, lines in groups.items()}


def test_each_requirement_has_a_lower_bound_and_a_pinned_version_that_fits_it():
    file = ROOT / "constraints.txt"
    if not file.exists():
        pytest.skip("no constraints.txt yet")
    lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if line and not line.startswith("-"))
    pins = {
        re.sub(r"[-_.]+", "-", name.split("[")[0]).lower(): version.split(";")[0].strip()
        for name, version in pins.items()
    }
    assert pins["torch"] == "2.13.0"
    for group, needed in requirements().items():
        for requirement in needed:
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            assert str(requirement.specifier).startswith(">="), (group, name)
            assert name in pins, f"{name} of [{group}] is not in constraints.txt"
            assert requirement.specifier.contains(pins[name]), (name, pins[name])


def test_the_types_of_the_package_are_published():
    assert (PACKAGE / "py.typed").exists()

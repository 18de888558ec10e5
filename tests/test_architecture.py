"""The house: a module imports from lower floors only, and `import halfstep` stays light (DESIGN 3 and 6.12)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep

ROOT = Path(halfstep.__file__).parent

FLOORS = {
    "errors": 0, "formats": 0, "_compat": 0,
    "hardware": 1, "ops": 1, "tensor_cores": 1, "tf32": 1,
    "policy": 2, "casting": 2, "kernels": 2, "nn": 2, "autocast_ops": 2, "autocast_cases": 2,
    "scaling": 3, "optim": 3, "distributed": 3, "emulation": 3, "emulated_attention": 3,
    "training": 4, "memory": 4, "doctor": 4,
    "integrations": 5, "compare": 5, "bench": 5,
    "cli": 6, "cli_tables": 6, "__main__": 6,
}  # fmt: skip


def imports_of(source: str) -> set[str]:
    """Rooms of halfstep that a source text imports at run time (imports for type checking do not count)."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only, so that every arrow can be read"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("halfstep.")}


def broken_arrows(room: str, source: str) -> list[str]:
    """Imports that run upward, or sideways into another room of the same floor's folders."""
    return [
        f"{room} (F{FLOORS[room]}) -> {target} (F{FLOORS.get(target, -1)})"
        for target in imports_of(source)
        if target != room and target in FLOORS and not _allowed(room, target)
    ]


def _allowed(room: str, target: str) -> bool:
    if FLOORS[target] < FLOORS[room]:
        return True
    # Two single files of one floor may know each other (formats and errors); folders may not.
    is_file = (ROOT / f"{target}.py").exists() and (ROOT / f"{room}.py").exists()
    return FLOORS[target] == FLOORS[room] and is_file


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_run_down(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in FLOORS, f"{room} has no floor: give it one in DESIGN 3 and here"
    assert broken_arrows(room, path.read_text()) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "from halfstep.scaling.scale import DynamicScale"),
        ("scaling", "import halfstep.cli"),
        ("scaling", "from halfstep import emulation"),
        ("compare", "def f():\n    from halfstep.integrations import lightning"),
    ],
)
def test_the_arrow_test_can_fail(room, source):
    assert broken_arrows(room, source)


def test_downward_and_inner_imports_are_fine():
    assert broken_arrows("scaling", "from halfstep.kernels import inspect\nfrom halfstep.scaling import scale") == []
    assert broken_arrows("kernels", "if TYPE_CHECKING:\n    from halfstep.cli import app") == []


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_light():
    """No CUDA, Triton, numba, distributed or logging set-up, and no torch, until a name is used."""
    out = run_python(
        "import sys, logging; before = set(sys.modules); handlers = len(logging.getLogger().handlers)\n"
        "import halfstep\n"
        "heavy = {'torch', 'numba', 'triton', 'numpy', 'sklearn', 'matplotlib', 'typer', 'rich'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)), len(logging.getLogger().handlers) - handlers)"
    )
    assert out.split("\n")[0] == "[] 0"


def test_using_the_scaler_loads_no_optional_package():
    out = run_python(
        "import sys, torch; before = set(sys.modules)\n"
        "import halfstep; halfstep.GradScaler('cpu'); halfstep.Policy; halfstep.probe\n"
        "heavy = {'numba', 'triton', 'sklearn', 'matplotlib', 'typer', 'rich', 'torch.distributed.fsdp'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)), torch.cuda.is_initialized())"
    )
    assert out.strip() == "[] False"


def test_every_public_name_resolves_and_teaches():
    for name in halfstep.__all__:
        value = getattr(halfstep, name)
        assert name == "__version__" or (value.__doc__ and len(value.__doc__) > 40), name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        halfstep.nonsense  # noqa: B018

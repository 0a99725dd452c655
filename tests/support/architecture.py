"""Reads the source, and finds what breaks the design's rules of who may import and do what.

A file imports from lower floors (docs/about/architecture.md), or acyclically from its own room.
Every import counts, wherever it stands: in a function, under ``if TYPE_CHECKING``, or by
``importlib.import_module`` with a literal name. An import for the type checker alone is still
knowledge of the other file. Only the rule about mpi4py lets such imports pass, because naming
a type calls nothing.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOMS = {
    "training": 7, "sync": 6, "torch_backend": 6, "remote": 6, "collectives": 5, "checkpoints": 5,
    "front": 5, "launch": 4, "lifeline": 3, "process": 2, "schedules": 2, "options": 1,
}  # fmt: skip
BENCHMARK_ROOMS = {"measure": 13, "study": 12, "show": 11, "judge": 10, "records": 9}
DOORS = frozenset({
    "", "collective_calls", "models", "train", "plot", "export", "stacks", "__main__", "doctor",
    "checkout",
})  # fmt: skip
GROUND = frozenset({"errors", "environment", "wording", "files", "torch_internals"})

EXIT_CALLS = frozenset(
    {"sys.exit", "os._exit", "os.abort", "exit", "quit", "builtins.exit", "builtins.quit"}
)
MUTATORS = frozenset(
    {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"}
)
READERS = frozenset({"os.getenv", "os.environ.get", "os.environ.pop", "os.environ.setdefault"})
SCRIPTS = "benchmarks.measure.baselines."
"""Whole programs that stand for anybody's, and end as anybody's do."""
MAY_EXIT = ("mpiddp.launch.failure.", "mpiddp.front.", SCRIPTS)
"""The front is no rank."""
MAY_UNPICKLE = (
    "mpiddp.launch.mpi.mpi", "mpiddp.lifeline.stacks.flight_recorder",
    "mpiddp.checkpoints.storage.unpickling", "mpiddp.remote.pickling",
    "benchmarks.measure.programs.objects",
)  # fmt: skip
"""What came over MPI; what this very process has pickled; a list of harmless names; what came over
connections whose token was checked; and what a benchmark's own ranks have sent."""
UNPICKLERS = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
FOREIGN_ATTRIBUTES = frozenset({
    "__main__.argv", "script.argv", "reader.args", "script_trainer.args", "startup.excepthook",
    "movement.f_trace", "mpi.initialize", "mpi.finalize", "mpi.atexit", "shared_memory.atexit",
    "single_copy.restype", "single_copy.argtypes", "channel.restype", "channel.argtypes",
    "channel.atexit", "late_thread.argtypes", "shards.fs", "ddp_hook.__annotations__",
    "ddp_buckets._has_rebuilt_buckets", "ddp_buckets.grad",
    "ddp_buckets.layout", "optimizer_step.grad",
    "flat_parameters.grad", "flat_parameters.data", "server.grad", "divergence.grad",
    "divergence.model", "models.conv1", "models.maxpool", "activations.forward",
    "activations.momentum", "preparation.benchmark",
})  # fmt: skip
"""Of Python's, torch's and other libraries' objects, by module: others may assign these."""
FOREIGN_NAMES = frozenset({
    "_exit", "_current_frames", "_replace", "_fields", "_make", "_NamedFuncPointer",
    "_sizeof", "_handleof", "_has_rebuilt_buckets", "_rebuild_buckets", "_showtraceback",
    "_check_reducer_finalized", "_set_ddp_runtime_logging_sample_rate", "_share_fd_cpu_",
    "_shutdown_workers",
    "_foreach_copy_", "_foreach_lerp_", "_execution_engine", "_get_ddp_logging_data",
    "_parameters", "_C", "_get_backend", "_world", "_get_sequence_number_for_group",
    "_DYNAMIC_CLASS_TRACKER_BY_CLASS", "_class_setstate", "_neg_view",
    "_current_graph_task_id", "_InferenceMode",
})  # fmt: skip
"""Private names of other libraries' objects that nothing public stands for."""
EMPTY_NAMES = frozenset({"command", "report", "plot", "common", "utils", "helpers", "misc"})
"""Names of modules and folders that do not say what is in them."""
PUBLIC = frozenset({"mpiddp.models", "mpiddp.plot"})
"""Modules whose names users write: these stay, however short they are."""
LONGEST_FUNCTION = 60
MOST_FILES = 12
"""Of a folder, without its ``__init__.py``."""
MOST_LINES = {
    "mpiddp": 56_080, "mpiddp/checkpoints": 4_028, "mpiddp/collectives": 4_667,
    "mpiddp/front": 3_588, "mpiddp/launch": 9_726, "mpiddp/lifeline": 3_344,
    "mpiddp/options": 903, "mpiddp/process": 2_922, "mpiddp/remote": 2_522,
    "mpiddp/schedules": 4_886, "mpiddp/sync": 1_299, "mpiddp/torch_backend": 1_839,
    "mpiddp/training": 10_584, "mpiddp/doctor": 3_113, "benchmarks": 20_584,
    "benchmarks/measure": 9_265, "benchmarks/study": 2_133, "benchmarks/show": 5_179,
    "benchmarks/judge": 2_199, "benchmarks/records": 1_681, "jobs": 2_746, "tests": 57_747,
}  # fmt: skip
"""Of code, by folder; these figures only fall. A commit that raises one says why."""
CODE = {".py", ".sh", ".sbatch", ".js", ".css", ".html"}
FEWEST_LINES = 45
"""Of a file that only one other imports."""


@dataclass(frozen=True)
class Violation:
    module: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Import:
    """One module of this project, or of another, that a module imports."""

    target: str
    line: int
    for_types: bool


@dataclass(frozen=True)
class Module:
    name: str
    """With dots."""
    is_package: bool
    """Whether it is a package's ``__init__``."""
    tree: ast.Module
    lines: list[str]
    known: dict[str, Module]
    """All modules, by dotted name."""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree, which each rule goes through."""
        return list(ast.walk(self.tree))

    @cached_property
    def names(self) -> dict[str, str]:
        """What each imported name stands for: ``environ`` for ``os.environ``, and so on."""
        names = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    short = alias.asname or alias.name.split(".")[0]
                    names[short] = alias.name if alias.asname else short
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return names

    @cached_property
    def for_types(self) -> set[ast.AST]:
        """The nodes that stand under ``if TYPE_CHECKING``."""
        tests = [node for node in self.nodes if isinstance(node, ast.If)]
        return {
            inner
            for node in tests
            if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            for statement in node.body
            for inner in ast.walk(statement)
        }

    @cached_property
    def imports(self) -> list[Import]:
        """Every module that this one imports; a name that is a submodule counts as that."""
        return [
            Import(target, node.lineno, node in self.for_types)
            for node in self.nodes
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
            for target in self._list_targets(node)
        ]

    def _list_targets(self, node: ast.Import | ast.ImportFrom | ast.Call) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = self.name.split(".")
                parts = parts[: len(parts) - node.level + self.is_package]
                base = ".".join([*parts, *([base] if base else [])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield submodule if submodule in self.known else base
        elif self.find_name(node.func) in ("importlib.import_module", "__import__") and node.args:
            literal = node.args[0]
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                yield literal.value

    def find_name(self, node: ast.AST) -> str:
        """``os.environ.get`` for the expression of that meaning; empty for any other."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.find_name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    @cached_property
    def own_attributes(self) -> set[str]:
        """What its classes give their objects: fields, and assignments to ``self``."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                found |= {each.id for each in fields if isinstance(each, ast.Name)}
                found |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            elif isinstance(node, ast.Attribute) and _is_own(node):
                found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
        return found


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def read_modules(root: Path) -> dict[str, Module]:
    """All modules of mpiddp and benchmarks below ``root``, by dotted name."""
    modules: dict[str, Module] = {}
    for top in ("mpiddp", "benchmarks"):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text, str(path))
            modules[name] = Module(name, is_package, tree, text.splitlines(), modules)
    return modules


def locate(name: str) -> tuple[int, str] | None:
    """The floor and the room of a module of this project; None if the design has no place."""
    top, _, rest = name.partition(".")
    first = rest.split(".")[0]
    if top == "benchmarks":
        # Its __main__ and __init__ are above all of its rooms.
        return BENCHMARK_ROOMS.get(first, 14), f"benchmarks/{first}"
    if first in DOORS:
        return 8, "doors"
    if first in GROUND:
        return 0, "ground"
    return (ROOMS[first], first) if first in ROOMS else None


def check_floors(modules: dict[str, Module]) -> Iterator[Violation]:
    """Modules without a floor, and arrows that do not point down."""
    for module in modules.values():
        place = locate(module.name)
        if place is None:
            yield Violation(module.name, 1, "the design has no floor for it")
            continue
        for item in module.imports:
            top = item.target.partition(".")[0]
            if top not in ("mpiddp", "benchmarks") or item.target == module.name:
                continue
            target = locate(item.target)
            if target is None or not (target[0] < place[0] or target[1] == place[1]):
                yield Violation(module.name, item.line, f"must not import {item.target}")


def find_folder(module: Module) -> str:
    """The folder of a module's file. Files on top of mpiddp lie on several floors: each stands for
    itself."""
    parent = module.name.rpartition(".")[0]
    return module.name if module.is_package or parent == "mpiddp" else parent


def check_circles(modules: dict[str, Module]) -> Iterator[Violation]:
    """Modules that import each other, over however many others; and folders that do."""
    arrows = {
        name: sorted({item.target for item in module.imports} & modules.keys())
        for name, module in modules.items()
    }
    yield from _find_circles(arrows)
    folders: dict[str, set[str]] = {}
    for name, targets in arrows.items():
        found = {find_folder(modules[target]) for target in targets}
        folders.setdefault(find_folder(modules[name]), set()).update(found)
    yield from _find_circles({name: sorted(targets) for name, targets in folders.items()})


def _find_circles(arrows: dict[str, list[str]]) -> Iterator[Violation]:
    finished: set[str] = set()

    def walk(name: str, trail: list[str]) -> Iterator[Violation]:
        if name in trail:
            circle = [*trail[trail.index(name) :], name]
            yield Violation(name, 1, "a circle of imports: " + " > ".join(circle))
        elif name not in finished:
            for target in arrows.get(name, []):
                if target != name:
                    yield from walk(target, [*trail, name])
            finished.add(name)

    for name in arrows:
        yield from walk(name, [])


def find_exits(module: Module, node: ast.AST) -> Iterator[str]:
    """Ends of the process anywhere but in the failure handler."""
    if module.name.startswith(MAY_EXIT):
        return
    if isinstance(node, ast.Raise) and node.exc is not None:
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if module.find_name(raised) == "SystemExit":
            yield "raises SystemExit"
    if isinstance(node, ast.Call):
        called = module.find_name(node.func)
        aborts = isinstance(node.func, ast.Attribute) and node.func.attr == "Abort"
        if called in EXIT_CALLS or aborts:
            yield f"calls {called or 'Abort'}"


def _changes_environment(module: Module, node: ast.AST) -> bool:
    def is_environ(expression: ast.AST) -> bool:
        return module.find_name(expression) in ("os.environ", "os.environb")

    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
        return any(isinstance(item, ast.Subscript) and is_environ(item.value) for item in targets)
    if isinstance(node, ast.AugAssign):
        inner = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        return is_environ(inner)
    if isinstance(node, ast.Call):
        called = module.find_name(node.func)
        head, _, method = called.rpartition(".")
        changes = head in ("os.environ", "os.environb") and method in MUTATORS
        return changes or called in ("os.putenv", "os.unsetenv")
    return False


def find_variables(module: Module, node: ast.AST) -> Iterator[str]:
    """Variables that are set outside ``launch``, or whose names stand outside the table."""
    if _changes_environment(module, node) and locate(module.name) != (4, "launch"):
        yield "sets an environment variable"
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and module.find_name(node.value) == "os.environ":
        key = node.slice
    elif isinstance(node, ast.Call) and module.find_name(node.func) in READERS:
        key = node.args[0] if node.args else None
    # Benchmarks put together the environments of other processes.
    needs_table = module.name != "mpiddp.environment" and not module.name.startswith("bench")
    if isinstance(key, ast.Constant) and needs_table:
        yield f"names the variable {key.value!r}; it belongs into environment.py"


def _may_call_mpi(name: str) -> bool:
    place = locate(name)
    rooms = place is not None and (place[1] == "launch" or name.startswith("benchmarks."))
    modules = ("mpiddp.collectives.transport.mpi", "mpiddp.sync.parameter_server.server")
    return rooms or name in modules or f"{name}.".startswith("mpiddp.doctor.")


def check_mpi(modules: dict[str, Module]) -> Iterator[Violation]:
    """Imports of mpi4py, other than for types, where MPI is not to be called."""
    for module in modules.values():
        for item in module.imports:
            is_mpi = item.target.split(".")[0] == "mpi4py" and not item.for_types
            if is_mpi and not _may_call_mpi(module.name):
                yield Violation(module.name, item.line, "imports mpi4py")


def find_unpickling(module: Module, node: ast.AST) -> Iterator[str]:
    """Calls that run code which they find in a file, or in what comes from a socket."""
    if isinstance(node, ast.Attribute | ast.Name):
        found = module.find_name(node)
        root, _, what = found.partition(".")
        unpickles = root in UNPICKLERS and what in ("load", "loads", "Unpickler", "open")
        # torch.distributed's object collectives unpickle what Gloo receives.
        objects = found.endswith(("_object", "_object_list")) and "dist" in found
        if (unpickles or objects) and module.name not in MAY_UNPICKLE:
            yield f"unpickles: {found}"
    if isinstance(node, ast.Call):
        options = {each.arg: ast.unparse(each.value) for each in node.keywords}
        called = module.find_name(node.func)
        if called == "torch.load" and options.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if called == "numpy.load" and options.get("allow_pickle", "False") != "False":
            yield "numpy.load with pickles"


def find_prints(module: Module, node: ast.AST) -> Iterator[str]:
    """Writing to the console anywhere but in ``wording.print_text``, which knows its encoding."""
    called = module.find_name(node.func) if isinstance(node, ast.Call) else ""
    writes = called == "print" or called in ("sys.stdout.write", "sys.stderr.write")
    if writes and module.name != "mpiddp.wording" and not module.name.startswith(SCRIPTS):
        yield f"calls {called}"


def find_long_functions(_: Module, node: ast.AST) -> Iterator[str]:
    """Functions that are too long to be taken in at a glance."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > LONGEST_FUNCTION:
            yield f"{node.name} has {length} lines; {LONGEST_FUNCTION} are allowed"


def find_foreign_attributes(module: Module, node: ast.AST) -> Iterator[str]:
    """Attributes of another module's objects that are assigned, or that are private."""
    if not module.name.startswith("mpiddp") or not isinstance(node, ast.Attribute):
        return
    if _is_own(node) or node.attr in module.own_attributes:
        return
    place = f"{module.name.rpartition('.')[2]}.{node.attr}"
    if isinstance(node.ctx, ast.Store) and place not in FOREIGN_ATTRIBUTES:
        yield f"assigns {ast.unparse(node)} from outside"
    is_private = node.attr.startswith("_") and not node.attr.startswith("__")
    if is_private and node.attr not in FOREIGN_NAMES:
        yield f"looks into {ast.unparse(node)}, which is private"


def find_broad_exceptions(module: Module, node: ast.AST) -> Iterator[str]:
    """Broad ``except`` clauses that give no reason, and do not raise what they have caught."""
    if not isinstance(node, ast.ExceptHandler):
        return
    last = node.body[-1]
    is_passed_on = isinstance(last, ast.Raise) and last.exc is None
    near = module.lines[node.lineno - 1 : node.body[0].lineno]
    is_broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
    if is_broad and not is_passed_on and not any("#" in line for line in near):
        yield "catches everything, and does not say why"


RULES = (
    find_exits, find_variables, find_unpickling, find_prints, find_long_functions,
    find_foreign_attributes, find_broad_exceptions,
)  # fmt: skip


def check_nodes(modules: dict[str, Module]) -> Iterator[Violation]:
    """What breaks one of the rules by itself."""
    kinds = (ast.stmt, ast.ExceptHandler, ast.Call, ast.Attribute, ast.Name, ast.Subscript)
    for module in modules.values():
        for node in (each for each in module.nodes if isinstance(each, kinds)):
            for rule in RULES:
                for what in rule(module, node):
                    yield Violation(module.name, node.lineno, what)


def check_rooms(modules: dict[str, Module]) -> Iterator[Violation]:
    """Folders with too many files; and files so short that they belong to their one importer."""
    rooms = Counter(
        module.name.rpartition(".")[0] for module in modules.values() if not module.is_package
    )
    for name, count in rooms.items():
        if count > MOST_FILES:
            yield Violation(name, 1, f"has {count} files; {MOST_FILES} are allowed")
    importers: dict[str, set[str]] = {}
    for name, module in modules.items():
        for item in module.imports:
            importers.setdefault(item.target, set()).add(name)
    for name, found in importers.items():
        module = modules.get(name)
        if module is None or module.is_package or name.startswith(SCRIPTS) or name in PUBLIC:
            continue
        others = found - {name}
        if len(others) == 1 and len(module.lines) < FEWEST_LINES:
            (importer,) = others
            yield Violation(name, 1, f"has {len(module.lines)} lines: it belongs to {importer}")


def count_lines(root: Path, folder: str) -> int:
    """Of the code in a folder; of ``jobs/`` all files count but pictures."""
    total = 0
    for path in (root / folder).rglob("*"):
        is_code = path.suffix in CODE or (folder == "jobs" and path.suffix not in (".svg", ".png"))
        if is_code and path.is_file() and "__pycache__" not in path.parts:
            total += len(path.read_text(encoding="utf-8").splitlines())
    return total


def check_names(modules: dict[str, Module]) -> Iterator[Violation]:
    """Public classes that share a name within mpiddp, or within benchmarks; and modules whose name
    does not say what they hold."""
    homes: dict[str, str] = {}
    for module in modules.values():
        last = module.name.rpartition(".")[2]
        if last in EMPTY_NAMES and module.name not in PUBLIC:
            yield Violation(module.name, 1, f"a name like {last!r} does not say what it holds")
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            name = f"{module.name.partition('.')[0]}.{node.name}"
            home = homes.setdefault(name, module.name)
            if home != module.name:
                yield Violation(module.name, node.lineno, f"{home} has a class {node.name}, too")


CHECKS = (check_floors, check_circles, check_mpi, check_nodes, check_rooms, check_names)


def find_violations(modules: dict[str, Module]) -> list[Violation]:
    return [violation for check in CHECKS for violation in check(modules)]

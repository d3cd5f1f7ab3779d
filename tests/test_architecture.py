"""The walls: what may import what, read from the source with `ast`."""

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jinfire", "sharding", "pallas_kernels", "experiments")
MAX_LINES = 500

# Low to high. A module of jinfire imports only from the rows above its own in this table, which
# are lower levels; never from its own row.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "checks", "unweight.vectors"),
    ("unweight.kernels",),
    ("unweight.tiles",),
    ("unweight.coding",),
    ("unweight.codec", "unweight.device"),
    ("request", "config", "progress", "template", "unweight.policy"),
    ("tokenizer", "metrics", "fetch", "text", "packing", "kvcache.page_table", "unweight.tensor"),
    ("weights",),
    ("kvcache.page_set", "layers.linear", "layers.rope", "layers.routing"),
    ("sequence",),
    ("layers.norm", "layers.mlp"),
    ("layers.attention", "layers.moe"),
    ("layers.mla",),
    ("models.transformer", "models.hf_fields", "models.presets"),
    ("models.spec", "models.family", "models.hf_quantization"),
    (
        *("models.llama", "models.llama4", "models.mixtral", "models.qwen3", "models.qwen3_moe"),
        *("models.deepseek", "models.reduction"),
    ),
    ("models",),
    ("checkpoints.source", "checkpoints.int4", "checkpoints.config_json", "layout"),
    ("checkpoints.stored", "checkpoints.shards"),
    ("unweight.container", "unweight.files"),
    ("checkpoints.hugging_face", "checkpoints.gguf", "checkpoints.store"),
    ("checkpoints.hugging_face_writer",),
    ("checkpoints",),
    ("unweight.folder",),
    ("unweight.compress", "unweight.decompress"),
    ("unweight.verify", "unweight.describe"),
    ("kvcache.pages", "loading"),
    ("programs.sampler", "programs.runtime"),
    ("programs.batch",),
    ("programs.forward", "programs.prefill", "programs.decode", "programs.handoff"),
    ("programs.abstract", "planner.gpus", "planner.footprint"),
    ("planner.roofline",),
    ("planner.layouts",),
    ("planner.verify", "planner.steps"),
    ("planner.plan",),
    ("scheduler", "runner", "ledger", "admission"),
    ("model", "engine", "training"),
    ("cli.console",),
    ("cli.options", "cli.running", "cli.compressed"),
    (
        *("cli.generate", "cli.chat", "cli.inspect", "cli.plan", "cli.init", "cli.fetch"),
        *("cli.demo", "cli.compress", "cli.decompress", "cli.verify"),
    ),
    ("cli",),
    ("__main__",),
    ("",),  # jinfire/__init__.py re-exports
)
LEVEL = {name: level for level, row in enumerate(LEVELS) for name in row}
# Packages whose __init__ is a docstring.
LEVEL |= dict.fromkeys(("kvcache", "layers", "planner", "programs", "unweight"), 0)

# Host arithmetic that is tested, and could be replayed, without a device.
HOST_ONLY = (
    *("errors", "checks", "request", "progress", "metrics", "text"),
    *("sequence", "packing", "kvcache.page_table", "kvcache.page_set", "scheduler"),
)

# Nothing else reads the environment.
ENVIRONMENT_READERS = {
    "jinfire/fetch.py": "the user's cache directory",
    "pallas_kernels/toolchain.py": "handed on to a process that uses the GPU",
}

# Whole scripts for other interpreters, run as programs: they import none of the packages.
STANDALONE = ROOT / "experiments" / "peers"


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def modules(package: str) -> dict[str, Path]:
    """Dotted name -> file, for every module of a package."""
    found = {}
    for path in sources(package):
        if path.is_relative_to(STANDALONE):
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def all_modules() -> dict[str, Path]:
    return {name: path for package in PACKAGES for name, path in modules(package).items()}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def exports(module: str) -> set[str]:
    """Names that a package's __init__ takes from inside; `paged_attention` may be a function there
    although a module has the same name.
    """
    path = all_modules().get(module)
    if path is None or path.name != "__init__.py":
        return set()
    return {
        alias.asname or alias.name
        for node in parse(path).body
        if isinstance(node, ast.ImportFrom) and node.module != module
        for alias in node.names
    }


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted target of every import, wherever it stands.

    `from a import b` is `a.b` where that is one of our modules and `a` exports no `b`, else `a`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner in all_modules() and alias.name not in exports(base)
                yield node.lineno, inner if is_module else base


def edges(package: str) -> Iterator[tuple[str, str, str]]:
    """Importing module, imported module and place, for every import in a package."""
    for name, path in modules(package).items():
        for line, target in imports(parse(path)):
            yield name, target, f"{path.relative_to(ROOT)}:{line}"


def root_of(target: str) -> str:
    return target.partition(".")[0]


def short(name: str) -> str:
    """A module of jinfire as the level table writes it."""
    return name.removeprefix("jinfire").removeprefix(".")


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("package", "by_root"),
    [
        ("sharding", set()),
        ("pallas_kernels", set()),
        ("jinfire", {"sharding", "pallas_kernels"}),
        ("experiments", {"jinfire"}),
    ],
)
def test_walls_between_packages(package: str, by_root: set[str]) -> None:
    problems = []
    for importer, target, place in edges(package):
        root = root_of(target)
        allowed = by_root | ({"pallas_kernels"} if importer == "experiments.kernels" else set())
        if root == package or root not in {*PACKAGES, "tests"}:
            continue
        if root not in allowed:
            problems.append(f"{place}: {package} must not import {root}")
        elif target != root:
            problems.append(f"{place}: import {root} by its root, not {target}")
    report(problems)


def test_every_module_of_jinfire_has_a_level() -> None:
    missing = sorted(short(name) for name in modules("jinfire") if short(name) not in LEVEL)
    assert not missing, f"add to LEVELS: {missing}"


def test_levels_name_modules_that_exist() -> None:
    stale = sorted(LEVEL.keys() - {short(name) for name in modules("jinfire")})
    assert not stale, f"take out of LEVELS: {stale}"


def test_imports_in_jinfire_go_strictly_downward() -> None:
    problems = []
    for importer, target, place in edges("jinfire"):
        if root_of(target) != "jinfire":
            continue
        own, other = LEVEL.get(short(importer)), LEVEL.get(short(target))
        if own is not None and other is not None and other >= own:
            problems.append(f"{place}: {importer} (level {own}) imports {target} (level {other})")
    report(problems)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycles(package: str) -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules(package)}
    for importer, target, _ in edges(package):
        if target in graph:
            graph[importer].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_relative_imports() -> None:
    report(
        [
            f"{place}: relative import"
            for package in PACKAGES
            for _, target, place in edges(package)
            if target.startswith(".")
        ]
    )


def test_no_imports_inside_functions() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    dodges = {"__import__", "import_module"}
    problems = []
    for path in all_modules().values():
        place = path.relative_to(ROOT)
        for node in ast.walk(parse(path)):
            if isinstance(node, functions):
                problems += [f"{place}:{line}: {target}" for line, target in imports(node)]
            elif isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if name in dodges:
                    problems.append(f"{place}:{node.lineno}: {name}")
    report(sorted(set(problems)))


def test_host_only_modules_import_no_device_library() -> None:
    report(
        [
            f"{place}: imports {target}"
            for importer, target, place in edges("jinfire")
            if short(importer) in HOST_ONLY
            and root_of(target) in {"jax", "jaxlib", "flax", "sharding", "pallas_kernels"}
        ]
    )


def test_environment_changes_no_behaviour() -> None:
    readers = {"environ", "environb", "getenv", "getenvb", "putenv"}
    problems = []
    for path in all_modules().values():
        place = path.relative_to(ROOT).as_posix()
        if place in ENVIRONMENT_READERS:
            continue
        for node in ast.walk(parse(path)):
            attribute = (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
                and node.attr in readers
            )
            imported = isinstance(node, ast.ImportFrom) and node.module == "os"
            if attribute or (imported and readers & {alias.name for alias in node.names}):
                problems.append(f"{place}:{node.lineno}: reads the environment")
    report(problems)


def test_no_global_statements() -> None:
    report(
        [
            f"{path.relative_to(ROOT)}:{node.lineno}: global {', '.join(node.names)}"
            for path in all_modules().values()
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Global)
        ]
    )


def test_peer_scripts_stand_alone() -> None:
    report(
        [
            f"{path.relative_to(ROOT)}:{line}: imports {target}"
            for path in sources("experiments/peers")
            for line, target in imports(parse(path))
            if root_of(target) in PACKAGES
        ]
    )


def test_no_file_is_long() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(*PACKAGES, "tests")
    }
    report(
        [f"{name}: {n} lines, at most {MAX_LINES}" for name, n in lengths.items() if n > MAX_LINES]
    )

"""Imports run one way: contract <- ops <- models <- runtimes <- verify, train, cli. Read from the syntax trees; nothing is imported."""

import ast
import sys
from pathlib import Path

import isoexec

LAYERS = ("contract", "ops", "models", "runtimes", "verify", "train", "cli")
RANK = {"contract": 0, "ops": 1, "models": 2, "runtimes": 3, "verify": 4, "train": 4, "cli": 4}
STANDARD = sys.stdlib_module_names
#: An adapter knows its own framework: a trainer's process does not import the engine's. SkyRL drives both: a file of its adapter belongs to
#: the driver, and knows neither, or to one of them.
RUNTIMES = ("vllm", "megatron", "skyrl")
#: Third-party packages that a layer may import; None: any.
THIRD_PARTY = {"contract": set(), "ops": {"torch", "triton"}, "models": {"torch"}, "runtimes": None, "verify": None, "train": None, "cli": None}


def imported(tree: ast.AST, module: str, is_package: bool):
    """(line, absolute dotted name) of every import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parents, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(package: Path) -> list[str]:
    """Imports below ``package`` (the folder named isoexec) that go against the arrows."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        layer = parts[0]
        if layer not in RANK:
            if parts != ("__init__",) and parts != ("__main__",):
                found.append(f"{path.name}: {layer} is no layer; expected one of {LAYERS}")
            continue
        is_package = parts[-1] == "__init__"
        module = ".".join(("isoexec", *(parts[:-1] if is_package else parts)))
        known: set[str] = set()  # frameworks beside its own that the file has imported so far
        for line, name in imported(ast.parse(path.read_text(encoding="utf-8")), module, is_package):
            top, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if top == "isoexec":
                wrong = other in RANK and RANK[other] > RANK[layer]
            else:
                allowed = THIRD_PARTY[layer]
                wrong = allowed is not None and top not in allowed and top not in STANDARD
            if layer == "runtimes" and parts[1] in RUNTIMES:
                framework = rest.split(".")[1] if rest.startswith("runtimes.") else top
                if framework in RUNTIMES and framework != parts[1]:
                    known.add(framework)
                    wrong |= parts[1] != "skyrl" or len(known) > 1
            if wrong:
                found.append(f"{'/'.join(parts)}.py:{line}: {layer} imports {name}")
    return found


def test_imports_follow_the_arrows():
    assert violations(Path(isoexec.__file__).parent) == []


def planted(tmp_path, where, text):
    path = tmp_path / "isoexec" / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return violations(tmp_path / "isoexec")


def test_planted_imports_are_found(tmp_path):
    assert planted(tmp_path, "contract/a.py", "import json\nfrom isoexec.contract import b\n") == []
    assert planted(tmp_path, "contract/a.py", "import torch\n") == ["contract/a.py:1: contract imports torch"]
    assert planted(tmp_path, "contract/a.py", "from isoexec import ops\n") == ["contract/a.py:1: contract imports isoexec.ops"]
    planted(tmp_path, "contract/a.py", "")
    assert planted(tmp_path, "ops/norm/a.py", "def f():\n    from vllm import x\n") == ["ops/norm/a.py:2: ops imports vllm.x"]
    assert planted(tmp_path, "ops/norm/a.py", "from ...models import qwen3\n") == ["ops/norm/a.py:1: ops imports isoexec.models.qwen3"]
    assert planted(tmp_path, "ops/norm/a.py", "from .. import matmul\nfrom . import b\nimport torch.nn\n") == []
    assert planted(tmp_path, "models/__init__.py", "from ..runtimes import vllm\n") == ["models/__init__.py:1: models imports isoexec.runtimes.vllm"]
    planted(tmp_path, "models/__init__.py", "")
    assert planted(tmp_path, "runtimes/vllm/a.py", "import vllm\nfrom isoexec.verify import x\n") == [
        "runtimes/vllm/a.py:2: runtimes imports isoexec.verify.x"
    ]
    for text in ("import megatron.core", "from isoexec.runtimes.megatron import x", "from ..megatron.trainer import x", "from .. import megatron"):
        [found] = planted(tmp_path, "runtimes/vllm/a.py", text)
        assert found.startswith("runtimes/vllm/a.py:1: runtimes imports ")
    assert planted(tmp_path, "runtimes/vllm/a.py", "import vllm\nfrom isoexec.runtimes.vllm import x\nfrom . import y\n") == []
    planted(tmp_path, "runtimes/vllm/a.py", "")
    assert planted(tmp_path, "runtimes/skyrl/a.py", "import skyrl\nimport vllm\nfrom isoexec.runtimes import vllm\n") == []
    [found] = planted(tmp_path, "runtimes/skyrl/a.py", "import megatron.core\nfrom isoexec.runtimes.vllm import x\n")
    assert found.startswith("runtimes/skyrl/a.py:2: runtimes imports ")
    planted(tmp_path, "runtimes/skyrl/a.py", "")
    assert planted(tmp_path, "helpers/a.py", "") == [f"a.py: helpers is no layer; expected one of {LAYERS}"]

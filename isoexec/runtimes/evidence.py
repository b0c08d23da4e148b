"""What this process runs, as evidence: digests of sources and binaries, versions, device and math modes. Knows no framework.

Everything is computed from what is installed and set here; nothing is copied from the contract.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

import isoexec
from isoexec.contract import ContractError, ExecutionContract, Identity, sha256_hex
from isoexec.contract.architectures import REGIONS, is_hybrid, regions
from isoexec.ops._core import provider, registry

_PACKAGE = Path(isoexec.__file__).parent
_FAMILIES = ("activation", "attention", "collective", "embedding", "gdn", "logprob", "matmul", "moe", "norm", "rope", "sampling")
#: Distributions whose version can move a bit, and those of them whose installed sources are digested, with the package that holds them.
_DISTRIBUTIONS = ("torch", "triton", "safetensors", "transformers")
_PATCHED = {"vllm": "vllm", "megatron-core": "megatron.core", "skyrl": "skyrl"}
#: Environment variables through which a library lowers precision or picks another kernel.
_MATH_VARIABLES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
                   "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")  # fmt: skip


def identity(
    contract: ExecutionContract,
    role: str,
    *,
    model: str = "",
    settings: Mapping[str, str] | None = None,
    deployment: Mapping[str, str] | None = None,
) -> Identity:
    """Identity of this process under ``contract``.

    Args:
        contract: of the process.
        role: ``"engine"`` or ``"trainer"``.
        model: sha256 of the configuration that was opened (:func:`isoexec.contract.model_digest`); the contract's where it is left out.
        settings: what the process was told beside the contract and can move a bit, to be compared, e.g. the temperature's bit pattern.
        deployment: settings that are known to move no bit, to be compared and logged.

    Raises:
        ContractError: what is installed is not what the contract names.
    """
    check_model(contract, model or contract.model)
    parts = contract.parts()
    ops = op_digests(contract)
    policy = {
        "contract": parts["numerical_policy"],
        "ops": ops,
        "launch": launch_tables(contract.architecture) if contract.backend == "cuda" else {},
        "providers": providers(op["implementation"] for op in ops.values()),
        "packages": packages(),
        "device": device(contract.backend),
        "math": math_modes(contract.backend),
        "settings": dict(settings or {}),
    }
    neutral = {"python": platform.python_version(), **parts["deployment"], **(deployment or {})}
    return Identity(role, {"architecture": contract.architecture, "model": model or contract.model}, policy, neutral)


def check_model(contract: ExecutionContract, model: str) -> None:
    """Refuse another model than the contract's.

    Raises:
        ContractError: ``model``, a sha256 of a configuration, is not the contract's.
    """
    if contract.model and model != contract.model:
        raise ContractError(
            f"semantic.model: the contract was built for a checkpoint whose configuration has sha256 {contract.model}, this one has "
            f"{model}; open that checkpoint, or build a contract from this one"
        )


def ops_of(contract: ExecutionContract) -> tuple[str, ...]:
    """Names of the ops on the logprob path of the contract's architecture, optional ones included.

    Raises:
        ContractError: the architecture is not known.
    """
    found = regions(contract.architecture, contract.numerics.gdn_form)
    if not found:
        raise ContractError(f"architecture: expected one of {', '.join(REGIONS)}, found {contract.architecture!r}")
    return tuple(sorted({op for r in found for op in (*r.trainer, *r.prefill, *r.decode, *r.optional)}))


def declarations() -> dict[str, registry.OpDeclaration]:
    """Every op of the library, by name."""
    for family in _FAMILIES:
        importlib.import_module(f"isoexec.ops.{family}")
    return registry.declarations()


def op_digests(contract: ExecutionContract) -> dict[str, dict[str, str]]:
    """Op -> its implementation for the contract's backend and the digest of that implementation's sources; ops without one are left out."""
    known = declarations()
    found = {}
    files: dict[Path, bytes] = {}  # of this call alone: a file can change while the process runs
    for op in ops_of(contract):
        target = known[op].implementations.get(contract.backend) if op in known else None
        if target is not None:
            found[op] = {"implementation": target, "sources": source_digest(target, files)}
    return found


def source_digest(target: str, files: dict[Path, bytes] | None = None) -> str:
    """sha256 over the source of ``"module:function"`` and of every module of ours that it imports, directly or not, in path order.

    ``files`` holds name and digest of files read so far, and is added to.
    """
    files = {} if files is None else files
    h = hashlib.sha256()
    for path in sources(target.partition(":")[0]):
        if path not in files:
            files[path] = f"{path.relative_to(_PACKAGE).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest()
        h.update(files[path])
    return h.hexdigest()


@functools.lru_cache(maxsize=None)
def sources(module: str) -> tuple[Path, ...]:
    """Files that decide what ``module`` computes: its own and those of its imports below ``isoexec.ops``, read from the syntax trees.

    A package's ``__init__`` counts where a name is taken from it. Nothing is imported: a GPU implementation is digested without a GPU.
    Which files they are is found once per process: an edit that brings in another one shows in the digest of the file edited.
    """
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        path = _file_of(waiting.pop())
        if path is None or path in found:
            continue
        found.add(path)
        waiting += _imports(path)
    return tuple(sorted(found))


@functools.lru_cache(maxsize=None)
def _imports(path: Path) -> tuple[str, ...]:
    parts = ("isoexec", *path.relative_to(_PACKAGE).with_suffix("").parts)
    package = parts[:-1]  # of a module and of an __init__ alike
    names = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])]) if node.level else node.module
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(name for name in names if name.startswith("isoexec.ops."))


def _file_of(module: str) -> Path | None:
    base = _PACKAGE.joinpath(*module.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def launch_tables(architecture: str) -> dict[str, str]:
    """sha256 of the launch configurations as this process holds them."""
    if not is_hybrid(architecture):
        return {}
    from isoexec.ops.gdn import launch

    return {"gdn": sha256_hex(launch.TABLE)}


def providers(targets: Iterable[str]) -> dict[str, str]:
    """Provider binaries that implementations load -> sha256 of their files, or ``"absent"``."""
    used = sorted({name for target in set(targets) for name in providers_of(target)})
    roots = {name: provider.folder() / name for name in used}
    return {name: _provider_digest(root, _statuses(root)) if root.is_dir() else "absent" for name, root in roots.items()}


def _statuses(root: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Path, inode, size and times of every file under ``root``: what changes when a file is written or replaced."""
    found = ((path.as_posix(), path.stat()) for path in sorted(root.rglob("*")) if path.is_file())
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)


@functools.lru_cache(maxsize=None)
def _provider_digest(root: Path, statuses: tuple) -> str:
    """Read again only where ``statuses`` moved: FlashAttention 3 alone is 150 MB, and a handshake comes before every weight sync."""
    return provider.digest(root)


@functools.lru_cache(maxsize=None)
def providers_of(target: str) -> tuple[str, ...]:
    """Names of the provider binaries that the sources of ``"module:function"`` load."""
    texts = [path.read_text(encoding="utf-8") for path in sources(target.partition(":")[0])]
    return tuple(name for name in sorted(provider.PROVIDERS) if any(f'provided("{name}")' in text for text in texts))


def packages() -> dict[str, str]:
    """Version of each distribution; of a patched tree, with the digest of its installed sources, which covers the patch series."""
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name))}
    for name, folder in _PATCHED.items():
        if version := _version(name):
            found[name] = f"{version} {_tree_digest(folder)}"
    for layer in ("models", "runtimes"):  # which ops make a layer, and what is handed to them; the ops have digests of their own
        found[f"isoexec.{layer}"] = _tree_digest(f"isoexec.{layer}")
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=None)
def _tree_digest(package: str) -> str:
    """sha256 over the Python sources of an installed package; once per process, since code that is loaded stays what it is.

    Raises:
        ContractError: its sources are not found, so that an edit of them would go unseen.
    """
    try:
        spec = importlib.util.find_spec(package)  # imports what is above the package, not the package
    except ModuleNotFoundError:
        spec = None
    root = next((Path(place) for place in (spec and spec.submodule_search_locations or ()) if Path(place).is_dir()), None)
    if root is None:
        raise ContractError(f"packages: {package} is installed, and its sources are not found; install it as make build does")
    h = hashlib.sha256()
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        h.update(f"{name}\0".encode())
        h.update(hashlib.sha256((root / name).read_bytes()).digest())
    return h.hexdigest()


def device(backend: str) -> dict[str, str]:
    """Architecture of the device, and the build of the libraries that compute on it."""
    build = hashlib.sha256(torch.__config__.show().encode()).hexdigest()
    if backend == "cuda":
        return {"architecture": architecture_of(backend), "cuda": torch.version.cuda or "none", "torch_build": build}
    return {"architecture": architecture_of(backend), "instructions": torch.backends.cpu.get_cpu_capability(), "torch_build": build}


def architecture_of(backend: str) -> str:
    """The device architecture as a composition entry names it.

    Raises:
        ContractError: ``backend`` is cuda and there is no GPU to ask.
    """
    if backend == "cuda":
        if not torch.cuda.is_available():
            raise ContractError("no GPU is visible, so that the architecture of cuda is not known; name it (--device sm_90), or run on a GPU host")
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"
    return platform.machine().lower()


def math_modes(backend: str) -> dict[str, str]:
    """Modes in which torch computes; what can be measured is measured."""
    found = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "subnormals": "kept" if (torch.tensor([2.0**-140], dtype=torch.float32) * 2).item() else "flushed",
        **{f"environment.{name}": os.environ[name] for name in _MATH_VARIABLES if name in os.environ},
    }
    if backend == "cpu":
        return found | {"threads": str(torch.get_num_threads()), "mkldnn": str(torch.backends.mkldnn.enabled).lower()}
    matmul = torch.backends.cuda.matmul
    return found | {
        "tf32": str(matmul.allow_tf32).lower(),
        "reduced_bf16": str(matmul.allow_bf16_reduced_precision_reduction).lower(),
        "reduced_fp16": str(matmul.allow_fp16_reduced_precision_reduction).lower(),
    }

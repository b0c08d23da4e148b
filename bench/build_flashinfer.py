"""Builds FlashInfer's Gated DeltaNet prefill for Hopper as far as vLLM calls it, ahead of time, for bench/gdn.py:

    python -m bench.build_flashinfer PACKAGE FILE [--nvcc nvcc]

PACKAGE is the folder `flashinfer` of an unpacked flashinfer-python wheel. FlashInfer compiles the kernel when it is first called, in 64
variants (types, gating, states, checkpoints), which takes a many-core machine minutes. Here the two of bf16 with grouped values, gates and
beta are compiled, with its flags; the others stay undefined and would be bound when called. Needs nvcc 13 and apache-tvm-ffi.
"""

from __future__ import annotations

import argparse
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TEMPLATE = "gdn_prefill_sm90_kernel_inst.jinja"
FLAGS = """
-gencode=arch=compute_90a,code=sm_90a -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DFLAT_SM90A_ENABLED -DFLASHINFER_ENABLE_F16
-DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 -DFLASHINFER_ENABLE_FP8_E5M2 -DFLASHINFER_ENABLE_FP8_E8M0 -DFLASHINFER_ENABLE_FP4_E2M1
-DPy_LIMITED_API=0x03090000 -std=c++20 -DNDEBUG -O3 -use_fast_math --expt-relaxed-constexpr -static-global-template-stub=false
--compiler-options=-fPIC
""".split()


def instance(template: str, initial_state: bool) -> str:
    values = dict(dtype="nv_bfloat16", is_gva=True, needs_beta=True, needs_alpha=True, init_state=initial_state, enable_checkpointing=False)
    for name, value in values.items():
        template = template.replace("{{ %s }}" % name, value if isinstance(value, str) else str(value).lower())
    return template


def main() -> None:
    import tvm_ffi

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--nvcc", default="nvcc")
    options = parser.parse_args()
    data = options.package / "data"
    csrc, vendored = data / "csrc", data / "cccl"
    toolkit = Path(subprocess.check_output(["which", options.nvcc], text=True).strip()).resolve().parents[1]
    first = [vendored / "cub", vendored / "libcudacxx" / "include", vendored / "thrust"]
    ffi = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    cutlass = data / "cutlass"
    system = [sysconfig.get_path("include"), toolkit / "include", *ffi, data / "include", csrc, cutlass / "include",
              cutlass / "tools" / "util" / "include", data / "spdlog" / "include"]  # fmt: skip
    includes = [f"-I{path}" for path in first] + [word for path in system for word in ("-isystem", str(path))]
    with tempfile.TemporaryDirectory() as folder:
        sources = [csrc / "gdn_prefill_launcher.cu", csrc / "prefill_kernel_delta_rule_sm90.cu"]
        for initial_state in (False, True):
            source = Path(folder) / f"instance_{int(initial_state)}.cu"
            source.write_text(instance((csrc / TEMPLATE).read_text(), initial_state))
            sources.append(source)
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]

        def compile(source, target):
            subprocess.run([options.nvcc, *FLAGS, *includes, "-c", str(source), "-o", target], check=True)

        with ThreadPoolExecutor() as threads:
            list(threads.map(compile, sources, objects))
        link = ["-Wl,-z,lazy", f"-L{toolkit}/lib64", f"-L{toolkit}/lib64/stubs", "-lcudart", "-lcuda"]
        subprocess.run(["c++", "-shared", *objects, *link, "-o", str(options.file)], check=True)
    print(f"{options.file}: {options.file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

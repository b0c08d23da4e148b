"""What a Gluon kernel becomes on sm_90, found without a GPU."""

import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from isoexec.ops._core.triton_math import COMPILE


def ptx_and_resources(source, **options) -> tuple[str, str]:
    """PTX of a ``GluonASTSource``, and ptxas's report of registers, stack and local memory.

    Args:
        options: of the launch (``num_warps``, ``maxnreg``), beside those that every kernel is compiled with.
    """
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**options, **COMPILE})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return found.asm["ptx"], usage

"""A process that prints its identity once for each contract file named, after ``high`` in another math mode, after ``edit`` with one more
byte in a kernel's source."""

import sys
from pathlib import Path

import torch

import isoexec
from isoexec.contract import ExecutionContract
from isoexec.runtimes import evidence

torch.set_num_threads(1)
role, *steps = sys.argv[1:]
for step in steps:
    torch.set_float32_matmul_precision("high" if step == "high" else "highest")
    if step == "edit":
        with open(Path(isoexec.__file__).parent / "ops" / "norm" / "reference.py", "ab") as source:
            source.write(b"\n")
    elif step != "high":
        contract = ExecutionContract.from_json(Path(step).read_text())
    print(evidence.identity(contract, role).to_json())

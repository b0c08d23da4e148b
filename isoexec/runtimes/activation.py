"""What a process does once, when it builds a model under a contract."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError, ExecutionContract
from isoexec.runtimes import compose, live


def activate(contract: ExecutionContract, role: str) -> None:
    """Check that the ops installed are the contract's, leave a note of this process, and compute on one torch thread on the CPU: a second
    one would split reductions.

    Args:
        contract: the contract of this process, whose settings have been checked.
        role: "engine" or "trainer".

    Raises:
        ContractError: an op is another than the contract's, or the threads are more and cannot be changed any more.
    """
    compose.check_installed(contract)
    live.publish(contract, role)
    if contract.backend == "cpu":
        torch.set_num_threads(1)
        if torch.get_num_threads() != 1:  # vLLM disables the call once a worker of this process has started
            raise ContractError(
                f"torch.get_num_threads(): expected 1, found {torch.get_num_threads()}; start the process with OMP_NUM_THREADS=1"
            )

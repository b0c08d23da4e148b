"""What must be identical on both sides. Standard library only; imports nothing else of the project."""

from isoexec.contract.active import CONTRACT_VARIABLE, active_contract
from isoexec.contract.build import contract_for_model, read_config
from isoexec.contract.canonical import canonical_json, sha256_hex
from isoexec.contract.errors import ContractError
from isoexec.contract.types import CASES, Claims, ExecutionContract, Numerics

__all__ = [
    "CASES",
    "CONTRACT_VARIABLE",
    "Claims",
    "ContractError",
    "ExecutionContract",
    "Numerics",
    "active_contract",
    "canonical_json",
    "contract_for_model",
    "read_config",
    "sha256_hex",
]

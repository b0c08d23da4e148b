"""What must be identical on both sides. Standard library only; imports nothing else of the project."""

from isoexec.contract.active import CONTRACT_VARIABLE, active_contract
from isoexec.contract.build import contract_for_model, model_digest, read_config
from isoexec.contract.canonical import canonical_json, sha256_hex
from isoexec.contract.composition import Entry
from isoexec.contract.errors import ContractError
from isoexec.contract.identity import Difference, Identity, differences, handshake
from isoexec.contract.served import check_served
from isoexec.contract.types import CASES, Claims, ExecutionContract, LogprobRule, Numerics

__all__ = [
    "CASES",
    "CONTRACT_VARIABLE",
    "Claims",
    "ContractError",
    "Difference",
    "Entry",
    "ExecutionContract",
    "Identity",
    "LogprobRule",
    "Numerics",
    "active_contract",
    "canonical_json",
    "check_served",
    "contract_for_model",
    "differences",
    "handshake",
    "model_digest",
    "read_config",
    "sha256_hex",
]

"""The one error of the contract."""


class ContractError(ValueError):
    """A run would leave, or has left, what its contract allows.

    The message names the setting or entry, what the contract expects, what was found and what to do.
    """

"""IsoExec: one policy, executed by a rollout engine and by a trainer, in the same bits."""

__version__ = "0.1.0"

"""Prompts in place of a dataset of SkyRL."""

from __future__ import annotations


class Prompts:
    """As many prompts as asked for."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, i):
        return i

    def collate_fn(self, rows):
        return [{"prompt": i, "env_class": None, "env_extras": {}, "uid": str(i)} for i in rows]

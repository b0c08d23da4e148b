"""The engine's or trainer's real worker, in whose process a test runs a statement too: what a live process may turn into."""

import importlib
import os

from isoexec.verify.protocol import serve


def start():
    worker = importlib.import_module(f"isoexec.verify.{os.environ['MUTABLE']}_worker")
    operations = worker.start()
    inside = {"operations": next(iter(operations.values())).__self__}
    return operations | {"run": lambda statement: exec(statement, inside)}


if __name__ == "__main__":
    raise SystemExit(serve(start))

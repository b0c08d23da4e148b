"""What two workers say of themselves, held against their contract: handshakes, weight manifests, and the ops that served them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from isoexec.contract import ContractError, ExecutionContract, check_served
from isoexec.contract.manifest import Manifest, differing
from isoexec.runtimes.handshake import check_weights, handshake

#: ``ask(operation)``: what a worker answers.
Ask = Callable[[str], object]


class Agreement:
    """Between the engine and the trainer of one arm.

    Args:
        contract: file of both.
        engine, trainer: ask the worker; blocks.
        trainer_served: what the trainer answered to ``served`` before it opened the model; it may still be importing.

    Attributes:
        record: what was checked, for verify.json.
    """

    def __init__(self, contract: Path, engine: Ask, trainer: Ask, trainer_served: Future):
        self._contract = ExecutionContract.from_json(contract.read_text(encoding="utf-8"))
        self._ask: dict[str, Ask] = {"engine": engine, "trainer": trainer}
        self._engine_before, self._trainer_before = _counter(engine("served")), trainer_served
        self._trainer_identity: str | None = None
        self.record: dict = {"sha256": self._contract.digest, "handshakes": 0, "neutral_differences": [], "weights": []}

    def shake_hands(self, *, wait: bool = True) -> None:
        """Refuse two processes that differ.

        Args:
            wait: ask the trainer again, after all it has to do; else compare with what it said last.

        Raises:
            ContractError: names the first entry that differs.
        """
        if wait or self._trainer_identity is None:
            self._trainer_identity = self._ask["trainer"]("identity")
        logged = handshake(self._contract, {"trainer": self._trainer_identity, "engine": self._ask["engine"]("identity")})
        self.record["handshakes"] += 1
        self.record["neutral_differences"] += [str(d) for d in logged]

    def check_weights(self, when: str) -> None:
        """Refuse an engine that does not hold the trainer's weights.

        Raises:
            ContractError: names the first tensor that differs.
        """
        began = time.monotonic()
        manifests = {side: ask("weights") for side, ask in self._ask.items()}
        version = check_weights(self._contract, manifests)
        spent = round(time.monotonic() - began, 3)
        self.record["weights"].append({"when": when, "version": version, "tensors": len(manifests["trainer"]), "seconds": spent})

    def check_planted(self) -> None:
        """In the self-test, where one weight of the trainer's copy is off by one ulp: the manifests must say so.

        Raises:
            ContractError: they differ in no tensor, or in several.
        """
        names = differing(*(Manifest.from_data(ask("weights")) for ask in self._ask.values()))
        self.record["planted"] = names
        if len(names) != 1:
            raise ContractError(f"weights: expected manifests that differ in the one planted tensor, found {names}; they are blind")

    def check_served(self, cases: Iterable[str]) -> None:
        """Refuse if, since this object was made, an op ran undeclared, a declared one did not run, or a case did not happen.

        Args:
            cases: that the two processes have executed between them.

        Raises:
            ContractError: names the op and the case.
        """
        before = {"engine": self._engine_before, "trainer": _counter(self._trainer_before.result())}
        ran: Counter = Counter()
        for side, ask in self._ask.items():
            calls = _counter(ask("served")) - before[side]
            check_served(self._contract, calls)
            for (_, case, _), count in calls.items():
                ran[case] += count
        for case in cases:
            if not ran[case]:
                raise ContractError(f"case {case}: no op was served in it; the patched tree attributes its ops otherwise, build it again")
        self.record["op_calls"] = {str(case): count for case, count in sorted(ran.items(), key=str)}

    def line(self) -> str:
        """One line for the person who runs it."""
        versions = ", ".join(f"{w['version'][:12]} ({w['when']}, {w['tensors']} tensors)" for w in self.record["weights"])
        calls = sum(self.record.get("op_calls", {}).values())
        return (
            f"contract {self.record['sha256'][:12]}: {self.record['handshakes']} handshakes; weights equal on both sides: "
            f"{versions or 'not compared'}; {calls} op calls, all declared"
        )


def _counter(served: list) -> Counter:
    return Counter({(op, case, implementation): calls for op, case, implementation, calls in served})

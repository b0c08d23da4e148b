"""The engine's worker with faults to plant."""

from __future__ import annotations

import faults
import latent_faults
import planting
import plug

from isoexec.verify import engine_worker
from isoexec.verify.protocol import serve


class Operations(engine_worker.EngineOperations):
    """As the product's, and ``plant``."""

    _planted = None

    def plant(self, fault: str | None) -> None:
        """Plant a fault in place of the one before; None: none."""
        if self._planted is not None:
            self._planted.close()
            self._planted = None
        if fault is not None:
            self._planted = plug.Plant()
            model = self._engine._runner.get_model()
            (faults.FAULTS | latent_faults.FAULTS)[fault].plant(self._planted, planting.EngineParts(self._engine, model))


def start() -> dict:
    """As the product's."""
    plug.install(faults.SWITCHED)
    engine_worker.EngineOperations = Operations
    operations = engine_worker.start()
    return operations | {"plant": operations["open"].__self__.plant}


if __name__ == "__main__":
    raise SystemExit(serve(start))

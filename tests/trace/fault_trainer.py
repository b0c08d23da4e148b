"""The trainer's worker with faults to plant."""

from __future__ import annotations

import faults
import latent_faults
import planting
import plug

from isoexec.verify import trainer_worker
from isoexec.verify.protocol import serve


class Operations(trainer_worker.TrainerOperations):
    """As the product's, and ``plant``."""

    _planted = None

    def plant(self, fault: str | None) -> None:
        """Plant a fault in place of the one before; None: none."""
        if self._planted is not None:
            self._planted.close()
            self._planted = None
        if fault is not None:
            self._planted = plug.Plant()
            (faults.FAULTS | latent_faults.FAULTS)[fault].plant(self._planted, planting.TrainerParts(self._trainer))


def start() -> dict:
    """As the product's."""
    plug.install(faults.SWITCHED)
    trainer_worker.TrainerOperations = Operations
    operations = trainer_worker.start()
    return operations | {"plant": operations["open"].__self__.plant}


if __name__ == "__main__":
    raise SystemExit(serve(start))

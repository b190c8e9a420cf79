"""How the state of a run is spread over workers: not at all, DDP, or DeepSpeed ZeRO 1 to 3."""

from lwray.engine.backends.backend import Backend
from lwray.engine.backends.choose import choose_backend, make_backend

__all__ = ["Backend", "choose_backend", "make_backend"]

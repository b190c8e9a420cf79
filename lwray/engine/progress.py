"""The run's own state beside its tensors: small, JSON, in every checkpoint."""

from dataclasses import asdict, dataclass
from typing import Any

from lwray.checkpoint.manifest import Manifest


@dataclass(slots=True)
class Progress:
    """`step` updates are done, in `seconds` of training over all attempts; `ended` is why the run needs no more."""

    step: int = 0
    seconds: float = 0.0
    loss: float | None = None
    val_loss: float | None = None
    val_step: int | None = None
    """The step whose state `val_loss` is of."""
    best_val_loss: float | None = None
    reference_val_loss: float | None = None
    evals_since_best: int = 0
    ended: str | None = None
    updates_before: int = 0
    """Updates that the optimiser had done before step 0: it came from another run."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_best(self) -> bool:
        """Whether this very state has been evaluated, and no earlier one was better."""
        return self.val_step == self.step and self.val_loss == self.best_val_loss

    def evaluated(self, val_loss: float, min_delta: float) -> None:
        """Take an evaluation into account: patience starts anew at one that is better by more than `min_delta`."""
        self.val_loss = val_loss
        self.val_step = self.step
        self.best_val_loss = val_loss if self.best_val_loss is None else min(self.best_val_loss, val_loss)
        if self.reference_val_loss is None or val_loss < self.reference_val_loss - min_delta:
            self.reference_val_loss = val_loss
            self.evals_since_best = 0
        else:
            self.evals_since_best += 1


def optimizer_updates(manifest: Manifest) -> int:
    """Updates that the optimiser in a checkpoint has done, in this run and before it."""
    return manifest.step + int(manifest.progress.get("updates_before", 0))

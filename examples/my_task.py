"""A task of your own, outside the package: a small network that predicts the last column of a CSV table.

From the repository's root: lwray train examples/my_task.toml task.options.csv=table.csv
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from lwray.config import Config
from lwray.data.rows import Batch
from lwray.errors import UserError
from lwray.tasks.task import Split, Task

OPTIONS: dict[str, Any] = {"csv": "", "width": 64, "dropout": 0.1}


class Table:
    """Rows with the ids 0…n-1; NaN in the last column stands for a target that is not known."""

    def __init__(self, values: Tensor) -> None:
        self.x, self.y = values[:, :-1], values[:, -1]

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, ids: NDArray[np.int64]) -> Batch:
        """`x` float32 [rows, columns]; `y` float32 and `known` bool [rows]."""
        return {"x": self.x[ids], "y": self.y[ids].nan_to_num(), "known": ~self.y[ids].isnan()}


class MyTask(Task):
    """Squared error; a row without a target has weight zero, and so counts neither in the loss nor in its mean."""

    def __init__(self, config: Config, data: Path | None) -> None:
        super().__init__(config, data)
        self.options = OPTIONS | config.task.options
        table = (
            made_table()
            if data is None
            else torch.from_numpy(np.genfromtxt(data, np.float32, delimiter=",", skip_header=1))
        )
        # every fifth row is held out
        held_out = torch.arange(len(table)) % 5 == 4
        self.splits = {"train": table[~held_out], "val": table[held_out]}

    @classmethod
    def prepare(cls, config: Config, cache: Path) -> tuple[Path | None, str]:
        """Runs once, where the command is typed: workers, which stand elsewhere, get the absolute path.

        The fingerprint binds the run to this data: changed under it, the next start is refused.
        """
        if unknown := config.task.options.keys() - OPTIONS.keys():
            raise UserError(f"task.options: {min(unknown)} is none of {', '.join(OPTIONS)}.")
        if not (named := config.task.options.get("csv")):
            return None, "made"
        csv = Path(named).absolute()
        if not csv.is_file():
            raise UserError(f"task.options.csv: there is no file {csv}.")
        return csv, xxhash.xxh3_64_hexdigest(csv.read_bytes())

    def rows(self, split: Split) -> Table:
        return Table(self.splits[split])

    def model(self) -> nn.Module:
        torch.manual_seed(self.config.run.seed)
        width, columns = self.options["width"], self.splits["train"].shape[1] - 1
        # this nn.Dropout is replaced by one whose draws are a function of (seed, step, row, place)
        return nn.Sequential(
            nn.Linear(columns, width), nn.GELU(), nn.Dropout(self.options["dropout"]), nn.Linear(width, 1)
        )

    def weights(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": batch["known"].double()}

    def losses(self, model: nn.Module, batch: Batch, keys: Tensor, part: str) -> dict[str, Tensor]:
        error = model(batch["x"]).squeeze(1).float() - batch["y"]
        return {"loss": error.square() * batch["known"]}


def made_table(rows: int = 1000) -> Tensor:
    """A table for a first run: float32 [rows, 4], a seventh of the targets unknown."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
    y[::7] = torch.nan
    return torch.cat([x, y[:, None]], dim=1)

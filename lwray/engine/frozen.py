"""What a network holds but does not train: never saved, so that a checkpoint names it by checksum."""

from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import Tensor, nn

from lwray.engine.world import World
from lwray.errors import RunFailed

BLOCK = 1 << 28


def frozen_checksums(network: nn.Module, sources: Mapping[str, nn.Module], world: World) -> dict[str, str]:
    """xxh3-64 by name: `network` for its parameters that are not trained, then the task's frozen sources.

    Taken of the tensors themselves, whatever file or download they came from. Each rank reads its share of them; the
    sums of the tensors, in the order of their names, are summed again.
    """
    tensors: dict[str, dict[str, Tensor]] = {
        "network": {name: p for name, p in network.named_parameters() if not p.requires_grad}
    }
    tensors |= {name: _tensors_of(module) for name, module in sources.items()}
    listed = [(source, name, tensor) for source, named in tensors.items() for name, tensor in sorted(named.items())]
    mine = [(source, name, _checksum(tensor)) for source, name, tensor in listed[world.rank :: world.size]]
    by_source: dict[str, list[tuple[str, str]]] = {}
    for source, name, digest in (each for rank in world.gather(mine) for each in rank):
        by_source.setdefault(source, []).append((name, digest))
    return {source: _digest(repr(sorted(named)).encode()) for source, named in sorted(by_source.items())}


def check_frozen(checkpoint: str, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises RunFailed, by name, where frozen weights are not those that the checkpoint was trained with."""
    if differing := sorted(name for name in {*then, *now} if then.get(name) != now.get(name)):
        raise RunFailed(
            f"The frozen weights of {', '.join(differing)} are not those that {checkpoint} was trained with. "
            "Restore their files, or choose another run.name."
        )


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Without what a module keeps of its own beside tensors (`get_extra_state`)."""
    return {name: each for name, each in module.state_dict().items() if isinstance(each, Tensor)}


def _checksum(tensor: Tensor) -> str:
    digest = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for block in _blocks(tensor.detach().reshape(-1).view(torch.uint8)):
        digest.update(block.cpu().numpy().data)
    return digest.hexdigest()


def _blocks(data: Tensor) -> Iterator[Tensor]:
    """A part at a time, so that a large table on a device needs no second copy in host memory."""
    return (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)

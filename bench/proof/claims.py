"""What is claimed of `configs/invariance.toml`: the runs, their legs, and what each is compared with."""

from dataclasses import dataclass
from typing import Literal

from proof.legs import Journey, Leg

Kind = Literal["whole", "control", "close", "bits"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A run, and how near it has to come to another one."""

    journey: Journey
    kind: Kind
    """`whole`: others are compared with it. `control`: only the order of summation differs. `close`: as near as
    rounding allows. `bits`: losses and final weights are the same to the bit."""
    against: str = ""
    """The name of the whole run that it is compared with."""

    @property
    def bf16(self) -> bool:
        return "precision.mode=bf16" in self.journey.keys

    @property
    def workers(self) -> int:
        """The most that a leg has."""
        return max(leg.workers for leg in self.journey.legs)


def plan(quick: bool = False, device: str = "cpu") -> list[Claim]:
    """Every claim; a run stands before those that are compared with it, and a control before what it bounds."""
    claims = [*quick_claims(), *bf16_claims(30)] if quick else [*full_claims(), *bf16_claims(60)]
    # cuda's own kernels add in an order of their own from run to run, unless they are told not to
    place = (f"parallel.device={device}", *(("train.deterministic=true",) if device == "cuda" else ()))
    return [on(claim, place) for claim in claims]


def full_claims() -> list[Claim]:
    """300 steps in fp32."""
    steps = 300
    sizes = (Leg(4, "ddp"), Leg(2, "ddp"), Leg(3, "ddp"), Leg(), Leg(4, "ddp", ray=True))
    backends = tuple(Leg(2, backend) for backend in ("ddp", "zero2", "zero3", "zero1", "ddp"))
    both = (Leg(3, "zero3"), Leg(2, "ddp"), Leg(), Leg(4, "zero2"), Leg(2, "zero1"))
    micro = (Leg(), Leg(micro=5), Leg(micro=1), Leg(micro=4))
    return [
        Claim(Journey("whole", steps), "whole"),
        Claim(Journey("control", steps, (Leg(micro=1),)), "control", "whole"),
        Claim(Journey("control padded", steps, (Leg(micro=5),)), "control", "whole"),
        Claim(Journey("workers", steps, sizes), "close", "whole"),
        Claim(Journey("backends", steps, backends), "close", "whole"),
        Claim(Journey("workers and backends", steps, both), "close", "whole"),
        Claim(Journey("micro-batches", steps, micro), "close", "whole"),
        *to_the_bit(steps, 3, (Leg(), Leg(2, "ddp"), Leg(3, "ddp"), Leg(2, "zero2"), Leg(2, "zero3"))),
    ]


def quick_claims() -> list[Claim]:
    """The same kinds of claims with fewer steps and legs."""
    steps = 90
    return [
        Claim(Journey("whole", steps), "whole"),
        Claim(Journey("control", steps, (Leg(micro=5),)), "control", "whole"),
        Claim(Journey("workers", steps, (Leg(2, "ddp"), Leg(3, "ddp"), Leg())), "close", "whole"),
        Claim(Journey("backends", steps, tuple(Leg(2, b) for b in ("ddp", "zero3", "zero2"))), "close", "whole"),
        *to_the_bit(steps, 2, (Leg(), Leg(3, "ddp"), Leg(2, "zero3"))),
    ]


def bf16_claims(steps: int) -> list[Claim]:
    """bf16 autocast over fp32 weights."""
    legs = (Leg(2, "ddp"), Leg(3, "zero2"), Leg())
    keys = ("precision.mode=bf16",)
    return [
        Claim(Journey("bf16 whole", steps, keys=keys), "whole"),
        Claim(Journey("bf16 control", steps, (Leg(micro=5),), keys), "control", "bf16 whole"),
        Claim(Journey("bf16 workers and backends", steps, legs, keys), "close", "bf16 whole"),
    ]


def to_the_bit(steps: int, kills: int, layouts: tuple[Leg, ...]) -> list[Claim]:
    """On each layout a run that is killed so often, and, beside the plain one, a whole run to compare it with."""
    claims = []
    for leg in layouts:
        plain = leg == Leg()
        whole = "whole" if plain else f"whole {leg}"
        if not plain:
            # uninterrupted on another layout than the plain one: near it, as every other
            claims.append(Claim(Journey(whole, steps, (leg,)), "close", "whole"))
        claims.append(Claim(Journey(f"killed {leg}", steps, (leg,) * (kills + 1)), "bits", whole))
    return claims


def on(claim: Claim, place: tuple[str, ...]) -> Claim:
    """The same claim with keys that say where it is run."""
    journey = claim.journey
    placed = Journey(journey.name, journey.steps, journey.legs, (*journey.keys, *place))
    return Claim(placed, claim.kind, claim.against)

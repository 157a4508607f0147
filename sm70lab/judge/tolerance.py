"""How far a lossless route's own arithmetic may move a token: measured on the run's tokens where possible."""

from __future__ import annotations

from dataclasses import dataclass

from sm70lab.schema import ModelDtype, Rounding

SAFETY = 4.0  # over the largest difference seen: a route adds in other orders, and over more tokens
LEAST_EDGE_SHARE = 5e-4


@dataclass(frozen=True)
class Tolerance:
    """How far outside the support a token may lie and still be the arithmetic's doing.

    ``logit``: gap to the cut of top-k and min-p, between near-equal greedy choices and between
    near-equal draws with the same noise (nats); ``mass``: gap to the cut of top-p (probability). A
    banned token has no tolerance, and neither has one that no cut explains. ``edge_share``: how large
    a share of the tokens may lie there. ``measured_on``: tokens behind the numbers; 0: defaults.
    """

    logit: float
    mass: float
    edge_share: float
    measured_on: int = 0


# Where no reference can measure. Seen on sampled tokens of the embedded model: in float16 three of
# 24,000 outside, the farthest by 0.013 of mass; in bfloat16 five of 2,500, the farthest by 0.025.
FLOAT32 = Tolerance(logit=1e-3, mass=1e-4, edge_share=LEAST_EDGE_SHARE)
FLOAT16 = Tolerance(logit=0.05, mass=0.03, edge_share=2e-3)
BFLOAT16 = Tolerance(logit=0.4, mass=0.04, edge_share=5e-3)


def tolerance_for(dtype: ModelDtype, rounding: Rounding | None = None) -> Tolerance:
    """The tolerance of a route that computes in ``dtype``, from its measured ``rounding`` if there is one.

    The edge share covers what the coarser arithmetic alone would keep in the support, and near-equal
    draws: two candidates' log-probabilities plus noise lie within δ of each other with probability
    of about δ at most (the difference of two Gumbel variables has density 1/4 at most).
    """
    if rounding is None:
        if dtype is ModelDtype.float16:
            return FLOAT16
        return BFLOAT16 if dtype is ModelDtype.bfloat16 else FLOAT32
    return Tolerance(
        logit=SAFETY * rounding.logit,
        mass=SAFETY * rounding.mass,
        edge_share=max(LEAST_EDGE_SHARE, SAFETY * (rounding.outside + rounding.logit_rms)),
        measured_on=rounding.rows,
    )

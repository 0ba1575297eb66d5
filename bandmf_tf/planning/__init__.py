"""Planning: from what a training run looks like to a calibrated mechanism, with alternatives."""

from bandmf_tf.planning.bands import BandCandidate, BandSearch, choose_num_bands
from bandmf_tf.planning.plan import Plan, PlanRequest
from bandmf_tf.planning.planner import make_participation, plan_mechanism

__all__ = [
    "BandCandidate",
    "BandSearch",
    "Plan",
    "PlanRequest",
    "choose_num_bands",
    "make_participation",
    "plan_mechanism",
]

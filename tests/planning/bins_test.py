from __future__ import annotations

import math

from bandmf_tf.accounting.random_participation import BallsInBins
from bandmf_tf.factorization import buffered, workloads
from bandmf_tf.factorization.error import squared_error
from bandmf_tf.planning.bins import optimize_buffered_in_bins


def test_a_strategy_made_for_bins_has_less_error_at_the_same_certified_epsilon():
    workload, scheme = workloads.prefix_sum(128), BallsInBins(128, 32)
    epsilon, delta = 2.0, 1e-6

    def error(strategy):
        noise, certificate = scheme.noise_multiplier(strategy, epsilon, delta)
        assert certificate.epsilon == epsilon
        return noise * math.sqrt(squared_error(workload, strategy))

    in_order = buffered.optimize_buffered(workload, 1, scheme.participation).strategy
    in_bins = optimize_buffered_in_bins(workload, 1, scheme, epsilon, delta)
    assert in_bins.num_buffers == 1
    assert scheme.participation.sensitivity(in_bins).value <= 1 + 1e-9
    assert error(in_bins) < 0.97 * error(in_order)


def test_where_no_replicas_reach_delta_it_is_the_strategy_of_a_fixed_order():
    """One bin, 64 replicas at most: at epsilon 0.05 no noise has a bound of 1e-9."""
    workload, scheme = workloads.prefix_sum(3), BallsInBins(3, 1)
    found = optimize_buffered_in_bins(workload, 1, scheme, 0.05, 1e-9)
    in_order = buffered.optimize_buffered(workload, 1, scheme.participation).strategy
    assert math.isclose(squared_error(workload, found), squared_error(workload, in_order))

"""A simulated federated run: a population of clients, its tasks, and the training program."""

from bandmf_tf.simulation.config import ConfigError, RunConfig
from bandmf_tf.simulation.population import Population
from bandmf_tf.simulation.tasks import FederatedTask
from bandmf_tf.simulation.training import FederatedTraining

__all__ = [
    "ConfigError",
    "FederatedTask",
    "FederatedTraining",
    "Population",
    "RunConfig",
]

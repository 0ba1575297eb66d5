"""A simulated federated run: a population of clients, its tasks, and the training program.

Import what is needed by its module (`config`, `population`, `tasks`, `training`): programs read
their configuration before TensorFlow starts.
"""

from bandmf_tf import _extras

_extras.require_tensorflow(__name__)

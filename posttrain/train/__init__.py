"""Training: the learner, the offline and the online loop, set-up of a run, reference and critic, evaluation, resume."""

WORKER_MODULES = ("posttrain.train.rollout_workers",)
"""Modules that import what learners and rollout workers need; workers on a CPU are forked from a process with them."""

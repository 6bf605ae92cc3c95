"""Training: the learner, the offline and the online loop, set-up of a run, reference and critic, evaluation, resume."""

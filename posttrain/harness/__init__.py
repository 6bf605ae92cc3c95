"""Evaluation harnesses, lm-eval and inspect-ai, that compute with the weights of this process."""

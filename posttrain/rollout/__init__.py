"""Generates completions and scores them: rollouts, multi-turn environments, records."""

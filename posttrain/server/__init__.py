"""The HTTP API: OpenAI-compatible completions, and the scores of a reward model."""

"""Writes models for other runtimes (GGUF, FP8, AWQ, GPTQ), compares them with the original, and uploads them."""

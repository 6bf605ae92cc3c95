"""Generates tokens with given weights: the local engine and vLLM, behind the interface of base.py."""

"""Tokenizes files in advance, into the indexed files of Megatron."""

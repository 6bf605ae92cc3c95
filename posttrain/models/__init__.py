"""Loads, saves and exports Hugging Face models, with adapters; estimates their memory; the toy model `pico`."""

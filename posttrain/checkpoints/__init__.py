"""Writes and reads checkpoint directories that a kill cannot damage: tensor files, manifests, random states."""

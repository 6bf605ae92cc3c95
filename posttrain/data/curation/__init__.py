"""Near-duplicates, overlap with evaluation sets, mixing and splitting of files."""

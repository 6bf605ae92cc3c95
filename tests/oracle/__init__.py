"""Every loss and its gradient against slow loops over single tokens."""

"""What is measured, how, and the last results (results.md)."""

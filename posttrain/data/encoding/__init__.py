"""From examples to tokens: chat templates, loss masks, truncation."""

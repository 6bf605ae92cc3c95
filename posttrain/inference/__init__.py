"""Generates, scores, selects, evaluates and chats with a trained model."""

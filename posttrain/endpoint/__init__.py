"""The OpenAI-compatible endpoint that `posttrain serve` and the agents of training share: protocol, HTTP, engine."""

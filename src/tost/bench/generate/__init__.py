"""Language models: decoding, prompts and training steps."""

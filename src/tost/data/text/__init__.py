"""Text corpora: reading, tokenizing and preparing them."""

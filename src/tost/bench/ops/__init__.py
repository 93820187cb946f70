"""The operators against the matrix products they contain."""

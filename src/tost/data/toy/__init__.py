"""Small data sets that need no download."""

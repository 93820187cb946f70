"""Folders of tokens written by `tost data prepare`."""

"""Attention layers side by side: the efficiency figures of the paper."""

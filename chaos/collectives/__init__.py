"""Faults of collectives and messages: what is done to a call, and what calls a rank was in."""

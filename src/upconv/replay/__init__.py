"""Calls that are known: their guards, what they launch, and the C++ module that repeats it."""

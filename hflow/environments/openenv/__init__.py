"""Environments of the package `openenv`."""

"""Environments of the package `gymnasium`."""

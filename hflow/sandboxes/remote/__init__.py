"""Sandbox providers that run tools in containers and on other machines, which have no hflow."""

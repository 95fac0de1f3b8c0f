"""Tokens, chat templates, messages and tool calls."""

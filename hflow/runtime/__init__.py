"""Runs a plan: the state machine (`state`), its executor (`execution`), a simulator and the ledger.

`events` defines what passes between the state machine and the executor or simulator that acts on it.
"""

"""The state machine of a run: events in, instructions out. Start reading at `run_state`."""

"""Finding the rank that is missing from a collective.

`stack_probe` runs in each worker and samples its device thread. `hang_detector` runs in the controller,
collects the answers of a call and asks the probes when it fails or hangs. `hang_report` writes the error
message.
"""

"""Workers: the processes that hold models, engines and samples, one per device.

`interface` is what the controller sees of them, `messages` is the table of what can be sent to them, and
`worker` receives messages in one process. Rooms: `ray` (workers as Ray actors), `bodies` (running the bodies
of nodes), `generation` (engines and episodes), `storage` (samples), `weights` (weights on their way to
engines) and `hangs` (finding the rank that is missing from a collective).
"""

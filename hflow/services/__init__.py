"""Remote services that bodies call, such as judges: their limits hold for a run, whatever process asks.

`limits` decides when a request may begin. One `server` beside the controller asks it, for the clients in all
processes of the run.
"""

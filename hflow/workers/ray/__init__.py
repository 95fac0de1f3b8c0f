"""Workers as Ray actors.

`ray_workers` is the controller's side, with `ray_weights` for weights on their way to engines. `ray_actor` is
the process of one device. `ray_actors` reserves devices and starts these processes.
"""

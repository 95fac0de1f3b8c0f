"""What runs the engine of any library in a process of its own, a child of the worker.

`engine` is the worker's side, `ProcessEngine`. `engine_process` calls the process, which runs `engine_main`.
That steps the library by a `Stepper`, which each library has in its own package.
"""

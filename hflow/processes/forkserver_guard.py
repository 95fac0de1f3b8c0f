"""Guards the fork server that imports this module, see `forkserver`. Import it nowhere else."""

from hflow.processes.guard import guard_server

guard_server()

"""Guards the fork server that imports this module, see `hflow.workers.forkserver`. Import it nowhere else."""

from hflow.workers.process_guard import guard_server

guard_server()

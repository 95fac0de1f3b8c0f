"""Measurements of hflow. Run them from the root of the repository: `python -m benchmarks.speed.ledger`."""

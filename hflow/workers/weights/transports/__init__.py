"""Transports that carry published weights from the processes that send them to those that load them."""

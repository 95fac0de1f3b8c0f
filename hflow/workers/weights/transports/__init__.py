"""Ways in which published weights get from the processes that send them to those that load them."""

"""What is known of models and of the backends that run them."""

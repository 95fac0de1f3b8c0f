"""What runs tools that are not trusted: an owner's `Sandboxes`, and the providers that they choose from."""

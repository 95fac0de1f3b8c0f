"""What a plan will need: memory, traffic and seconds, and the period of its steps."""

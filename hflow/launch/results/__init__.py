"""Reading what runs wrote."""

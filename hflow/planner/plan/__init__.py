"""The plan as a value: its rows, and the values that they are made of and from."""

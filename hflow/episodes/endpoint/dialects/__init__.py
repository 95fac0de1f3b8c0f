"""The APIs that the endpoint speaks, one file each. `registry` lists them."""
